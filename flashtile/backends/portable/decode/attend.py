"""Attention of few query rows over a cache: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) in portable
Triton.

Its time is bound by reading the cache. The cache is read only once, because all query heads of a key/value
head and all query tokens form one tile of rows. A program walks its share of the n_blocks (:mod:`schedule`)
with an online softmax. If it computes a whole work tile, it writes the result to ``out``. Otherwise it leaves
a normalised partial result, with its log-sum-exp in base 2, for :mod:`combine`.

The cache is dense or in pages (PagedAttention, Kwon et al. 2023, arXiv:2309.06180; :mod:`cache`). The loop
over its n_blocks is in :mod:`steps`.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.backends.portable.decode.append import append_tokens, load_rotated, start_of_rotation
from flashtile.backends.portable.decode.arguments import DecodeCall
from flashtile.backends.portable.decode.cache import cache_of, find_faults, prefetch_n_block
from flashtile.backends.portable.decode.results import (
    Rows,
    normalised,
    store_results,
    store_rows,
    with_prior,
)
from flashtile.backends.portable.decode.schedule import (
    WorkTile,
    heads_of_rows,
    load_sequence,
    reach_of,
    sequence_of,
    share_start,
    stream_k_start,
    window_at,
    work_tile_at,
)
from flashtile.backends.portable.decode.steps import NextWork, ScoreRows, as_float16, attend_n_blocks
from flashtile.backends.portable.decode.unified_max import as_online, is_in_range, load_shift


@triton.jit
def rows_of(work, lengths, C: tl.constexpr):
    """Return (index [BLOCK_M] of each row in the work tile, the :class:`Rows` of the work tile)."""
    b, m = sequence_of(work.m_block, lengths, C)
    b = b.to(tl.int64)
    index = tl.arange(0, C.BLOCK_M)
    exists = index < work.num_rows
    tokens, heads = heads_of_rows(m * C.BLOCK_M + index, work.head_kv, lengths, C)
    return index, Rows(b, work.sequence.start_q, tokens, heads, exists)


@triton.jit
def load_queries(rows, call, C: tl.constexpr):
    """Load (q [BLOCK_M, BLOCK_D], qv [BLOCK_M, BLOCK_DV]). Without qv, return (q, q).

    If C.APPEND has rotary embedding, q is rotated.
    """
    pointers, strides, lengths = call.pointers, call.strides, call.lengths
    tokens = rows.start_q.to(tl.int64) + rows.tokens
    columns = tl.arange(0, C.BLOCK_D)
    offsets = rows.b * strides.q_batch + tokens * strides.q_token
    offsets += rows.heads.to(tl.int64) * strides.q_head
    q = tl.load(
        pointers.q + offsets[:, None] + columns[None, :],
        mask=rows.exists[:, None] & (columns < C.HEAD_DIM)[None, :],
        other=0.0,
    )
    if C.APPEND is not None:
        APPEND: tl.constexpr = C.APPEND
        if APPEND.ROTARY_DIM > 0:
            dtype: tl.constexpr = q.dtype
            new, rotary_rows = pointers.new, call.new_lengths.rotary_rows
            positions = rows.tokens * 0 + start_of_rotation(rows.b, new, APPEND)
            q = load_rotated(pointers.q, offsets, rows.exists, positions, new, rotary_rows, APPEND)
            q = q.to(dtype)
    qv = q
    if C.HAS_QV:
        columns_v = tl.arange(0, C.BLOCK_DV)
        first_row = rows.start_q if C.VARLEN else rows.b * lengths.seqlen_q
        num_heads_q = lengths.num_heads_kv * lengths.group_size
        qv_rows = (first_row.to(tl.int64) + rows.tokens) * num_heads_q + rows.heads
        qv = tl.load(
            pointers.qv + qv_rows[:, None] * C.HEAD_DIM_V + columns_v[None, :],
            mask=rows.exists[:, None] & (columns_v < C.HEAD_DIM_V)[None, :],
            other=0.0,
        )
    return q, qv


@triton.jit
def append_token(b, head_kv, call, C: tl.constexpr):
    """Write the new token of sequence ``b`` to the cache, for one key/value head.

    Only the program that attends to the last n_block of the work tile calls this function. No other program
    reads the token's key and value.
    """
    APPEND: tl.constexpr = C.APPEND
    token = tl.arange(0, APPEND.ROWS)
    first = tl.zeros([], tl.int64)
    append_tokens(
        head_kv, b, token, first, token == 0, call.pointers.new, call.new_strides, call.new_lengths, APPEND
    )


@triton.jit
def load_scales(head_kv, b, pointers, outer, C: tl.constexpr):
    """Load the scales of (k, v) if they are per head or per sequence. Otherwise both are 1 here."""
    k_scale = tl.full([], 1.0, tl.float32)
    v_scale = k_scale
    if C.DESCALE == "head":
        k_scale = tl.load(pointers.k_descale + head_kv)
        v_scale = tl.load(pointers.v_descale + head_kv)
    if C.DESCALE == "sequence":
        k_scale = tl.load(pointers.k_descale + b * outer.k_descale_stride + head_kv)
        v_scale = tl.load(pointers.v_descale + b * outer.v_descale_stride + head_kv)
    return k_scale, v_scale


@triton.jit
def store_work_tile(acc, row_max, row_sum, index, rows, slot, whole, call, C: tl.constexpr):
    """Normalise and write the sums that a program has computed over n_blocks of a work tile.

    If these n_blocks are the whole work tile (``whole``), the result goes to ``out``. Otherwise it goes to
    ``slot`` of the partial results.
    """
    pointers, lengths, splits = call.pointers, call.lengths, call.splits
    # The caller's results over other keys (``prior_out``) must be added only once: here if the work tile
    # is whole, and otherwise where the partial results are combined.
    if C.HAS_PRIOR:  # noqa: SIM102 - HAS_PRIOR is a constant, ``whole`` is not
        if whole:
            acc, row_max, row_sum = with_prior(
                acc, row_max, row_sum, pointers.prior_out, pointers.prior_lse, rows, lengths, C
            )
    out, lse = normalised(acc, row_max, row_sum)
    if whole:
        store_results(pointers, out, lse, rows, lengths, C)
    elif C.SPLIT:
        partial_row = slot.to(tl.int64) * splits.partial_rows + index
        offsets = partial_row * C.HEAD_DIM_V
        store_rows(pointers.partial, offsets, rows.exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
        partial_lse = pointers.partial + splits.slots.to(tl.int64) * splits.partial_rows * C.HEAD_DIM_V
        tl.store(partial_lse + partial_row, lse, mask=rows.exists)


@triton.jit
def attend_work_tile(
    work, first, count, slot, whole, next_work_tile, next_first, more, call, C: tl.constexpr
):
    """Attend to ``count`` n_blocks of a work tile, from n_block ``first`` on.

    If ``whole``, these n_blocks are the whole work tile, and the result goes to ``out``. Otherwise it goes to
    ``slot`` of the partial results. If ``more``, the program continues with ``next_work_tile`` from n_block
    ``next_first`` on, and the first n_blocks of that work tile are prefetched.
    """
    pointers, lengths = call.pointers, call.lengths
    sequence = work.sequence
    index, rows = rows_of(work, lengths, C)
    cache = cache_of(work, first, call, C)
    next_cache = cache
    if C.PREFETCH != 0:
        next_cache = cache_of(next_work_tile, next_first, call, C)
    q, qv = load_queries(rows, call, C)
    tree_rows = rows.tokens
    slope = tl.zeros([], tl.float32)
    if C.HAS_ALIBI:
        slopes = pointers.alibi_slopes + rows.b * call.outer.alibi_stride + rows.heads
        slope = tl.load(slopes, mask=rows.exists, other=0.0)[:, None]
    k_scale, v_scale = load_scales(work.head_kv, rows.b, pointers, call.outer, C)
    if C.HAS_TREE:
        tree_rows = pointers.tree_mask + rows.b * call.outer.tree_stride + rows.tokens * lengths.seqlen_q
    if C.SOFTMAX_MAX != "none":
        shift = load_shift(call.numbers.softmax_max, pointers.softmax_max, rows.heads, rows.exists, C)
    faults = find_faults(cache, first, first + count, work.keys, C)
    if C.APPEND is not None:  # noqa: SIM102 - APPEND is a constant, the other condition is not
        if first + count == work.keys.first // C.BLOCK_N + work.n_blocks:
            append_token(rows.b, work.head_kv, call, C)
    # The first loads of a work tile are issued together. Without a barrier, the compiler would move each load
    # to its use, and their latencies would add up. The barrier also orders the stores of the new token before
    # the loads of the cache by other threads.
    tl.debug_barrier()
    dtype: tl.constexpr = pointers.q.dtype.element_ty
    IN_FLOAT16: tl.constexpr = C.E4M3 and dtype != tl.float32
    if IN_FLOAT16:
        q, q_scale = as_float16(q)
        k_scale = (k_scale * q_scale)[:, None]
    next_work = NextWork(next_cache, next_first, next_work_tile.keys, more)
    offset = sequence.len_k - sequence.len_q
    left, right = window_at((rows.tokens + offset)[:, None], sequence.leftpad, lengths)
    score_rows = ScoreRows(rows.tokens, offset, slope, k_scale, tree_rows, sequence.len_q, left, right)
    last = first + count
    if C.SOFTMAX_MAX == "none":
        acc, row_max, row_sum = attend_n_blocks(
            q, first, last, work.keys, cache, faults, next_work, score_rows, call, dtype, C, C.PREFETCH, qv
        )
    else:
        acc, _, row_sum = attend_n_blocks(
            q, first, last, work.keys, cache, faults, next_work, score_rows, call, dtype, C, C.PREFETCH, qv,
            shift,
        )  # fmt: skip
        row_max = shift + tl.zeros_like(row_sum)
        OPERAND: tl.constexpr = dtype if C.DESCALE == "block" else q.dtype
        if is_in_range(acc, row_sum, rows.exists, count * C.BLOCK_N, OPERAND) == 0:
            # Compute the cache and the faults again. This is rare, and values that are kept for this case
            # would occupy registers in the first loop.
            again = cache_of(work, first, call, C)
            faults = find_faults(again, first, last, work.keys, C)
            acc, row_max, row_sum = attend_n_blocks(
                q, first, last, work.keys, again, faults, next_work, score_rows, call, dtype, C, 0, qv
            )
        if C.HAS_SINK or C.HAS_PRIOR:
            acc, row_max, row_sum = as_online(acc, row_max, row_sum)
    if C.DESCALE == "head" or C.DESCALE == "sequence":
        acc = acc * v_scale
    store_work_tile(acc, row_max, row_sum, index, rows, slot, whole, call, C)


@triton.jit
def prefetch_first(program, call, C: tl.constexpr):
    """Prefetch the n_blocks with which a program probably begins.

    An earlier kernel may still be writing the lengths and tables, so they may be wrong. All reads stay within
    the tensors, even if lengths and tables have invalid values. The values that are read only select which
    part of the cache is prefetched to the L2 cache. Since all writes go through L2, no stale data remains.
    """
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    pointers, lengths = call.pointers, call.lengths
    team = program // HEADS
    teams = tl.num_programs(0) // HEADS
    total, position, m_block, m_block_start = stream_k_start(
        tl.arange(0, C.SCAN_BLOCK), team, teams, pointers, lengths, C, True
    )
    work, nth, _ = work_tile_at(program, position, m_block, m_block_start, pointers, lengths, C, True)
    n = work.keys.first // C.BLOCK_N + nth
    cache = cache_of(work, n, call, C, True)
    if position < share_start(team + 1, teams, total):
        for i in tl.static_range(2):
            page = cache.row
            if C.PAGE_SIZE != 0:
                page = cache.pages[i]
            prefetch_n_block(cache, page, n + i, work.keys, call.strides, C)


@triton.jit
def attend_balanced(program, call, C: tl.constexpr):
    """Do the work of a program in a stream-K grid: attend to an equal, contiguous share of all n_blocks."""
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    pointers, lengths = call.pointers, call.lengths
    team = program // HEADS
    teams = tl.num_programs(0) // HEADS
    total, position, m_block, m_block_start = stream_k_start(
        tl.arange(0, C.SCAN_BLOCK), team, teams, pointers, lengths, C
    )
    end = share_start(team + 1, teams, total)
    # The condition is not checked before the first iteration. So values that do not depend on the lengths are
    # computed while the lengths are loaded.
    more = tl.full([], True, tl.int1)
    while more:
        work, nth, m_block_end = work_tile_at(program, position, m_block, m_block_start, pointers, lengths, C)
        count = min(work.n_blocks - nth, end - position)
        position += count
        more = position < end
        # If a team covers all heads, every work tile of a program is in a new m_block. The next m_block is
        # then known before the lengths are loaded.
        finished = (position >= m_block_end) | C.ONE_TEAM
        m_block += finished.to(tl.int32)
        m_block_start = tl.where(finished, m_block_end, m_block_start)
        next_work, next_first = work, nth
        if C.PREFETCH != 0:
            next_work, next_first, _ = work_tile_at(
                program, position, m_block, m_block_start, pointers, lengths, C
            )
            next_first = next_work.keys.first // C.BLOCK_N + next_first
        if count > 0:
            # A program has two slots for partial results: one for a work tile that an earlier program began,
            # and one for a work tile that it begins itself.
            slot = 2 * program + (nth == 0).to(tl.int32)
            attend_work_tile(
                work, work.keys.first // C.BLOCK_N + nth, count, slot, count == work.n_blocks, next_work,
                next_first, more, call, C,
            )  # fmt: skip


@triton.jit
def attend_split(program, call, C: tl.constexpr):
    """Do the work of a program in a grid without stream-K: attend to one split of a work tile.

    The split depends only on the length of the tile's sequence. The m_blocks of a sequence run concurrently
    and share keys in the L2 cache; the last ones start first, because they see the most keys.
    """
    lengths, splits = call.lengths, call.splits
    m_blocks, num_splits = lengths.m_blocks_per_sequence, splits.num_splits
    m = m_blocks - 1 - program % m_blocks
    split = (program // m_blocks) % num_splits
    head_kv = program // (m_blocks * num_splits) % lengths.num_heads_kv
    b = program // (m_blocks * num_splits * lengths.num_heads_kv)
    sequence = load_sequence(b, True, call.pointers, lengths, C)
    num_rows, keys, n_blocks = reach_of(m, sequence, lengths, C)
    if C.SPLIT:
        each = splits.split_n_blocks
        if splits.split_n_blocks == 0:
            each = max((n_blocks + num_splits - 1) // num_splits, 1)
    else:
        each = n_blocks
    nth = split * each
    if nth < n_blocks:
        work = WorkTile(b * m_blocks + m, head_kv, sequence, num_rows, keys, n_blocks)
        attend_work_tile(
            work, keys.first // C.BLOCK_N + nth, min(each, n_blocks - nth), program, each >= n_blocks, work,
            nth, False, call, C,
        )  # fmt: skip


@kernel(do_not_specialize=("outer", "lengths", "num_blocks", "splits", "new_lengths"))
def decode_kernel(
    pointers, strides, outer, lengths, numbers, num_blocks, splits, new_strides, new_lengths, C: tl.constexpr
):
    """Compute attention over a cache, after appending a new token of each sequence if C.APPEND is given.

    A program stores the results ``out`` and ``lse`` of each work tile that it computes alone. Of a work tile
    that several programs share, each program stores a partial result.

    Grid: (teams * HEADS_PER_TEAM,) if STREAM_K, else (m_blocks * splits * heads_kv * batch,).

    q is (batch, seqlen_q, heads_q, HEAD_DIM), or (total_q, heads_q, HEAD_DIM) when VARLEN. Caches are (rows,
    capacity, heads_kv, ...) or (num_blocks, PAGE_SIZE, heads_kv, ...). out is like q, with HEAD_DIM_V
    columns. lse is (batch, heads_q, seqlen_q) or (heads_q, total_q). out and lse are contiguous. Partial
    results are float32: outputs (slots, partial_rows, HEAD_DIM_V), then log-sum-exps (slots, partial_rows).
    """
    call = DecodeCall(
        pointers, strides, outer, lengths, numbers, num_blocks, splits, new_strides, new_lengths
    )
    program = tl.program_id(0)
    if C.PREFETCH != 0:
        prefetch_first(program, call, C)
    if C.PDL:
        # The kernel may reach this point before its predecessor has ended. Data that it has read before this
        # wait only served to choose what to prefetch. Dependent kernels read lengths as soon as they start.
        # They are therefore launched after this wait: here, or later by a program that prefetches.
        tl.extra.cuda.gdc_wait()
        if C.PREFETCH == 0:
            tl.extra.cuda.gdc_launch_dependents()
    if C.STREAM_K:
        attend_balanced(program, call, C)
    else:
        attend_split(program, call, C)
