"""Comparisons within a document of measurements: the best peer of each cell, geometric means over cells."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

BEST_PEER = "best peer"


def names(document: dict[str, Any], *, ours: bool) -> list[str]:
    """Contestants that are flashtile, or that are not."""
    return [c["name"] for c in document["contestants"] if c["ours"] == ours]


def timed(cell: dict[str, Any], candidates: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Results of those contestants that were timed in the cell."""
    return {name: cell["results"][name] for name in candidates if cell["results"][name]["status"] == "ok"}


def best(cell: dict[str, Any], candidates: Iterable[str]) -> str | None:
    """The fastest contestant of a cell, None if none was timed."""
    results = timed(cell, candidates)
    return min(results, key=lambda name: results[name]["ms"], default=None)


def ratio(cell: dict[str, Any], ours: str, peer: str | None) -> float | None:
    """Speed of ``ours`` over that of ``peer``; None unless both were timed."""
    results = timed(cell, [ours] + ([peer] if peer is not None else []))
    return results[peer]["ms"] / results[ours]["ms"] if peer in results and ours in results else None


def summarize(document: dict[str, Any]) -> list[dict[str, Any]]:
    """For each pass, form of flashtile and peer: the speed ratios over the cells that both ran.

    Each row has ``pass, ours, peer, cells, geometric_mean, lowest, lowest_cell``; ``peer`` is "best peer" for
    the fastest peer of each cell.
    """
    peers = names(document, ours=False)
    rows = []
    for which in dict.fromkeys(cell["pass"] for cell in document["cells"]):
        cells = [cell for cell in document["cells"] if cell["pass"] == which]
        for ours in names(document, ours=True):
            for peer in [*peers, BEST_PEER]:
                ratios = {
                    cell["workload"]: found
                    for cell in cells
                    if (found := ratio(cell, ours, best(cell, peers) if peer == BEST_PEER else peer))
                    is not None
                }
                if ratios:
                    rows.append({"pass": which, "ours": ours, "peer": peer, **_statistics(ratios)})
    return rows


def share_of_ceiling(document: dict[str, Any], cell: dict[str, Any], name: str, unit: str) -> float | None:
    """Part of the measured ceiling that a contestant reaches, in TFLOP/s ("tflops") or GB/s ("gbps")."""
    result = cell["results"][name]
    if result["status"] != "ok":
        return None
    ceilings = document["ceilings"]
    ceiling = ceilings["copy_gbps"] if unit == "gbps" else ceilings["matmul_tflops"][cell["dtype"]]
    return result[unit] / ceiling


def floor_ms(document: dict[str, Any], cell: dict[str, Any]) -> float:
    """Milliseconds that a cell takes at least at the measured ceilings: its FLOPs at the speed of a matrix
    product, or the least bytes at that of a copy, whichever is longer."""
    ceilings = document["ceilings"]
    compute = cell["flops"] / ceilings["matmul_tflops"][cell["dtype"]] * 1e-9
    return max(compute, cell["bytes"] / ceilings["copy_gbps"] * 1e-6)


def over_floor(document: dict[str, Any], cell: dict[str, Any], name: str) -> float | None:
    """A contestant's time over :func:`floor_ms`; None if it was not timed."""
    result = cell["results"][name]
    return result["ms"] / floor_ms(document, cell) if result["status"] == "ok" else None


def _statistics(ratios: dict[str, float]) -> dict[str, Any]:
    lowest = min(ratios, key=lambda name: ratios[name])
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    return {"cells": len(ratios), "geometric_mean": mean, "lowest": ratios[lowest], "lowest_cell": lowest}
