"""A layer's products one after the other, as :func:`flashtile.linear.linear` computes them and as peers do.

Weights come from memory: there are more of them than any L2 cache holds. On a GPU the chain is a replayed
CUDA graph, so that no host time counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from flashtile.bench.workloads import SMALL_MODEL, select_models
from flashtile.hardware import machine
from flashtile.hardware.timing import capture, copy_ceiling, release_memory, replay_time, time_call
from flashtile.io_model import find_model
from flashtile.linear import linear

NAME = "linear"
SHAPES = {
    **{name: find_model(name).products for name in ("llama-2-7b", "llama-3-8b")},
    SMALL_MODEL: ((96, 64), (64, 64), (172, 64), (64, 86)),
}
"""(N, K) of a layer's products: queries, keys and values; output; gate and up; down."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
LAYERS = 4
OURS = "flashtile"
ALLOWED = 2.0
"""Times the error of torch's product, beside one rounding of the result."""

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """The products of a layer for some rows of x."""

    model: str
    rows: int

    @property
    def name(self) -> str:
        return f"{NAME}-{self.model}-m{self.rows}"

    @property
    def shape(self) -> str:
        return f"M {self.rows}, products of a layer"


WORKLOADS = tuple(
    Workload(model, rows) for model in SHAPES for rows in ((1, 16) if model == SMALL_MODEL else ROWS)
)


def select(names: Sequence[str]) -> tuple[Workload, ...]:
    """Those of ``names``, as :func:`flashtile.bench.workloads.select_models` has it."""
    return select_models(NAME, WORKLOADS, names)


def contestants(device: torch.device) -> dict[str, Product]:
    """flashtile, torch, and torch compiled with its own search for the fastest kernel."""
    found: dict[str, Product] = {
        OURS: partial(linear, prefetch=True),
        "torch": torch.nn.functional.linear,
    }
    if device.type == "cuda":
        found["torch-compile"] = torch.compile(
            torch.nn.functional.linear, mode="max-autotune-no-cudagraphs", dynamic=False
        )
    return found


def run(
    chosen: Sequence[Workload],
    device: torch.device,
    rounds: int,
    rep: float,
    names: Sequence[str] = (),
    after_cell: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Every workload with every contestant that is named (all, if none is), as a document for JSON."""
    known = contestants(device)
    for name in names:
        if name not in (*known, "none"):
            raise ValueError(f"peer must be none or one of {', '.join(known)}, got {name!r}")
    entrants = {name: f for name, f in known.items() if not names or name in (OURS, *names)}
    document: dict[str, Any] = {
        "kind": NAME,
        "versions": machine.versions(),
        "device": machine.describe_device(device),
        "source": machine.source_commit(),
        "read_tbps": read_tbps(device, rounds, rep),
        "cells": [],
    }
    for workload in chosen:
        document["cells"].append(_cell(workload, entrants, device, rounds, rep))
        release_memory(device)
        after_cell(document)
    return document


def read_tbps(device: torch.device, rounds: int, rep: float) -> float:
    """10^12 bytes a second of reading; of copying on the CPU."""
    if device.type != "cuda":
        return copy_ceiling(device, rounds, rep) * 1e-3
    from flashtile.bench.linear_profile import read_bandwidth

    return read_bandwidth(device)


@torch.no_grad()
def _cell(
    workload: Workload, entrants: dict[str, Product], device: torch.device, rounds: int, rep: float
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = SHAPES[workload.model]
    weights = [
        torch.randn(shape, device=device).mul_(shape[1] ** -0.5).to(dtype)
        for _ in range(LAYERS)
        for shape in shapes
    ]
    x = {K: torch.randn(workload.rows, K, device=device).to(dtype) for _, K in shapes}
    moved = sum(weight.nbytes for weight in weights)
    results: dict[str, Any] = {}
    clocks: dict[str, Callable[[], float]] = {}
    for name, product in entrants.items():
        wrong = _wrong(product, x, weights[: len(shapes)])
        if wrong is not None:
            results[name] = {"status": "wrong", "text": wrong}
            continue
        results[name] = {"status": "ok", "tbps": []}
        clocks[name] = _clock(partial(_chain, product, x, weights), device, rep)
    for _ in range(rounds):
        for name, clock in clocks.items():
            results[name]["tbps"].append(moved / clock() * 1e-9)
    return {"workload": workload.name, "model": workload.model, "rows": workload.rows, "results": results}


def _chain(product: Product, x: dict[int, Tensor], weights: Sequence[Tensor]) -> None:
    for weight in weights:
        product(x[weight.shape[1]], weight)


def _clock(function: Callable[[], None], device: torch.device, rep: float) -> Callable[[], float]:
    """Milliseconds of a call."""
    if device.type == "cuda":
        function()
        return partial(replay_time, capture([function]), rep)
    return lambda: statistics.median(time_call(function, rep, device))


def _wrong(product: Product, x: dict[int, Tensor], weights: Sequence[Tensor]) -> str | None:
    """What is wrong with a product, None if it is within the error rule."""
    for weight in weights:
        rows = x[weight.shape[1]]
        exact = rows.double() @ weight.double().T
        plain = (torch.nn.functional.linear(rows, weight) - exact).abs().max().item()
        error = (product(rows, weight) - exact).abs().max().item()
        rounding = torch.finfo(rows.dtype).eps * exact.abs().max().item()
        if not error <= ALLOWED * plain + rounding:
            return f"{tuple(weight.shape)}: error {error:.3g}, torch's {plain:.3g}"
    return None


def table(document: dict[str, Any]) -> Table:
    """TB/s of weights, and of what reading alone reaches, by rows of x."""
    read = document["read_tbps"]
    shown = Table(title=f"{document['device']['name']}: weights in TB/s (share of reading, {read:.2f} TB/s)")
    names = list(dict.fromkeys(name for cell in document["cells"] for name in cell["results"]))
    shown.add_column("workload")
    for name in names:
        shown.add_column(name, justify="right")
    for cell in document["cells"]:
        texts = []
        for name in names:
            result = cell["results"].get(name, {"status": "absent"})
            if result["status"] != "ok":
                texts.append(result.get("text", result["status"]))
                continue
            tbps = statistics.median(result["tbps"])
            texts.append(f"{tbps:.3g} ({tbps / read:.2f})")
        shown.add_row(cell["workload"], *texts)
    return shown
