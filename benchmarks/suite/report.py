"""Prints a document of measurements as tables on the terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from benchmarks.suite import documents
from flashtile.tools.demo import operations

UNITS = ("tflops", "gbps")
MARKS = {"wrong": "[red]WRONG[/]", "refused": "–", "out of memory": "OOM", "failed": "[red]failed[/]"}


def print_report(document: dict[str, Any], console: Console, unit: str | None = None) -> None:
    """Print all tables of a document; the geometric means come last. ``unit`` is "tflops" or "gbps"."""
    _print_lines(head_lines(document), console)
    console.print(*(cells_table(document, cells, unit) for cells in by_pass(document).values()))
    apart = taken_apart(document)
    if apart:
        console.print(operations.table(apart, documents.names(document, ours=True)[0]))
    _print_lines(note_lines(document), console)
    if any(row["peer"] == documents.BEST_PEER for row in document["summary"]):
        console.print(summary_table(document))


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def by_pass(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the cells by pass."""
    passes: dict[str, list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        passes.setdefault(cell["pass"], []).append(cell)
    return passes


def head_lines(document: dict[str, Any]) -> list[str]:
    """Return how the measurements were made: device, versions, date, measured ceilings and rounds."""
    settings, ceilings = document["settings"], document["ceilings"]
    threads = f", {settings['threads']} threads" if settings["threads"] else ""
    lines = [f"{headline(document)}{threads}"]
    if ceilings is not None:
        factor, label = scale(document, "tflops")
        products = ", ".join(
            f"{dtype} {factor * speed:.3g} {label}" for dtype, speed in ceilings["matmul_tflops"].items()
        )
        lines.append(
            f"measured ceilings: matrix product {products}; copy {ceilings['copy_gbps']:.4g} GB/s. "
            f"{settings['rounds']} rounds of {settings['rep_ms']:g} ms, contestants in rotation."
        )
    return lines


def note_lines(document: dict[str, Any]) -> list[str]:
    """Return what was not timed and why, and the host time of a small call."""
    lines = _refusals(document)
    beyond = documents.beyond_ceiling(document)
    if beyond:
        lines.append(
            f"faster than the measured ceilings: {', '.join(beyond)}. The machine was busier while they were "
            "measured: do not quote these shares, measure again on a quiet machine"
        )
    if document.get("left_out"):
        lines.append(f"left out, because the time was up: {', '.join(document['left_out'])}")
    return lines + ([_host_times(document)] if document.get("host_time_us") else [])


def cells_table(document: dict[str, Any], cells: Sequence[dict[str, Any]], unit: str | None = None) -> Table:
    """Return the table of one pass: a row per workload, a column per contestant, the fastest in bold.

    A cell of ``cells`` is one workload in one pass. ``unit`` is "tflops" or "gbps"; None takes the unit that
    :func:`documents.unit_of` returns.
    """
    unit = unit or documents.unit_of(cells)
    ours, peers = (documents.names(document, ours=side) for side in (True, False))
    factor, label = scale(document, unit)
    shown = [*ours, *(peer for peer in peers if any(documents.timed(cell, [peer]) for cell in cells))]
    memory = any(_memory_ratio(cell, ours[0]) for cell in cells)
    derived = ("% of ceiling", "x floor", "x best peer", *(["memory"] if memory else []))
    table = Table(
        Column("workload", no_wrap=True),
        *(Column(escape(name), justify="right", no_wrap=True) for name in shown),
        *(Column(heading, justify="right") for heading in derived),
        title=f"{cells[0]['pass']}, {label}, median of rounds ± half their range", title_justify="left",
    )  # fmt: skip
    for cell in cells:
        fastest = documents.best(cell, shown)
        row = [cell["workload"], *(_speed(cell, name, unit, factor, bold=name == fastest) for name in shown)]
        share = documents.share_of_ceiling(document, cell, ours[0], unit)
        ratios = [
            documents.over_floor(document, cell, ours[0]),
            documents.ratio(cell, ours[0], documents.best(cell, peers)),
            *([_memory_ratio(cell, ours[0])] if memory else []),
        ]
        table.add_row(*row, "" if share is None else f"{100 * share:.0f}", *map(_ratio, ratios))
    if memory:
        table.caption = "memory: peak, in multiples of q, k, v, out, their gradients and lse together"
    return table


def cell_line(cell: dict[str, Any], names: Sequence[str] | None = None) -> str:
    """Describe a measured cell in one line: the time or speed of each contestant, or its status."""
    results = (f"{name} {_measured(cell['results'][name])}" for name in names or cell["results"])
    which = " ".join(cell[key] for key in ("workload", "pass") if key in cell)
    return f"{which}: {', '.join(results)}"


def _measured(result: dict[str, Any]) -> str:
    if "ms" in result:
        return f"{result['ms']:.4g} ms"
    if "tokens_per_second" in result:
        return f"{result['tokens_per_second']:.4g} tokens/s"
    if result.get("tbps"):
        return f"{statistics.median(result['tbps']):.3g} TB/s"
    return str(result["status"])


def taken_apart(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells in which standard attention's operations were timed one by one."""
    return [cell for cell in document["cells"] if cell.get("operations", {}).get("status") == "ok"]


def summary_table(document: dict[str, Any]) -> Table:
    """Return a table of flashtile's speed over each peer's: geometric mean and lowest ratio."""
    table = Table(
        *(Column(heading, no_wrap=True) for heading in ("pass", "flashtile", "peer")),
        *(Column(heading, justify="right") for heading in ("geometric mean", "cells", "lowest")),
        Column("lowest at", no_wrap=True), title="flashtile's speed over each peer's", title_justify="left",
    )  # fmt: skip
    for row in document["summary"]:
        style = "bold" if row["peer"] == documents.BEST_PEER else None
        means = (_ratio(row["geometric_mean"]), str(row["cells"]), _ratio(row["lowest"]))
        contestants = (escape(row["ours"]), escape(row["peer"]))
        where = f"{row['class']}, {row['pass']}" if "class" in row else row["pass"]
        table.add_row(where, *contestants, *means, row["lowest_cell"], style=style)
    return table


def scale(document: dict[str, Any], unit: str) -> tuple[float, str]:
    """Return (factor, label) for numbers of ``unit``, shown as ``number * factor`` and the label."""
    if unit == "gbps":
        return 1.0, "GB/s"
    return (1e3, "GFLOP/s") if _on_cpu(document) else (1.0, "TFLOP/s")


def _on_cpu(document: dict[str, Any]) -> bool:
    return document["device"]["device"] == "cpu"


def headline(document: dict[str, Any]) -> str:
    versions = document["versions"]
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "cuda") if versions[name])
    return ", ".join(filter(None, (document["device"]["name"], software, document["date"][:10])))


def _host_times(document: dict[str, Any]) -> str:
    times = document["host_time_us"]
    shape = next(iter(times.values()))["call"]
    what = "time of a small call" if _on_cpu(document) else "host time a call"
    each = (
        f"{name} {entry['status'] if entry['us'] is None else format(entry['us'], '.1f') + ' us'}"
        for name, entry in times.items()
    )
    return f"{what}, forward without gradients ({shape}): {', '.join(each)}"


def _refusals(document: dict[str, Any]) -> list[str]:
    """Return the reasons why contestants were not timed, each with its number of cells."""
    reasons: Counter[tuple[str, str, str]] = Counter()
    for cell in document["cells"]:
        apart = {"standard, by operation": cell["operations"]} if "operations" in cell else {}
        for name, result in (cell["results"] | apart).items():
            if result["status"] != "ok":
                # The message with the missing bytes differs in each cell, so it is left out.
                reason = "" if result["status"] == "out of memory" else f": {result['reason']}"
                reasons[name, result["status"], reason] += 1
    return [
        f"{name}: {status} in {count} cell{'s' * (count > 1)}{reason}"
        for (name, status, reason), count in reasons.items()
    ]


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
