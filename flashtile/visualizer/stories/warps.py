"""Four warps that share the work of a thread block, by keys or by rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashtile.algorithms import Memory, Trace, warp_split
from flashtile.visualizer.stories.case import Case

NUM_WARPS, ROWS, KEYS, HEAD_DIM, BLOCK = 4, 64, 128, 64, 64
"""One thread block, two tiles of scores."""


def cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, HEAD_DIM, generator=generator) for rows in (ROWS, KEYS, KEYS))
    traces = {name: Trace() for name in ("split_k", "split_q")}
    for name, trace in traces.items():
        getattr(warp_split, name)(
            q, k, v, Memory(trace=trace), num_warps=NUM_WARPS, block_m=BLOCK, block_n=BLOCK
        )
        trace.spans = warp_split.timeline(trace.events)
    cycles = max(span.end for trace in traces.values() for span in trace.spans)
    for name, trace in traces.items():
        yield Case(name, trace, {"num_warps": NUM_WARPS, "cycles": cycles})
