"""``flashtile demo``: exactness, speed, memory and a training run on this machine, written to a report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flashtile.tools.commands.options import Device, finite, output_folder, parse_device


def demo(
    out: Annotated[
        Path,
        typer.Option(
            callback=output_folder,
            help="Folder for results.json, the plots, report.html and visualize.html.",
        ),
    ] = Path("flashtile-demo"),
    seconds: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Seconds of training with flashtile's attention.")
    ] = 45.0,
    device: Device = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes, and leave out the interactive page.")
    ] = False,
) -> None:
    """Measure exactness, speed, memory and a small training run on this machine, and write a report.

    The exit code is 1 if any check fails.
    """
    # OpenMP's threads spin while they wait for each other. If other programs use the cores, a call of many
    # short operations then takes up to thirty times as long. torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from flashtile.tools.demo.corpus import python_library
    from flashtile.tools.demo.steps import run

    chosen = parse_device(device)
    try:
        corpus = python_library()
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    if not run(out, seconds, chosen, quick, corpus):
        raise typer.Exit(1)
