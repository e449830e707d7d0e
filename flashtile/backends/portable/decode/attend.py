"""Attention of few query rows over a cache: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) in portable
Triton.

Bound by the bytes of the cache, which are read once: all query heads of a key/value head, and all query
tokens, stand in one tile of rows. A program walks its share of the key tiles (:mod:`schedule`) with an
online softmax, and writes an item that it has whole to ``out``; of any other it leaves a partial result,
normalised, with its log-sum-exp in base 2, for :mod:`combine`.

The cache is dense or in pages (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). Entries of the block
table are read for keys that are seen, and for no others.
"""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.portable.decode.results import (
    normalised,
    store_results,
    store_rows,
    with_prior,
    with_sink,
)
from flashtile.backends.portable.decode.schedule import (
    balanced_start,
    first_tile,
    heads_of_rows,
    item_at,
    rows_of_pair,
    sequence,
    share_start,
    tiles_of,
)
from flashtile.backends.portable.decode.steps import (
    as_float16,
    attend_tiles,
    in_cache,
    prefetch_tile,
    table_entries,
)


@triton.jit
def cache_of_item(
    pair,
    head_kv,
    tile,
    keys_seen,
    tensors,
    strides,
    shape,
    num_blocks,
    LAYOUT: tl.constexpr,
    FEATURES: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """(cache of an item, its row of a dense one, blocks of the two tiles from ``tile`` on)."""
    (_, k_ptr, v_ptr, _, _, _, cache_batch_idx, block_table, _, _, k_descale, v_descale, _, _) = tensors
    (_, _, _, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride, _,
     k_descale_stride, v_descale_stride, _) = strides  # fmt: skip
    b, _ = rows_of_pair(pair, shape[1], LAYOUT)
    b = b.to(tl.int64)
    cache_row = b
    if FEATURES.HAS_BATCH_IDX:
        cache_row = tl.load(cache_batch_idx + b, cache_modifier=".cg" if EARLY else "").to(tl.int64)
        cache_row = in_cache(cache_row, num_blocks)
    # What the call does not have is some number that is not used: tuples of tensors hold no None.
    table = b
    entries = (b, b)
    k_scales = b
    v_scales = b
    if FEATURES.PAGE_SIZE != 0:
        table = block_table + b * table_stride
        entries = (
            table_entries(table, tile, keys_seen, LAYOUT, FEATURES, EARLY),
            table_entries(table, tile + 1, keys_seen, LAYOUT, FEATURES, EARLY),
        )
    if FEATURES.DESCALE == "block":
        k_scales = k_descale + head_kv
        v_scales = v_descale + head_kv
    head64 = head_kv.to(tl.int64)
    cache = (
        k_ptr + head64 * k_stride_h, v_ptr + head64 * v_stride_h, table, k_scales, v_scales,
        (k_stride_b, k_stride_s, v_stride_b, v_stride_s, k_descale_stride, v_descale_stride), num_blocks,
    )  # fmt: skip
    return cache, cache_row, entries


@triton.jit
def attend_item(
    pair,
    head_kv,
    tile,
    count,
    slot,
    sequence_of_pair,
    keys_seen,
    whole,
    following,
    tensors,
    strides,
    shape,
    numbers,
    LAYOUT: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Attend to ``count`` key tiles from ``tile`` on; write to ``out`` if they are the ``whole`` item, else
    to partial result ``slot``. ``following``: (pair, head_kv, tile, keys that are seen) of the item after it,
    and whether there is one.
    """
    (q_ptr, _, _, out_ptr, lse_ptr, partial_ptr, _, _, alibi_slopes, sink_ptr, k_descale, v_descale,
     tree_mask, prior) = tensors  # fmt: skip
    (q_stride_b, q_stride_s, q_stride_h, _, _, _, _, _, _, _, alibi_stride, _, _, tree_stride) = strides
    _, num_m, _, group_size, seqlen_q, _, _, _, _, _ = shape
    softmax_scale, scale_log2, softcap, num_blocks, partial_rows, slots = numbers
    start_q, len_q, len_k, num_rows = sequence_of_pair
    b, m = rows_of_pair(pair, num_m, LAYOUT)
    b = b.to(tl.int64)

    index = tl.arange(0, LAYOUT.BLOCK_M)
    exists = index < num_rows
    row = m * LAYOUT.BLOCK_M + index
    tokens, heads = heads_of_rows(row, head_kv, group_size, LAYOUT)
    tokens64 = start_q.to(tl.int64) + tokens
    columns = tl.arange(0, FEATURES.BLOCK_D)
    q_rows = b * q_stride_b + tokens64 * q_stride_s + heads.to(tl.int64) * q_stride_h
    q = tl.load(
        q_ptr + q_rows[:, None] + columns[None, :],
        mask=exists[:, None] & (columns < FEATURES.HEAD_DIM)[None, :],
        other=0.0,
    )
    tree_rows = tokens
    slope = tl.zeros([], tl.float32)
    k_scale = tl.full([], 1.0, tl.float32)
    v_scale = k_scale
    if FEATURES.HAS_ALIBI:
        slope = tl.load(alibi_slopes + b * alibi_stride + heads, mask=exists, other=0.0)[:, None]
    if FEATURES.DESCALE == "head":
        k_scale = tl.load(k_descale + head_kv)
        v_scale = tl.load(v_descale + head_kv)
    if FEATURES.HAS_TREE:
        tree_rows = tree_mask + b * tree_stride + tokens * seqlen_q
    cache, cache_row, entries = cache_of_item(
        pair, head_kv, tile, keys_seen, tensors, strides, shape, num_blocks, LAYOUT, FEATURES
    )
    next_pair, next_head, next_tile, next_seen, more = following
    next_cache, next_row, next_entries = cache, cache_row, entries
    if FEATURES.AHEAD != 0:
        next_cache, next_row, next_entries = cache_of_item(
            next_pair, next_head, next_tile, next_seen, tensors, strides, shape, num_blocks, LAYOUT, FEATURES
        )
    # All that an item begins with is on its way together: no load moves across a barrier, but each would move
    # down to where it is used, and one latency would follow another.
    tl.debug_barrier()
    IN_FLOAT16: tl.constexpr = FEATURES.E4M3 and q_ptr.dtype.element_ty != tl.float32
    if IN_FLOAT16:
        q, q_scale = as_float16(q)
        k_scale = (k_scale * q_scale)[:, None]
    rows = (tokens, len_k - len_q, slope, k_scale, tree_rows, len_q)
    acc, row_max, row_sum = attend_tiles(
        q, cache, cache_row, entries, keys_seen, (tile, tile + count),
        (next_cache, next_row, next_entries, next_tile, next_seen, more), rows, shape,
        (softmax_scale, scale_log2, softcap), q_ptr.dtype.element_ty, LAYOUT, FEATURES,
    )  # fmt: skip

    if FEATURES.DESCALE == "head":
        acc = acc * v_scale
    # What is not among the keys enters once: here, or where parts are combined.
    if FEATURES.HAS_PRIOR:  # noqa: SIM102 - one is known to the compiler, the other is not
        if whole:
            acc, row_max, row_sum = with_prior(
                acc, row_max, row_sum, prior, b, start_q, tokens, heads, exists, shape, LAYOUT.VARLEN,
                FEATURES.HEAD_DIM_V, FEATURES.BLOCK_DV,
            )  # fmt: skip
    if FEATURES.HAS_SINK:  # noqa: SIM102
        if whole:
            sink = tl.load(sink_ptr + heads, mask=exists, other=0.0)
            acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sink)
    out, lse = normalised(acc, row_max, row_sum)
    if whole:
        store_results(
            out_ptr, lse_ptr, out, lse, b, start_q, tokens, heads, exists, shape, LAYOUT.VARLEN,
            FEATURES.HEAD_DIM_V, FEATURES.BLOCK_DV,
        )  # fmt: skip
    elif FEATURES.SPLIT:
        partial_row = slot.to(tl.int64) * partial_rows + index
        offsets = partial_row * FEATURES.HEAD_DIM_V
        store_rows(partial_ptr, offsets, exists, out, FEATURES.HEAD_DIM_V, FEATURES.BLOCK_DV)
        partial_lse = partial_ptr + slots.to(tl.int64) * partial_rows * FEATURES.HEAD_DIM_V
        tl.store(partial_lse + partial_row, lse, mask=exists)


@triton.jit
def prefetch_first(
    program, tensors, strides, lengths, shape, num_blocks, LAYOUT: tl.constexpr, FEATURES: tl.constexpr
):
    """Ask for the first tiles of a program by lengths and tables that somebody may still be writing.

    A guess, which is not remembered: what is read here is within the tensors whatever they hold, and nothing
    is done with it but to have some of the cache brought to the L2 cache, which all writes go through.
    """
    HEADS: tl.constexpr = LAYOUT.HEADS_IN_STEP
    team = program // HEADS
    teams = tl.num_programs(0) // HEADS
    total, position, pair, pair_start = balanced_start(team, teams, lengths, shape, LAYOUT, True)
    pair, head_kv, tile, _, _, keys_seen, _ = item_at(
        program, position, pair, pair_start, lengths, shape, LAYOUT, True
    )
    tile = first_tile(tile, keys_seen, LAYOUT)
    cache, cache_row, entries = cache_of_item(
        pair, head_kv, tile, keys_seen, tensors, strides, shape, num_blocks, LAYOUT, FEATURES, True
    )
    if position < share_start(team + 1, teams, total):
        for i in tl.static_range(2):
            block = cache_row
            if FEATURES.PAGE_SIZE != 0:
                block = entries[i]
            prefetch_tile(cache, block, tile + i, keys_seen, LAYOUT, FEATURES)


RUNTIME_INTEGERS = (
    "num_pairs",
    "num_m",
    "num_heads_kv",
    "group_size",
    "seqlen_q",
    "seqlen_new",
    "total_q",
    "capacity",
    "window_left",
    "window_right",
    "num_blocks",
    "partial_rows",
    "slots",
    "num_splits",
    "split_tiles",
    "table_stride",
    "alibi_stride",
    "k_descale_stride",
    "v_descale_stride",
    "tree_stride",
    "teams",
    "num_heads_q",
    "row_blocks",
)
"""Arguments whose value must not lead to another compilation (only strides decide how wide loads can be)."""


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    cache_seqlens,
    cache_leftpad,
    cache_batch_idx,
    block_table,
    cu_seqlens_q,
    cu_seqlens_k_new,
    alibi_slopes,
    sink_ptr,
    k_descale,
    v_descale,
    tree_mask,
    prior_out,
    prior_lse,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    table_stride,
    alibi_stride,
    k_descale_stride,
    v_descale_stride,
    tree_stride,
    num_pairs,
    num_m,
    num_heads_kv,
    group_size,
    seqlen_q,
    seqlen_new,
    total_q,
    capacity,
    window_left,
    window_right,
    softmax_scale,
    scale_log2,
    softcap,
    num_blocks,
    partial_rows,
    slots,
    num_splits,
    split_tiles,
    LAYOUT: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Grid: (teams * HEADS_IN_STEP,) if BALANCED, else (row blocks * splits * heads_kv * batch,).

    q (batch, seqlen_q, heads_q, HEAD_DIM), without the batch when VARLEN; caches (rows, capacity, heads_kv,
    ...) or (num_blocks, PAGE_SIZE, heads_kv, ...); out like q with HEAD_DIM_V and lse (batch, heads_q,
    seqlen_q) or (heads_q, total_q), contiguous; partial results float32, (slots, partial_rows, HEAD_DIM_V)
    and behind them (slots, partial_rows) log-sum-exps.
    """
    tensors = (
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_ptr, cache_batch_idx, block_table, alibi_slopes,
        sink_ptr, k_descale, v_descale, tree_mask, (prior_out, prior_lse),
    )  # fmt: skip
    strides = (
        q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s,
        v_stride_h, table_stride, alibi_stride, k_descale_stride, v_descale_stride, tree_stride,
    )  # fmt: skip
    lengths = (cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    shape = (
        num_pairs, num_m, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity, window_left,
        window_right,
    )  # fmt: skip
    numbers = (softmax_scale, scale_log2, softcap, num_blocks, partial_rows, slots)
    program = tl.program_id(0)
    if FEATURES.AHEAD != 0:
        prefetch_first(program, tensors, strides, lengths, shape, num_blocks, LAYOUT, FEATURES)
    if FEATURES.PDL:
        # It may be here before the kernel that it follows has ended: nothing is read until then, but to guess
        # what is worth fetching. Nor may what depends on this kernel start before: it reads lengths at once.
        tl.extra.cuda.gdc_wait()
        if FEATURES.AHEAD == 0:
            tl.extra.cuda.gdc_launch_dependents()
    if FEATURES.BALANCED:
        HEADS: tl.constexpr = LAYOUT.HEADS_IN_STEP
        team = program // HEADS
        teams = tl.num_programs(0) // HEADS
        total, position, pair, pair_start = balanced_start(team, teams, lengths, shape, LAYOUT)
        end = share_start(team + 1, teams, total)
        # Not asked before the first item, so that what the loop needs anyway is worked out while lengths are
        # on their way.
        going = tl.full([], True, tl.int1)
        while going:
            known, head_kv, tile, tiles, sequence_of_pair, keys_seen, pair_end = item_at(
                program, position, pair, pair_start, lengths, shape, LAYOUT
            )
            count = min(tiles - tile, end - position)
            position += count
            going = position < end
            # With one block of heads, it is known at once which lengths the next item has.
            finished = (position >= pair_end) | LAYOUT.ONE_HEAD_BLOCK
            pair += finished.to(tl.int32)
            pair_start = tl.where(finished, pair_end, pair_start)
            following = (known, head_kv, tile, keys_seen, going)
            if FEATURES.AHEAD != 0:
                next_pair, next_head, next_tile, _, _, next_seen, _ = item_at(
                    program, position, pair, pair_start, lengths, shape, LAYOUT
                )
                next_tile = first_tile(next_tile, next_seen, LAYOUT)
                following = (next_pair, next_head, next_tile, next_seen, going)
            if count > 0:
                # An item's first part is the last work of its program, any other part the first.
                slot = 2 * program + (tile == 0).to(tl.int32)
                attend_item(
                    known, head_kv, first_tile(tile, keys_seen, LAYOUT), count, slot, sequence_of_pair,
                    keys_seen, count == tiles, following, tensors, strides, shape, numbers, LAYOUT, FEATURES,
                )  # fmt: skip
    else:
        # The row blocks of an item run side by side and share the keys in the L2 cache; the last see the
        # most.
        m = num_m - 1 - program % num_m
        split = (program // num_m) % num_splits
        head_kv = program // (num_m * num_splits) % num_heads_kv
        b = program // (num_m * num_splits * num_heads_kv)
        start_q, len_q, len_k, leftpad = sequence(b, True, lengths, shape, LAYOUT)
        num_rows, low, high, tiles = tiles_of(m, len_q, len_k, leftpad, shape, LAYOUT)
        if FEATURES.SPLIT:
            each = split_tiles
            if split_tiles == 0:
                each = max((tiles + num_splits - 1) // num_splits, 1)
        else:
            each = tiles
        tile = split * each
        if tile < tiles:
            pair = b * num_m + m
            attend_item(
                pair, head_kv, low // LAYOUT.BLOCK_N + tile, min(each, tiles - tile), program,
                (start_q, len_q, len_k, num_rows), (low, high), each >= tiles,
                (pair, head_kv, tile, (low, high), False), tensors, strides, shape, numbers, LAYOUT, FEATURES,
            )  # fmt: skip
