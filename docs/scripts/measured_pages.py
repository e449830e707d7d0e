"""MkDocs hook: a page ``measured/NAME.md`` for each subject in benchmarks/results/experiments/NAME.json.

A subject has a ``title``, what it is ``about``, and ``experiments``, newest first. The page shows the
``title`` and the ``conclusion`` of each. Folded below are the ``date``, the ``setting``, the ``lines``
(``question``, ``predicted``, ``measured``, ``decision``) and the ``values`` (tables: ``columns``, ``rows``).
``docs/assets/row_filter.js`` searches them. ``notes`` stay in the JSON. Links to the JSON lead to the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from markdown_tables import of_rows
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from repository_links import rewrite

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
COLUMNS = ["question", "predicted", "measured", "decision"]
HEAD = "---\nsearch: {boost: 0.1}\n---"
"""Front matter that lists guides before experiments in the site's search."""
BETWEEN = re.compile(r"; (?![^(]*\))")
"""Between the cases of a line, which are not in parentheses."""


def page(path: Path) -> str:
    """One subject: a section for each experiment, and a field that searches the rows of all of them."""
    document: dict[str, Any] = json.loads(path.read_text())
    sections = [section(experiment) for experiment in document["experiments"]]
    search = '<input id="row-filter" type="search" placeholder="Search the rows"> <output></output>'
    text = "\n\n".join([HEAD, f"# {document['title']}", document["about"], search, *sections])
    text = rewrite(text, f"docs/measured/{path.stem}.md")
    return f"{text}\n\nAll values and notes: [{path.name}](../benchmarks/results/experiments/{path.name}).\n"


def section(experiment: dict[str, Any]) -> str:
    """The conclusion of one experiment, and its tables in a block that opens."""
    lines = [row for line in experiment["lines"] for row in cases(line)]
    values = experiment.get("values", [])
    tables = [(COLUMNS, lines), *((table["columns"], table["rows"]) for table in values)]
    count = sum(len(rows) for _, rows in tables)
    shown = [
        f"## {experiment['title']}",
        experiment["conclusion"],
        f'<details class="rows" data-search-exclude markdown><summary>{experiment["date"]}: {count} rows'
        "</summary>",
        experiment["setting"],
        *(of_rows(columns, [[cell(value) for value in row] for row in rows]) for columns, rows in tables),
        "</details>",
    ]
    return with_links("\n\n".join(shown), experiment["date"])


def cases(line: dict[str, str]) -> list[list[str]]:
    """Return a row for each case of a line if question and results, which are numbers, list equally many."""
    questions, predicted, measured = (BETWEEN.split(line[column]) for column in COLUMNS[:3])
    predicted *= len(questions) if len(predicted) == 1 and ", " not in predicted[0] else 1
    numbers = all(re.match(r"[-+]?\d", result) for result in measured)
    if not numbers or not len(questions) == len(predicted) == len(measured):
        return [[line[column] for column in COLUMNS]]
    subject, colon, _ = questions[0].rpartition(": ")
    questions[1:] = [case if ": " in case else f"{subject}{colon}{case}" for case in questions[1:]]
    return [[*case, line["decision"]] for case in zip(questions, predicted, measured, strict=True)]


def cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def with_links(text: str, date: str) -> str:
    """`` `NAME.json` `` as a link to that day's result of the name, where there is one."""

    def link(name: re.Match[str]) -> str:
        exists = (RESULTS / f"{date}-{name[1]}.json").exists()
        return f"[{name[1]}](../../benchmarks/results/{date}-{name[1]}.json)" if exists else name[0]

    return re.sub(r"`([\w-]+)\.json`", link, text)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path in sorted((RESULTS / "experiments").glob("*.json")):
        place = f"benchmarks/results/experiments/{path.name}"
        files.append(File.generated(config, place, content=path.read_text()))
        files.append(File.generated(config, f"measured/{path.stem}.md", content=page(path)))
    return files
