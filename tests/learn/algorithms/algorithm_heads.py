"""One head of attention for the algorithms' tests, and what standard attention makes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.reference import attention as reference


class Head(NamedTuple):
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v and dout (..., head_dim_v)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def random_head(
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Head:
    generator = torch.Generator().manual_seed(seed)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v), (seqlen_q, head_dim_v))
    return Head(*(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes))


class Attention(NamedTuple):
    """out (seqlen_q, head_dim_v), lse (seqlen_q, 1) and the gradients."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention(head: Head, dtype: torch.dtype = torch.float64, **mask: Any) -> Attention:
    """The oracle, in ``dtype``."""
    leaves = [t.to(dtype)[None, :, None].clone().requires_grad_() for t in head[:3]]
    out, lse = reference.attention(*leaves, **mask)
    gradients = torch.autograd.grad(out, leaves, head.dout.to(dtype)[None, :, None])
    return Attention(out[0, :, 0].detach(), lse[0, 0, :, None].detach(), *(g[0, :, 0] for g in gradients))
