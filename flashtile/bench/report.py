"""A document of measurements as tables on the terminal, as JSON and as a plot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashtile.bench import summary

UNITS = ("tflops", "gbps")
MARKS = {"wrong": "[red]WRONG[/]", "refused": "–", "out of memory": "OOM", "failed": "[red]failed[/]"}


def write_json(document: dict[str, Any], path: Path) -> None:
    """Replace the file in one step, so that a run cut short leaves the last complete one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def print_report(document: dict[str, Any], console: Console, unit: str = "tflops") -> None:
    """Every table; the geometric means come last."""
    print_head(document, console)
    for which in document["settings"]["passes"]:
        cells = [cell for cell in document["cells"] if cell["pass"] == which]
        if cells:
            console.print(cells_table(document, cells, unit))
    print_notes(document, console)
    if any(row["peer"] == summary.BEST_PEER for row in document["summary"]):
        console.print(summary_table(document))


def print_head(document: dict[str, Any], console: Console) -> None:
    """Where and with what it was measured: device, versions, date, ceilings, rounds."""
    settings, ceilings = document["settings"], document["ceilings"]
    threads = f", {settings['threads']} threads" if settings["threads"] else ""
    console.print(f"{headline(document)}{threads}", highlight=False, markup=False)
    factor, label = scale(document, "tflops")
    products = ", ".join(
        f"{dtype} {factor * speed:.3g} {label}" for dtype, speed in ceilings["matmul_tflops"].items()
    )
    console.print(
        f"measured ceilings: matrix product {products}; copy {ceilings['copy_gbps']:.4g} GB/s. "
        f"{settings['rounds']} rounds of {settings['rep_ms']:g} ms, contestants in rotation.",
        highlight=False,
    )


def print_notes(document: dict[str, Any], console: Console) -> None:
    """What was not timed and why, and the host time of a small call."""
    _print_refusals(document, console)
    if "host_time_us" in document:
        console.print(_host_times(document), highlight=False, markup=False)


def cells_table(document: dict[str, Any], cells: Sequence[dict[str, Any]], unit: str = "tflops") -> Table:
    """One pass: a row for each workload, a column for each contestant, the fastest in bold."""
    ours, peers = (summary.names(document, ours=side) for side in (True, False))
    factor, label = scale(document, unit)
    shown = [*ours, *(peer for peer in peers if any(summary.timed(cell, [peer]) for cell in cells))]
    memory = any(_memory_ratio(cell, ours[0]) for cell in cells)
    table = Table(
        title=f"{cells[0]['pass']}, {label}, median of rounds ± half their range", title_justify="left"
    )
    table.add_column("workload", no_wrap=True)
    for name in shown:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for heading in ("% of ceiling", "x floor", "x best peer", *(["memory"] if memory else [])):
        table.add_column(heading, justify="right")
    for cell in cells:
        fastest = summary.best(cell, shown)
        row = [cell["workload"], *(_speed(cell, name, unit, factor, bold=name == fastest) for name in shown)]
        row.append(_percent(summary.share_of_ceiling(document, cell, ours[0], unit)))
        row.append(_ratio(summary.over_floor(document, cell, ours[0])))
        row.append(_ratio(summary.ratio(cell, ours[0], summary.best(cell, peers))))
        row += [_ratio(_memory_ratio(cell, ours[0]))] if memory else []
        table.add_row(*row)
    if memory:
        table.caption = "memory: peak over what q, k, v, out, their gradients and lse take together"
    return table


def summary_table(document: dict[str, Any]) -> Table:
    """Geometric means of flashtile's speed over each peer's, over the cells that both ran."""
    table = Table(title="flashtile's speed over each peer's", title_justify="left")
    for heading in ("pass", "flashtile", "peer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("geometric mean", "cells", "lowest"):
        table.add_column(heading, justify="right")
    table.add_column("lowest at", no_wrap=True)
    for row in document["summary"]:
        style = "bold" if row["peer"] == summary.BEST_PEER else None
        means = (_ratio(row["geometric_mean"]), str(row["cells"]), _ratio(row["lowest"]))
        contestants = (escape(row["ours"]), escape(row["peer"]))
        table.add_row(row["pass"], *contestants, *means, row["lowest_cell"], style=style)
    return table


def write_plot(document: dict[str, Any], path: Path, unit: str = "tflops") -> None:
    """A panel for each series and pass: lines over the sequence length, or bars where there is one length.

    Raises:
        ValueError: nothing was measured, or matplotlib does not know the file's suffix.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        panels.setdefault((cell["pass"], cell["series"]), []).append(cell)
    if not panels:
        raise ValueError("there is nothing to plot: no cell was measured")
    columns = min(len(panels), max(2, len(document["settings"]["passes"])))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    contestants = [c["name"] for c in document["contestants"]]
    styles = {name: _style(document, name, index) for index, name in enumerate(contestants)}
    handles: dict[str, Any] = {}
    factor, label = scale(document, unit)
    for axis, ((which, series), cells) in zip(axes, panels.items(), strict=False):
        lengths = sorted({cell["seqlen_k"] for cell in cells})
        for index, name in enumerate(contestants):
            points = [
                (cell["seqlen_k"], factor * cell["results"][name][unit])
                for cell in cells
                if summary.timed(cell, [name])
            ]
            if points and len(lengths) == 1:
                (handles[name],) = axis.bar([index], [points[0][1]], color=styles[name]["color"])
            elif points:
                (handles[name],) = axis.plot(*zip(*sorted(points), strict=True), **styles[name])
        if len(lengths) == 1:
            axis.set_xticks([])
            axis.set_xlabel(f"sequence length {lengths[0]}", fontsize=8)
        else:
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
            axis.minorticks_off()
            axis.set_xlabel("sequence length", fontsize=8)
        kind = f"{cells[0]['mask']}, D {cells[0]['head_dim']}, {cells[0]['dtype']}"
        axis.set_title(f"{series}, {which}\n{kind}", fontsize=9)
        axis.set_ylabel(label, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), 6) or 1,
        fontsize=9,
    )
    figure.suptitle(headline(document), fontsize=10)
    figure.savefig(path, dpi=150)


def scale(document: dict[str, Any], unit: str) -> tuple[float, str]:
    """What to multiply numbers in ``unit`` by for display, and what to call them then."""
    if unit == "gbps":
        return 1.0, "GB/s"
    return (1e3, "GFLOP/s") if _on_cpu(document) else (1.0, "TFLOP/s")


def _on_cpu(document: dict[str, Any]) -> bool:
    return document["device"]["device"] == "cpu"


def _style(document: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    ours = name in summary.names(document, ours=True)
    return {"color": f"C{index % 10}", "marker": "o" if ours else ".", "linewidth": 2.4 if ours else 1.2}


def headline(document: dict[str, Any]) -> str:
    versions = document["versions"]
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "cuda") if versions[name])
    return f"{document['device']['name']}, {software}, {document['date'][:10]}"


def _host_times(document: dict[str, Any]) -> str:
    times = document["host_time_us"]
    shape = next(iter(times.values()))["call"]
    what = "time of a small call" if _on_cpu(document) else "host time a call"
    each = (
        f"{name} {entry['status'] if entry['us'] is None else format(entry['us'], '.1f') + ' us'}"
        for name, entry in times.items()
    )
    return f"{what}, forward without gradients ({shape}): {', '.join(each)}"


def _print_refusals(document: dict[str, Any], console: Console) -> None:
    """Each reason once, with the number of cells."""
    reasons: Counter[tuple[str, str, str]] = Counter()
    for cell in document["cells"]:
        for name, result in cell["results"].items():
            if result["status"] != "ok":
                # How much memory was missing differs from cell to cell.
                reason = "" if result["status"] == "out of memory" else f": {result['reason']}"
                reasons[name, result["status"], reason] += 1
    for (name, status, reason), count in reasons.items():
        cells = "1 cell" if count == 1 else f"{count} cells"
        console.print(f"{name}: {status} in {cells}{reason}", highlight=False, markup=False)


def _speed(cell: dict[str, Any], name: str, unit: str, factor: float, bold: bool) -> str:
    result = cell["results"][name]
    if result["status"] != "ok":
        return MARKS[result["status"]]
    speed = factor * result[unit]
    number = f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"
    text = f"{number} ±{50 * result['spread']:.0f}%"
    return f"[bold green]{text}[/]" if bold else text


def _memory_ratio(cell: dict[str, Any], name: str) -> float | None:
    peak = cell["results"][name].get("peak_memory_bytes")
    return None if peak is None else peak / cell["resident_bytes"]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"
