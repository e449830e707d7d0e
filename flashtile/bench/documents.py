"""Documents of measurements as JSON files: written in one step, read with a check of what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashtile.bench import runner, summary
from flashtile.bench.workloads import WORKLOADS

FIELDS: dict[str, type | tuple[type, ...]] = {
    "date": str, "versions": dict, "device": dict, "settings": dict, "contestants": list,
    "ceilings": (dict, type(None)), "cells": list, "summary": list,
}  # fmt: skip

DECODE_PASSES = {"cold_ms": "forward", "graph_ms": "graph"}
"""The times of a document that has decoding calls only, and the passes that they are now."""


def write(document: dict[str, Any], path: Path) -> None:
    """Replace the file in one step, so that a run cut short leaves the last complete one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A document of ``flashtile bench --json``, of this schema or an earlier one.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        document = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    try:
        return current(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no document of flashtile bench: {_said(error)}") from None


def current(document: dict[str, Any]) -> dict[str, Any]:
    """A document in the schema of today.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is no document of measurements.
    """
    if "cells" in document and "settings" not in document:
        document = _from_decode_document(document)
    for name, kind in FIELDS.items():
        if not isinstance(document[name], kind):
            raise ValueError(f"{name} is of type {type(document[name]).__name__}")
    for cell in document["cells"]:
        if set(cell["results"]) != {contestant["name"] for contestant in document["contestants"]}:
            raise ValueError(f"results of {cell['workload']} are not those of the contestants")
    return document


def _from_decode_document(old: dict[str, Any]) -> dict[str, Any]:
    """What ``flashtile.bench.decode`` wrote, when decoding had a command of its own."""
    workloads = {workload.name: workload for workload in WORKLOADS}
    names = old["contestants"]
    cells = []
    for kind, which in DECODE_PASSES.items():
        for cell in old["cells"]:
            workload = workloads[f"decode-{cell['workload']}"]
            found = cell["results"]
            results = {name: _result_of(found.get(name, {}), kind, workload, which) for name in names}
            described = runner.describe_cell(workload, which) | {"copies": cell["copies"]}
            cells.append(described | {"results": results})
    document = {
        "schema": runner.SCHEMA,
        "date": old.get("date", ""),
        "versions": old["versions"],
        "source": old["source"],
        "device": old["device"],
        "settings": {"passes": list(DECODE_PASSES.values()), "rounds": None, "rep_ms": None, "threads": None},
        "contestants": [{"name": name, "ours": name.startswith("flashtile")} for name in names],
        "ceilings": None,
        "host_time_us": {
            name: {"status": runner.OK, "reason": None, "us": us, "call": "B 1, S 1/8192, H 32/8, D 128"}
            for name, us in old.get("host_us", {}).items()
        },
        "cells": cells,
    }
    document["summary"] = summary.summarize(document)
    return document


def _result_of(found: dict[str, Any], kind: str, workload: Any, which: str) -> dict[str, Any]:
    if kind in found:
        times = runner.summarize_times(found[kind], workload, which)
        return {"status": runner.OK, "reason": None, "gate": [], **times}
    status = runner.WRONG if "wrong" in found else runner.REFUSED
    reason = found.get("wrong") or found.get("refused") or "takes no such call"
    return {"status": status, "reason": reason, "gate": []}


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
