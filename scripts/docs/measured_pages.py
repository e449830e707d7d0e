"""MkDocs hook: a page ``measured/NAME.md`` for each subject in benchmarks/results/experiments/NAME.json.

A subject has a ``title``, what it is ``about``, and ``experiments``, newest first. The page shows of an
experiment the ``title``, ``date``, ``setting`` and ``lines``: ``question``, ``predicted``, ``measured`` and
``decision``. Its ``values`` (tables: ``columns`` and ``rows``) and ``notes`` complete the record and stay in
the JSON. Links to the JSON lead to the page.
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
COLUMNS = ("question", "predicted", "measured", "decision")


def page(path: Path) -> str:
    """One subject: a section for each experiment, a row for each of its lines."""
    document: dict[str, Any] = json.loads(path.read_text())
    parts = [f"# {document['title']}", document["about"]]
    for experiment in document["experiments"]:
        rows = [[line[column] for column in COLUMNS] for line in experiment["lines"]]
        parts += [
            f"## {experiment['title']}",
            with_links(f"{experiment['date']}. {experiment['setting']}", experiment["date"]),
            with_links(of_rows(list(COLUMNS), rows, [False] * len(COLUMNS)), experiment["date"]),
        ]
    text = rewrite("\n\n".join(parts), f"docs/measured/{path.stem}.md")
    return f"{text}\n\nAll values and notes: [{path.name}](../benchmarks/results/experiments/{path.name}).\n"


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
