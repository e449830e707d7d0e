"""``python -m benchmarks``: flashtile compared with its peers on named workloads."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.suite import (
    contestants,
    documents,
    engine_bench,
    linear_bench,
    report,
    report_charts,
    report_page,
    runner,
    workloads,
)
from benchmarks.suite.documents import summarize
from benchmarks.suite.model_bench import select_models
from flashtile.cli import run
from flashtile.tools.commands.options import (
    Device,
    bad_parameters,
    console,
    finite,
    output_file,
    parse_device,
    progress_bar,
    say,
)

Names = list[str]

FLOPS_ON_CPU = 1e11
"""Calls with more floating-point operations are for a GPU: on a CPU their reference takes minutes."""
STOPPED = 128 + signal.SIGINT
"""Exit code of a command that a signal ended early."""


@dataclass
class Stop:
    """Result of :func:`stops_early`. ``early`` becomes True if a signal ended the ``with`` block."""

    early: bool = False


@contextmanager
def stops_early() -> Iterator[Stop]:
    """End the ``with`` block at an interrupt (Ctrl-C) or SIGTERM; the program then continues after it."""
    stop = Stop()
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield stop
    except KeyboardInterrupt:
        stop.early = True
    finally:
        signal.signal(signal.SIGTERM, former)


def bench(
    workload_names: Annotated[
        Names | None,
        typer.Option(
            "--workloads",
            "-w",
            help="Names, series or tags of workloads (see --list), separated by commas or repeated. "
            "Default: paper on a GPU, else cpu.",
        ),
    ] = None,
    passes: Annotated[
        Names | None,
        typer.Option(
            "--pass",
            "-p",
            help=f"Passes: {', '.join(workloads.PASSES)}; separated by commas or repeated. both: forward and "
            "backward together; graph: forward calls in a CUDA graph. Default: forward, and graph for "
            "decoding on a GPU.",
        ),
    ] = None,
    peer_names: Annotated[
        Names | None,
        typer.Option("--peers", help="Peers to compare with, or none. Default: all that can run here."),
    ] = None,
    backends: Annotated[
        Names | None,
        typer.Option("--backend", help="Backends of flashtile to compare. Default: dispatch's choice."),
    ] = None,
    head_dims: Annotated[Names | None, typer.Option("--head-dim", help="Keep these head sizes only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of all workloads, instead of their own.")] = None,
    device: Device = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each contestant, taken in turns.")] = 3,
    rep: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="Milliseconds of calls per measurement.")
    ] = 25.0,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Leave out workloads that would probably end after this time."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of workloads that are drawn.")] = 0,
    host_time: Annotated[bool, typer.Option(help="Also measure the host time of a small call.")] = True,
    operations: Annotated[
        bool,
        typer.Option(
            "--operations",
            help="Also time standard attention's operations one by one: products, mask, softmax, dropout.",
        ),
    ] = False,
    unit: Annotated[
        str | None,
        typer.Option(help="Unit of tables and plot: tflops or gbps. Default: gbps for decoding."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", callback=output_file(), help="File of numbers, written after every cell."),
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", callback=output_file(".png", ".svg", ".pdf"), help="Chart: PNG, SVG or PDF."),
    ] = None,
    report_path: Annotated[
        Path | None,
        typer.Option(
            "--report",
            callback=output_file(),
            help="HTML file with tables and charts of speed, speed-up and memory.",
        ),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Report an earlier --json file instead of measuring."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List workloads and peers instead of measuring.")
    ] = False,
) -> None:
    """Compare flashtile's speed with its peers', after a check of every contestant's results."""
    out = console()
    with bad_parameters():
        if unit is not None and unit not in report.UNITS:
            raise ValueError(f"unit must be one of {', '.join(report.UNITS)}, got {unit!r}")
        files = [path.resolve() for path in (json_path, plot_path, report_path) if path is not None]
        if len(set(files)) < len(files):
            raise ValueError(f"--json, --plot and --report must be different files, got {files[0]} twice")
        earlier = None if show is None else documents.read(show)
    chosen_device = parse_device(device)
    if earlier is not None:
        _finish(earlier, out, unit, plot_path, report_path)
        return
    if list_all:
        out.print(_workload_table(), *(_peer_table(kind, chosen_device) for kind in contestants.OURS))
        return
    with bad_parameters():
        for bench_kind in (linear_bench, engine_bench):
            others = select_models(bench_kind.NAME, bench_kind.WORKLOADS, _split(workload_names))
            given = (passes, backends, head_dims, dtype, operations, plot_path, report_path, seconds)
            if others and any(given):
                raise ValueError(
                    f"{bench_kind.NAME} workloads take --peers, --device, --rounds, --rep and --json, "
                    f"got {next(filter(None, given))}"
                )
            if others:
                measure = partial(bench_kind.run, others, chosen_device, rounds, rep, _split(peer_names))
                _bench_others(bench_kind, measure, f"{len(others)} workloads", json_path, out)
                return
    with bad_parameters():
        chosen = workloads.select(
            _split(workload_names) or ["paper" if chosen_device.type == "cuda" else "cpu"],
            head_dims=_numbers(head_dims),
            dtype=dtype,
            seed=seed,
        )
        kind = contestants.kind_of(chosen)
        settings = runner.Settings(
            chosen_device, _passes(passes, kind, chosen_device), rounds, rep, host_time, operations,
            math.inf if seconds is None else seconds,
        )  # fmt: skip
        if operations and (kind != "attention" or "forward" not in settings.passes):
            raise ValueError("--operations takes attention workloads with pass forward")
        entrants = contestants.contestants(kind, _split(peer_names), _split(backends), chosen_device)

    largest = max(chosen, key=lambda workload: workload.flops())
    if chosen_device.type == "cpu" and largest.flops() > FLOPS_ON_CPU:
        typer.echo(
            f"{largest.name} has {largest.flops() / 1e9:.0f} GFLOP and takes minutes on a CPU: "
            "workloads for it have names that begin with cpu or ci-, such as ci-packed and ci-mixed",
            err=True,
        )
    document: dict[str, Any] = {}
    with progress_bar(Console(stderr=True)) as progress, stops_early() as stop:
        cells = len(chosen) * len(settings.passes)
        task = progress.add_task("compiling, measuring ceilings", total=cells)

        def after_cell(so_far: dict[str, Any]) -> None:
            document.update(so_far, summary=summarize(so_far))
            if json_path is not None:
                documents.write(document, json_path)
            done = len(document["cells"])
            following = chosen[min(done // len(settings.passes), len(chosen) - 1)]
            progress.update(task, completed=done, description=following.name)
            if done:
                say(progress, f"{done}/{cells} {report.cell_line(document['cells'][-1])}")

        runner.run(chosen, entrants, settings, after_cell=after_cell)
    if document.get("cells"):
        _finish(document, out, unit, plot_path, report_path)
    _exit(document, [contestant.name for contestant in entrants if contestant.ours], stop)


def _bench_others(
    kind: Any, measure: Callable[..., Any], described: str, json_path: Path | None, out: Console
) -> None:
    """Run ``measure``, which is ``run`` of the module ``kind``: ``linear_bench`` or ``engine_bench``."""
    document: dict[str, Any] = {}
    with bad_parameters(), progress_bar(Console(stderr=True)) as progress, stops_early() as stop:
        progress.add_task(f"{kind.NAME}: {described}", total=None)
        told: set[str] = set()

        def after_cell(so_far: dict[str, Any]) -> None:
            document.update(so_far)
            if json_path is not None:
                documents.write(document, json_path)
            lines = [report.cell_line(cell, [name]) for cell in so_far["cells"] for name in cell["results"]]
            for line in lines:  # the document also has earlier results: print only new lines
                if line not in told:
                    told.add(line)
                    say(progress, line)

        measure(after_cell=after_cell)
    if document.get("cells"):
        out.print(kind.table(document))
    _exit(document, [kind.OURS], stop)


def _exit(document: dict[str, Any], ours: list[str], stop: Stop) -> None:
    """Exit with an error if a signal ended the run, or if a result of flashtile is wrong."""
    if stop.early:
        raise typer.Exit(STOPPED)
    results = [cell["results"].get(name, {}) for cell in document["cells"] for name in ours]
    if any(result.get("status") == runner.WRONG for result in results):
        raise typer.Exit(1)


def _finish(
    document: dict[str, Any],
    out: Console,
    unit: str | None,
    plot_path: Path | None,
    report_path: Path | None,
) -> None:
    if plot_path is not None:
        report_charts.write_plot(document, plot_path, unit)
    if report_path is not None:
        report_path.write_text(report_page.render_page(document))
    report.print_report(document, out, unit)


def _split(values: Names | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _passes(values: Names | None, kind: str, device: torch.device) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(_split(values)))
    if not chosen:
        replayed = kind in ("decode", "mass", "invariant") and device.type == "cuda"
        return ("forward", "graph") if replayed else ("forward",)
    backward = [which for which in chosen if which in workloads.PASSES and runner.needs_gradients(which)]
    if kind not in ("attention", "masks", "tree", "jvp") and backward:
        raise ValueError(f"pass must be forward or graph for {kind} workloads, got {', '.join(backward)}")
    return chosen


def _numbers(values: Names | None) -> list[int]:
    try:
        return [int(value) for value in _split(values)]
    except ValueError:
        raise ValueError(f"head-dim must be numbers, got {', '.join(values or ())}") from None


def _workload_table() -> Table:
    table = Table("name", "shape", "mask", "tags", title="workloads", title_justify="left")
    for w in workloads.WORKLOADS:
        table.add_row(w.name, w.shape, w.mask, ", ".join(w.tags))
    for kind in (linear_bench, engine_bench):
        whole = select_models(kind.NAME, kind.WORKLOADS, [kind.NAME])
        for other in kind.WORKLOADS:
            tags = [kind.NAME] * (other in whole) + [f"{kind.NAME}-{other.model}"]
            table.add_row(other.name, other.shape, "", ", ".join(tags))
    return table


def _peer_table(kind: str, device: torch.device) -> Table:
    table = Table(
        "name", "can run here", title=f"peers of {kind} workloads on {device}", title_justify="left"
    )
    for peer in contestants.peers(kind):
        table.add_row(peer.name, escape(peer.unavailable(device) or "yes"))
    return table


def application() -> typer.Typer:
    """Return the command as a ``typer.Typer``."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(bench)
    return app


def main() -> None:
    """Run the command line as ``flashtile`` runs its own."""
    run(application(), "benchmarks")
