"""The house of the package: no circle, no import upwards, no private name of another module.

docs/design.md has the house. A room is a folder or a file of ``flashtile/``, or a folder of ``backends/``.
"""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter

import pytest

import flashtile
import sources

pytestmark = pytest.mark.quick

FILES = {
    ".".join(path.relative_to(sources.PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sources.FILES
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
"""Rooms, from the ground up. A room imports only from floors below its own."""
INTERNAL = {
    "api", "backends", "caches", "checks", "cli", "compilation", "files", "garbage", "hardware", "op",
    "operators", "problems", "rounding", "tools", "torch_private", "version",
}  # fmt: skip
"""Rooms that users do not import. All others can be reached after ``import flashtile``."""


def tree(module: str) -> ast.Module:
    return sources.tree(FILES[module])


@functools.cache
def imported(module: str) -> list[tuple[str, str | None, bool]]:
    """Return (module, name or None, whether at load) of each import from flashtile, but those for types."""
    found: list[tuple[str, str | None, bool]] = []

    def walk(node: ast.AST, at_load: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # no import is in one, and most of a tree is
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, None, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.extend((child.module, alias.name, at_load) for alias in child.names)
            walk(child, at_load and not isinstance(child, ast.FunctionDef))

    walk(tree(module), True)
    return [entry for entry in found if entry[0].split(".")[0] == "flashtile"]


def targets(module: str, lazily: bool) -> set[str]:
    """Return the modules that ``module`` imports, with ``lazily`` also those that its functions import."""
    found = set()
    for source, name, at_load in imported(module):
        if at_load or lazily:
            inner = f"{source}.{name}"
            found.add(inner if inner in FILES else source)
    return found - {module}


def test_no_circle_of_modules():
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
    """So rooms form no circle either. Imports within functions count as well."""
    wrong = [
        f"{module} -> {target}"
        for module in FILES
        for target in targets(module, lazily=True)
        if room(target) != room(module) and FLOOR_OF[room(target)] >= FLOOR_OF[room(module)]
    ]
    assert wrong == []


def test_operations_reach_backends_by_name_only():
    """Backends import no public function, operation or check, and no room below ``api`` imports a backend."""
    above = ("api", "operators", "checks", "op")
    for module in FILES:
        if module.startswith("flashtile.backends."):
            wrong = [t for t in targets(module, lazily=True) if room(t) in above]
            assert wrong == [], module
        elif FLOOR_OF[room(module)] < FLOOR_OF["api"]:
            named = [t for t in targets(module, lazily=True) if t.startswith("flashtile.backends")]
            assert named == [], module


def test_every_public_room_is_an_attribute_of_the_package():
    rooms = {module.split(".")[1] for module in FILES if "." in module} - {"__main__"}
    assert rooms - INTERNAL <= set(dir(flashtile))
    assert rooms >= INTERNAL


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
