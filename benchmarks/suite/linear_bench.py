"""Benchmark of a transformer layer's matrix products in :func:`flashtile.linear.linear` and in its peers.

The products of several layers run one after the other. Together their weights are larger than any L2 cache,
so weights are read from memory. On a GPU the products are a replayed CUDA graph, which excludes host time.
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

from benchmarks.suite.model_bench import SMALL_MODEL, cells_table, check_peers, new_document
from benchmarks.suite.timing import release_memory
from flashtile.hardware.timing import capture, median_time, replay_time
from flashtile.learn.io_model import find_model
from flashtile.linear import linear

NAME = "linear"
SHAPES = {
    **{name: find_model(name).products for name in ("llama-2-7b", "llama-3-8b")},
    SMALL_MODEL: ((96, 64), (64, 64), (172, 64), (64, 86)),
}
"""(N, K) of a layer's four products: q, k and v projections; output projection; gate and up; down."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
LAYERS = 4
OURS = "flashtile"
ALLOWED = 2.0
"""Allowed error in multiples of torch's error, in addition to one rounding of the result."""

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ProductWorkload:
    """The products of a layer for a number of rows of x."""

    model: str
    rows: int

    @property
    def name(self) -> str:
        return f"{NAME}-{self.model}-m{self.rows}"

    @property
    def shape(self) -> str:
        return f"M {self.rows}, products of a layer"


WORKLOADS = tuple(
    ProductWorkload(model, rows) for model in SHAPES for rows in ((1, 16) if model == SMALL_MODEL else ROWS)
)


def contestants(device: torch.device) -> dict[str, Product]:
    """Return flashtile's and torch's linear functions by name; on a GPU also torch's compiled function."""
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
    chosen: Sequence[ProductWorkload],
    device: torch.device,
    rounds: int,
    rep: float,
    names: Sequence[str] = (),
    after_cell: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure every workload with each named contestant (all without names) and return a JSON document."""
    known = contestants(device)
    check_peers(names, known)
    entrants = {name: f for name, f in known.items() if not names or name in (OURS, *names)}
    document = new_document(NAME, device, rounds, rep, [])
    for workload in chosen:
        document["cells"].append(_cell(workload, entrants, device, rounds, rep))
        release_memory(device)
        after_cell(document)
    return document


@torch.no_grad()
def _cell(
    workload: ProductWorkload, entrants: dict[str, Product], device: torch.device, rounds: int, rep: float
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
    """Return a function that measures the milliseconds of a call of ``function``."""
    if device.type == "cuda":
        function()
        return partial(replay_time, capture([function]), rep)
    return partial(median_time, function, rep, device)


def _wrong(product: Product, x: dict[int, Tensor], weights: Sequence[Tensor]) -> str | None:
    """Describe the first product whose error is larger than allowed; None if there is no such product."""
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
    """Return a table of the speed at which weights are read, in TB/s and as a share of the read bandwidth."""
    read = document["read_tbps"]

    def text_of(cell: dict[str, Any], result: dict[str, Any]) -> str:
        tbps = statistics.median(result["tbps"])
        return f"{tbps:.3g} ({tbps / read:.2f})"

    return cells_table(
        f"TB/s of weights (as a share of {read:.2f} TB/s, the speed of reading)", document, text_of
    )
