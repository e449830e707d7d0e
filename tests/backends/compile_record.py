"""The numbers of every compiled configuration, recorded, so that tests compile only what has changed since.

    python tests/backends/compile_record.py  # compiles what has changed, and records it: make record-compiled

A record holds as long as all that the compiler is given is the same: Triton's release, the sources of the
kernel, its signature, constants and options. Comments and docstrings may change. (They move line numbers,
which can change the order of instructions, and so a spill by some bytes: ``make test-compile`` compiles all.)
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import triton

from flashtile.backends.common.compile_report import (
    CompileCase,
    CompileReport,
    architecture,
    every_case,
    report,
    reports,
)

ARCHITECTURES = ("sm_80", "sm_90a")
PATH = Path(__file__).with_name("compiled.json")
OF_THE_CASE = ("name", "arch", "spill_budget", "shared_limit", "expects_tensor_cores", "seconds")
"""Fields of a report that a case or an architecture states, or that differ from machine to machine."""


@cache
def record() -> dict[str, Any]:
    """{"triton": release, architecture: {case: {"inputs": digest, and numbers of its report}}}."""
    return json.loads(PATH.read_text()) if PATH.exists() else {"triton": None}


def is_of_this_triton() -> bool:
    return record()["triton"] == triton.__version__


def recorded(case: CompileCase, arch: str) -> CompileReport | None:
    """The report of a case, from the record; None if that has none for what the compiler is given now."""
    found = dict(record().get(arch, {}).get(case.name, {}))
    if not is_of_this_triton() or found.pop("inputs", None) != inputs(case):
        return None
    return CompileReport(
        **found,
        name=case.name,
        arch=arch,
        spill_budget=case.spill_budget,
        shared_limit=architecture(arch).shared_limit,
        expects_tensor_cores=case.tensor_cores,
        seconds=0.0,
    )


def numbers(case: CompileCase, arch: str) -> CompileReport:
    """The report of a case, compiled only where the record lacks it."""
    return recorded(case, arch) or report(case, arch)


def inputs(case: CompileCase) -> str:
    """A digest of what the compiler is given."""
    given = (
        *(text(getattr(case, field)) for field in ("signature", "constants", "options")),
        text((sorted(case.divisible_by_16), case.num_warps, case.num_stages, case.kernel.fn.__name__)),
        *(source(module) for module in sorted(modules_of(case.kernel.fn.__module__))),
    )
    return hashlib.sha256("\0".join(given).encode()).hexdigest()[:16]


def text(value: Any) -> str:
    """A constant in full: functions by their source, the same in every process."""
    if isinstance(value, dict):
        return text(sorted(value.items()))
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(text, value))})"
    if is_dataclass(value) and not isinstance(value, type):  # a kernel may ask for its properties, too
        members = {name: getattr(value, name) for name in dir(value) if not name.startswith("__")}
        members = {name: member for name, member in members.items() if not isinstance(member, MethodType)}
        return f"{type(value).__name__}({text(members)})"
    if isinstance(value, triton.JITFunction):
        return text(value.fn.__name__) + value.src
    shown = repr(value)
    if " at 0x" in shown:
        raise TypeError(f"a constant of {type(value)} has no text that is the same in every process: {shown}")
    return shown


@cache
def modules_of(name: str) -> frozenset[str]:
    """The module of a kernel and those it imports, as far as they have functions for the compiler: no other
    module imports triton."""
    found, waiting = set(), {name}
    while waiting:
        module = waiting.pop()
        found.add(module)
        waiting |= {imported for imported in imports(module) if "triton" in source(imported)} - found
    return frozenset(found)


@cache
def imports(name: str) -> set[str]:
    """Modules of the package that a module imports."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flashtile"):
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} | {module for module in below if is_module(module)}
    return {module for module in found if module.startswith("flashtile.")}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@cache
def source(name: str) -> str:
    """A module's code, without comments and docstrings."""
    return ast.unparse(tree(name))


def path_of(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


@cache
def tree(name: str) -> ast.Module:
    parsed = ast.parse(path_of(name).read_text("utf-8"))
    for node in ast.walk(parsed):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not is_text(statement)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return parsed


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def compile_changed() -> Iterator[str]:
    """Compile what the record lacks and write it anew; what is beyond its limits, a line each."""
    entries: dict[str, Any] = {}
    for arch in ARCHITECTURES:
        cases = every_case(arch)
        known = {case.name: recorded(case, arch) for case in cases}
        changed = [case for case in cases if known[case.name] is None]
        print(f"{arch}: {len(changed)} of {len(cases)} configurations to compile", flush=True)
        known |= {found.name: found for found in reports(changed, arch)}
        entries[arch] = {}
        for case in sorted(cases, key=lambda case: case.name):
            found = known[case.name]
            assert found is not None
            numbers = {name: number for name, number in asdict(found).items() if name not in OF_THE_CASE}
            entries[arch][case.name] = {"inputs": inputs(case)} | numbers
            if found.violations:
                yield f"{arch} {case.name}: {'; '.join(found.violations)}"
    PATH.write_text(lines(entries))


def lines(entries: dict[str, Any]) -> str:
    """The record as JSON with a line for each case, so that changes can be merged."""
    archs = [
        f"{json.dumps(arch)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in cases.items())
        + "\n}"
        for arch, cases in entries.items()
    ]
    return f'{{"triton": {json.dumps(triton.__version__)},\n' + ",\n".join(archs) + "\n}\n"


if __name__ == "__main__":
    unsound = list(compile_changed())
    print("\n".join(unsound))
    sys.exit(bool(unsound))
