"""Write the tables of docs/guides/fp8.md from benchmarks/results/2026-11-21-fp8-accuracy.json.

    python scripts/docs/fp8_tables.py

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; a test holds the page to this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from markdown_tables import of_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "fp8.md"
DATA = ("normal", "outliers", "small GPT")


def measurement(text: str) -> dict[str, Any]:
    """Return the document that the page links to."""
    path = re.search(r"\]\(([^)]*fp8-accuracy\.json)\)", text)
    assert path is not None
    return json.loads((PAGE.parent / path[1]).read_text())


def errors_table(errors: list[dict[str, Any]], first: str) -> str:
    """Return a table of each method's error for each kind of data, also in % of the output."""
    heads = [first, *(f"{data}, {unit}" for data in DATA for unit in ("rms", "%"))]
    return of_rows(heads, _rows(errors), [False, *[True] * 6])


def _rows(errors: list[dict[str, Any]]) -> Iterable[list[str]]:
    found = {(error["data"], error["method"]): error for error in errors}
    for method in dict.fromkeys(error["method"] for error in errors):
        cells = (found[data, method] for data in DATA)
        numbers = ((f"{cell['rmse']:.2e}", f"{100 * cell['relative']:.2g}") for cell in cells)
        yield [_name(method), *chain.from_iterable(numbers)]


def _name(method: str) -> str:
    return method.replace("a scale a", "one scale per")


def loss_table(losses: list[dict[str, Any]]) -> str:
    rows = [[_name(row["method"]), f"{row['bits_per_byte']:.4f}"] for row in losses]
    return of_rows(["attention", "bits per byte"], rows, [False, True])


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return each table by its name in the page."""
    return {
        "errors": errors_table(document["errors"], "method"),
        "ingredients": errors_table(document["one_ingredient_alone"], "rounded to e4m3 alone"),
        "loss": loss_table(document["loss_of_the_small_gpt"]),
    }


def with_tables(text: str) -> str:
    """Return the page with its tables made from the measurement."""
    for name, table in tables(measurement(text)).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, between = text.split(begin)
        _, after = between.split(end)
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
