"""The figures of the report as PNG, each for a light and for a dark page."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from flashtile.demo.scaling import Row


@dataclass(frozen=True)
class Theme:
    page: str
    ink: str
    grid: str
    ours: str
    theirs: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d8dee4", "#0a66c2", "#c2410c"),
    "dark": Theme("#14181d", "#d7dde4", "#333b45", "#6cb6ff", "#f59e6b"),
}

SIZE = (6.4, 3.8)
DOTS_PER_INCH = 160

Draw = Callable[[Axes, Theme], None]


def render(draw: Draw, theme: Theme) -> bytes:
    """Draw into a new figure and return it as PNG."""
    figure = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained", facecolor=theme.page)
    axes = figure.add_subplot(facecolor=theme.page)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.grid)
    axes.grid(color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    draw(axes, theme)
    axes.tick_params(which="both", colors=theme.ink, length=0)
    axes.xaxis.label.set_color(theme.ink)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=theme.ink)
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=theme.page)
    return file.getvalue()


def time_plot(rows: Sequence[Row]) -> Draw:
    """Milliseconds of a pass over sequence length, both on logarithmic axes."""

    def draw(axes: Axes, theme: Theme) -> None:
        ours = [(row.seqlen, row.flashtile.milliseconds) for row in rows]
        theirs = [(row.seqlen, row.standard.milliseconds) for row in rows if row.standard is not None]
        _two_curves(axes, theme, ours, theirs, rows)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: _duration(ms)))
        _title(axes, theme, "Time of a forward and backward pass")

    return draw


def memory_plot(rows: Sequence[Row]) -> Draw:
    """Peak bytes of a pass over sequence length, both on logarithmic axes."""

    def draw(axes: Axes, theme: Theme) -> None:
        ours = [(row.seqlen, row.flashtile.peak_bytes) for row in rows if row.flashtile.peak_bytes]
        theirs = [
            (row.seqlen, row.standard.peak_bytes)
            for row in rows
            if row.standard is not None and row.standard.peak_bytes
        ]
        _two_curves(axes, theme, ours, theirs, rows)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
        _title(axes, theme, "Peak memory of a forward and backward pass, beyond q, k, v")

    return draw


def loss_plot(losses: Sequence[float], twin: Sequence[float], validation: float) -> Draw:
    """Training loss in nats a byte by step, of both attentions, and the validation loss at the end.

    Every step is a faint line, and its running mean a strong one.
    """

    def draw(axes: Axes, theme: Theme) -> None:
        window = max(1, len(losses) // 40)
        axes.plot(range(1, len(losses) + 1), losses, color=theme.ours, linewidth=0.8, alpha=0.3)
        for curve, color, style, label in (
            (losses, theme.ours, "-", "flashtile"),
            (twin, theme.theirs, (0, (2, 2)), f"standard attention, the same {len(twin)} steps"),
        ):
            mean = running_mean(curve, window)
            axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, linestyle=style, label=label)
        axes.plot(
            [len(losses)],
            [validation],
            "o",
            markeredgecolor=theme.ink,
            markerfacecolor=theme.page,
            label="files it never saw",
        )
        axes.set_xlabel("step")
        _title(axes, theme, "Loss, nats a byte")

    return draw


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Of each value and those before it, up to ``window`` values."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def format_bytes(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            value = size / unit
            return f"{value:.0f} {name}" if value >= 10 or value == int(value) else f"{value:.1f} {name}"
    return f"{size:.0f} B"


def _two_curves(
    axes: Axes,
    theme: Theme,
    ours: Sequence[tuple[int, float]],
    theirs: Sequence[tuple[int, float]],
    rows: Sequence[Row],
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    curves = ((theirs, theme.theirs, "standard attention"), (ours, theme.ours, "flashtile"))
    for points, color, label in curves:
        if points:
            seqlens, values = zip(*points, strict=True)
            axes.plot(seqlens, values, "o-", color=color, linewidth=1.8, markersize=4.5, label=label)
    for row in rows:
        if row.obstacle is not None:
            reason = "does not fit" if "does not fit" in row.obstacle else "left out"
            axes.axvline(row.seqlen, color=theme.theirs, linewidth=0.9, linestyle=":")
            axes.annotate(
                f"standard {reason}",
                (row.seqlen, 0.04),
                xycoords=("data", "axes fraction"),
                rotation=90,
                ha="right",
                va="bottom",
                fontsize=8,
                color=theme.theirs,
            )
    axes.set_xticks([row.seqlen for row in rows], [_length(row.seqlen) for row in rows])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sequence length")


def _title(axes: Axes, theme: Theme, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=theme.ink)


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"
