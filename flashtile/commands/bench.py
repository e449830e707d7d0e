"""``flashtile bench``: flashtile beside its peers on named workloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashtile.bench import fp8_peers, peers, report, report_page, runner, workloads
from flashtile.bench.summary import summarize
from flashtile.commands.devices import parse_device

Names = list[str]
NARROW = 160
"""Columns of a table that is not printed to a terminal."""


def bench(
    workload_names: Annotated[
        Names | None,
        typer.Option(
            "--workloads", "-w", help="Names, series or tags, by commas or repeated. Default: paper, or cpu."
        ),
    ] = None,
    passes: Annotated[
        Names | None,
        typer.Option("--pass", "-p", help="forward, backward, both (as one); repeated or by commas."),
    ] = None,
    peer_names: Annotated[
        Names | None,
        typer.Option("--peers", help="Peers to run, 'none' for flashtile alone. Default: all that can run."),
    ] = None,
    backends: Annotated[
        Names | None,
        typer.Option("--backend", help="Backends of flashtile to compare. Default: dispatch's choice."),
    ] = None,
    head_dims: Annotated[Names | None, typer.Option("--head-dim", help="Keep these head sizes only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Replaces the workloads' own dtype.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu. Default: cuda if present.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant.")] = 3,
    rep: Annotated[float, typer.Option(min=1.0, help="Milliseconds a measurement.")] = 25.0,
    host_time: Annotated[bool, typer.Option(help="Measure the host time of a call.")] = True,
    unit: Annotated[str, typer.Option(help="Of the tables and the plot: tflops or gbps.")] = "tflops",
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="All numbers, written after every cell.")
    ] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="PNG, SVG or PDF.")] = None,
    report_path: Annotated[
        Path | None,
        typer.Option(
            "--report", dir_okay=False, help="HTML: charts of speed, speed-up and memory, and tables."
        ),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Report an earlier --json file; measure nothing."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List workloads and peers; measure nothing.")
    ] = False,
) -> None:
    """Measure flashtile beside its peers: correctness first, then speed, peers in rotation."""
    console = _console()
    if unit not in report.UNITS:
        raise typer.BadParameter(f"unit must be one of {', '.join(report.UNITS)}, got {unit!r}")
    if show is not None:
        _finish(json.loads(show.read_text()), console, unit, plot_path, report_path)
        return
    chosen_device = parse_device(device)
    if list_all:
        console.print(_workload_table(), _peer_table(chosen_device))
        return
    try:
        settings = runner.Settings(chosen_device, _passes(passes), rounds, rep, host_time)
        chosen = workloads.select(
            _split(workload_names) or ["paper" if chosen_device.type == "cuda" else "cpu"],
            head_dims=_numbers(head_dims),
            dtype=dtype,
        )
        fp8 = _all_or_none_fp8(chosen, settings.passes)
        find = fp8_peers.contestants if fp8 else peers.contestants
        contestants = find(_split(peer_names), _split(backends), chosen_device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not chosen:
        raise typer.BadParameter("no workload is left: none has that head size")

    with _progress() as progress:
        task = progress.add_task("compiling, measuring ceilings", total=len(chosen) * len(settings.passes))

        def after_cell(document: dict[str, Any]) -> None:
            document["summary"] = summarize(document)
            if json_path is not None:
                report.write_json(document, json_path)
            done = len(document["cells"])
            following = chosen[min(done // len(settings.passes), len(chosen) - 1)]
            progress.update(task, completed=done, description=following.name)

        document = runner.run(chosen, contestants, settings, after_cell=after_cell)
    _finish(document, console, unit, plot_path, report_path)
    if any(
        result["status"] == runner.WRONG for cell in document["cells"] for result in _ours(document, cell)
    ):
        raise typer.Exit(1)


def _finish(
    document: dict[str, Any], console: Console, unit: str, plot_path: Path | None, report_path: Path | None
) -> None:
    if plot_path is not None:
        report.write_plot(document, plot_path, unit)
    if report_path is not None:
        report_page.write_page(document, report_path)
    report.print_report(document, console, unit)


def _ours(document: dict[str, Any], cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell["results"][c["name"]] for c in document["contestants"] if c["ours"]]


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=NARROW)


def _progress() -> Progress:
    """On the error stream, and only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _split(values: Names | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _passes(values: Names | None) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(_split(values))) or ("forward",)
    for which in chosen:
        if which not in workloads.PASSES:
            raise ValueError(f"pass must be one of {', '.join(workloads.PASSES)}, got {which!r}")
    return chosen


def _all_or_none_fp8(chosen: Sequence[workloads.Workload], passes: tuple[str, ...]) -> bool:
    """Whether the run is of e4m3, which has contestants of its own."""
    kinds = {workload.fp8 for workload in chosen}
    if len(kinds) > 1:
        raise ValueError(f"workloads in {workloads.FP8} need a run of their own")
    if True in kinds and passes != ("forward",):
        raise ValueError(f"pass must be forward in {workloads.FP8}, got {', '.join(passes)}")
    return True in kinds


def _numbers(values: Names | None) -> list[int]:
    try:
        return [int(value) for value in _split(values)]
    except ValueError:
        raise ValueError(f"head-dim must be numbers, got {', '.join(values or ())}") from None


def _workload_table() -> Table:
    table = Table(title="workloads", title_justify="left")
    for heading in ("name", "shape", "mask", "tags"):
        table.add_column(heading)
    for w in workloads.WORKLOADS:
        table.add_row(w.name, w.shape, w.mask, ", ".join(w.tags))
    return table


def _peer_table(device: torch.device) -> Table:
    table = Table(title=f"peers on {device}", title_justify="left")
    for heading in ("name", "can run here"):
        table.add_column(heading)
    for peer in peers.peers():
        table.add_row(peer.name, escape(peer.unavailable(device) or "yes"))
    return table
