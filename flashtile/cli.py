"""The ``flashtile`` command line."""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib import import_module
from importlib.resources import files
from typing import Any, NoReturn

COMMANDS = (
    "info", "demo", "generate", "serve", "profile", "inspect", "explain", "compile", "record", "visualize",
)  # fmt: skip
"""Commands in the order of their list. Each is a function in the module of its name."""


def application(only: str | None = None) -> Any:
    """Return the commands as a ``typer.Typer``. Raise ModuleNotFoundError if their extras are missing.

    Given ``only``, no other command is imported, because most of them import torch. The others are then only
    listed.
    """
    import typer

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

    for name in COMMANDS:
        command, kind = _unused, None
        if only is None or name == only:
            module = import_module(f"flashtile.tools.commands.{name}")
            command, kind = getattr(module, name), getattr(module, "COMMAND_CLASS", None)
        app.command(name, short_help=_first_sentence(name), cls=kind)(command)
    return app


def _unused() -> None:
    pass


def _first_sentence(name: str) -> str:
    """Return the first sentence of a command's docstring, which Click would cut after 45 characters."""
    source = (files("flashtile.tools.commands") / f"{name}.py").read_text("utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    text = next(ast.get_docstring(function) or "" for function in functions if function.name == name)
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]


def version_line() -> str:
    """Return the versions of flashtile, torch and triton on one line."""
    from flashtile.version import __version__, installed_version

    versions = {name: installed_version(name) for name in ("torch", "triton")}
    others = (f"{name} {found}" if found else f"no {name}" for name, found in versions.items())
    return ", ".join([f"flashtile {__version__}", *others])


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
        name = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ""
        # The shell's completion runs the program with this variable, and without its arguments.
        app = application(None if "_FLASHTILE_COMPLETE" in os.environ else name)
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
