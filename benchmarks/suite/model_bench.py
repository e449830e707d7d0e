"""Code that the benchmarks of a layer's matrix products and of engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.suite.documents import source_commit
from flashtile.hardware import machine
from flashtile.hardware.timing import copy_ceiling

SMALL_MODEL = "ci"
"""Name of the small model for CPUs. Its workloads run only if they are named explicitly."""


def select_models(kind: str, workloads: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the workloads that ``names`` choose. A workload has a ``name`` and a ``model``.

    Each of ``names`` is the name of a workload, or "KIND-MODEL" for all workloads of a model, or ``kind`` for
    all workloads except those of the small model. The result is () if all names belong to another kind of
    workload.

    Raises:
        ValueError: some names belong to these workloads and some do not.
    """
    chosen: list[Any] = []
    for name in names:
        of_name = [w for w in workloads if name in (w.name, f"{kind}-{w.model}")]
        if name == kind:
            of_name = [w for w in workloads if w.model != SMALL_MODEL]
        chosen += of_name
        if bool(of_name) != bool(chosen) or (not of_name and name.startswith(kind)):
            known = ", ".join(w.name for w in workloads)
            raise ValueError(f"workload must be {kind} or one of {known}, got {name!r}")
    return tuple(dict.fromkeys(chosen))


def check_peers(names: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError for a name that is neither a known contestant nor "none"."""
    for name in names:
        if name not in (*known, "none"):
            raise ValueError(f"peer must be none or one of {', '.join(known)}, got {name!r}")


def new_document(
    kind: str, device: torch.device, rounds: int, rep: float, cells: list[dict[str, Any]]
) -> dict[str, Any]:
    """Measure the read bandwidth (on the CPU, of a copy), and return a new JSON document for a run."""
    if device.type == "cuda":
        from flashtile.tools.linear_profile import read_bandwidth

        read_tbps = read_bandwidth(device)
    else:
        read_tbps = copy_ceiling(device, rounds, rep) * 1e-3
    return {
        "kind": kind,
        "versions": machine.versions(),
        "device": machine.describe_device(device),
        "source": source_commit(),
        "read_tbps": read_tbps,
        "cells": cells,
    }


def cells_table(title: str, document: dict[str, Any], text_of: Callable[[Any, Any], str]) -> Table:
    """Return a table with a row for each workload and a column for each contestant.

    ``text_of(cell, result)`` formats a successful result.
    """
    shown = Table(title=f"{document['device']['name']}: {title}")
    names = list(dict.fromkeys(name for cell in document["cells"] for name in cell["results"]))
    shown.add_column("workload")
    for name in names:
        shown.add_column(name, justify="right")
    for cell in document["cells"]:
        results = (cell["results"].get(name, {"status": "-"}) for name in names)
        texts = (
            text_of(cell, result) if result["status"] == "ok" else result.get("text", result["status"])
            for result in results
        )
        shown.add_row(cell["workload"], *texts)
    return shown
