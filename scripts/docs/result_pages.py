"""MkDocs hook: a page for each measurement under benchmarks/results, newest first in the navigation.

Tables and charts are those of ``flashtile bench --show``; nothing is copied by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.bench import report
from flashtile.bench.report_charts import Chart, charts

SECTION = "Measurements"
"""The part of the navigation that the pages join."""

FOLDER = "benchmarks/results"


HIDE_CONTENTS = "---\nhide: [toc]\n---"
"""Front matter that gives wide tables the whole page."""


def markdown_table(table: Table) -> str:
    """A table for the terminal as one for a page: numbers to the right, bold where the terminal has style."""
    heads = [str(column.header) for column in table.columns]
    rules = ["--:" if column.justify == "right" else "---" for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [heads, rules, *([_cell(str(cell)) for cell in row] for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{table.caption}\n" if table.caption else f"{text}\n"


def _cell(markup: str) -> str:
    text = Text.from_markup(markup)
    plain = text.plain.replace("|", "\\|")
    return f"**{plain}**" if text.spans else plain


def page(document: dict[str, Any], name: str) -> str:
    """A document of ``flashtile bench`` as Markdown; its JSON lies beside the page."""
    parts = [HIDE_CONTENTS, f"# {document['device']['name']}, {document['date'][:10]}"]
    parts += _printed(report.print_head, document)
    if note := document.get("source", {}).get("note"):
        parts.append(f"Commit {document['source']['commit']}: {note}.")
    parts.append(f"Every number of this run: [{name}.json]({name}.json).")
    if document["summary"]:
        parts += ["## Speed over each peer", markdown_table(report.summary_table(document))]
    parts += ["## Charts", '<div class="charts">', *map(_figure, charts(document)), "</div>"]
    for which in document["settings"]["passes"]:
        cells = [cell for cell in document["cells"] if cell["pass"] == which]
        if cells:
            table = report.cells_table(document, cells)
            parts += [f"## {which.capitalize()}", f"{table.title}.", markdown_table(table)]
    notes = [f"- {line}" for line in _printed(report.print_notes, document)]
    parts += ["## Refused, out of memory, host time", "\n".join(notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def _printed(part: Callable[[dict[str, Any], Console], None], document: dict[str, Any]) -> list[str]:
    """The lines that a part of the report prints."""
    file = StringIO()
    part(document, Console(file=file, width=10_000, no_color=True))
    return [line for line in file.getvalue().splitlines() if line]


def _figure(chart: Chart) -> str:
    """One block of HTML: a blank line would end it."""
    svg = "\n".join(line for line in chart.svg.splitlines() if line.strip())
    return f'<figure role="img" aria-label="{chart.title}">{svg}</figure>'


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    listed = []
    for path in sorted((root / FOLDER).glob("*.json"), reverse=True):
        document = json.loads(path.read_text())
        place = f"{FOLDER}/{path.name}"
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=path.read_text()))
        if "cells" not in document or "contestants" not in document:
            continue
        name = f"{FOLDER}/{path.stem}.md"
        files.append(File.generated(config, name, content=page(document, path.stem)))
        listed.append(name)
    entries = [entry for entry in config.nav or [] if isinstance(entry, dict)]
    section = next(entry[SECTION] for entry in entries if SECTION in entry)
    section.extend(listed)
    return files
