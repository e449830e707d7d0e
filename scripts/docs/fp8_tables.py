"""Writes the tables of docs/guides/fp8.md from benchmarks/results/2026-11-21-fp8-accuracy.json.

    python scripts/docs/fp8_tables.py

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; a test holds the page to this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from markdown_tables import of_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "fp8.md"
DATA = ("normal", "outliers", "small GPT")


def measurement(text: str) -> dict[str, Any]:
    """The document that the page links to."""
    path = re.search(r"\]\(([^)]*fp8-accuracy\.json)\)", text)
    assert path is not None
    return json.loads((PAGE.parent / path[1]).read_text())


def errors_table(errors: list[dict[str, Any]], first: str) -> str:
    """A row a method, for each kind of data the error, and what it is of the output's size."""
    heads = [first, *DATA]
    return of_rows(heads, _rows(errors), [False, True, True, True])


def _rows(errors: list[dict[str, Any]]) -> Iterable[list[str]]:
    found = {(error["data"], error["method"]): error for error in errors}
    for method in dict.fromkeys(error["method"] for error in errors):
        cells = (found[data, method] for data in DATA)
        yield [method, *(f"{cell['rmse']:.2e} ({100 * cell['relative']:.2g} %)" for cell in cells)]


def loss_table(losses: list[dict[str, Any]]) -> str:
    rows = [[row["method"], f"{row['bits_per_byte']:.4f}"] for row in losses]
    return of_rows(["attention", "bits a byte"], rows, [False, True])


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Each table by its name in the page."""
    return {
        "errors": errors_table(document["errors"], "method"),
        "ingredients": errors_table(document["one_ingredient_alone"], "rounded to e4m3 alone"),
        "loss": loss_table(document["loss_of_the_small_gpt"]),
    }


def with_tables(text: str) -> str:
    """The page with its tables as they are measured."""
    for name, table in tables(measurement(text)).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, between = text.split(begin)
        _, after = between.split(end)
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
