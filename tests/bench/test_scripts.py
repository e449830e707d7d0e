"""Every script under ``benchmarks/`` starts on the CPU, and finds what it names of the package."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_starts(script):
    found = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "usage" in found.stdout.lower()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
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
