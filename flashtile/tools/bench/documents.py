"""Documents of measurements as JSON files, written atomically and checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIELDS: dict[str, type | tuple[type, ...]] = {
    "date": str, "versions": dict, "device": dict, "settings": dict, "contestants": list,
    "ceilings": (dict, type(None)), "cells": list, "summary": list,
}  # fmt: skip


def write(document: dict[str, Any], path: Path) -> None:
    """Replace the file atomically, so that an interrupted run leaves the last complete document."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a document that ``flashtile bench --json`` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        document = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    try:
        for name, kind in FIELDS.items():
            if not isinstance(document[name], kind):
                raise ValueError(f"{name} is of type {type(document[name]).__name__}")
        for cell in document["cells"]:
            if set(cell["results"]) != {contestant["name"] for contestant in document["contestants"]}:
                raise ValueError(f"results of {cell['workload']} are not those of the contestants")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{str(path)!r} is no document of flashtile bench: {said}") from None
    return document
