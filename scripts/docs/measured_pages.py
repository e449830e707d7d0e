"""Writes docs/measured/ from the experiments under benchmarks/results/experiments/.

    python scripts/docs/measured_pages.py

A subject is a JSON file with a ``title``, what it is ``about``, and ``experiments``, newest first. The page
shows of an experiment the ``title``, ``date``, ``setting``, and ``lines`` of ``question``, ``predicted``,
``measured`` and ``decision``. Its ``values`` (tables: ``columns`` and ``rows``) and ``notes`` complete the
record and stay in the JSON. A test holds the pages to this.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from markdown_tables import of_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = RESULTS / "experiments"
FOLDER = ROOT / "docs" / "measured"

SUBJECTS = (
    "peers", "hopper_forward", "hopper_backward", "fp8", "decoding", "linear", "portable", "cpu", "host_time",
    "models", "compilers",
)  # fmt: skip
"""In the order of the index."""

COLUMNS = ("question", "predicted", "measured", "decision")

INTRODUCTION = """# What was measured

Experiments, failed ones among them: what was asked, what was predicted before measuring, what came out, and
what was decided. Each page is made from a JSON file, which has every value. Cards and moments differ by some
per cent, so compare within one experiment only. [Benchmarking](../benchmarking.md) says how to measure.
"""


def subject(name: str) -> dict[str, Any]:
    return json.loads((EXPERIMENTS / f"{name}.json").read_text())


def page(name: str) -> str:
    """One subject: a section for each experiment, a row for each of its lines."""
    document = subject(name)
    record = f"../../{(EXPERIMENTS / name).relative_to(ROOT).as_posix()}.json"
    parts = [f"# {document['title']}", f"{document['about']} All values and notes: [{name}.json]({record})."]
    for experiment in document["experiments"]:
        rows = [[line[column] for column in COLUMNS] for line in experiment["lines"]]
        parts += [
            f"## {experiment['title']}",
            with_links(f"{experiment['date']}. {experiment['setting']}", experiment["date"]),
            with_links(of_rows(list(COLUMNS), rows, [False] * len(COLUMNS)), experiment["date"]),
        ]
    return "\n\n".join(parts) + "\n"


def with_links(text: str, date: str) -> str:
    """`` `NAME.json` `` as a link to that day's result of the name, where there is one."""

    def link(name: re.Match[str]) -> str:
        exists = (RESULTS / f"{date}-{name[1]}.json").exists()
        return f"[{name[1]}](../../benchmarks/results/{date}-{name[1]}.json)" if exists else name[0]

    return re.sub(r"`([\w-]+)\.json`", link, text)


def index() -> str:
    """What the subjects are, and how many lines each has."""
    rows = []
    for name in SUBJECTS:
        document = subject(name)
        lines = sum(len(experiment["lines"]) for experiment in document["experiments"])
        titles = "; ".join(experiment["title"] for experiment in document["experiments"])
        rows.append([f"[{document['title']}]({name}.md)", titles, str(lines)])
    return f"{INTRODUCTION}\n{of_rows(['subject', 'experiments', 'lines'], rows, [False, False, True])}\n"


def pages() -> dict[str, str]:
    """Each file of docs/measured/ by its name."""
    return {"index.md": index(), **{f"{name}.md": page(name) for name in SUBJECTS}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
