"""What a reader counts on: every room has a floor, none imports upwards, no private name crosses a module."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "flashtile").rglob("*.py")
}
FLOORS = (
    ("torch_private",),
    ("rounding", "caches", "garbage", "files", "version", "problems", "backends", "backends.libcuda"),
    ("hardware", "checks", "backends.compat"),
    ("dropout", "masks", "op", "backends.common"),
    ("reference",),
    ("operators", "backends.cpu", "backends.portable"),
    ("api", "compilation", "backends.hopper"),
    (
        "flashtile",
        "kv_cache",
        "nn",
        "compat",
        "testing",
        "integrations",
        "parallel",
        "linear",
        "padding",
        "machine",
    ),
    ("engine", "learn", "fp8", "decode"),
    ("tools", "algorithms", "io_model"),
    ("cli", "demo"),
    ("__main__",),
)
"""Rooms, from the ground up: folders and files of ``flashtile/``, and the folders of ``backends/``. A room
imports from floors below its own."""


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@functools.cache
def imported(module: str) -> list[tuple[str, str | None, bool]]:
    """(module, name or None, whether at load) of each import of flashtile's own, without types."""
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
    """The modules that ``module`` imports; ``lazily``: within functions as well."""
    found = set()
    for source, name, at_load in imported(module):
        if at_load or lazily:
            inner = f"{source}.{name}"
            found.add(inner if inner in FILES else source)
    return found - {module}


def test_there_is_no_circle():
    TopologicalSorter({module: targets(module, lazily=True) for module in FILES}).prepare()


def is_private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def test_no_private_name_crosses_a_module():
    private = []
    for module in FILES:
        private += [f"{module}: {source}.{name}" for source, name, _ in imported(module) if is_private(name)]
        modules = {name for source, name, _ in imported(module) if f"{source}.{name}" in FILES}
        private += [
            f"{module}: {node.value.id}.{node.attr}"
            for node in ast.walk(tree(module))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and is_private(node.attr)
        ]
    assert private == []


def room(module: str) -> str:
    parts = module.split(".")[1:] or ["flashtile"]
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}


def test_every_room_has_a_floor():
    assert {room(module) for module in FILES} == set(FLOOR_OF)


def test_rooms_import_from_floors_below():
    """So rooms form no circle either, imports within functions counted."""
    wrong = [
        f"{module} -> {target}"
        for module in FILES
        for target in targets(module, lazily=True)
        if room(target) != room(module) and FLOOR_OF[room(target)] >= FLOOR_OF[room(module)]
    ]
    assert wrong == []


def test_there_are_few_floors():
    assert len(FLOORS) <= 12


def test_operations_reach_backends_by_name_only():
    """Backends import no door, operation or check, and what stands below the doors imports no backend."""
    above = ("api", "operators", "checks", "op")
    for module in FILES:
        if module.startswith("flashtile.backends."):
            wrong = [t for t in targets(module, lazily=True) if room(t) in above]
            assert wrong == [], module
        elif FLOOR_OF[room(module)] < FLOOR_OF["api"]:
            named = [t for t in targets(module, lazily=True) if t.startswith("flashtile.backends")]
            assert named == [], module


def test_the_package_imports_nothing_of_its_checkout():
    """Benchmarks, tests, scripts and examples are in no wheel."""
    outside = {"benchmarks", "examples", "scripts", "tests"}
    wrong = []
    for module in FILES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{module} -> {name}" for name in names if name.split(".")[0] in outside]
    assert wrong == []
