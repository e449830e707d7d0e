"""Time of GPT-2's attention: standard attention's operations one by one, and flashtile's one call.

This repeats the measurement of GPT-2 in FlashAttention's paper (Dao et al. 2022, arXiv:2205.14135, figure 1).
Each of the operations (matrix product, mask, softmax, dropout, matrix product) reads or writes the scores in
memory. The fused kernel does not. The sum and the fused call are compared twice: both with dropout, and both
without.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.markup import escape
from rich.table import Column, Table
from torch import Tensor
from torch.nn import functional as F

from flashtile import attention, testing
from flashtile.hardware.timing import median_time
from flashtile.tools.demo.attention import later_keys
from flashtile.tools.demo.exactness import Check
from flashtile.tools.demo.scaling import ScalingWorkload, memory_obstacle

DROPOUT = 0.1
"""Dropout probability of GPT-2 in training."""

FIRST, MASK, SOFTMAX, DROP, SECOND = "q k", "mask", "softmax", "dropout", "p v"
NAMES = (FIRST, MASK, SOFTMAX, DROP, SECOND)
FUSED = "fused"
"""Name of flashtile's call with dropout, which is timed with the operations."""

OK, WRONG, REFUSED, NO_MEMORY = "ok", "wrong", "refused", "out of memory"

SEQLEN, QUICK_SEQLEN = 1024, 256
BATCH_ON_GPU = 16


def steps(hidden: Tensor | None, scale: float) -> dict[str, Callable[..., Tensor]]:
    """Return the operations of standard attention by name, for tensors (batch, heads, seqlen, head_dim).

    ``hidden`` is True for scores that the mask hides. If it is None, the operation "mask" returns its input.
    """
    return {
        FIRST: lambda q, k: (q * scale) @ k.transpose(-2, -1),
        MASK: lambda scores: scores if hidden is None else scores.masked_fill(hidden, -torch.inf),
        SOFTMAX: lambda scores: torch.softmax(scores, -1),
        DROP: lambda p: F.dropout(p, DROPOUT, training=True),
        SECOND: torch.matmul,
    }


def functions(
    steps: Mapping[str, Callable[..., Tensor]], q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return, by the name of an operation, a function without arguments that runs it once.

    The inputs of an operation are the results of the previous operations, which are computed here.
    """
    given: dict[str, tuple[Tensor, ...]] = {FIRST: (q, k)}
    for name, following in itertools.pairwise(NAMES):
        result = steps[name](*given[name])
        given[following] = (result, v) if following == SECOND else (result,)
    return {name: partial(steps[name], *given[name]) for name in NAMES}


def summarized(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Summarize times, in milliseconds, for the JSON document of results.

    ``ms`` has the median time of each operation, and ``together_ms`` is the sum of these medians.
    ``fused_dropout_ms`` is the median time of flashtile's call with dropout. It is missing if ``times`` has
    none.

    Args:
        times: time in each round of each operation and of :data:`FUSED`, by name.
    """
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    fused = {"fused_dropout_ms": medians.pop(FUSED)} if FUSED in medians else {}
    return {"ms": medians, "together_ms": sum(medians.values()), "dropout_p": DROPOUT} | fused


def workload_for(device: torch.device, dtype: torch.dtype, quick: bool) -> ScalingWorkload:
    """Return the attention of one GPT-2 layer over 16 sequences of 1024 tokens; one sequence on a CPU.

    ``quick`` shortens the sequences to 256 tokens.
    """
    batch = 1 if device.type == "cpu" else BATCH_ON_GPU
    name = str(dtype).removeprefix("torch.")
    return ScalingWorkload(str(device), name, batch, 12, 64, (QUICK_SEQLEN if quick else SEQLEN,), 0.05)


@torch.no_grad()
def measure(workload: ScalingWorkload) -> dict[str, Any]:
    """Check both sides without dropout, time them, and return all results.

    ``results`` has flashtile's call, and ``operations`` the operations as :func:`summarized`. The ``status``
    of a side is "ok" if it was timed; otherwise ``reason`` says why it was not.
    """
    device, (seqlen,) = torch.device(workload.device), workload.seqlens
    shape = (workload.batch, seqlen, workload.heads, workload.head_dim)
    q, k, v = (testing.random_tensor(shape, workload.torch_dtype, device, seed=seed) for seed in range(3))
    fused = partial(attention, q, k, v, causal=True)
    by_operation = steps(later_keys(seqlen, seqlen, device), workload.head_dim**-0.5)

    def standard(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        masked = by_operation[MASK](by_operation[FIRST](q.transpose(1, 2), k.transpose(1, 2)))
        out = by_operation[SECOND](by_operation[SOFTMAX](masked), v.transpose(1, 2))
        return out.transpose(1, 2), masked.logsumexp(-1)

    def time(function: Callable[[], Any]) -> list[float]:
        return [median_time(function, 1e3 * workload.seconds_each, device)]

    def time_fused() -> dict[str, Any]:
        return _judged(attention, q, k, v) or {"status": OK, "ms": time(fused)[0]}

    def time_operations() -> dict[str, Any]:
        wrong = _judged(standard, q, k, v)
        if wrong is not None:
            return wrong
        single = functions(by_operation, *(t.transpose(1, 2) for t in (q, k, v)))
        times = {name: time(function) for name, function in single.items()}
        if device.type != "cpu":  # its dropout is many short operations, which measure torch's threads
            times[FUSED] = time(partial(fused, dropout_p=DROPOUT))
        return {"status": OK, **summarized(times)}

    obstacle = memory_obstacle(workload, seqlen)
    return {
        "workload": f"gpt2-s{seqlen}",
        "shape": f"{seqlen} tokens, {workload.described}",
        "results": {"flashtile": _within_memory(time_fused)},
        "operations": (
            {"status": REFUSED, "reason": obstacle} if obstacle else _within_memory(time_operations)
        ),
    }


def _judged(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any] | None:
    """Return None if the results for the first sequence meet the error rule, otherwise what is wrong.

    One sequence is enough: the others are computed by the same kernel, and the reference is in float64.
    """
    with torch.enable_grad():
        report = testing.measure(
            q[:1], k[:1], v[:1], gradients=False, poison=False, function=function, causal=True
        )
    return None if report.holds else {"status": WRONG, "reason": str(report)}


def _within_memory(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measured()
    except torch.OutOfMemoryError as error:
        return {"status": NO_MEMORY, "reason": str(error).split(". ")[0]}


def checks(cell: dict[str, Any]) -> list[Check]:
    """Check the results of flashtile and standard attention; no check if neither had enough memory."""
    sides = {"flashtile": cell["results"]["flashtile"], "standard attention": cell["operations"]}
    judged = {name: side for name, side in sides.items() if side["status"] in (OK, WRONG)}
    wrong = [f"{name}: {side['reason']}" for name, side in judged.items() if side["status"] != OK]
    detail = "; ".join(wrong) or f"{' and '.join(judged)} within the error rule"
    return [Check("GPT-2's attention is right before it is timed", not wrong, detail)] if judged else []


def table(cells: Sequence[dict[str, Any]], ours: str) -> Table:
    """Return a table of milliseconds by workload: standard attention's operations, and the fused call."""
    found = Table(
        "forward, milliseconds",
        *(Column(escape(cell["workload"]), justify="right") for cell in cells),
        title="standard attention by operation, and the fused call", title_justify="left",
    )  # fmt: skip
    columns = [compared_times(cell, ours) for cell in cells]
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(value is not None for value in values):
            found.add_row(escape(name), *("–" if value is None else f"{value:.3g}" for value in values))
    dropout = cells[0]["operations"]["dropout_p"]
    dropped = any("fused_dropout_ms" in cell["operations"] for cell in cells)
    found.caption = (
        f"both sides with dropout of {dropout:g}, then both sides without dropout" if dropped else None
    )
    return found


def compared_times(cell: dict[str, Any], ours: str) -> dict[str, float | None]:
    """Return the milliseconds of both sides and their ratios, by the name of a row of :func:`table`."""
    found, fused = cell["operations"], cell["results"][ours].get("ms")
    exact = found["together_ms"] - found["ms"][DROP]
    dropped = found.get("fused_dropout_ms")  # missing on CPUs, and in documents of version 0.1
    return found["ms"] | {
        DROP: None if dropped is None else found["ms"][DROP],
        "together": None if dropped is None else found["together_ms"],
        f"{ours} with dropout": dropped,
        f"together / {ours} with dropout": None if dropped is None else found["together_ms"] / dropped,
        "without dropout": exact,
        ours: fused,
        f"without dropout / {ours}": None if fused is None else exact / fused,
    }
