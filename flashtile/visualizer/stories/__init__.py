"""The page's stories: one idea each, told by a few short runs side by side.

A story is a module here with ``cases()``, which runs its algorithm once for each case and keeps the trace; a
picture of one case, ``assets/js/stories/NAME.js``; and its words in both languages,
``assets/texts/stories/NAME.json``. Its name in :data:`STORIES` does the rest: the button, the address, the
player, the counters of bytes and operations, and the captions are the same for all.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from flashtile.visualizer.stories.case import Case

STORIES = ("softmax", "matmul", "chain", "warps", "fp8", "unified", "pool", "masks")
"""In the order of the page."""


@functools.cache
def recorded(name: str) -> tuple[Case, ...]:
    """The cases of a story, run once for all pages that a process writes."""
    return tuple(import_module(f"{__name__}.{name}").cases())


def catalogue() -> list[dict[str, Any]]:
    """Every story, for the page."""
    return [{"name": name, "cases": [case.as_record() for case in recorded(name)]} for name in STORIES]
