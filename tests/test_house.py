"""What a reader counts on: no circle of imports, none upwards, no private name across modules."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "flashtile").rglob("*.py")
}
FLOORS = (
    ("flashtile.problem", "flashtile.caches"),
    ("flashtile.attn.problem", "flashtile.decode.problem", "flashtile.fp8.problem", "flashtile.fp8.layout"),
    ("flashtile.checks",),
    ("flashtile.op",),
    ("flashtile.attn.operators", "flashtile.decode.operators", "flashtile.fp8.operators"),
    ("flashtile.attn.functional", "flashtile.decode.functional", "flashtile.fp8.functional"),
    ("flashtile.explanations",),
    ("flashtile.padding", "flashtile.parallel"),
    ("flashtile.integrations", "flashtile.compat", "flashtile.nn"),
    ("flashtile.commands",),
)
"""Each may import from those before it, never from those after."""


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@functools.cache
def imported(module: str) -> list[tuple[str, str | None, bool]]:
    """(module, name or None, whether when it is loaded) of each import of flashtile's own, types left out."""
    found: list[tuple[str, str | None, bool]] = []

    def walk(node: ast.AST, at_load: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, None, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.extend((child.module, alias.name, at_load) for alias in child.names)
            walk(child, at_load and not isinstance(child, (ast.FunctionDef, ast.Lambda)))

    walk(tree(module), True)
    return [entry for entry in found if entry[0].split(".")[0] == "flashtile"]


def targets(module: str, lazily: bool) -> set[str]:
    """The modules that ``module`` imports; ``lazily``: within functions, too."""
    found = set()
    for source, name, at_load in imported(module):
        if at_load or lazily:
            inner = f"{source}.{name}"
            found.add(inner if inner in FILES else source)
    return found - {module, "flashtile"}


def test_there_is_no_circle():
    TopologicalSorter({module: targets(module, lazily=False) for module in FILES}).prepare()


@pytest.mark.parametrize("module", FILES)
def test_no_private_name_crosses_a_module(module):
    private = [
        f"{source}.{name}"
        for source, name, _ in imported(module)
        if name is not None and name.startswith("_") and not name.startswith("__")
    ]
    modules = {name for source, name, _ in imported(module) if f"{source}.{name}" in FILES}
    private += [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    ]
    assert private == []


def floor(module: str) -> int | None:
    for number, prefixes in enumerate(FLOORS):
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return number
    return None


def test_nothing_imports_upwards():
    for module in FILES:
        for target in targets(module, lazily=True):
            lower, upper = floor(module), floor(target)
            if lower is not None and upper is not None:
                assert upper <= lower, f"{module} imports {target}"


def test_backends_know_problems_only():
    """They are imported by name, and import no front door, no operation and no check."""
    above = ("functional", "operators", "explanations", "checks", "op")
    for module in FILES:
        if module.startswith("flashtile.backends."):
            wrong = [t for t in targets(module, lazily=True) if set(t.split(".")[1:3]) & set(above)]
            assert wrong == [], module
        elif floor(module) in range(FLOORS.index(("flashtile.explanations",))):
            named = [t for t in targets(module, lazily=True) if t.startswith("flashtile.backends")]
            assert named == [], module
