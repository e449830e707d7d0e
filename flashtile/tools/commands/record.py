"""``flashtile record``: writes the calls of a program to a file, for ``flashtile compile``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashtile.tools.commands.options import output_file


def record(
    out: Annotated[Path, typer.Argument(callback=output_file(".json"), help="File for the calls: .json.")],
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Python script to run.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
) -> None:
    """Run a Python script and write its calls of flashtile to a file, for flashtile compile.

    The script may run on a CPU: kernels are chosen when they are compiled.
    """
    from flashtile.compilation.calls import record_calls

    sys.argv = [str(script), *(arguments or ())]
    sys.path.insert(0, str(script.parent))
    with record_calls(out):
        runpy.run_path(str(script), run_name="__main__")
