"""Renders a document of measurements as one HTML file: charts, tables, and how they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.files import DESIGN
from flashtile.learn.io_model.tables import format_bytes
from flashtile.tools.bench import report
from flashtile.tools.bench.documents import names
from flashtile.tools.bench.report_charts import charts


def render_page(document: dict[str, Any]) -> str:
    """Return the HTML of the report. Raise ValueError if nothing was measured."""
    sections: dict[str, list[Any]] = {}
    for chart in charts(document):
        sections.setdefault(chart.series, []).append(chart)
    apart = report.taken_apart(document)
    return render(
        "flashtile.tools.bench",
        "report_page.html.jinja",
        headline=report.headline(document),
        head="\n".join(report.head_lines(document)),
        notes="\n".join(report.note_lines(document)),
        sections=sections,
        means=report.summary_table(document) if document["summary"] else None,
        operations=report.operations_table(apart, names(document, ours=True)[0]) if apart else None,
        tables=[report.cells_table(document, cells) for cells in report.by_pass(document).values()],
    )


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of ``package`` that extends the self-contained ``page.html.jinja``."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("flashtile.tools.bench", ".")]),
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
