"""Tables of the terminal, and records of JSON, as tables of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def of_table(table: Table) -> str:
    """A table for the terminal: numbers to the right, bold where the terminal has style."""
    heads = [str(column.header) for column in table.columns]
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows = [[_without_markup(str(cell)) for cell in row] for row in cells]
    text = of_rows(heads, rows, [column.justify == "right" for column in table.columns])
    return f"{text}\n\n{table.caption}" if table.caption else text


def of_records(records: list[dict[str, Any]]) -> str:
    """Records that may hold records; a column has the name of its last key, or of its path if others do."""
    flat = [dict(_flattened(record)) for record in records]
    paths = list(dict.fromkeys(path for record in flat for path in record))
    same_name = Counter(path[-1] for path in paths)
    heads = [(path[-1] if same_name[path[-1]] == 1 else " ".join(path)).replace("_", " ") for path in paths]
    rows = [[_plain(record.get(path, "")) for path in paths] for record in flat]
    return of_rows(heads, rows)


def of_rows(heads: list[str], rows: Iterable[list[str]], right: Sequence[bool] = ()) -> str:
    """Lines of Markdown; ``right`` says which columns are aligned to the right (default: none)."""
    rules = ["--:" if to_the_right else "---" for to_the_right in right or [False] * len(heads)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rules, *rows))


def _without_markup(cell: str) -> str:
    text = Text.from_markup(cell)
    plain = text.plain.replace("|", "\\|")
    return f"**{plain}**" if text.spans else plain


def _flattened(record: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flattened(value, (*path, key))
        else:
            yield (*path, key), value


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
