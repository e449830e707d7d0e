"""Attention sinks, one score per head without a value, added to finished attention.

``lse' = log(exp(lse) + exp(sink))`` and ``out' = out exp(lse - lse')``. In terms of out' and lse', the
gradients of q, k and v have the same form as without a sink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.attention import OptionalTensors


def join(out: Tensor, lse: Tensor, extras: OptionalTensors) -> None:
    """Add the sink to out (..., heads, head_dim) and lse (..., heads, rows), in place.

    Rows that belong to no sequence or are unused have no sink: out stays 0 and lse stays -inf.
    """
    assert extras.sink is not None
    joined = torch.logaddexp(lse, extras.sink.to(lse.dtype)[:, None])
    if extras.cu_seqlens_q is not None or extras.seqused_q is not None:
        joined.masked_fill_(_unused(lse, extras), -torch.inf)
    weight = torch.exp(lse - joined).masked_fill_(joined == -torch.inf, 0.0)
    out *= weight.mT[..., None]
    lse.copy_(joined)


def _unused(lse: Tensor, extras: OptionalTensors) -> Tensor:
    """Return a bool mask that broadcasts to lse: True for rows outside all sequences or unused."""
    used, offsets = extras.seqused_q, extras.cu_seqlens_q
    rows = torch.arange(lse.shape[-1], device="cpu")
    if offsets is None:
        assert used is not None
        return (rows >= used[:, None])[:, None]
    ends = offsets[1:] if used is None else offsets[:-1] + used
    return ~((rows >= offsets[:-1, None]) & (rows < ends[:, None])).any(0)
