"""Figures of the report: time and memory by sequence length, and the training loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flashtile.learn.io_model.tables import format_bytes, format_seconds
from flashtile.tools.charts import INK, as_svg, figure_of, length_axis, operation_bars
from flashtile.tools.demo.scaling import Cost, ScalingRow

OURS, THEIRS = "#0072b2", "#b34700"
VARIABLES = {OURS: "--q", THEIRS: "--k"}
"""CSS variable of the page for each colour. On a dark page the variable has another value."""

OPERATIONS = ("#e8894a", "#f0b27e", "#d9a441", "#f3d06b", "#c9b79c")
"""Colours of standard attention's operations, light enough for black text."""

HALF_WIDTH = (5.4, 3.6)
"""Inches of a figure that has half of the page's width."""


def bars(row: ScalingRow | None) -> dict[str, list[dict[str, Any]]]:
    """Return the bars "Time" and "Memory" that compare standard attention with flashtile at one length.

    The ``share`` of a bar is its length divided by that of the longest bar.
    """
    if row is None or row.standard is None:
        return {}
    ours, theirs = row.flashtile, row.standard
    found = {"Time": _bars(ours.milliseconds / 1e3, theirs.milliseconds / 1e3, format_seconds)}
    if ours.peak_bytes and theirs.peak_bytes:
        found["Memory"] = _bars(ours.peak_bytes, theirs.peak_bytes, format_bytes)
    return found


def _bars(ours: float, theirs: float, described: Callable[[float], str]) -> list[dict[str, Any]]:
    sides = (("standard attention", theirs, VARIABLES[THEIRS]), ("flashtile", ours, VARIABLES[OURS]))
    longest = max(ours, theirs)
    return [
        {"label": label, "value": described(value), "share": value / longest, "color": color}
        for label, value, color in sides
    ]


def themed_svg(figure: Figure) -> str:
    """Return an SVG element in which the CSS variables of the page replace the two main colours."""
    svg = as_svg(figure)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable}, {color})")
    return svg


def time_figure(rows: Sequence[ScalingRow]) -> Figure:
    """Plot the milliseconds of a pass by sequence length on logarithmic axes."""
    return _pass_figure(rows, "Time of a pass", lambda cost: cost.milliseconds, 10, _duration)


def memory_figure(rows: Sequence[ScalingRow]) -> Figure:
    """Plot the peak bytes of a pass by sequence length on logarithmic axes."""
    title = "Peak memory of a pass, beyond q, k and v"
    return _pass_figure(rows, title, lambda cost: cost.peak_bytes, 2, format_bytes)


def operations_figure(cell: dict[str, Any]) -> Figure:
    """Plot the milliseconds of each operation of standard attention, and those of flashtile's call."""
    title = f"Forward pass of GPT-2's attention: {cell['shape']}"
    with mpl.rc_context({"axes.prop_cycle": cycler(color=[OURS, *OPERATIONS])}):
        return figure_of(lambda axes: operation_bars(axes, cell, "flashtile"), title)


def loss_figure(losses: Sequence[float], twin: Sequence[float], validation: float) -> Figure:
    """Plot the training loss in nats per byte by step, and the final validation loss.

    ``losses`` are those of flashtile, and ``twin`` those of the same run with standard attention. The running
    mean of each run is a strong line. The loss of each step with flashtile is a faint line.
    """

    def draw(axes: Axes) -> None:
        window = max(1, len(losses) // 40)
        axes.plot(range(1, len(losses) + 1), losses, color=OURS, linewidth=0.8, alpha=0.3)
        for curve, color, style, label in (
            (losses, OURS, "-", "flashtile"),
            (twin, THEIRS, (0, (2, 2)), f"standard attention,\nthe same {len(twin)} steps"),
        ):
            mean = running_mean(curve, window)
            axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, linestyle=style, label=label)
        axes.plot([len(losses)], [validation], "o", color=INK, fillstyle="none", label="files it never saw")
        axes.set_xlabel("step", fontsize=8)

    return figure_of(draw, "Training loss, nats per byte")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean: element i is the mean of the last ``window`` values up to value i."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _pass_figure(
    rows: Sequence[ScalingRow],
    title: str,
    value: Callable[[Cost], float | None],
    base: int,
    text_of: Callable[[float], str],
) -> Figure:
    """Plot ``value`` by sequence length on logarithmic axes; ``text_of`` formats numbers of the y axis."""

    def draw(axes: Axes) -> None:
        _two_curves(axes, rows, value)
        axes.set_yscale("log", base=base)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: text_of(number)))

    figure = figure_of(draw, title)
    figure.set_size_inches(HALF_WIDTH)
    return figure


def _two_curves(axes: Axes, rows: Sequence[ScalingRow], value: Callable[[Cost], float | None]) -> None:
    """Plot ``value`` by sequence length, a curve for flashtile and one for standard attention.

    Lengths that standard attention cannot run are marked.
    """
    for name, label, color in (("standard", "standard attention", THEIRS), ("flashtile", "flashtile", OURS)):
        costs = ((row.seqlen, getattr(row, name)) for row in rows)
        points = [(seqlen, found) for seqlen, cost in costs if cost is not None and (found := value(cost))]
        if points:
            seqlens, values = zip(*points, strict=True)
            axes.plot(seqlens, values, "o-", color=color, linewidth=1.8, markersize=4.5)
            # Both curves rise. The label of the upper curve fits at the left above it, and that of the lower
            # curve at the right below it.
            is_upper = name == "standard"
            axes.annotate(
                label, points[-1 if is_upper else len(points) // 2], xytext=(-8, 3) if is_upper else (4, -11),
                textcoords="offset points", ha="right" if is_upper else "left", va="center", fontsize=9,
                color=color,
            )  # fmt: skip
    for row in rows:
        if row.obstacle is not None:
            reason = "does not fit" if "does not fit" in row.obstacle else "left out"
            axes.axvline(row.seqlen, color=THEIRS, linewidth=0.9, linestyle=":")
            axes.annotate(
                f"standard {reason}", (row.seqlen, 0.04), xycoords=("data", "axes fraction"), rotation=90,
                ha="right", va="bottom", fontsize=8, color=THEIRS,
            )  # fmt: skip
    length_axis(axes, [row.seqlen for row in rows])
    axes.margins(y=0.14)


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"
