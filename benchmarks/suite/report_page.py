"""Renders a document of measurements as one HTML file: charts, tables, and how they were measured."""

from __future__ import annotations

from typing import Any

from benchmarks.suite import report
from benchmarks.suite.documents import names
from benchmarks.suite.report_charts import charts
from flashtile.tools.demo.operations import table
from flashtile.tools.page import render


def render_page(document: dict[str, Any]) -> str:
    """Return the HTML of the report. Raise ValueError if nothing was measured."""
    sections: dict[str, list[Any]] = {}
    for chart in charts(document):
        sections.setdefault(chart.series, []).append(chart)
    apart = report.taken_apart(document)
    return render(
        "benchmarks.suite",
        "report_page.html.jinja",
        headline=report.headline(document),
        head="\n".join(report.head_lines(document)),
        notes="\n".join(report.note_lines(document)),
        sections=sections,
        means=report.summary_table(document) if document["summary"] else None,
        operations=table(apart, names(document, ours=True)[0]) if apart else None,
        tables=[report.cells_table(document, cells) for cells in report.by_pass(document).values()],
    )
