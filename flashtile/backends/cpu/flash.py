"""torch's flash kernel for the CPU by our conventions, on transpose views: no copy in, no copy of out.

Its causal mask is aligned to the top left, which is ours only where there are as many queries as keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim).

    Computes in ``dtype``; ``bias`` (1, heads_q or 1, seqlen_q, seqlen_k) of that dtype is added to scores.
    """
    given = q.dtype
    if given != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, lse = _forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=bias, scale=scale
    )
    out = out.transpose(1, 2)  # contiguous: the kernel lays it out as (batch, seqlen_q, heads_q, head_dim)
    return (out if given == dtype else out.to(given)), lse.contiguous()


def differentiate(
    dtype: torch.dtype,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in ``dtype``, from dout and what :func:`attend` took and gave."""
    inputs = (t.to(dtype).transpose(1, 2) for t in (dout, q, k, v, out))
    gradients = _backward(*inputs, lse, 0.0, causal, attn_mask=bias, scale=scale)
    dq, dk, dv = (t.transpose(1, 2) for t in gradients)
    return dq, dk, dv
