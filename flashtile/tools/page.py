"""Self-contained HTML pages from templates of Jinja, and their charts.

Charts are SVG, with lines and letters in the colour of the surrounding text for light and dark pages.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib as mpl
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.files import DESIGN
from flashtile.learn.io_model.tables import format_bytes, format_number, format_tokens
from flashtile.tools.demo.operations import DROP


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of ``package`` that extends the self-contained ``page.html.jinja``."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("flashtile.tools", ".")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"rows": _rows, "bytes": format_bytes}
    return environment.get_template(template).render(design=DESIGN.read_text("utf-8"), **values)


def _rows(table: Table) -> Iterator[list[list[tuple[str, str]]]]:
    """Yield the rows of a table, each cell as a list of (text, Rich style)."""
    console = Console()
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        texts = [Text.from_markup(str(cell), end="") for cell in cells]
        yield [[(piece.text, str(piece.style or "")) for piece in text.render(console)] for text in texts]


INK = "#010203"
"""Placeholder for the colour of the text around the chart."""

SIZE = (7.2, 3.6)
"""Inches."""


def figure_of(draw: Callable[[Axes], None], title: str, footer: str = "") -> Figure:
    """Return a figure drawn by ``draw``, with text and lines in :data:`INK`."""
    figure = Figure(figsize=SIZE, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    draw(axes)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(which="both", colors=INK, labelsize=8)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, labelcolor=INK)
    figure.supxlabel(footer, fontsize=7, color=INK, alpha=0.7)
    return figure


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG in the colour of the text around it. Equal figures give equal SVG."""
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.axes[0].get_title(loc="left")}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor").strip()


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic, and label it with sequence lengths."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_tokens(length) for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sequence length", fontsize=8)


def operation_bars(axes: Axes, cell: dict[str, Any], ours: str) -> None:
    """Draw two bars of milliseconds: the stacked operations of standard attention, and the fused call.

    Both bars include dropout if the fused call was timed with dropout. Otherwise both exclude it.
    """
    height, found = 0.0, cell["operations"]
    dropped = found.get("fused_dropout_ms")
    fused = cell["results"][ours].get("ms", 0.0) if dropped is None else dropped
    tallest = max(found["together_ms"], fused)
    for index, (name, milliseconds) in enumerate(found["ms"].items()):
        if name == DROP and dropped is None:
            continue
        axes.bar([0], [milliseconds], 0.6, bottom=height, label=name, color=f"C{index + 1}")
        if milliseconds > 0.07 * tallest:  # high enough for its name
            label = f"{name} {format_number(milliseconds)}"
            axes.text(
                0, height + milliseconds / 2, label, ha="center", va="center", fontsize=8, color="black"
            )
        height += milliseconds
    axes.bar([1], [fused], 0.6, label=ours, color="C0")
    for place, whole in enumerate((height, fused)):
        label = format_number(whole) if whole else "not timed"
        axes.text(place, whole, label, ha="center", va="bottom", fontsize=8, color=INK)
    both = "no dropout" if dropped is None else f"dropout {found['dropout_p']:g}"
    axes.set_xticks([0, 1], [f"standard attention,\n{both}", f"{ours},\n{both}"])
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylabel("milliseconds, forward", fontsize=8)
    axes.margins(y=0.14)
