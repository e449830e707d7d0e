"""A step of decoding few short sequences on a CPU beside SDPA over dense keys: microseconds, least of 400.

    python benchmarks/cpu_decode_step.py

fp32, 8 heads of 64, pages of 16, in order or scattered. The findings stand in docs/measured/cpu.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import flashtile

HEADS, HEAD_DIM, PAGE = 8, 64, 16
SHAPES = (1, 128), (4, 128), (8, 512), (1, 1024)
REPEATS = 400


def least(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def measure(batch: int, seqlen: int) -> dict[str, float]:
    q, k, v = torch.randn(3, batch, 1, HEADS, HEAD_DIM).unbind()
    blocks = batch * seqlen // PAGE
    caches: tuple[Any, ...] = torch.randn(2, blocks, PAGE, HEADS, HEAD_DIM).unbind()
    dense: list[Any] = [torch.randn(batch, HEADS, length, HEAD_DIM) for length in (1, seqlen, seqlen)]
    found = {"sdpa": least(partial(torch.nn.functional.scaled_dot_product_attention, *dense))}
    lengths = torch.full((batch,), seqlen - 1, dtype=torch.int32)
    for name, order in (("in order", torch.arange(blocks)), ("scattered", torch.randperm(blocks))):
        table = order.int().view(batch, -1)
        step: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table}
        found[name] = least(partial(flashtile.flash_attn_with_kvcache, q, *caches, **step))
        step |= {"k": k, "v": v}
        found[f"{name}, append"] = least(partial(flashtile.flash_attn_with_kvcache, q, *caches, **step))
    return found


for batch, seqlen in SHAPES:
    times = measure(batch, seqlen)
    cells = ", ".join(f"{name} {us:.0f} ({us / times['sdpa']:.1f} x)" for name, us in times.items())
    print(f"{batch} x {seqlen}: {cells}")
