"""Padded batches on a CPU: attention with key_padding_mask beside SDPA with the same mask, in turns.

    python benchmarks/cpu_padding.py

fp32, 12 heads of 64 (BERT-base); milliseconds, least of 9, forward and forward with backward. The findings
stand in docs/measured/cpu.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtile

HEADS, HEAD_DIM = 12, 64
REPEATS = 9
BATCHES = {
    "8 x 128, a quarter to all of it": (128, torch.linspace(32, 128, 8)),
    "8 x 512, a quarter to all of it": (512, torch.linspace(128, 512, 8)),
    "8 x 512, nothing padded": (512, torch.full((8,), 512)),
    "4 x 1024, one long": (1024, torch.tensor([1024, 256, 128, 128])),
}


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return flashtile.attention(q, k, v, key_padding_mask=mask)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None, None]).transpose(1, 2)


def forward(attend: Callable[..., Tensor], inputs: list[Tensor], mask: Tensor) -> None:
    with torch.no_grad():
        attend(*inputs, mask)


def both(attend: Callable[..., Tensor], inputs: list[Tensor], mask: Tensor) -> None:
    out = attend(*(t.requires_grad_() for t in inputs), mask)
    out.backward(out.detach())


def least(calls: list[Callable[[], Any]]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            of_call.append(time.perf_counter() - start)
    return [1e3 * min(of_call) for of_call in times]


for name, (seqlen, lengths) in BATCHES.items():
    inputs = [torch.randn(len(lengths), seqlen, HEADS, HEAD_DIM) for _ in range(3)]
    for side, mask in (
        ("right", torch.arange(seqlen) < lengths[:, None]),
        ("left", torch.arange(seqlen) >= seqlen - lengths[:, None]),
    ):
        real = mask[:, :, None, None]
        torch.testing.assert_close(ours(*inputs, mask) * real, sdpa(*inputs, mask) * real)
        for what in (forward, both):
            mine, theirs = least([partial(what, attend, inputs, mask) for attend in (ours, sdpa)])
            print(f"{name}, {side}, {what.__name__}: {mine:.1f} of {theirs:.1f} ms ({mine / theirs:.2f})")
