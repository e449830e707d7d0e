"""Scripts outside of the package (examples, benchmarks), for the tests that run them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import typer
from click.testing import Result
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """Import the script at a path relative to the repository, without running its ``main``."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the types of their fields
    spec.loader.exec_module(module)
    return module


def runner(module: ModuleType) -> Callable[..., Result]:
    """Return a function that runs the script's ``main`` with command line arguments."""
    app = typer.Typer()
    app.command()(module.main)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
