"""Griffe extension: docstrings written for a reader of the source, as Markdown for the reference pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|data):`~?([\w.]+)`")


NAMES_OVER_LINES = re.compile(r"^( +(?:\w+, )*\w+),\n +(?=(?:\w+, )*\w+:)", re.MULTILINE)
"""Arguments that one description covers, where their names take more than a line."""


class SourceDocstrings(griffe.Extension):
    """Sphinx roles such as ``:func:`name``` become links where the reference has the name, else code.

    Names of arguments that fill more than one line become one, as the parser expects them.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = NAMES_OVER_LINES.sub(r"\1, ", obj.docstring.value)
            obj.docstring.value = ROLE.sub(lambda role: _link(role[1], obj), text)


def _link(name: str, obj: griffe.Object) -> str:
    known = name if "." in name else f"{obj.module.path}.{name}"
    return f'<autoref identifier="{known}" optional><code>{name}</code></autoref>'
