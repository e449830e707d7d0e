"""The figures of the report as PNG, each for a light and for a dark page."""

from __future__ import annotations

import io
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
    axes.title.set_color(theme.ink)
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
        axes.set_title("Time of a forward and backward pass", loc="left", fontsize=11)

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
        axes.set_title("Peak memory of a forward and backward pass, beyond q, k, v", loc="left", fontsize=11)

    return draw


def loss_plot(losses: Sequence[float], twin: Sequence[float], validation: float) -> Draw:
    """Training loss in nats a byte by step, of both attentions, and the validation loss at the end."""

    def draw(axes: Axes, theme: Theme) -> None:
        axes.plot(range(1, len(losses) + 1), losses, color=theme.ours, linewidth=1.6, label="flashtile")
        axes.plot(
            range(1, len(twin) + 1),
            twin,
            color=theme.theirs,
            linewidth=1.6,
            linestyle=(0, (2, 2)),
            label=f"standard attention, the same {len(twin)} steps",
        )
        axes.plot(
            [len(losses)], [validation], "o", color=theme.ours, markerfacecolor=theme.page, label="validation"
        )
        axes.set_xlabel("step")
        axes.set_title("Loss, nats a byte", loc="left", fontsize=11)

    return draw


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


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"
