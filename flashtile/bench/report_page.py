"""A document of measurements as one HTML file: pictures, tables, and how it was measured."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from flashtile.bench import report, summary
from flashtile.bench.report_charts import charts


def write_page(document: dict[str, Any], path: Path) -> None:
    """Write the report.

    Raises:
        ValueError: nothing was measured.
    """
    path.write_text(render_page(document))


def render_page(document: dict[str, Any]) -> str:
    """The HTML of the report.

    Raises:
        ValueError: nothing was measured.
    """
    sections: dict[str, list[Any]] = {}
    for chart in charts(document):
        sections.setdefault(chart.series, []).append(chart)
    environment = Environment(
        loader=PackageLoader("flashtile.bench", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    factor, label = report.scale(document, "tflops")
    return environment.get_template("report_page.html.jinja").render(
        headline=report.headline(document),
        head=_text(report.print_head, document),
        notes=_text(report.print_notes, document),
        document=document,
        sections=sections,
        contestants=[contestant["name"] for contestant in document["contestants"]],
        floors=[summary.over_floor(document, cell, _ours(document)) for cell in document["cells"]],
        best=[summary.best(cell, cell["results"]) for cell in document["cells"]],
        factor=factor,
        label=label,
    )


def _ours(document: dict[str, Any]) -> str:
    return summary.names(document, ours=True)[0]


def _text(print_part: Any, document: dict[str, Any]) -> str:
    file = io.StringIO()
    print_part(document, Console(file=file, width=10_000))
    return file.getvalue().strip()
