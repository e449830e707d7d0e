"""Measures the host time of an eager backward pass beside SDPA's, and that of an empty autograd node.

    python -m benchmarks.host_backward --json host_backward.json
    python -m benchmarks.host_backward --device cpu --shapes 1x16x2x8 --rounds 1 --calls 1

A call is ``torch.autograd.grad`` on a graph built before, causal, in bfloat16. The contestants run in turns
in one process. The host issues calls without waiting for the GPU, so the time is that of the host where it is
more than the GPU's (``device_us``). Gradients are compared with standard attention's in float32 before
anything is timed. The empty node saves nothing and returns the gradient of its output three times: the rest
of a contestant's time is its own. SDPA gets tensors with heads first, so its graph has no views.
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from benchmarks.suite.documents import source_commit
from flashtile.hardware import machine
from flashtile.hardware.timing import median_time, synchronize
from flashtile.reference import attention as reference

ALLOWED = 0.02
"""Largest allowed difference from float32's gradients, relative to their norm."""
EMPTY = "empty node"
SDPA = {"sdpa": None, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
"""SDPA's backends by contestant; None lets torch choose."""


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradients[0], gradients[0], gradients[0]


def main(
    shapes: Annotated[
        str, typer.Option(help="Calls, each batch x tokens x heads x head size, by commas.")
    ] = "1x768x16x64,2x128x8x64",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all contestants.")] = 60,
    calls: Annotated[int, typer.Option(min=1, help="Calls of a contestant in a round.")] = 50,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if present.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Print the least and the median microseconds of each contestant, over the rounds."""
    place = machine.find_device(device)
    document: dict[str, Any] = {
        "schema": 1,
        "kind": "host_backward",
        "date": datetime.date.today().isoformat(),
        "versions": machine.versions(),
        "source": source_commit(),
        "device": machine.describe_device(place),
        "note": "Microseconds of the host for torch.autograd.grad, causal, bfloat16; least and median of "
        f"{rounds} rounds of {calls} calls in turns in one process. The median time on the device is beside "
        "them. Gradients were compared with float32's first.",
        "rows": [],
    }
    for shape in shapes.split(","):
        document["rows"] += measured(shape, [int(size) for size in shape.split("x")], rounds, calls, place)
        if json_file is not None:
            json_file.write_text(json.dumps(document, indent=1) + "\n")
    if any("error" in row for row in document["rows"] if row["name"] == "flashtile"):
        raise typer.Exit(1)


def measured(
    shape: str, sizes: list[int], rounds: int, calls: int, place: torch.device
) -> list[dict[str, Any]]:
    """Print and return a row for each contestant."""
    batch, tokens, heads, head_dim = sizes
    torch.manual_seed(0)
    tensors = [
        torch.randn(batch, tokens, heads, head_dim, device=place, dtype=torch.bfloat16) for _ in range(4)
    ]
    standard = lambda q, k, v: reference.attention(q, k, v, causal=True)[0]  # noqa: E731
    expected = gradients(standard, [t.float() for t in tensors])()
    contestants: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {
        name: {"call": shape, "name": name} for name in ("flashtile", *SDPA, EMPTY)
    }
    for name, row in rows.items():
        try:
            heads_first = name in SDPA
            call = gradients(attend_of(name), [t.transpose(1, 2) if heads_first else t for t in tensors])
            found = call()
            if name != EMPTY:
                found = [t.transpose(1, 2) for t in found] if heads_first else found
                row["difference"] = max(difference(*pair) for pair in zip(found, expected, strict=True))
                if not row["difference"] <= ALLOWED:
                    raise ValueError("wrong gradients")
            contestants[name] = call
        except Exception as error:  # a backend that a device or torch lacks
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            synchronize(place)
            start = time.perf_counter()
            for _ in range(calls):
                contestants[name]()
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    for name, of in times.items():
        on_device = median_time(contestants[name], 10.0, place) * 1e3
        rows[name] |= {"us": min(of), "median_us": statistics.median(of), "device_us": on_device}
    for row in rows.values():
        numbers = [f"{key} {row[key]:.4g}" for key in ("us", "median_us", "device_us") if key in row]
        print(row["call"], row["name"], *numbers, row.get("error", ""), flush=True)
    return list(rows.values())


def gradients(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """Run the forward pass, and return the function that computes the gradients of q, k and v."""
    inputs = [t.detach().requires_grad_() for t in tensors[:3]]
    out, dout = attend(*inputs), tensors[3]
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def attend_of(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == "flashtile":
        return lambda q, k, v: flashtile.flash_attn_func(q, k, v, causal=True)
    if name == EMPTY:
        return Empty.apply
    backend = SDPA[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


if __name__ == "__main__":
    typer.run(main)
