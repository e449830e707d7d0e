"""Attention in e4m3 with an outlier: one scale a tensor, one a block of rows, and a rotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.algorithms import Memory, Trace, flash2, flash3_fp8
from flashtile.visualizer.stories.case import Case, numbers

SEQLEN, HEAD_DIM, BLOCK, COLUMN = 32, 32, 8, 3
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"block_scales": False, "incoherent": False},
    "block": {"block_scales": True, "incoherent": False},
    "rotated": {"block_scales": True, "incoherent": True},
}
HUGE = 200_000.0
"""e4m3 has an exponent of its own: only beside so large a number others lose their bits."""

LOUD = 0.25
"""A rounding error that ordinary numbers, around 1, do not have."""


def inputs(variant: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (SEQLEN, HEAD_DIM), normally distributed but for outliers."""
    q, k, v = torch.randn(3, SEQLEN, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    if variant == "column":  # large in the same column of both, as models have it
        q[:, COLUMN] = 20 + q[:, COLUMN] / 2
        k[:, COLUMN] = -15 + k[:, COLUMN] / 2
    elif variant == "huge":
        q[BLOCK - 1, COLUMN] = HUGE
    return q, k, v


def cases() -> Iterator[Case]:
    for variant in ("column", "huge", "none"):
        q, k, v = inputs(variant)
        exact, _ = flash2.forward(q.double(), k.double(), v.double(), Memory(), block_m=BLOCK, block_n=BLOCK)
        for name, options in CASES.items():
            trace = Trace()
            out, _ = flash3_fp8.forward(q, k, v, Memory(trace=trace), block_m=BLOCK, block_n=BLOCK, **options)
            error = ((out - exact).norm() / exact.norm()).item()
            rows = BLOCK if options["block_scales"] else SEQLEN
            rotation = flash3_fp8.random_rotation(q, seed=0) if options["incoherent"] else None
            facts = {"error": error, "block": BLOCK}
            facts |= {array: rounding(t, rows, rotation) for array, t in (("Q", q), ("K", k))}
            yield Case(name, trace, facts, variant)


def rounding(x: Tensor, rows: int, rotation: Tensor | None) -> dict[str, Any]:
    """What storing x does to each number, a digit for each.

    0 within e4m3's 1/16, 1 coarser, 2 rounded to zero; 3 within 1/16, which is more than :data:`LOUD`.
    """
    x = x if rotation is None else x @ rotation
    stored, scales = flash3_fp8.quantise(x, rows)
    values = stored * scales.repeat_interleave(rows, 0)
    lost = (values == 0) & (x != 0)
    coarse = (values - x).abs() > x.abs() / 16 * (1 + 1e-6)
    loud = ~coarse & ((values - x).abs() > LOUD)
    classes = torch.where(lost, 2, coarse.int() + 3 * loud.int())
    return {
        "classes": ["".join(map(str, row)) for row in classes.tolist()],
        "scales": numbers(scales[:, 0], 4),
        "largest": numbers(x.abs().amax(), 4),
        "coarse": int((classes == 1).sum()),
        "lost": int(lost.sum()),
        "loud": int(loud.sum()),
    }
