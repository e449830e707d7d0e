"""Decoding of sequences that share a prefix: the prefix is read once for all of them (cascade inference).

All queries of a group attend together to the pages of their prefix, as if they belonged to one sequence. Each
sequence then attends to its own remaining keys and continues the prefix's softmax (cascade inference:
FlashInfer, 2024; Hydragen, Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import ERRORS, renamed
from flashtile.checks.conversions import (
    as_int,
    as_masking,
    check_flag,
    make_options,
    split_arguments,
    under_autocast,
)
from flashtile.checks.decode import check_decode, check_shared_prefix
from flashtile.checks.values import check_prefix_values
from flashtile.op.operation import is_plain, reads_values
from flashtile.operators.decode import APPEND, SharedKeys, attend_shared, decode
from flashtile.problems.common import shared_fields
from flashtile.problems.decode import AppendOptions, AppendTensors, CacheTensors, DecodeOptions


def flash_attn_with_shared_prefix(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    prefix_seqlens: int | Tensor,
    cu_prefix_groups: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    split_size: int | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    debug_checks: bool = False,
) -> Tensor | Any:
    """Attend over a paged cache whose sequences share their first pages.

    Computes the result of :func:`flash_attn_with_kvcache`, but reads the shared pages once per group instead
    of once per sequence. New keys must be appended beforehand (:func:`append_kvcache`).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k_cache, v_cache: (num_blocks, page_size, heads_kv, head_dim).
        block_table: (batch, max_blocks) int32: the pages of each whole sequence. The rows of a group start
            with the same pages.
        cache_seqlens: (batch,) int32: number of tokens of each sequence, including its prefix and queries.
        prefix_seqlens: number of tokens that the sequences of a group share, as an int or (num_groups,)
            int32. A prefix may end within a page. With ``causal`` every query must come after it.
        cu_prefix_groups: (num_groups + 1,) int32: group g is sequences ``cu_prefix_groups[g]`` to
            ``cu_prefix_groups[g + 1]``; every sequence is in a group. None: all sequences are in one group.
        softmax_scale, causal, softcap, sink: as for :func:`flash_attn_with_kvcache`. Windows and ALiBi are
            not supported, because they treat the prefix differently in each sequence.
        k_descale, v_descale, num_splits, split_size, return_softmax_lse, out, lse, backend, debug_checks: as
            for :func:`flash_attn_with_kvcache`.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v); with ``return_softmax_lse`` (out, lse), lse float32
        (batch, heads_q, seqlen_q).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> k_pages, v_pages = torch.randn(2, 10, 16, 2, 64).unbind()  # ten pages of 16 tokens
        >>> block_table = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)  # they share two pages
        >>> cache_seqlens = torch.tensor([40, 35], dtype=torch.int32)
        >>> q = torch.randn(2, 1, 8, 64)
        >>> out = flashtile.flash_attn_with_shared_prefix(q, k_pages, v_pages, block_table, cache_seqlens, 32)
        >>> alone = flashtile.flash_attn_with_kvcache(
        ...     q, k_pages, v_pages, cache_seqlens=cache_seqlens, block_table=block_table
        ... )
        >>> torch.testing.assert_close(out, alone)
    """
    shared = make_options(as_masking(causal), softmax_scale=softmax_scale, softcap=softcap, backend=backend)
    check_flag("return_softmax_lse", return_softmax_lse)
    check_flag("debug_checks", debug_checks)
    num_splits, split_size = split_arguments(num_splits, split_size)
    (q,) = under_autocast(q, cache=k_cache)
    if not isinstance(prefix_seqlens, Tensor):
        prefix_seqlens = as_int("prefix_seqlens", prefix_seqlens)
    descales = k_descale, v_descale
    check_shared_prefix(q, block_table, cache_seqlens, prefix_seqlens, cu_prefix_groups, descales)
    batch, seqlen_q = q.shape[:2]
    of_groups, of_sequences = _prefixes(q, prefix_seqlens, cu_prefix_groups)
    options = DecodeOptions(
        **shared_fields(DecodeOptions, shared),
        num_splits=num_splits,
        split_size=split_size,
        return_lse=return_softmax_lse or lse is not None,
        debug_checks=debug_checks,
    )
    own = CacheTensors(
        cache_seqlens=cache_seqlens, block_table=block_table, sink=sink, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    buffers = () if out is lse is None else (out, lse)
    given = (q, block_table, cache_seqlens, of_groups, cu_prefix_groups)
    if reads_values(q, debug_checks) and is_plain(given[:-1], given[-1:]):
        check_decode(q, k_cache, v_cache, own, options)
        check_prefix_values(q, k_cache, block_table, cache_seqlens, of_groups, cu_prefix_groups, causal)

    if batch > 0:
        cache = q, k_cache, v_cache
        if cu_prefix_groups is None:
            level = SharedKeys(block_table[:1], of_groups)
        else:
            first = cu_prefix_groups[:-1].clamp(0, batch - 1)  # an empty last group starts at ``batch``
            offsets = cu_prefix_groups * seqlen_q
            level = SharedKeys(block_table[first], of_groups, None, offsets, batch * seqlen_q)
        try:
            own = attend_shared(cache, own, options, [level])
        except ERRORS as error:
            names = {"cache_seqlens": "prefix_seqlens", "cu_seqlens_q": "cu_prefix_groups"}
            raise renamed(error, names) from None
        own = own._replace(cache_leftpad=of_sequences)  # hides the prefix; other keys keep their positions
    out, lse = decode((q, k_cache, v_cache), own, options, buffers)
    return (out, lse) if return_softmax_lse else out


def _prefixes(
    q: Tensor, prefix_seqlens: int | Tensor, cu_prefix_groups: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the prefix length of each group, (num_groups,), and of each sequence, (batch,), both int32."""
    batch = q.shape[0]
    if not isinstance(prefix_seqlens, Tensor):
        groups = 1 if cu_prefix_groups is None else cu_prefix_groups.shape[0] - 1
        lengths = torch.full((max(groups, batch),), prefix_seqlens, dtype=torch.int32, device=q.device)
        return lengths[:groups], lengths[:batch]
    if cu_prefix_groups is None:
        return prefix_seqlens, prefix_seqlens.expand(batch).contiguous()
    sequence = torch.arange(batch, dtype=torch.int32, device=q.device)
    group = torch.searchsorted(cu_prefix_groups[1:].contiguous(), sequence, right=True)
    return prefix_seqlens, prefix_seqlens[group.clamp(max=prefix_seqlens.shape[0] - 1)]


def cascade_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    levels: Sequence[SharedKeys],
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k_new: int | None = None,
    num_splits: int = 0,
    **tensors: Tensor | None,
) -> Any:
    """Compute :func:`flash_attn_with_kvcache` in ``levels``, for the engine, which has checked everything.

    Args:
        levels: the keys that groups of sequences share.
        num_splits: of attention to each sequence's own keys.
        tensors: the other tensors, by name. ``cache_leftpad`` (batch,) int32 is the number of each sequence's
            first keys that are in a level, or that a window hides from all its queries.
    """
    own = CacheTensors(**tensors)
    if k is not None and v is not None:  # all levels need the rotated queries, so no kernel also appends
        rotated = q.new_empty(q.shape)
        appended = AppendTensors(
            cache_seqlens=own.cache_seqlens, block_table=own.block_table, cu_seqlens_q=own.cu_seqlens_q,
            cu_seqlens_k_new=own.cu_seqlens_k_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, q=q,
            q_rotated=rotated,
        )  # fmt: skip
        append = AppendOptions(max_seqlen_k_new, max_seqlen_q, rotary_interleaved, rotate_q_by_token=True)
        APPEND((k_cache, v_cache, k, v), appended, append)
        q = rotated
    options = DecodeOptions(
        max_seqlen_q=max_seqlen_q, seqlen_new=0 if k is None or k.dim() == 3 else k.shape[1],
        softmax_scale=softmax_scale, masking=as_masking(causal, window_size), softcap=softcap,
        return_lse=False,
    )  # fmt: skip
    cache = q, k_cache, v_cache
    own = attend_shared(cache, own, options, levels)
    return decode(cache, own, options._replace(num_splits=num_splits), ())[0]
