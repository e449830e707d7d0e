"""Renders a self-contained HTML page from a template of Jinja."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.files import DESIGN
from flashtile.learn.io_model.tables import format_bytes


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of ``package`` that extends the self-contained ``page.html.jinja``."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("flashtile.tools", ".")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"rows": _rows, "bytes": format_bytes}
    return environment.get_template(template).render(design=DESIGN.read_text("utf-8"), **values)


def _rows(table: Table) -> Iterator[list[list[tuple[str, str]]]]:
    """Yield the rows of a table, each cell as a list of (text, Rich style)."""
    console = Console()
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        texts = [Text.from_markup(str(cell), end="") for cell in cells]
        yield [[(piece.text, str(piece.style or "")) for piece in text.render(console)] for text in texts]
