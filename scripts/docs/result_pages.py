"""MkDocs hook: a page for each measurement under benchmarks/results, newest first in the navigation.

Tables and charts are those of the commands that measured; nothing is copied by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.bench import decode, report
from flashtile.bench.report_charts import Chart, charts

SECTION = "Measurements"
"""The part of the navigation that the pages join."""

FOLDER = "benchmarks/results"


HIDE_CONTENTS = "---\nhide: [toc]\n---"
"""Front matter that gives wide tables the whole page."""


def page(document: dict[str, Any], name: str) -> str:
    """A document of measurements as Markdown; its JSON lies beside the page."""
    parts = [HIDE_CONTENTS, f"# {name[:10]} {name[11:].replace('-', ' ')}"]
    parts += body(document)
    parts.append(f"Every number: [{name}.json]({name}.json).")
    if note := document.get("source", {}).get("note"):
        parts.append(f"Commit {document['source']['commit']}: {note}.")
    return "\n\n".join(parts) + "\n"


def body(document: dict[str, Any]) -> list[str]:
    if "settings" in document:
        return bench_parts(document)
    software = (f"{tool} {document['versions'][tool]}" for tool in ("torch", "triton"))
    head = ", ".join([document["device"]["name"], *software])
    if "contestants" in document:
        table = decode.table_of(document)
        return [f"{head}.", f"{table.title}.", markdown_table(table)]
    return [f"{head}.", *plain_parts(document)]


def bench_parts(document: dict[str, Any]) -> list[str]:
    """What ``flashtile bench`` wrote: its tables, charts and notes."""
    parts = _printed(report.print_head, document)
    if document["summary"]:
        parts += ["## Speed over each peer", markdown_table(report.summary_table(document))]
    parts += ["## Charts", '<div class="charts">', *map(_figure, charts(document)), "</div>"]
    for which in document["settings"]["passes"]:
        cells = [cell for cell in document["cells"] if cell["pass"] == which]
        if cells:
            table = report.cells_table(document, cells)
            parts += [f"## {which.capitalize()}", f"{table.title}.", markdown_table(table)]
    notes = [f"- {line}" for line in _printed(report.print_notes, document)]
    return parts + (["## Refused, out of memory, host time", "\n".join(notes)] if notes else [])


def plain_parts(document: dict[str, Any]) -> list[str]:
    """Any other document: a table for each of its lists of records."""
    parts = []
    for title, rows in document.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            flat = [dict(_flattened(row)) for row in rows]
            columns = list(dict.fromkeys(column for row in flat for column in row))
            lines = [columns, ["---"] * len(columns)]
            lines += [[_plain(row.get(column, "")) for column in columns] for row in flat]
            parts += [f"## {title.replace('_', ' ').capitalize()}", _lines(lines)]
    return parts


def markdown_table(table: Table) -> str:
    """A table for the terminal as one for a page: numbers to the right, bold where the terminal has style."""
    heads = [str(column.header) for column in table.columns]
    rules = ["--:" if column.justify == "right" else "---" for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    text = _lines([heads, rules, *([_cell(str(cell)) for cell in row] for row in rows)])
    return f"{text}\n\n{table.caption}" if table.caption else text


def _lines(rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(markup: str) -> str:
    text = Text.from_markup(markup)
    plain = text.plain.replace("|", "\\|")
    return f"**{plain}**" if text.spans else plain


def _flattened(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested records, named by their path."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}".replace("_", " "), value


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
        place = f"{FOLDER}/{path.name}"
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=path.read_text()))
        name = f"{FOLDER}/{path.stem}.md"
        files.append(File.generated(config, name, content=page(json.loads(path.read_text()), path.stem)))
        listed.append(name)
    entries = [entry for entry in config.nav or [] if isinstance(entry, dict)]
    section = next(entry[SECTION] for entry in entries if SECTION in entry)
    section.extend(listed)
    return files
