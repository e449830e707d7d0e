"""The attention functions that the demo compares, with one signature."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile import flash_attn_func
from flashtile.problems.masking import CAUSAL, positions
from flashtile.reference import attention as reference

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> out, each (batch, seqlen, heads, head_dim). The causal mask is aligned to the bottom right."""


def flashtile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def standard(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return causal attention computed without a fused kernel, with the score matrix in memory.

    ``hidden`` is the mask from :func:`later_keys`. Pass it to reuse one mask in several calls. If it is None,
    the mask is computed here.
    """
    if hidden is None:
        hidden = later_keys(q.shape[1], k.shape[1], q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return reference.standard(q, k, v, q.shape[-1] ** -0.5, hidden=hidden)[0].transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch's scaled_dot_product_attention. torch chooses the backend."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    square = q.shape[2] == k.shape[2]  # torch's own causal mask is aligned to the upper left
    seen = None if square else ~later_keys(q.shape[2], k.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=square).transpose(1, 2)


def later_keys(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Return (seqlen_q, seqlen_k) bool, True for keys that a causal query must not attend to."""
    return ~CAUSAL.visible(positions(seqlen_q, seqlen_k), range(seqlen_k), device)


ATTENTIONS: dict[str, Attention] = {"flashtile": flashtile, "standard": standard, "sdpa": sdpa}
