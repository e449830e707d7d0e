"""The package as syntax trees, for tests that judge its source. Parsing it takes a second."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "flashtile"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the tree of a file, parsed once. Do not change it."""
    return ast.parse(path.read_text("utf-8"))
