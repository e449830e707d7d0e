"""The ``flashtile`` command line."""

from __future__ import annotations

import sys
from typing import Any


def application() -> Any:
    """Every command, as a ``typer.Typer``; ModuleNotFoundError without the extras that they need."""
    import typer

    from flashtile.commands.bench import bench
    from flashtile.commands.demo import demo
    from flashtile.commands.explain import explain
    from flashtile.commands.info import info
    from flashtile.commands.inspect import inspect
    from flashtile.commands.visualize import visualize

    app = typer.Typer(
        help="Exact, IO-aware attention in pure Python.", no_args_is_help=True, pretty_exceptions_enable=False
    )
    for command in (info, demo, bench, inspect, explain, visualize):
        app.command()(command)
    return app


def main() -> None:
    """Run the command line; without its extras, say how to install them."""
    try:
        app = application()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("flashtile", "torch", "triton"):
            raise
        sys.exit(f"flashtile: the command line needs {error.name}: pip install 'flashtile[cli]'")
    app()
