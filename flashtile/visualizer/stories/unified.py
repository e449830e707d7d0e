"""Sixteen scores in four splits: a running maximum, and one number for all that a spike refutes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashtile.algorithms import Memory, Trace, flash_decoding, unified_max
from flashtile.visualizer.stories.case import Case, numbers

SCORES = [5.0, 6.5, 4.0, 6.0, 7.0, 5.5, 8.5, 6.0, 4.5, 7.5, 6.0, 5.0, 8.0, 6.5, 5.5, 7.0]
SPIKE = 9.0
"""exp(9 - 6) is beyond the bound exp(3): the paper's Figure 5."""

SPIKE_AT, PHI, BOUNDS = 9, 6.0, (-3.0, 3.0)
NUM_SPLITS, BLOCK = 4, 2


def cases() -> Iterator[Case]:
    for variant in ("spike", "calm"):
        scores = list(SCORES)
        if variant == "spike":
            scores[SPIKE_AT] = SPIKE
        q, k = torch.ones(1, 1), torch.tensor(scores)[:, None]  # head_dim 1, so that scores are the keys
        v = torch.arange(16.0)[:, None]
        options: dict[str, Any] = {"num_splits": NUM_SPLITS, "block_m": 1, "block_n": BLOCK}
        facts = {"scores": scores, "phi": PHI, "bounds": list(BOUNDS), "num_splits": NUM_SPLITS}
        trace = Trace()
        out, _ = flash_decoding.forward(q, k, v, Memory(trace=trace), **options)
        yield Case("running", trace, {**facts, "out": numbers(out[0])}, variant)
        trace = Trace()
        out, _, again = unified_max.forward(q, k, v, Memory(trace=trace), phi=PHI, bounds=BOUNDS, **options)
        yield Case("unified", trace, {**facts, "out": numbers(out[0]), "recomputed": len(again)}, variant)
