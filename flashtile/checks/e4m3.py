"""Converts queries, new keys and rotary tables of float8_e4m3fn to bfloat16, for calls over an FP8 cache.

FlashAttention-3's interface accepts such calls. bfloat16 represents every e4m3 number exactly. The scales of
q are multiplied into those of the keys in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.arguments import check_dense, check_heads_tensor, check_same_dtype, check_tensor
from flashtile.checks.decode import check_cache, check_descales
from flashtile.problems.decode import FP8, MAX_HEAD_DIM


class Widened(NamedTuple):
    """The arguments of a call after conversion.

    Attributes:
        q: queries in bfloat16.
        k, v: new keys and values in bfloat16, if they were e4m3; otherwise unchanged.
        descales: scales of the cache's keys and values for reading, with q_descale multiplied into the keys'.
        new_descales: scales of k and v for writing. (None, None) if k and v were e4m3: they are stored
            unchanged.
    """

    q: Tensor
    k: Any
    v: Any
    descales: tuple[Tensor | None, Tensor | None]
    new_descales: tuple[Tensor | None, Tensor | None]


def widen_tables(rotary_cos: Any, rotary_sin: Any) -> tuple[Any, Any]:
    """Convert rotary tables in e4m3 to bfloat16. Other tables are returned unchanged.

    Rotary tables may have the dtype of the queries, which can be e4m3.
    """
    cos, sin = (
        t.to(torch.bfloat16) if isinstance(t, Tensor) and t.dtype == FP8 else t
        for t in (rotary_cos, rotary_sin)
    )
    return cos, sin


def widen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any,
    v: Any,
    scaled: tuple[Any, Any, Any],
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> Widened:
    """Convert a call with e4m3 queries to one with bfloat16 queries.

    ``scaled`` holds the scales (q_descale, k_descale, v_descale).

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.flash_attn_with_kvcache`.
    """
    q_descale, k_descale, v_descale = scaled
    check_dense("q", q)
    if q.dtype != FP8:
        raise ValueError(f"q_descale must be None for q of {q.dtype}, because only {FP8} is scaled")
    packed = isinstance(cu_seqlens_q, Tensor)
    check_heads_tensor("q", q, packed, "total_q", "seqlen_q", q, MAX_HEAD_DIM)
    batch = cu_seqlens_q.shape[0] - 1 if isinstance(cu_seqlens_q, Tensor) else q.shape[0]
    check_cache(q, k_cache, v_cache, block_table)
    check_descales(k_cache, k_descale, v_descale, batch)
    heads = k_cache.shape[2]
    shapes = ((heads,), (batch, heads))
    check_tensor("q_descale", q_descale, shapes, "(heads_kv,) or (batch, heads_kv)", q, any_strides=True)

    new_descales = k_descale, v_descale
    if isinstance(k, Tensor) and isinstance(v, Tensor) and FP8 in (k.dtype, v.dtype):
        # New e4m3 keys and values are stored as they are: bfloat16 holds them exactly, and no scale applies.
        check_same_dtype("v", v, "k", k)
        k, v, new_descales = k.to(torch.bfloat16), v.to(torch.bfloat16), (None, None)
    if q_descale is None:
        return Widened(q.to(torch.bfloat16), k, v, (k_descale, v_descale), new_descales)
    if k_descale is None or v_descale is None:
        k_descale, v_descale = q.new_ones(2, heads, dtype=torch.float32).unbind()
    if q_descale.dim() == 2:
        if k_descale.dim() == 2:
            raise NotImplementedError(
                f"q_descale must be (heads_kv,) with a k_descale per page, got {tuple(q_descale.shape)}"
            )
        q_descale = q_descale.unsqueeze(1)
    k_descale = q_descale * k_descale
    if v_descale.dim() < k_descale.dim():
        v_descale = v_descale.expand_as(k_descale)
    return Widened(q.to(torch.bfloat16), k, v, (k_descale, v_descale), new_descales)
