"""The recordings of the page's own settings, kept in the package: making them takes minutes.

They carry a stamp of the code that made them. Where the code is another they are not used, and a test asks
for ``python scripts/record_page.py``, which makes them anew.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from flashtile.visualizer.settings import Setting

Recorded = tuple[dict[str, Any], str]
"""(what the catalogue says of a run, its packed events)"""

NAME = "recordings.json.gz"
CODE = ("recording.py", "packing.py")
"""Beside the algorithms: what decides what is recorded."""


def stamp() -> str:
    """Of the code, without its comments, docstrings and white space."""
    algorithms = files("flashtile.algorithms")
    sources = [path for path in algorithms.iterdir() if path.name.endswith(".py")]
    sources += [files("flashtile.visualizer") / name for name in CODE]
    digest = hashlib.sha256()
    for path in sorted(sources, key=lambda path: path.name):
        text = re.sub(r'"""(.|\n)*?"""', "", path.read_text("utf-8"))
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        digest.update("\n".join(filter(None, lines)).encode())
    return digest.hexdigest()


def load() -> dict[Setting, Recorded]:
    """The kept recordings by their setting; none where there is no file, or other code made it."""
    path = files("flashtile.visualizer") / "assets" / NAME
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
    """What :func:`load` reads. Runs with the same events share them."""
    packed: list[str] = []
    places: dict[str, int] = {}
    runs = []
    for setting, (entry, events) in recorded:
        if events not in places:
            places[events] = len(packed)
            packed.append(events)
        runs.append({"setting": vars(setting), "entry": entry, "packed": places[events]})
    document = {"stamp": stamp(), "recordings": runs, "packed": packed}
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), compresslevel=9, mtime=0)
