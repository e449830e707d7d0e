"""Recordings of the page's own settings, kept in the package because making them takes minutes.

The file has a stamp, a hash of the code that made the recordings. If the code has changed since, the
recordings are not used, and a test tells developers to run ``python scripts/record_page.py``, which makes new
ones.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from flashtile.learn.visualizer.packing import zipped
from flashtile.learn.visualizer.settings import Setting

Recorded = tuple[dict[str, Any], str]
"""A recording: the catalogue entry of a run, and its events in the format of :mod:`.packing`."""

NAME = "recordings.json.gz"
CODE = ("recording.py", "packing.py")
"""Modules that the recordings depend on, in addition to the algorithms."""


def stamp() -> str:
    """Return a hash of the code that makes recordings. Comments, docstrings and white space are ignored."""
    algorithms = files("flashtile.learn.algorithms")
    sources = [path for path in algorithms.iterdir() if path.name.endswith(".py")]
    sources += [files("flashtile.learn.visualizer") / name for name in CODE]
    digest = hashlib.sha256()
    for path in sorted(sources, key=lambda path: path.name):
        text = re.sub(r'"""(.|\n)*?"""', "", path.read_text("utf-8"))
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        digest.update("\n".join(filter(None, lines)).encode())
    return digest.hexdigest()


def load() -> dict[Setting, Recorded]:
    """Return the packaged recordings by setting.

    The result is empty if the file is missing, or if the code that makes recordings has changed since.
    """
    path = files("flashtile.learn.visualizer") / "assets" / NAME
    if not path.is_file():
        return {}
    document = json.loads(gzip.decompress(path.read_bytes()))
    if document["stamp"] != stamp():
        return {}
    packed = document["packed"]
    return {
        Setting(**run["setting"]): (run["entry"], packed[run["packed"]]) for run in document["recordings"]
    }


def dump(recorded: Iterable[tuple[Setting, Recorded]]) -> bytes:
    """Return the content of the file that :func:`load` reads. Runs with equal events share one copy."""
    packed: dict[str, int] = {}
    runs = [
        {"setting": vars(setting), "entry": entry, "packed": packed.setdefault(events, len(packed))}
        for setting, (entry, events) in recorded
    ]
    return zipped({"stamp": stamp(), "recordings": runs, "packed": list(packed)})
