"""JSON documents of measurements: writing, reading with checks, and comparisons of their results.

A cell of a document is one workload measured in one pass (such as "forward"), with a result per contestant.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flashtile
from flashtile.files import replace_file

FIELDS: dict[str, type | tuple[type, ...]] = {
    "date": str, "versions": dict, "device": dict, "settings": dict, "contestants": list,
    "ceilings": (dict, type(None)), "cells": list, "summary": list,
}  # fmt: skip


def write(document: dict[str, Any], path: Path) -> None:
    """Replace the file atomically, so an interrupted run leaves the last complete document."""
    replace_file(path, json.dumps(document, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a document that ``python -m benchmarks --json`` wrote.

    Raises:
        ValueError: the file cannot be read, or is not such a document.
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
        raise ValueError(f"{str(path)!r} is no document of the benchmarks: {said}") from None
    return document


BEST_PEER = "best peer"

DECODE_RATIO = 16
"""Calls with at least this many keys per query are bound by reading keys and values.

Their speed is shown in GB/s.
"""


def names(document: dict[str, Any], *, ours: bool) -> list[str]:
    """Return the names of flashtile's contestants, or the names of the peers with ``ours=False``."""
    return [c["name"] for c in document["contestants"] if c["ours"] == ours]


def timed(cell: dict[str, Any], candidates: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the results of the contestants ``candidates`` that were timed in a cell, by contestant."""
    return {name: cell["results"][name] for name in candidates if cell["results"][name]["status"] == "ok"}


def best(cell: dict[str, Any], candidates: Iterable[str]) -> str | None:
    """Return the name of the candidate with the shortest time in a cell; None if none was timed."""
    results = timed(cell, candidates)
    return min(results, key=lambda name: results[name]["ms"], default=None)


def ratio(cell: dict[str, Any], ours: str, peer: str | None) -> float | None:
    """Return the speed of ``ours`` divided by the speed of ``peer``; None unless both were timed."""
    results = timed(cell, [ours] + ([peer] if peer is not None else []))
    return results[peer]["ms"] / results[ours]["ms"] if peer in results and ours in results else None


def summarize(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the speed of flashtile with each peer's.

    Return a row for each combination of a pass, a contestant of flashtile and a peer. A row summarizes the
    ratios of flashtile's speed to the peer's, one ratio for each cell in which both were timed. A row has
    ``pass, ours, peer, cells, geometric_mean, lowest, lowest_cell``. Rows whose ``peer`` is "best peer"
    compare flashtile with the fastest peer of each cell. If the cells are of several classes, rows of each
    class follow, with its name as ``class``.
    """
    every = document["cells"]
    rows = _summarized(document, every)
    classes = dict.fromkeys(cell.get("class") for cell in every)
    if len(classes) > 1:
        for name in filter(None, classes):
            of_class = _summarized(document, [cell for cell in every if cell.get("class") == name])
            rows += [{"class": name, **row} for row in of_class]
    return rows


def _summarized(document: dict[str, Any], every: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of :func:`summarize` for the cells ``every``."""
    peers = names(document, ours=False)
    rows = []
    for which in dict.fromkeys(cell["pass"] for cell in every):
        cells = [cell for cell in every if cell["pass"] == which]
        for ours in names(document, ours=True):
            for peer in [*peers, BEST_PEER]:
                ratios = {
                    cell["workload"]: found
                    for cell in cells
                    if (found := ratio(cell, ours, best(cell, peers) if peer == BEST_PEER else peer))
                    is not None
                }
                if ratios:
                    lowest = min(ratios, key=lambda name: ratios[name])
                    rows.append({
                        "pass": which, "ours": ours, "peer": peer, "cells": len(ratios),
                        "geometric_mean": statistics.geometric_mean(ratios.values()),
                        "lowest": ratios[lowest], "lowest_cell": lowest,
                    })  # fmt: skip
    return rows


def ceiling(document: dict[str, Any], cell: dict[str, Any], unit: str) -> float | None:
    """Return the measured ceiling of a cell's speed, in TFLOP/s or GB/s; None if none was measured."""
    ceilings = document["ceilings"]
    if ceilings is None:
        return None
    return ceilings["copy_gbps"] if unit == "gbps" else ceilings["matmul_tflops"][cell["dtype"]]


def share_of_ceiling(document: dict[str, Any], cell: dict[str, Any], name: str, unit: str) -> float | None:
    """Return a contestant's speed divided by :func:`ceiling`; None if the speed or the ceiling is unknown."""
    result, most = cell["results"][name], ceiling(document, cell, unit)
    return None if result["status"] != "ok" or most is None else result[unit] / most


def beyond_ceiling(document: dict[str, Any]) -> list[str]:
    """Return the names of the workloads in which a contestant was faster than the measured ceilings allow."""
    found: dict[str, None] = {}
    for cell in document["cells"]:
        floor = floor_ms(document, cell)
        times = [result["ms"] for result in cell["results"].values() if result["status"] == "ok"]
        if floor is not None and times and min(times) < floor:
            found[cell["workload"]] = None
    return list(found)


def floor_ms(document: dict[str, Any], cell: dict[str, Any]) -> float | None:
    """Return the minimum time of a cell (a workload in one pass) in milliseconds; None without ceilings.

    It is the time of the cell's FLOPs at the speed of a matrix product, or of its minimum memory traffic at
    the speed of a copy, whichever is longer.
    """
    flops, bytes_ = (ceiling(document, cell, unit) for unit in ("tflops", "gbps"))
    if flops is None or bytes_ is None:
        return None
    return max(cell["flops"] / flops * 1e-9, cell["bytes"] / bytes_ * 1e-6)


def over_floor(document: dict[str, Any], cell: dict[str, Any], name: str) -> float | None:
    """Return a contestant's time divided by :func:`floor_ms`; None if the time or the floor is unknown."""
    result, floor = cell["results"][name], floor_ms(document, cell)
    return None if result["status"] != "ok" or floor is None else result["ms"] / floor


def unit_of(cells: Sequence[dict[str, Any]]) -> str:
    """Return "gbps" if all cells are bound by reading keys and values, as in decoding; else "tflops"."""
    decoding = all(cell["seqlen_k"] >= DECODE_RATIO * max(1, cell["seqlen_q"]) for cell in cells)
    return "gbps" if decoding else "tflops"


def source_commit() -> dict[str, Any] | None:
    """Return the commit of the git checkout that flashtile is imported from, and whether it is modified.

    The result is {"commit": hash, "dirty": bool}, or None if flashtile is not imported from a checkout.
    """
    root = Path(flashtile.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commands = (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, check=True, timeout=20
            ).stdout.strip()
            for command in commands
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return {"commit": commit, "dirty": changes != ""}
