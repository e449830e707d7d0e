"""Figures of the report: time and memory by sequence length, and the training loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flashtile.learn.io_model.tables import format_bytes
from flashtile.tools.bench.report_charts import INK, figure_of, length_axis, operation_bars
from flashtile.tools.demo.scaling import Cost, ScalingRow

OURS, THEIRS = "C0", "C1"


def time_figure(rows: Sequence[ScalingRow]) -> Figure:
    """Plot the milliseconds of a pass by sequence length on logarithmic axes."""

    def draw(axes: Axes) -> None:
        _two_curves(axes, rows, lambda cost: cost.milliseconds)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: _duration(ms)))

    return figure_of(draw, "Time of a forward and backward pass")


def memory_figure(rows: Sequence[ScalingRow]) -> Figure:
    """Plot the peak bytes of a pass by sequence length on logarithmic axes."""

    def draw(axes: Axes) -> None:
        _two_curves(axes, rows, lambda cost: cost.peak_bytes)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))

    return figure_of(draw, "Peak memory of a forward and backward pass, beyond q, k, v")


def operations_figure(cell: dict[str, Any]) -> Figure:
    """Plot the milliseconds of standard attention by operation, and of flashtile's call."""
    title = f"Forward pass of GPT-2's attention: {cell['shape']}"
    return figure_of(lambda axes: operation_bars(axes, cell, "flashtile"), title)


def loss_figure(losses: Sequence[float], twin: Sequence[float], validation: float) -> Figure:
    """Plot the training loss in nats per byte by step, for both attentions, and the final validation loss.

    The loss of each step is a faint line, its running mean a strong one.
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

    return figure_of(draw, "Loss, nats a byte")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of it and the values before it, at most ``window`` values in all."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _two_curves(axes: Axes, rows: Sequence[ScalingRow], value: Callable[[Cost], float | None]) -> None:
    """Plot ``value`` of both attentions by sequence length, and mark lengths that standard attention cannot
    run."""
    for name, label, color in (("standard", "standard attention", THEIRS), ("flashtile", "flashtile", OURS)):
        costs = ((row.seqlen, getattr(row, name)) for row in rows)
        points = [(seqlen, found) for seqlen, cost in costs if cost is not None and (found := value(cost))]
        if points:
            seqlens, values = zip(*points, strict=True)
            axes.plot(seqlens, values, "o-", color=color, linewidth=1.8, markersize=4.5, label=label)
    for row in rows:
        if row.obstacle is not None:
            reason = "does not fit" if "does not fit" in row.obstacle else "left out"
            axes.axvline(row.seqlen, color=THEIRS, linewidth=0.9, linestyle=":")
            axes.annotate(
                f"standard {reason}", (row.seqlen, 0.04), xycoords=("data", "axes fraction"), rotation=90,
                ha="right", va="bottom", fontsize=8, color=THEIRS,
            )  # fmt: skip
    length_axis(axes, [row.seqlen for row in rows])


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"
