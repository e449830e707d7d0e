"""MkDocs hook: a page for each measurement under benchmarks/results, which docs/measured/index.md lists.

Tables and charts are those of the commands that measured; nothing is copied by hand.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import counters
import markdown_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from benchmarks.suite import engine_bench, linear_bench, report
from benchmarks.suite.report_charts import charts
from flashtile.io_model import card_of_device

FOLDER = "benchmarks/results"

HEAD = "---\nhide: [toc]\nsearch: {exclude: true}\n---"
"""Front matter that gives wide tables the whole page, and leaves their rows out of the site's search."""


def page(document: dict[str, Any], name: str, most_charts: int) -> str:
    """Return a document of measurements as Markdown; its JSON lies next to the page."""
    parts = [HEAD, f"# {name[:10]} {name[11:].replace('-', ' ')}", *body(document, most_charts)]
    parts.append(f"Every number: [{name}.json]({name}.json).")
    if note := document.get("source", {}).get("note"):
        parts.append(f"Commit {document['source']['commit']}: {note}.")
    return "\n\n".join(parts) + "\n"


def body(document: dict[str, Any], most_charts: int) -> list[str]:
    """Return the document's contents as Markdown, in the form of the command that wrote it."""
    for bench in (linear_bench, engine_bench):
        if document.get("kind") == bench.NAME:
            table = bench.table(document)
            return [f"{machine(document)}.", f"{table.title}.", markdown_tables.of_table(table)]
    if "cells" in document:
        return bench_parts(document, most_charts)
    head = f"{machine(document)}."
    card = card_of_device(document["device"]["name"])
    if "l2_bytes" in document and card is not None:
        rows = [list(comparison.cells) for comparison in counters.compare(document, card)]
        right = [False] + [True] * (len(counters.HEAD) - 1)
        return [head, "Sizes in 10^6 bytes.", markdown_tables.of_rows(list(counters.HEAD), rows, right)]
    return [head, *plain_parts(document)]


def machine(document: dict[str, Any]) -> str:
    software = (f"{tool} {document['versions'][tool]}" for tool in ("torch", "triton"))
    return ", ".join([document["device"]["name"], *software])


def bench_parts(document: dict[str, Any], most_charts: int) -> list[str]:
    """Return a document of ``python -m benchmarks`` as Markdown: tables, charts and notes."""
    parts = report.head_lines(document)
    if document["summary"]:
        parts += ["## Speed over each peer", markdown_tables.of_table(report.summary_table(document))]
    drawn = islice(charts(document), most_charts)
    parts += ["## Charts", _figures([(chart.title, chart.svg) for chart in drawn])]
    for which, cells in report.by_pass(document).items():
        table = report.cells_table(document, cells)
        parts += [f"## {which.capitalize()}", f"{table.title}.", markdown_tables.of_table(table)]
    notes = [f"- {line}" for line in report.note_lines(document)]
    return parts + (["## Refused, out of memory, host time", "\n".join(notes)] if notes else [])


def plain_parts(document: dict[str, Any]) -> list[str]:
    """Return any other document as Markdown: a table for each of its lists of records."""
    parts = []
    for title, records in document.items():
        if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
            heading = title.removesuffix("_us").replace("_", " ").capitalize()
            unit = ", microseconds" if title.endswith("_us") else ""
            parts += [f"## {heading}{unit}", markdown_tables.of_records(records)]
    return parts


def _figures(pictures: list[tuple[str, str]]) -> str:
    """(title, SVG) of each as one block of HTML, which a blank line would end."""
    figures = [f'<figure role="img" aria-label="{title}">{svg}</figure>' for title, svg in pictures]
    lines = "\n".join(['<div class="charts">', *figures, "</div>"]).splitlines()
    return "\n".join(line for line in lines if line.strip())


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for path in sorted((root / FOLDER).glob("*.json")):
        place = f"{FOLDER}/{path.name}"
        files.append(File.generated(config, place, content=path.read_text()))
        name = f"{FOLDER}/{path.stem}.md"
        content = page(json.loads(path.read_text()), path.stem, config.extra["charts"])
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, content=content, inclusion=level))
    return files
