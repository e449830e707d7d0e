"""Every script under ``benchmarks/`` starts on the CPU, and finds what it names of the package."""

from __future__ import annotations

import ast
import functools
import runpy
import sys
from pathlib import Path

import pytest

import flashtile
from walk import walk

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("__"))


@walk("script", SCRIPTS)
def test_it_starts(monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    written = capsys.readouterr()
    assert not stopped.value.code, written.err
    assert "usage" in written.out.lower()


@walk("script", SCRIPTS)
def test_what_it_names_of_the_package_is_there(script):
    """Functions that are called only on several GPUs name modules as well."""
    names = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Attribute)
    }
    for name in names:
        first, *rest = name.split(".")
        if first == "flashtile":
            functools.reduce(getattr, rest, flashtile)
