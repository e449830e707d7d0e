"""Charts of a document of measurements: bars of speed, speed-up and memory against sequence length.

Charts are SVG. Their lines and letters have the colour of the surrounding text, so they suit light and dark
pages. Each chart names the device, the versions and the date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.suite import documents
from benchmarks.suite.report import by_pass, headline, scale, taken_apart
from flashtile.learn.io_model.tables import format_bytes, format_tokens
from flashtile.tools.page import INK, SIZE, as_svg, figure_of, length_axis, operation_bars

ABSENT = {"wrong": "wrong", "refused": "", "out of memory": "OOM", "failed": "failed"}
"""Text that replaces a bar."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One chart: a name that is unique in a document, its series, a caption, and the image as SVG."""

    name: str
    series: str
    title: str
    svg: str


def charts(document: dict[str, Any]) -> Iterator[Chart]:
    """Yield the charts of each series of workloads that differ only in sequence length.

    A series has a chart of the speed in each pass. If operations of standard attention were timed, it also
    has charts of their times. A series with several lengths also has charts of the speed-up and of the
    memory.

    Raises:
        ValueError: nothing was measured.
    """
    for series, cells, passes in _by_series(document):
        what = _what(cells)
        for which, measured in passes.items():
            yield _chart(document, series, f"{which} speed", what, _speed_bars, measured)
        for cell in taken_apart({"cells": cells}):
            kind = f"operations {cell['seqlen_k']}"
            yield _chart(document, series, kind, cell["shape"], _operation_bars, [cell])
        if len({cell["seqlen_k"] for cell in cells}) > 1:
            for which, measured in passes.items():
                if _curves(document, measured, _speed_up):
                    yield _chart(document, series, f"{which} speed-up", what, _speed_up_lines, measured)
            with_memory = [measured for measured in passes.values() if _curves(document, measured, _peak)]
            if with_memory:
                # One chart is enough: the memory of the passes differs little.
                yield _chart(document, series, "memory", what, _memory_lines, with_memory[-1])


def write_plot(document: dict[str, Any], path: Path, unit: str | None = None) -> None:
    """Write one picture with the speed of each contestant, a panel for each pass of each series of workloads.

    Raises:
        ValueError: nothing was measured.
    """
    panels = [(which, cells) for _, _, passes in _by_series(document) for which, cells in passes.items()]
    columns = min(len(panels), max(2, len({which for which, _ in panels})))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (which, cells) in zip(axes, panels, strict=False):
        _speed_bars(axis, document, cells, unit)
        axis.set_title(f"{which}, {_what(cells)}", loc="left", fontsize=9)
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(headline(document), fontsize=10)
    figure.savefig(path, dpi=150)


def _by_series(document: dict[str, Any]) -> Iterator[tuple[str, list[Cell], dict[str, list[Cell]]]]:
    """Yield each series of workloads as (name, cells, cells by pass)."""
    if not document["cells"]:
        raise ValueError("there is nothing to draw: no cell was measured")
    for series in dict.fromkeys(cell["series"] for cell in document["cells"]):
        cells = [cell for cell in document["cells"] if cell["series"] == series]
        yield series, cells, by_pass({"cells": cells})


def _what(cells: Sequence[Cell]) -> str:
    """Describe the properties that all workloads of a series share."""
    kinds = (("{}", "mask"), ("head_dim {}", "head_dim"), ("{}", "dtype"))
    same = [text.format(cells[0][key]) for text, key in kinds if len({cell[key] for cell in cells}) == 1]
    return f"{cells[0]['series']}: {', '.join(same)}"


def _chart(
    document: dict[str, Any], series: str, kind: str, what: str, draw: Any, cells: Sequence[Cell]
) -> Chart:
    title = f"{kind}, {what}"
    name = f"{series}-{kind}".replace(" ", "-")
    figure = figure_of(lambda axes: draw(axes, document, cells), title, headline(document))
    return Chart(name, series, title, as_svg(figure))


def _speed_bars(axes: Axes, document: dict[str, Any], cells: Sequence[Cell], unit: str | None = None) -> None:
    """Draw a group of bars for each workload, with a bar for each contestant that was timed at least once."""
    unit = unit or documents.unit_of(cells)
    factor, label = scale(document, unit)
    shown = [name for name in _names(document) if any(documents.timed(cell, [name]) for cell in cells)]
    ordered = sorted(cells, key=lambda cell: (cell["seqlen_k"], cell["workload"]))
    width = 0.84 / max(1, len(shown))

    for index, name in enumerate(shown):
        places = [group - 0.42 + (index + 0.5) * width for group in range(len(ordered))]
        results = [cell["results"][name] for cell in ordered]
        speeds = [factor * result[unit] if result["status"] == "ok" else 0.0 for result in results]
        bars = axes.bar(places, speeds, width * 0.94, label=name, color=_color(document, name))
        texts = [
            f"{speed:.3g}" if speed else ABSENT[result["status"]]
            for speed, result in zip(speeds, results, strict=True)
        ]
        axes.bar_label(bars, texts, padding=1.5, fontsize=6, rotation=90, color=INK)
    ceiling = documents.ceiling(document, cells[0], unit)
    if ceiling is not None:
        axes.axhline(factor * ceiling, color=INK, alpha=0.5, linewidth=0.8, linestyle=":")
        what = "copy" if unit == "gbps" else "matrix product"
        axes.annotate(
            f"{what}, measured", (0, factor * ceiling), xycoords=("axes fraction", "data"), fontsize=6.5,
            color=INK, xytext=(2, 2), textcoords="offset points",
        )  # fmt: skip
    lengths = [_length(cell) for cell in ordered]
    if len(set(lengths)) == len(lengths):
        axes.set_xticks(range(len(ordered)), lengths)
        axes.set_xlabel("sequence length", fontsize=8)
    else:
        names = [cell["workload"] for cell in ordered]
        axes.set_xticks(range(len(ordered)), names, rotation=20, ha="right")
    axes.set_ylabel(label, fontsize=8)
    axes.margins(y=0.14)


def _operation_bars(axes: Axes, document: dict[str, Any], cells: Sequence[Cell]) -> None:
    operation_bars(axes, cells[0], _ours(document))


def _speed_up_lines(axes: Axes, document: dict[str, Any], cells: Sequence[Cell]) -> None:
    _lines(document, axes, _curves(document, cells, _speed_up))
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"speed of {_ours(document)} over", fontsize=8)


def _memory_lines(axes: Axes, document: dict[str, Any], cells: Sequence[Cell]) -> None:
    _lines(document, axes, _curves(document, cells, _peak))
    resident = sorted((cell["seqlen_k"], cell["resident_bytes"]) for cell in cells)
    axes.plot(*zip(*resident, strict=True), ":", color=INK, linewidth=1, label="inputs, results")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.set_ylabel("peak memory", fontsize=8)


def _lines(document: dict[str, Any], axes: Axes, curves: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in curves.items():
        ours = name == _ours(document)
        axes.plot(
            *zip(*points, strict=True), "o-", label=name, color=_color(document, name), markersize=3.5,
            linewidth=2.4 if ours else 1.3, zorder=3 if ours else 2,
        )  # fmt: skip
    length_axis(axes, sorted({seqlen for points in curves.values() for seqlen, _ in points}))


def _curves(
    document: dict[str, Any],
    cells: Sequence[Cell],
    value: Callable[[dict[str, Any], Cell, str], float | None],
) -> dict[str, list[tuple[int, float]]]:
    """Return the points (sequence length, value) of each contestant that has at least one value."""
    curves = {}
    for name in _names(document):
        points = [
            (cell["seqlen_k"], found) for cell in cells if (found := value(document, cell, name)) is not None
        ]
        if points:
            curves[name] = sorted(points)
    return curves


def _speed_up(document: dict[str, Any], cell: Cell, name: str) -> float | None:
    return None if name == _ours(document) else documents.ratio(cell, _ours(document), name)


def _peak(document: dict[str, Any], cell: Cell, name: str) -> float | None:
    return cell["results"][name].get("peak_memory_bytes")


def _names(document: dict[str, Any]) -> list[str]:
    return [contestant["name"] for contestant in document["contestants"]]


def _ours(document: dict[str, Any]) -> str:
    return documents.names(document, ours=True)[0]


def _color(document: dict[str, Any], name: str) -> str:
    return f"C{_names(document).index(name) % 10}"


def _length(cell: Cell) -> str:
    length = format_tokens(cell["seqlen_k"])
    return length if cell["seqlen_q"] == cell["seqlen_k"] else f"{format_tokens(cell['seqlen_q'])}/{length}"
