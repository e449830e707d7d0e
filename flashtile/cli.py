"""The ``flashtile`` command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def application() -> Any:
    """Return all commands as a ``typer.Typer``. Raise ModuleNotFoundError if their extras are missing."""
    import typer

    from flashtile.tools.commands.compile import compile
    from flashtile.tools.commands.demo import demo
    from flashtile.tools.commands.explain import explain
    from flashtile.tools.commands.generate import generate
    from flashtile.tools.commands.info import info
    from flashtile.tools.commands.inspect import inspect
    from flashtile.tools.commands.profile import profile
    from flashtile.tools.commands.record import record
    from flashtile.tools.commands.serve import VllmCommand, serve
    from flashtile.tools.commands.visualize import visualize

    app = typer.Typer(
        help="Exact, IO-aware attention in pure Python.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's help is a table, which cuts long option names at 80 columns
    )

    @app.callback()
    def common(
        version: bool = typer.Option(
            False, "--version", callback=_print_version, is_eager=True, help="Print the versions."
        ),
    ) -> None:
        pass

    for command in (
        info, demo, generate, serve, profile, inspect, explain, compile, record, visualize,
    ):  # fmt: skip
        kind = VllmCommand if command is serve else None
        app.command(short_help=_first_sentence(command), cls=kind)(command)
    return app


def _first_sentence(command: Callable[..., None]) -> str:
    """Return the first sentence of a command's docstring, which Click would cut after 45 characters."""
    paragraph = " ".join((command.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def version_line() -> str:
    """Return the versions of flashtile, torch and triton on one line."""
    import torch

    from flashtile.hardware.machine import installed_version
    from flashtile.version import __version__

    triton = installed_version("triton")
    return (
        f"flashtile {__version__}, torch {torch.__version__}, {f'triton {triton}' if triton else 'no triton'}"
    )


def _print_version(asked: bool) -> None:
    if asked:
        print(version_line())
        sys.exit(0)


def main() -> None:
    """Run the command line.

    For invalid input, one line is printed and the exit code is 2. If packages are missing, the message says
    how to install them.
    """
    _print_version(sys.argv[1:] == ["--version"])  # needs no extras
    if sys.argv[1:2] == ["bench"]:
        print(
            "flashtile: benchmarks are no part of the package: run `python -m benchmarks` in its repository",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        app = application()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("flashtile", "torch", "triton"):
            raise
        sys.exit(f"flashtile: the command line needs {error.name}: pip install '.[cli]' in its checkout")
    run(app)


def run(app: Any, name: str = "flashtile") -> NoReturn:
    """Run an application of typer with the process's arguments. Messages begin with ``name``."""
    if not sys.argv[1:]:
        app()
    try:
        code = app(standalone_mode=False)
    except BrokenPipeError:  # the reader of a pipe closed it, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # Typer's exceptions come from Click, or since 0.25 from a copy of Click without a public name.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            print(f"{name}: {' '.join(error.format_message().split())}", file=sys.stderr)
            sys.exit(error.exit_code)
        raise
    sys.exit(code)
