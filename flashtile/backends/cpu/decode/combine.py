"""Combination of Flash-Decoding's partial results on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.decode import CombineProblem, DecodeProblem


def combine(
    problem: CombineProblem | DecodeProblem, out_partial: Tensor, lse_partial: Tensor, tensors: None = None
) -> tuple[Tensor, Tensor]:
    """Return out (batch, seqlen, heads, head_dim), lse (batch, heads, seqlen); parts are added in order."""
    lse_partial = lse_partial.masked_fill(lse_partial == torch.inf, -torch.inf)
    largest = lse_partial.amax(0)
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0.0)
    total = torch.zeros_like(largest)
    out = torch.zeros(out_partial.shape[1:], dtype=lse_partial.dtype)
    for out_part, lse_part in zip(out_partial, lse_partial, strict=True):
        weight = torch.exp(lse_part - largest)
        total += weight
        # Where a part has no key, its out is not written and may hold NaN, which a weight of 0 would keep.
        part = out_part.to(out.dtype).masked_fill((lse_part == -torch.inf).unsqueeze(-1), 0.0)
        out.addcmul_(part, weight.unsqueeze(-1))
    out /= total.masked_fill(empty, 1.0).unsqueeze(-1)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    return out.to(problem.out_dtype), lse.transpose(1, 2).contiguous().detach()
