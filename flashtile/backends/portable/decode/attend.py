"""Attention of few query rows over a cache: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) in portable
Triton.

Bound by the bytes of the cache, which are read once: all query heads of a key/value head, and all query
tokens, stand in one tile of rows. A program walks its share of the n_blocks (:mod:`schedule`) with an online
softmax, and writes a work tile that it has whole to ``out``; of any other it leaves a partial result,
normalised, with its log-sum-exp in base 2, for :mod:`combine`.

The cache is dense or in pages (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). Entries of the block
table are read for keys that are seen, and for no others.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.portable.decode.results import (
    Rows,
    Splits,
    normalised,
    store_results,
    store_rows,
    with_prior,
    with_sink,
)
from flashtile.backends.portable.decode.schedule import (
    Lengths,
    Sequences,
    WorkTile,
    balanced_start,
    heads_of_rows,
    load_sequence,
    reach_of,
    sequence_of,
    share_start,
    work_tile_at,
)
from flashtile.backends.portable.decode.steps import (
    Cache,
    NextWork,
    Numbers,
    ScoreRows,
    Strides,
    as_float16,
    attend_n_blocks,
    find_faults,
    in_cache,
    load_pages,
    prefetch_n_block,
)
from flashtile.backends.portable.decode.unified_max import as_online, is_in_range, load_shift


class Pointers(NamedTuple):
    """Tensors of the kernel beside :class:`schedule.Sequences`; None for each that a call does not have."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    partial: Any
    cache_batch_idx: Any
    block_table: Any
    alibi_slopes: Any
    sink: Any
    k_descale: Any
    v_descale: Any
    tree_mask: Any
    prior_out: Any
    prior_lse: Any
    softmax_max: Any
    qv: Any


@triton.jit
def cache_of(
    work, n, pointers, strides, num_blocks, lengths, C: tl.constexpr, EARLY: tl.constexpr = False
):
    """The :class:`Cache` of a work tile whose n_blocks are attended to from ``n`` on."""
    b, _ = sequence_of(work.m_block, lengths, C)
    b = b.to(tl.int64)
    row = b
    fault = work.sequence.fault
    if C.HAS_BATCH_IDX:
        given = tl.load(pointers.cache_batch_idx + b, cache_modifier=".cg" if EARLY else "")
        row = in_cache(given, num_blocks)
        fault = fault | (given ^ row)
        row = row.to(tl.int64)
    # Tuples that go through a loop hold no None: an absent tensor is some number.
    block_table = b
    pages = (b, b)
    k_descale = b
    v_descale = b
    if C.PAGE_SIZE != 0:
        block_table = pointers.block_table + b * strides.table_stride
        pages = (
            load_pages(block_table, n, work.keys, C, EARLY),
            load_pages(block_table, n + 1, work.keys, C, EARLY),
        )
    if C.DESCALE == "block":
        k_descale = pointers.k_descale + work.head_kv
        v_descale = pointers.v_descale + work.head_kv
    head64 = work.head_kv.to(tl.int64)
    k = pointers.k + head64 * strides.k_stride_h
    v = pointers.v + head64 * strides.v_stride_h
    return Cache(k, v, row, block_table, pages, k_descale, v_descale, num_blocks, fault)


@triton.jit
def attend_work_tile(
    work, first, count, slot, whole, next_work_tile, next_first, more, pointers, strides, num_blocks, lengths,
    numbers, splits, C: tl.constexpr,
):  # fmt: skip
    """Attend to ``count`` n_blocks from ``first`` on; write to ``out`` if they are the ``whole`` work tile,
    else to partial result ``slot``. After it comes ``next_work_tile`` from n_block ``next_first`` on, if
    there is ``more``.
    """
    sequence = work.sequence
    b, m = sequence_of(work.m_block, lengths, C)
    b = b.to(tl.int64)

    index = tl.arange(0, C.BLOCK_M)
    exists = index < work.num_rows
    row = m * C.BLOCK_M + index
    tokens, heads = heads_of_rows(row, work.head_kv, lengths, C)
    tokens64 = sequence.start_q.to(tl.int64) + tokens
    columns = tl.arange(0, C.BLOCK_D)
    q_rows = b * strides.q_stride_b + tokens64 * strides.q_stride_s + heads.to(tl.int64) * strides.q_stride_h
    q = tl.load(
        pointers.q + q_rows[:, None] + columns[None, :],
        mask=exists[:, None] & (columns < C.HEAD_DIM)[None, :],
        other=0.0,
    )
    qv = q
    if C.HAS_QV:
        columns_v = tl.arange(0, C.BLOCK_DV)
        first_row = sequence.start_q if C.VARLEN else b * lengths.seqlen_q
        qv_rows = (first_row.to(tl.int64) + tokens) * (lengths.num_heads_kv * lengths.group_size) + heads
        qv = tl.load(
            pointers.qv + qv_rows[:, None] * C.HEAD_DIM_V + columns_v[None, :],
            mask=exists[:, None] & (columns_v < C.HEAD_DIM_V)[None, :],
            other=0.0,
        )
    tree_rows = tokens
    slope = tl.zeros([], tl.float32)
    k_scale = tl.full([], 1.0, tl.float32)
    v_scale = k_scale
    if C.HAS_ALIBI:
        slopes = pointers.alibi_slopes + b * strides.alibi_stride + heads
        slope = tl.load(slopes, mask=exists, other=0.0)[:, None]
    if C.DESCALE == "head":
        k_scale = tl.load(pointers.k_descale + work.head_kv)
        v_scale = tl.load(pointers.v_descale + work.head_kv)
    if C.DESCALE == "sequence":
        k_scale = tl.load(pointers.k_descale + b * strides.k_descale_stride + work.head_kv)
        v_scale = tl.load(pointers.v_descale + b * strides.v_descale_stride + work.head_kv)
    if C.HAS_TREE:
        tree_rows = pointers.tree_mask + b * strides.tree_stride + tokens * lengths.seqlen_q
    if C.SOFTMAX_MAX != "none":
        shift = load_shift(numbers.softmax_max, pointers.softmax_max, heads, exists, C)
    cache = cache_of(work, first, pointers, strides, num_blocks, lengths, C)
    next_cache = cache
    if C.PREFETCH != 0:
        next_cache = cache_of(next_work_tile, next_first, pointers, strides, num_blocks, lengths, C)
    faults = find_faults(cache, first, first + count, work.keys, C)
    # All that a work tile begins with is on its way together: no load moves across a barrier, but each would
    # move down to where it is used, and one latency would follow another.
    tl.debug_barrier()
    IN_FLOAT16: tl.constexpr = C.E4M3 and pointers.q.dtype.element_ty != tl.float32
    if IN_FLOAT16:
        q, q_scale = as_float16(q)
        k_scale = (k_scale * q_scale)[:, None]
    offset = sequence.len_k - sequence.len_q
    next_work = NextWork(next_cache, next_first, next_work_tile.keys, more)
    score_rows = ScoreRows(tokens, offset, slope, k_scale, tree_rows, sequence.len_q)
    dtype: tl.constexpr = pointers.q.dtype.element_ty
    last = first + count
    if C.SOFTMAX_MAX == "none":
        acc, row_max, row_sum = attend_n_blocks(
            q, first, last, work.keys, cache, faults, next_work, score_rows, lengths, strides, numbers, dtype,
            C, C.PREFETCH, qv=qv,
        )  # fmt: skip
    else:
        acc, _, row_sum = attend_n_blocks(
            q, first, last, work.keys, cache, faults, next_work, score_rows, lengths, strides, numbers, dtype,
            C, C.PREFETCH, True, shift, qv,
        )  # fmt: skip
        row_max = shift + tl.zeros_like(row_sum)
        OPERAND: tl.constexpr = dtype if C.DESCALE == "block" else q.dtype
        if is_in_range(acc, row_sum, exists, count * C.BLOCK_N, OPERAND) == 0:
            # Looked for again: no register holds through the first loop what few calls need after it.
            again = cache_of(work, first, pointers, strides, num_blocks, lengths, C)
            faults = find_faults(again, first, last, work.keys, C)
            acc, row_max, row_sum = attend_n_blocks(
                q, first, last, work.keys, again, faults, next_work, score_rows, lengths, strides, numbers,
                dtype, C, 0, qv=qv,
            )  # fmt: skip
        if C.HAS_SINK or C.HAS_PRIOR:
            acc, row_max, row_sum = as_online(acc, row_max, row_sum)

    if C.DESCALE == "head" or C.DESCALE == "sequence":
        acc = acc * v_scale
    rows = Rows(b, sequence.start_q, tokens, heads, exists)
    # What is not among the keys enters once: here, or where parts are combined.
    if C.HAS_PRIOR:  # noqa: SIM102 - one is known to the compiler, the other is not
        if whole:
            acc, row_max, row_sum = with_prior(
                acc, row_max, row_sum, pointers.prior_out, pointers.prior_lse, rows, lengths, C
            )
    if C.HAS_SINK:  # noqa: SIM102
        if whole:
            sink = tl.load(pointers.sink + heads, mask=exists, other=0.0)
            acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sink)
    out, lse = normalised(acc, row_max, row_sum)
    if whole:
        store_results(pointers.out, pointers.lse, out, lse, rows, lengths, C)
    elif C.SPLIT:
        partial_row = slot.to(tl.int64) * splits.partial_rows + index
        offsets = partial_row * C.HEAD_DIM_V
        store_rows(pointers.partial, offsets, exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
        partial_lse = (
            pointers.partial + splits.slots.to(tl.int64) * splits.partial_rows * C.HEAD_DIM_V
        )
        tl.store(partial_lse + partial_row, lse, mask=exists)


@triton.jit
def prefetch_first(program, pointers, strides, num_blocks, sequences, lengths, C: tl.constexpr):
    """Ask for the first n_blocks of a program by lengths and tables that an earlier kernel may still be
    writing.

    A guess, which is not remembered: what is read here is within the tensors whatever they hold, and nothing
    is done with it but to have some of the cache brought to the L2 cache, which all writes go through.
    """
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    team = program // HEADS
    teams = tl.num_programs(0) // HEADS
    total, position, m_block, m_block_start = balanced_start(
        tl.arange(0, C.SCAN_BLOCK), team, teams, sequences, lengths, C, True
    )
    work, nth, _ = work_tile_at(program, position, m_block, m_block_start, sequences, lengths, C, True)
    n = work.keys.first // C.BLOCK_N + nth
    cache = cache_of(work, n, pointers, strides, num_blocks, lengths, C, True)
    if position < share_start(team + 1, teams, total):
        for i in tl.static_range(2):
            page = cache.row
            if C.PAGE_SIZE != 0:
                page = cache.pages[i]
            prefetch_n_block(cache, page, n + i, work.keys, strides, C)


RUNTIME_INTEGERS = (
    *Lengths._fields,
    *Splits._fields,
    "num_blocks",
    "table_stride",
    "alibi_stride",
    "k_descale_stride",
    "v_descale_stride",
    "tree_stride",
)
"""Arguments whose value must not lead to another compilation (only strides decide how wide loads can be)."""


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_ptr, cache_seqlens, cache_leftpad, cache_batch_idx,
    block_table, cu_seqlens_q, cu_seqlens_k_new, alibi_slopes, sink_ptr, k_descale, v_descale, tree_mask,
    prior_out, prior_lse, softmax_max_ptr, qv_ptr,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s,
    v_stride_h, table_stride, alibi_stride, k_descale_stride, v_descale_stride, tree_stride,
    m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
    window_left, window_right, softmax_scale, scale_log2, softcap, num_blocks, partial_rows, slots,
    num_splits, split_n_blocks, softmax_max, C: tl.constexpr,
):  # fmt: skip
    """Grid: (teams * HEADS_PER_TEAM,) if BALANCED, else (m_blocks * splits * heads_kv * batch,).

    q (batch, seqlen_q, heads_q, HEAD_DIM), without the batch when VARLEN; caches (rows, capacity, heads_kv,
    ...) or (num_blocks, PAGE_SIZE, heads_kv, ...); out like q with HEAD_DIM_V and lse (batch, heads_q,
    seqlen_q) or (heads_q, total_q), contiguous; partial results float32, (slots, partial_rows, HEAD_DIM_V)
    and behind them (slots, partial_rows) log-sum-exps.
    """
    pointers = Pointers(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_ptr, cache_batch_idx, block_table, alibi_slopes,
        sink_ptr, k_descale, v_descale, tree_mask, prior_out, prior_lse, softmax_max_ptr, qv_ptr,
    )  # fmt: skip
    strides = Strides(
        q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s,
        v_stride_h, table_stride, alibi_stride, k_descale_stride, v_descale_stride, tree_stride,
    )  # fmt: skip
    sequences = Sequences(cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    numbers = Numbers(softmax_scale, scale_log2, softcap, softmax_max)
    splits = Splits(partial_rows, slots, num_splits, split_n_blocks)
    program = tl.program_id(0)
    if C.PREFETCH != 0:
        prefetch_first(program, pointers, strides, num_blocks, sequences, lengths, C)
    if C.PDL:
        # It may be here before the kernel that it follows has ended: nothing is read until then, but to guess
        # what is worth fetching. Nor may what depends on this kernel start before: it reads lengths at once.
        tl.extra.cuda.gdc_wait()
        if C.PREFETCH == 0:
            tl.extra.cuda.gdc_launch_dependents()
    if C.BALANCED:
        HEADS: tl.constexpr = C.HEADS_PER_TEAM
        team = program // HEADS
        teams = tl.num_programs(0) // HEADS
        total, position, m_block, m_block_start = balanced_start(
            tl.arange(0, C.SCAN_BLOCK), team, teams, sequences, lengths, C
        )
        end = share_start(team + 1, teams, total)
        # Not asked before the first work tile, so that what the loop needs anyway is worked out while lengths
        # are on their way.
        more = tl.full([], True, tl.int1)
        while more:
            work, nth, m_block_end = work_tile_at(
                program, position, m_block, m_block_start, sequences, lengths, C
            )
            count = min(work.n_blocks - nth, end - position)
            position += count
            more = position < end
            # With one team of heads, it is known at once which lengths the next work tile has.
            finished = (position >= m_block_end) | C.ONE_TEAM
            m_block += finished.to(tl.int32)
            m_block_start = tl.where(finished, m_block_end, m_block_start)
            next_work, next_first = work, nth
            if C.PREFETCH != 0:
                next_work, next_first, _ = work_tile_at(
                    program, position, m_block, m_block_start, sequences, lengths, C
                )
                next_first = next_work.keys.first // C.BLOCK_N + next_first
            if count > 0:
                # A work tile's first part is the last work of its program, any other part the first.
                slot = 2 * program + (nth == 0).to(tl.int32)
                attend_work_tile(
                    work, work.keys.first // C.BLOCK_N + nth, count, slot, count == work.n_blocks, next_work,
                    next_first, more, pointers, strides, num_blocks, lengths, numbers, splits, C,
                )  # fmt: skip
    else:
        # The m_blocks of a sequence run side by side and share the keys in the L2 cache; the last see the
        # most.
        m = m_blocks_per_sequence - 1 - program % m_blocks_per_sequence
        split = (program // m_blocks_per_sequence) % num_splits
        head_kv = program // (m_blocks_per_sequence * num_splits) % num_heads_kv
        b = program // (m_blocks_per_sequence * num_splits * num_heads_kv)
        sequence = load_sequence(b, True, sequences, lengths, C)
        num_rows, keys, n_blocks = reach_of(m, sequence, lengths, C)
        if C.SPLIT:
            each = split_n_blocks
            if split_n_blocks == 0:
                each = max((n_blocks + num_splits - 1) // num_splits, 1)
        else:
            each = n_blocks
        nth = split * each
        if nth < n_blocks:
            m_block = b * m_blocks_per_sequence + m
            work = WorkTile(m_block, head_kv, sequence, num_rows, keys, n_blocks)
            attend_work_tile(
                work, keys.first // C.BLOCK_N + nth, min(each, n_blocks - nth), program, each >= n_blocks,
                work, nth, False, pointers, strides, num_blocks, lengths, numbers, splits, C,
            )  # fmt: skip
