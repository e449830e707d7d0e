"""Every script under ``benchmarks/`` starts on the CPU, and finds what it names of the package."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import flashtile
from walk import walk

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("__"))


@walk("script", SCRIPTS)
def test_it_starts(script):
    command = [sys.executable, "-m", f"benchmarks.{script.stem}", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "usage" in found.stdout.lower()


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
