"""Q K^T V without a softmax, N = 6 and d = 4: with S in HBM, without, and with the brackets moved."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashtile.algorithms import Memory, Trace, product_chain
from flashtile.visualizer.stories.case import Case

SEQLEN, HEAD_DIM, BLOCK = 6, 4, 2


def cases() -> Iterator[Case]:
    q, k, v = torch.randn(3, SEQLEN, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    facts = {"seqlen": SEQLEN, "head_dim": HEAD_DIM}
    for name in ("separate", "fused", "reordered"):
        trace = Trace()
        options = {} if name == "reordered" else {"block_m": BLOCK, "block_n": BLOCK}
        getattr(product_chain, name)(q, k, v, Memory(trace=trace), **options)
        yield Case(name, trace, facts)
