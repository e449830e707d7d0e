"""Griffe extension: docstrings written for a reader of the source, as Markdown for the reference pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|data):`~?([\w.]+)`")

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"

NAMES_OVER_LINES = re.compile(r"^( +(?:\w+, )*\w+),\n +(?=(?:\w+, )*\w+:)", re.MULTILINE)
"""Arguments that one description covers, where their names take more than a line."""

SHARED = re.compile(r"^( +)((?:\w+, )+\w+):", re.MULTILINE)
"""Attributes that share a description; the parser would take what follows a space for a type."""


class SourceDocstrings(griffe.Extension):
    """Sphinx roles such as ``:func:`name``` become links where the reference has the name, else code.

    Names that share a description become one name, as the parser expects it.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = NAMES_OVER_LINES.sub(r"\1, ", obj.docstring.value)
            text = SHARED.sub(lambda names: names[1] + names[2].replace(" ", NO_BREAK_SPACE) + ":", text)
            obj.docstring.value = ROLE.sub(lambda role: _link(role[1], obj), text)


def _link(name: str, obj: griffe.Object) -> str:
    known = name if "." in name else f"{obj.module.path}.{name}"
    return f'<autoref identifier="{known}" optional><code>{name}</code></autoref>'
