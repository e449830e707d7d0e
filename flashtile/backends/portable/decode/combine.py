"""Partial results of one softmax into one: the second half of Flash-Decoding.

Deterministic: a row is summed by one program, in the order of the keys.
"""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import LN_2, LOG2_E
from flashtile.backends.portable.decode.attend import RUNTIME_INTEGERS
from flashtile.backends.portable.decode.results import (
    normalised,
    store_results,
    store_rows,
    with_prior,
    with_sink,
)
from flashtile.backends.portable.decode.schedule import (
    balanced_pair,
    balanced_start,
    heads_of_rows,
    rows_of_pair,
    sequence,
    share_of,
    tiles_of,
)


@triton.jit
def sum_splits(
    out_rows,
    lse_rows,
    exists,
    splits,
    slots,
    NATURAL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(acc [ROWS, BLOCK_DV], maximum, sum [ROWS]) of the partial results at ``out_rows`` and ``lse_rows``,
    pointers [ROWS], SPLITS of them at a time. Log-sum-exps are in base 2 unless NATURAL, -inf (NATURAL:
    +inf, too) without keys. Split i lies in slot ``start + i * step``, the first ``first_extra`` later;
    strides are those of slots.
    """
    start, step, first_extra, out_stride, lse_stride = slots
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        slot = (start + split * step + tl.where(split == 0, first_extra, 0)).to(tl.int64)
        inside = (split < splits)[:, None] & exists[None, :]  # [SPLITS, ROWS]
        # Both loads at once: neither waits for the other.
        lse = tl.load(lse_rows[None, :] + (slot * lse_stride)[:, None], mask=inside, other=-float("inf"))
        pointers = out_rows[None, :, None] + (slot * out_stride)[:, None, None] + columns[None, None, :]
        wanted = inside[:, :, None] & (columns < HEAD_DIM_V)[None, None, :]
        out = tl.load(pointers, mask=wanted, other=0.0).to(tl.float32)  # [SPLITS, ROWS, BLOCK_DV]
        if NATURAL:
            lse = tl.where(lse == float("inf"), -float("inf"), lse * LOG2_E)
        # An empty part may hold anything.
        out = tl.where((lse == -float("inf"))[:, :, None], 0.0, out)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp2(lse - shift[None, :])
        alpha = tl.exp2(row_max - shift)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max
    return acc, row_max, row_sum


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def combine_kernel(
    partial_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    prior_out,
    prior_lse,
    cache_seqlens,
    cache_leftpad,
    cu_seqlens_q,
    cu_seqlens_k_new,
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
    partial_rows,
    slots,
    num_splits,
    split_tiles,
    teams,
    row_blocks,
    LAYOUT: tl.constexpr,
    BALANCED: tl.constexpr,
    BY_ITEM: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    PDL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """What ``decode_kernel`` left in parts, in a balanced grid of ``teams`` teams.

    Grid: (row blocks * items,), or unless BY_ITEM (row blocks * boundaries between those teams' programs,),
    which are fewer where the batch is large.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lengths = (cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    shape = (
        num_pairs, num_m, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity, window_left,
        window_right,
    )  # fmt: skip
    row_block = tl.program_id(0) % row_blocks
    unit = tl.program_id(0) // row_blocks
    if BALANCED:
        HEADS: tl.constexpr = LAYOUT.HEADS_IN_STEP
        if BY_ITEM:
            pair = unit // num_heads_kv
            head_kv = unit % num_heads_kv
            total, pair_start = balanced_pair(pair, lengths, shape, LAYOUT)
        else:
            # The item that holds the first tile of a program of the next team.
            head_kv = unit % HEADS
            total, position, pair, pair_start = balanced_start(
                unit // HEADS + 1, teams, lengths, shape, LAYOUT
            )
        b, m = rows_of_pair(pair, num_m, LAYOUT)
        start_q, len_q, len_k, leftpad = sequence(b, pair < num_pairs, lengths, shape, LAYOUT)
        num_rows, _, _, tiles = tiles_of(m, len_q, len_k, leftpad, shape, LAYOUT)
        if not (BY_ITEM or LAYOUT.ONE_HEAD_BLOCK):
            head_kv += (position - pair_start) // tl.maximum(tiles, 1) * HEADS
        item_start = pair_start + head_kv // HEADS * tiles
        first_team = share_of(item_start, teams, total)
        splits = share_of(item_start + tl.maximum(tiles, 1) - 1, teams, total) - first_team + 1
        # Of an item over several boundaries, the first one's program combines it.
        if tiles == 0 or (not BY_ITEM and first_team != unit // HEADS):
            splits = 0
        start = 2 * (first_team * HEADS + head_kv % HEADS)
        step = 2 * HEADS
        first_extra = 1
    else:
        m = num_m - 1 - unit % num_m
        head_kv = unit // num_m % num_heads_kv
        b = unit // (num_m * num_heads_kv)
        start_q, len_q, len_k, leftpad = sequence(b, True, lengths, shape, LAYOUT)
        num_rows, _, _, tiles = tiles_of(m, len_q, len_k, leftpad, shape, LAYOUT)
        each = split_tiles
        if split_tiles == 0:
            each = max((tiles + num_splits - 1) // num_splits, 1)
        splits = (tiles + each - 1) // each
        start = (unit // num_m) * num_splits * num_m + unit % num_m
        step = num_m
        first_extra = 0
    if PDL:
        # Waited for by every program: what follows in the stream may start when this kernel has ended.
        tl.extra.cuda.gdc_wait()
    first_row = row_block * ROWS
    if (splits > 1) & (first_row < num_rows):
        index = first_row + tl.arange(0, ROWS)
        exists = index < num_rows
        row = m * LAYOUT.BLOCK_M + index
        tokens, heads = heads_of_rows(row, head_kv, group_size, LAYOUT)
        partial_lse = partial_ptr + slots.to(tl.int64) * partial_rows * HEAD_DIM_V
        acc, row_max, row_sum = sum_splits(
            partial_ptr + index * HEAD_DIM_V, partial_lse + index, exists, splits,
            (start, step, first_extra, partial_rows * HEAD_DIM_V, partial_rows), False, HEAD_DIM_V, BLOCK_DV,
            ROWS, SPLITS,
        )  # fmt: skip
        if HAS_PRIOR:
            acc, row_max, row_sum = with_prior(
                acc, row_max, row_sum, (prior_out, prior_lse), b, start_q, tokens, heads, exists, shape,
                LAYOUT.VARLEN, HEAD_DIM_V, BLOCK_DV,
            )  # fmt: skip
        if HAS_SINK:
            sink = tl.load(sink_ptr + heads, mask=exists, other=0.0)
            acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sink)
        out, lse = normalised(acc, row_max, row_sum)
        store_results(
            out_ptr, lse_ptr, out, lse, b, start_q, tokens, heads, exists, shape, LAYOUT.VARLEN,
            HEAD_DIM_V, BLOCK_DV,
        )  # fmt: skip


@kernel(do_not_specialize=("splits", "seqlen", "num_heads", "rows_in_all"))
def combine_given_kernel(
    out_partial_ptr,
    lse_partial_ptr,
    out_ptr,
    lse_ptr,
    out_stride_split,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_split,
    lse_stride_b,
    lse_stride_s,
    lse_stride_h,
    splits,
    seqlen,
    num_heads,
    rows_in_all,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Partial results of the caller. Grid: (blocks of ROWS of the batch * seqlen * heads rows,).

    out_partial (splits, batch, seqlen, heads, HEAD_DIM_V), lse_partial (splits, batch, seqlen, heads),
    natural log; out (batch, seqlen, heads, HEAD_DIM_V) and lse (batch, heads, seqlen) contiguous.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows_in_all
    head = row % num_heads
    token = row // num_heads % seqlen
    b = row // num_heads // seqlen
    acc, row_max, row_sum = sum_splits(
        out_partial_ptr + b * out_stride_b + token * out_stride_s + head * out_stride_h,
        lse_partial_ptr + b * lse_stride_b + token * lse_stride_s + head * lse_stride_h,
        exists, splits, (0, 1, 0, out_stride_split, lse_stride_split), True, HEAD_DIM_V, BLOCK_DV, ROWS,
        SPLITS,
    )  # fmt: skip
    out, lse = normalised(acc, row_max, row_sum)
    store_rows(out_ptr, row * HEAD_DIM_V, exists, out, HEAD_DIM_V, BLOCK_DV)
    tl.store(lse_ptr + (b * num_heads + head) * seqlen + token, lse * LN_2, mask=exists)
