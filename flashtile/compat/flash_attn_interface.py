"""``flash_attn_interface``: FlashAttention-3's functions, with its argument names and order, and its results.

Arguments that only tune FlashAttention-3's kernels are accepted and ignored: ``pack_gqa``, ``sm_margin``,
``scheduler_metadata``, and ``num_splits`` outside of ``flash_attn_with_kvcache``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api import decode as decoding
from flashtile.api.attention import attention
from flashtile.api.decode import flash_attn_combine
from flashtile.checks.arguments import ERRORS, check_dense, check_int32, renamed
from flashtile.checks.conversions import as_int, check_flag, check_tuning
from flashtile.checks.values import check_between
from flashtile.op.operation import reads_values

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """Call :func:`flashtile.attention`. Return (out, lse) with ``return_attn_probs``."""
    check_flag("return_attn_probs", return_attn_probs)
    check_tuning(pack_gqa, num_splits=num_splits, sm_margin=sm_margin)
    return attention(
        q, k, v, qv=qv, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        attention_chunk=attention_chunk, deterministic=deterministic, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """Call :func:`flash_attn_func` on qkv (batch, seqlen, 3, heads, head_dim).

    With ``num_heads_q``, qkv is (batch, seqlen, num_heads_q + 2 heads_kv, head_dim).
    """
    q, k, v = split_qkv(qkv, num_heads_q)
    try:
        return flash_attn_func(
            q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
            attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
            return_attn_probs=return_attn_probs,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, dict.fromkeys("qkv", "qkv")) from None


def split_qkv(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """Split qkv in one of the shapes of :func:`flash_attn_qkvpacked_func` into views of q, k and v.

    Unlike the views of ``Tensor.unbind`` and ``Tensor.split``, these may be written in place under autograd.
    """
    check_dense("qkv", qkv)
    queries: int = 0 if num_heads_q is None else as_int("num_heads_q", num_heads_q)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if qkv.dim() == 4 and queries in range(qkv.shape[2] - 2, 0, -2):
        values = (qkv.shape[2] + queries) // 2
        return qkv[:, :, :queries], qkv[:, :, queries:values], qkv[:, :, values:]
    raise ValueError(
        "qkv must have shape (batch, seqlen, 3, heads, head_dim), or with num_heads_q "
        f"(batch, seqlen, num_heads_q + 2 heads_kv, head_dim), got {tuple(qkv.shape)} and {num_heads_q}"
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """Call :func:`flashtile.attention` on packed sequences. Return (out, lse) with ``return_attn_probs``."""
    check_flag("return_attn_probs", return_attn_probs)
    check_tuning(pack_gqa, num_splits=num_splits, sm_margin=sm_margin)
    return attention(
        q, k, v, qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        deterministic=deterministic, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | Any:
    """Call :func:`flashtile.flash_attn_with_kvcache` with ``page_table`` as its ``block_table``.

    Args:
        cache_batch_idx: (batch,) int32: the row of each sequence, in ``page_table`` if it is given, otherwise
            in the dense cache.
        q_descale, k_descale, v_descale: (batch, heads_kv), one factor for each sequence and head. The shape
            is the same with ``page_table``. None means 1.
        rotary_seqlens: ignored without ``rotary_cos``, as in FlashAttention-3.
    """
    check_tuning(pack_gqa, scheduler_metadata, sm_margin=sm_margin)
    if rotary_cos is None and rotary_sin is None:
        rotary_seqlens = None
    k_descale, v_descale = _of_sequences(k_descale, v_descale)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = _chosen_rows(page_table, cache_batch_idx), None
    try:
        return decoding.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            page_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits,
            return_softmax_lse, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale, qv=qv, attention_chunk=attention_chunk,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, {"block_table": "page_table"}) from None


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *others: Any,
    **named: Any,
) -> Tensor:
    """Return (0,) int32: flashtile's kernels need no metadata, because they read lengths on the device."""
    check_dense("cache_seqlens", cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _chosen_rows(page_table: Tensor, cache_batch_idx: Tensor) -> Tensor:
    """Return (batch, max_blocks) int32: the rows ``cache_batch_idx`` of ``page_table``."""
    check_dense("page_table", page_table)
    check_dense("cache_batch_idx", cache_batch_idx)
    check_int32("cache_batch_idx", cache_batch_idx, (cache_batch_idx.numel(),), "(batch,)", page_table)
    if reads_values(page_table):
        most = page_table.shape[0] - 1
        check_between("cache_batch_idx", cache_batch_idx, 0, most, "the last row of page_table")
    return page_table.index_select(0, cache_batch_idx)


def _of_sequences(k_descale: Tensor | None, v_descale: Tensor | None) -> tuple[Any, Any]:
    """Convert descales (batch, heads_kv) to contiguous (batch, 1, heads_kv).

    If only one of them is None, it becomes a tensor of ones.
    """
    given = []
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            check_dense(name, descale)
            if descale.dim() != 2:
                raise ValueError(f"{name} must have shape (batch, heads_kv), got {tuple(descale.shape)}")
            given.append(descale)
    if not given:
        return None, None
    k, v = (torch.ones_like(given[0]) if t is None else t for t in (k_descale, v_descale))
    return k.unsqueeze(1).contiguous(), v.unsqueeze(1).contiguous()
