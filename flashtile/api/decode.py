"""Attention over a key/value cache: FlashAttention-2's ``flash_attn_with_kvcache`` and related functions.

Keys and values lie in a dense cache or in pages (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). Where
few queries read many keys, the keys are split over the GPU's multiprocessors and the partial results are
combined (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.conversions import (
    as_int,
    as_masking,
    as_offset_pair,
    as_offsets,
    as_operands,
    check_flag,
    contiguous_qv,
    dense_tree,
    is_batch,
    lengths_tensor,
    make_options,
    softmax_max_arguments,
    split_arguments,
    under_autocast,
)
from flashtile.checks.decode import check_combine, check_combined_into, check_copy, check_step
from flashtile.checks.e4m3 import widen, widen_tables
from flashtile.operators import decode as operators
from flashtile.problems.decode import (
    FP8,
    AppendOptions,
    AppendTensors,
    CacheTensors,
    CombineOptions,
    CopyOptions,
    CopyTensors,
    DecodeOptions,
    NoTensors,
)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_k_new: int | None = None,
    rotary_seqlens: Tensor | None = None,
    sink: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    split_size: int | None = None,
    invariant: bool = False,
    softmax_max: float | Tensor | None = None,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
    mass: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    debug_checks: bool = False,
) -> Tensor | Any:
    """Attend from new queries to a key/value cache, after appending new keys and values if they are given.

    The keys of sequence b are positions 0 to ``L[b] - 1``, where ``L[b]`` is ``cache_seqlens[b]`` plus the
    number of its new tokens; query i is at position ``i + L[b] - seqlen_q``. There is no backward pass.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``;
            float16, bfloat16, float32 or (CPU) float64. Any number of queries; the kernels are made for few.
            If the cache is float8_e4m3fn, q may be float8_e4m3fn as well. It is then converted to bfloat16,
            and so the result is bfloat16.
        k_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), or with ``block_table``
            (num_blocks, page_size, heads_kv, head_dim) with page_size at least 1. The dtype of q, or
            float8_e4m3fn. heads_q must be a multiple of heads_kv.
        v_cache: shaped as k_cache, except that its head_dim may differ. Every head_dim is from 1 to 512.
        k, v: (batch, seqlen_new, heads_kv, head_dim), or (total_new, heads_kv, head_dim) with
            ``cu_seqlens_k_new``: written into the caches **in place** from position ``cache_seqlens`` on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), dtype of q or float32, only with k. Rotary
            embedding of the new keys, from position ``cache_seqlens`` on, and of the queries. If the call is
            causal, windowed or in chunks, each query is rotated by its own position. Otherwise all queries
            are rotated by position ``cache_seqlens``. rotary_dim is even and at most head_dim; the other
            columns of a head are not rotated.
        cache_seqlens: tokens in the cache before k is appended, as an int or (batch,) int32; None: the whole
            capacity.
        cache_batch_idx: (batch,) int32, the row of a dense cache that holds each sequence; None: row b holds
            sequence b.
        cache_leftpad: (batch,) int32: number of positions at the start of each sequence that hold no key.
            Positions still count from 0.
        block_table: (batch, max_blocks) int32: entry i of a row is the page of the sequence's positions from
            ``i * page_size`` on. Entries beyond the sequence's length are never read.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for :func:`flashtile.attention`.
        rotary_interleaved: True if the two numbers of a rotary pair are adjacent (GPT-J), False if they are
            rotary_dim / 2 apart (Llama).
        num_splits: number of parts that the keys of a sequence are split into; 0: chosen for speed.
            With ``num_splits=1``, or with ``split_size``, a sequence's result is bitwise independent of the
            other sequences in the batch.
        return_softmax_lse: also return the log-sum-exp of each row's scores.
        cu_seqlens_q, max_seqlen_q: (batch + 1,) int32 offsets of each sequence's queries (int64 is cast), and
            the largest number of queries in a sequence.
        cu_seqlens_k_new, max_seqlen_k_new: the same for k and v; max_seqlen_k_new may be left out.
        rotary_seqlens: (batch,) int32: first rotary position of each sequence, instead of ``cache_seqlens``.
        sink: (heads_q,), float32 or the dtype of q: the logit of a virtual key without a value, which only
            enters the softmax.
        q_descale: FlashAttention-3's float32 scales for queries of float8_e4m3fn, (heads_kv,) or (batch,
            heads_kv). The second shape cannot be combined with a ``k_descale`` per page.
        k_descale, v_descale: float32 scales of an FP8 cache, in one of three shapes. (heads_kv,): one scale
            per head. (num_blocks, heads_kv), or (batch_cache, heads_kv) for a dense cache: one per head of
            each page or row. (batch, 1, heads_kv): one per head of each sequence. New keys and values are
            divided by the scales and clamped to the range of e4m3. k and v that are float8_e4m3fn are stored
            unchanged.
        tree_mask: (seqlen_q, seqlen_q) or (batch, seqlen_q, seqlen_q) bool, for speculative decoding. Query i
            sees every key before the last seqlen_q tokens. Of these last tokens, query i sees token j if
            element (i, j) is True. Cannot be combined with ``causal``, windows, ALiBi or rotary embedding.
            With ``cu_seqlens_q``, the last two dimensions are max_seqlen_q.
        split_size: number of keys in a part, instead of ``num_splits``.
        invariant: give the result of each query the same bits in all calls, for any other sequences, and
            whether the queries of its sequence are in one call or in several. The sums over keys then have
            one order, and calls of :func:`flash_attn_varlen_func` with ``invariant`` have the same. Parts are
            chosen by ``split_size`` only; another size is another order. On Hopper, tensors that TMA cannot
            address (pointers or strides that are no multiples of 16 bytes) have another kernel, and so
            another order. Cannot be combined with ``tree_mask`` or ``softmax_max``.
        softmax_max: a number near the model's scores, or (heads_q,) float32, one per head. It is subtracted
            from the scores in place of each row's maximum, which then need not be computed (FlashDecoding++,
            Hong et al. 2023, arXiv:2311.01282, section 3). The result is as accurate as with the maximum:
            parts whose scores lie too far from softmax_max are computed again by the same kernel, which at
            most doubles the cost. :func:`flashtile.profile_scores` finds a value. Hopper's kernel for more
            than 16 query rows per key head ignores softmax_max.
        qv: shaped as q, but with the head_dim of v_cache; copied unless contiguous. Scores are then
            ``q k^T + qv v^T``: multi-head latent attention with absorbed projections (DeepSeek-V2, Liu et al.
            2024, arXiv:2405.04434, section 2.1). v_cache then holds the latent vectors, and k_cache the part
            of the keys that has rotary embedding. ``softmax_scale=None`` then means
            ``(head_dim + head_dim_v) ** -0.5``, as in FlashAttention-3. Not supported over a cache of
            float8_e4m3fn.
        attention_chunk: if > 0, positions are divided into chunks of this size, and a query sees only keys of
            its own chunk (Llama 4). The first chunk begins after ``cache_leftpad``, as in FlashAttention-3.
            Cannot be combined with ``tree_mask``.
        mass: float32, (batch_cache, seqlen_cache, heads_kv), or (num_blocks, page_size, heads_kv) with
            ``block_table``. To the number of each key the call adds, **in place**, the sum of the
            probabilities that the key receives from all queries of the heads of its group. A number whose key
            no query sees stays as it is. The result is bitwise the same in every run. If sequences share a
            page, it gets their sums in their order, and must be in the same column of ``block_table`` in all
            of them. No tensor may require a gradient.
        out, lse: tensors that receive the results, as for :func:`flashtile.attention`. If ``lse`` is
            given, it is written even without ``return_softmax_lse``.
        backend: the backend to require, as for :func:`flashtile.attention`.
        debug_checks: also check lengths, block table and write positions on a GPU, which synchronises
            (``FLASHTILE_DEBUG=1`` does the same). On the CPU they are always checked.

    Returns:
        out, shaped as q with the head_dim of v_cache. With ``return_softmax_lse``: (out, lse), lse in natural
        log, float32 (float64 for float64 inputs), (batch, heads_q, seqlen_q) or (heads_q, total_q). For a row
        without a key, out is 0 and lse is -inf, or the sink if there is one.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed,
            before anything is written.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 3, 512, 2, 64).unbind()  # (batch, capacity, heads_kv, head_dim)
        >>> cache_seqlens = torch.tensor([0, 17, 250], dtype=torch.int32)  # tokens before this step
        >>> q = torch.randn(3, 1, 8, 64)  # a new token of each sequence
        >>> k, v = torch.randn(2, 3, 1, 2, 64).unbind()
        >>> out = flashtile.flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, causal=True
        ... )
        >>> out.shape, torch.equal(k_cache[1, 17], k[1, 0])
        (torch.Size([3, 1, 8, 64]), True)
        >>> cache_seqlens += 1  # the call does not change the lengths
    """
    masking = as_masking(causal, window_size, attention_chunk=attention_chunk)
    scores = make_options(
        masking, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, softcap=softcap, backend=backend
    )
    check_flag("rotary_interleaved", rotary_interleaved)
    check_flag("debug_checks", debug_checks)
    check_flag("invariant", invariant)
    check_flag("return_softmax_lse", return_softmax_lse)
    q, k, v, qv = as_operands(q, k, v, qv, cache=k_cache)
    if not (cu_seqlens_q is cu_seqlens_k_new is None):
        cu_seqlens_q, cu_seqlens_k_new = as_offset_pair(cu_seqlens_q, cu_seqlens_k_new)
    descales = new_descales = k_descale, v_descale
    if q_descale is not None or getattr(q, "dtype", None) is FP8:
        scaled = (q_descale, k_descale, v_descale)
        q, k, v, descales, new_descales = widen(q, k_cache, v_cache, k, v, scaled, block_table, cu_seqlens_q)
        rotary_cos, rotary_sin = widen_tables(rotary_cos, rotary_sin)
    num_splits, split_keys = split_arguments(num_splits, split_size)
    if type(cache_seqlens) is int or (cache_seqlens is not None and not isinstance(cache_seqlens, Tensor)):
        cache_seqlens = lengths_tensor(cache_seqlens, "q", q, "cu_seqlens_q", cu_seqlens_q)
    phi = phi_by_head = None
    if softmax_max is not None:
        phi, phi_by_head = softmax_max_arguments(softmax_max)
    # With keywords, a call of a named tuple's class itself takes twice as long.
    tensors = CacheTensors.__new__(
        CacheTensors,
        cache_seqlens=cache_seqlens,
        cache_leftpad=cache_leftpad,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        alibi_slopes=alibi_slopes,
        sink=sink,
        k_descale=descales[0],
        v_descale=descales[1],
        tree_mask=None if tree_mask is None else dense_tree(tree_mask),
        softmax_max=phi_by_head,
        qv=None if qv is None else contiguous_qv(qv),
    )
    options = DecodeOptions.__new__(
        DecodeOptions,
        max_seqlen_q=scores.max_seqlen_q,
        seqlen_new=k.shape[1] if k is not None and cu_seqlens_k_new is None and is_batch(k) else 0,
        softmax_scale=scores.softmax_scale,
        masking=masking,
        softcap=scores.softcap,
        num_splits=num_splits,
        split_size=split_keys,
        invariant=invariant,
        return_lse=return_softmax_lse or lse is not None or mass is not None,
        phi=phi,
        backend=backend,
        debug_checks=debug_checks,
    )
    buffers = () if out is lse is mass is None else (out, lse) if mass is None else (mass, out, lse)
    if k is v is rotary_cos is rotary_sin is rotary_seqlens is cu_seqlens_k_new is max_seqlen_k_new is None:
        results = operators.decode((q, k_cache, v_cache), tensors, options, buffers)
        return results[-2:] if return_softmax_lse else results[-2]

    appended = AppendTensors.__new__(
        AppendTensors,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
        k_descale=new_descales[0],
        v_descale=new_descales[1],
    )
    if max_seqlen_k_new is not None:
        max_seqlen_k_new = as_int("max_seqlen_k_new", max_seqlen_k_new)
    append_options = AppendOptions(
        max_seqlen_k_new=max_seqlen_k_new,
        max_seqlen_q=scores.max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        rotate_q_by_token=masking.hides_by_position,
        backend=backend,
        debug_checks=debug_checks,
    )
    check_step(k, v, appended, append_options, tree_mask)
    results = operators.append_and_decode(
        q, k_cache, v_cache, k, v, appended, append_options, tensors, options, buffers
    )
    return results[-2:] if return_softmax_lse else results[-2]


def append_kvcache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: int | Tensor | None = None,
    *,
    slot_mapping: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_k_new: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
    debug_checks: bool = False,
) -> None:
    """Write new keys and values into a cache, in place, after optional rotation and quantisation.

    The positions are given either by ``cache_seqlens`` (with ``block_table`` or ``cache_batch_idx``) or by
    ``slot_mapping``. :func:`flash_attn_with_kvcache` describes the other arguments.

    Args:
        k, v: (batch, seqlen_new, heads_kv, head_dim); (total_new, heads_kv, head_dim) with
            ``cu_seqlens_k_new`` or ``slot_mapping``.
        slot_mapping: (total_new,) int64, ``block * page_size + offset`` of each token
            (``row * seqlen_cache + position`` for a dense cache); a token with a negative slot is not
            written. Cannot be combined with the rotary arguments or with other arguments that give positions.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flash_attn_with_kvcache`, before anything is
            written.

    Examples:
        >>> k_pages, v_pages = torch.zeros(2, 10, 16, 2, 64).unbind()  # ten pages of 16 tokens
        >>> k, v = torch.randn(2, 3, 2, 64).unbind()  # three tokens
        >>> slots = torch.tensor([16 * 7, 16 * 7 + 1, -1])  # two in page 7; the third is left out
        >>> flashtile.append_kvcache(k_pages, v_pages, k, v, slot_mapping=slots)
        >>> torch.equal(k_pages[7, :2], k[:2])
        True
    """
    check_flag("rotary_interleaved", rotary_interleaved)
    check_flag("debug_checks", debug_checks)
    k, v = under_autocast(k, v, cache=k_cache)
    cu_seqlens_k_new = as_offsets(cu_seqlens_k_new)
    if max_seqlen_k_new is not None:
        max_seqlen_k_new = as_int("max_seqlen_k_new", max_seqlen_k_new)
    if type(cache_seqlens) is int or (cache_seqlens is not None and not isinstance(cache_seqlens, Tensor)):
        cache_seqlens = lengths_tensor(cache_seqlens, "k", k, "cu_seqlens_k_new", cu_seqlens_k_new)
    tensors = AppendTensors(
        cache_seqlens=cache_seqlens,
        slot_mapping=slot_mapping,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    options = AppendOptions(
        max_seqlen_k_new=max_seqlen_k_new,
        rotary_interleaved=rotary_interleaved,
        backend=backend,
        debug_checks=debug_checks,
    )
    operators.APPEND((k_cache, v_cache, k, v), tensors, options)


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_pairs: Tensor,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
    debug_checks: bool = False,
) -> None:
    """Copy blocks of a paged cache onto others (copy-on-write). One launch copies all pairs in all layers.

    Args:
        k_cache, v_cache: (num_blocks, page_size, heads_kv, head_dim), optionally with a leading num_layers.
        block_pairs: (n, 2) int32 or int64, (source, destination), on the device of the caches. A pair with a
            negative source is skipped. No block may be a destination twice, or both a destination and a
            source.
        k_descale, v_descale: (num_blocks, heads_kv) float32, with a leading num_layers where the caches have
            one. They are copied with the blocks.
        backend, debug_checks: as for :func:`flash_attn_with_kvcache`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> k_pages, v_pages = torch.randn(2, 10, 16, 2, 64).unbind()  # ten pages of 16 tokens
        >>> flashtile.copy_blocks(k_pages, v_pages, torch.tensor([[3, 8], [4, 9]]))  # 3 onto 8, 4 onto 9
        >>> torch.equal(k_pages[8], k_pages[3]) and torch.equal(v_pages[9], v_pages[4])
        True
    """
    check_flag("debug_checks", debug_checks)
    tensors, options = CopyTensors(k_descale, v_descale), CopyOptions(backend, debug_checks)
    check_copy(k_cache, v_cache, block_pairs, tensors, options)
    if k_cache.dim() == 4:
        k_cache, v_cache = k_cache.unsqueeze(0), v_cache.unsqueeze(0)
        tensors = CopyTensors(*(None if t is None else t.unsqueeze(0) for t in tensors))
    operators.COPY((k_cache, v_cache, block_pairs), tensors, options)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3's ``flash_attn_combine``: combine partial results over disjoint sets of keys.

    Args:
        out_partial: (num_splits, batch, seqlen, heads, head_dim) or (num_splits, total, heads, head_dim).
        lse_partial: (num_splits, batch, seqlen, heads) or (num_splits, total, heads), natural log, float32
            (float64 if out_partial is float64), any strides. -inf (or FlashAttention-2's +inf) marks a part
            without keys, whose out is ignored.
        out: tensor that receives the result, of the result's shape and dtype; None: new memory.
        out_dtype: dtype of the result; None: that of ``out``, or of out_partial.
        backend: the backend to require.

    Returns:
        (out, lse): out has the shape of ``out_partial[0]``, and lse that of ``lse_partial[0]``.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 128, 4, 64).unbind()
        >>> halves = [flashtile.attention(q, k[:, i::2], v[:, i::2], return_lse=True) for i in range(2)]
        >>> out_partial = torch.stack([out for out, _ in halves])
        >>> lse_partial = torch.stack([lse.mT for _, lse in halves])  # (splits, batch, seqlen, heads)
        >>> out, lse = flashtile.flash_attn_combine(out_partial, lse_partial)
        >>> torch.testing.assert_close(out, flashtile.attention(q, k, v))
    """
    dtype = out_dtype
    if dtype is None:
        dtype = out.dtype if isinstance(out, Tensor) else getattr(out_partial, "dtype", torch.float32)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {type(dtype).__name__}")
    options = CombineOptions(dtype, backend)
    check_combine(out_partial, lse_partial, NoTensors(), options)
    if out is not None:
        check_combined_into(out_partial, out, dtype)
    varlen = out_partial.dim() == 4
    if varlen:
        out_partial, lse_partial = out_partial.unsqueeze(1), lse_partial.unsqueeze(1)
    result, lse = operators.COMBINE((out_partial, lse_partial), operators.COMBINE.nothing, options)
    lse = lse.transpose(-1, -2)
    if varlen:
        result, lse = result[0], lse[0]
    return (result if out is None else out.copy_(result)), lse
