"""Write the tables of docs/guides/fp8.md from the measurements of errors and gradients that it links to.

    python docs/scripts/fp8_tables.py

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


def measurement(text: str, kind: str) -> dict[str, Any]:
    """Return the document ``DATE-fp8-<kind>.json`` that the page links to."""
    path = re.search(rf"\]\(([^)]*fp8-{kind}\.json)\)", text)
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


def gradients_table(errors: list[dict[str, Any]]) -> str:
    """Return a table of relative errors in % and of cosines, of each method and kind of data."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for error in errors:
        found.setdefault((error["data"], error["method"]), {})[error["result"]] = error
    names = ("out", "dq", "dk", "dv")
    rows = [
        [data, method]
        + [f"{100 * cells[name]['relative']:.1f}" for name in names]
        + [f"{cells[name]['cosine']:.4f}" for name in names[1:]]
        for (data, method), cells in found.items()
    ]
    heads = [*(f"{name}, %" for name in names), *(f"{name}, cosine" for name in names[1:])]
    return of_rows(["data", "method", *heads], rows, [False, False, *[True] * 7])


def training_table(losses: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(loss["attention"] for loss in losses))
    found = {(loss["loss"], loss["attention"]): f"{loss['bits_per_byte']:.3f}" for loss in losses}
    rows = [
        [of, *(found[of, name] for name in names)] for of in dict.fromkeys(loss["loss"] for loss in losses)
    ]
    return of_rows(["loss, bits per byte", *names], rows, [False, *[True] * len(names)])


def tables(text: str) -> dict[str, str]:
    """Return each table of the page ``text`` by its name there."""
    document, gradients = measurement(text, "accuracy"), measurement(text, "gradients")
    return {
        "gradients": gradients_table(gradients["errors"]),
        "training": training_table(gradients["training"]),
        "errors": errors_table(document["errors"], "method"),
        "ingredients": errors_table(document["one_ingredient_alone"], "rounded to e4m3 alone"),
        "loss": loss_table(document["loss_of_the_small_gpt"]),
    }


def with_tables(text: str) -> str:
    """Return the page with its tables made from the measurements."""
    for name, table in tables(text).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, between = text.split(begin)
        _, after = between.split(end)
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
