"""FlashAttention-2's forward pass (Dao 2023, arXiv:2307.08691, Algorithm 1) in portable Triton.

One program owns BLOCK_M rows of one query head and walks the keys that they reach in blocks of BLOCK_N:
blocks at the window's edges or the sequence's end with a mask, the blocks between them without. The
accumulator stays unscaled until the end and only the log-sum-exp is kept for the backward pass.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import LN_2, LOG2_E, load_tile
from flashtile.backends.portable.arguments import Block, CellStrides, Lengths, Mods, Numbers, Strides
from flashtile.backends.portable.tiles import (
    block_range,
    bounded,
    cells_of,
    find_sequence,
    head_of,
    kept_cells,
    kept_or_zero,
    load_slope,
    load_state,
    modify_scores,
    result_bases,
    row_block,
    seen_cells,
    store_tile,
    walked_block,
    within_chunks,
)


class Pointers(NamedTuple):
    """Tensors of the kernel. From cu_seqlens_q on, None is one that the call does not have."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    alibi_slopes: Any
    sink: Any
    mask: Any
    key_padding_mask: Any
    bias: Any
    rng_state: Any
    seqused_q: Any
    key_bounds: Any


@triton.jit
def softmax_step(scores, row_max, scale_log2, HAS_SCORE_MOD: tl.constexpr, MASKED: tl.constexpr):
    """scores [BLOCK_M, BLOCK_N], row_max [BLOCK_M] -> (probabilities over the new maximum, it, the old one's
    factor).

    Unless HAS_SCORE_MOD, the scores are raw products and ``scale_log2`` is folded into the exponent.
    """
    if HAS_SCORE_MOD:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    if MASKED:
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that has met no key yet
    else:
        shift = new_max
    if HAS_SCORE_MOD:
        p = tl.exp2(scores - shift[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def sink_step(acc, row_max, row_sum, sink):
    """The sink, a score that has no value, joins each row: a new accumulator, maximum and sum.

    Last, so that it takes no precision from the probabilities however large it is.
    """
    new_max = tl.maximum(row_max, sink * LOG2_E)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha = tl.exp2(row_max - shift)
    return acc * alpha[:, None], new_max, row_sum * alpha + tl.exp2(sink * LOG2_E - shift)


@triton.jit
def attend_blocks(
    acc, row_max, row_sum, q, k, v, first, last, block, lengths, numbers, mods, MASKED: tl.constexpr, C:
    tl.constexpr,
):  # fmt: skip
    """Key blocks ``first`` to ``last`` (exclusive) into each row's running accumulator, maximum and sum.

    q [BLOCK_M, BLOCK_D] are the rows of ``block``; k and v are matrices in memory.
    """
    PAST_END: tl.constexpr = MASKED and not C.EVEN_N
    for n in range(first, last):
        start = walked_block(block, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.HAS_SCORE_MOD or MASKED:
            keys = start + tl.arange(0, C.BLOCK_N)
            rows = block.start + tl.arange(0, C.BLOCK_M)
            cells = cells_of(block, rows, keys, KEYS_FIRST=False)
            if C.HAS_SCORE_MOD:
                scores, _ = modify_scores(scores, cells, block, lengths, numbers, mods, C)
            if MASKED:
                seen = seen_cells(cells, block, lengths, mods, C)
                if PAST_END:
                    seen = seen & (keys < k.length)[None, :]
                scores = tl.where(seen, scores, -float("inf"))
        MAY_BE_EMPTY: tl.constexpr = MASKED or C.HAS_BIAS or C.SCORE_MOD is not None
        p, row_max, alpha = softmax_step(scores, row_max, numbers.scale_log2, C.HAS_SCORE_MOD, MAY_BE_EMPTY)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if C.HAS_DROPOUT:
            kept = kept_cells(block, block.start, start, lengths, mods, False, C)
            p = kept_or_zero(p, kept, numbers)
        v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, row_max, row_sum


@kernel(do_not_specialize=Lengths._fields)
def forward_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink, mask, key_padding_mask,
    bias, rng_state, seqused_q, key_bounds, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s,
    k_stride_h, v_stride_b, v_stride_s, v_stride_h, mask_stride_b, mask_stride_h, mask_stride_q,
    mask_stride_k, padding_stride_b, padding_stride_k, bias_stride_b, bias_stride_h, bias_stride_q,
    bias_stride_k, alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, total_q, total_k, window_left,
    window_right, attention_chunk, drop_threshold, softmax_scale, scale_log2, softcap, keep_scale, C:
    tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows * heads * batch,). q, k, v as given; out and lse contiguous.

    q [batch, seqlen_q, num_heads_q, HEAD_DIM], k [batch, seqlen_k, heads_kv, HEAD_DIM], v [..., HEAD_DIM_V],
    without the batch when VARLEN; out like q; lse [batch, num_heads_q, seqlen_q] or [num_heads_q, total_q].
    seqused_k [batch], sink [num_heads_q] masks and bias may be None.
    """
    pointers = Pointers(
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink, mask, key_padding_mask,
        bias, rng_state, seqused_q, key_bounds,
    )  # fmt: skip
    q_strides = Strides(q_stride_b, q_stride_s, q_stride_h)
    k_strides = Strides(k_stride_b, k_stride_s, k_stride_h)
    v_strides = Strides(v_stride_b, v_stride_s, v_stride_h)
    lengths = Lengths(
        alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, total_q, total_k, window_left,
        window_right, attention_chunk, drop_threshold,
    )  # fmt: skip
    numbers = Numbers(softmax_scale, scale_log2, softcap, keep_scale)
    seed, rng_offset = load_state(rng_state, C)
    mods = Mods(
        mask, CellStrides(mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k), key_padding_mask,
        padding_stride_b, padding_stride_k, key_bounds, bias,
        CellStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k), seed, rng_offset,
    )  # fmt: skip

    b, head, row_start = row_block(
        seqlen_q, num_heads_q, C.HAS_RIGHT, C.BLOCK_M, C.SEQUENCES_FIRST
    )  # fmt: skip
    head_kv = head // group_size
    sequence = find_sequence(pointers, lengths, b, C)
    if row_start >= sequence.len_q:
        return
    offset = sequence.len_k - sequence.len_q
    q_rows = head_of(q, q_strides, b, sequence.start_q, head, sequence.len_q)
    keys = head_of(k, k_strides, b, sequence.start_k, head_kv, sequence.len_k)
    values = head_of(v, v_strides, b, sequence.start_k, head_kv, sequence.len_k)
    slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
    block = Block(b, head, row_start, offset, slope, None, None)

    BLOCK_M: tl.constexpr = C.BLOCK_M  # a shape is made of constants, not of their fields
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    q_tile = load_tile(q_rows, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    first, full_first, full_last, last = block_range(
        row_start, min(row_start + C.BLOCK_M, sequence.len_q), offset, sequence.len_k, window_left,
        window_right, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
    )  # fmt: skip
    if C.HIDES:
        first, last = bounded(first, last, mods, b, C.BLOCK_N, C)
        first, last = within_chunks(
            first, last, row_start, row_start + C.BLOCK_M, offset, lengths, C.BLOCK_N, C
        )  # fmt: skip
        full_last = first  # one run, which takes a mask throughout
    # The window's left edge, whole blocks, its right edge or the end of the sequence.
    for RUN in tl.static_range(3):
        if (
            (RUN == 0 and C.HAS_LEFT and not C.HIDES)
            or (RUN == 1 and not C.HIDES)
            or (RUN == 2 and (C.HAS_RIGHT or not C.EVEN_N or C.HIDES))
        ):
            begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
            end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
            acc, row_max, row_sum = attend_blocks(
                acc, row_max, row_sum, q_tile, keys, values, begin, end, block, lengths, numbers, mods,
                RUN != 1, C,
            )

    if sink is not None:
        acc, row_max, row_sum = sink_step(acc, row_max, row_sum, tl.load(sink + head).to(tl.float32))
    empty = row_sum == 0.0
    out_tile = acc / tl.where(empty, 1.0, row_sum)[:, None]
    if C.HAS_DROPOUT:
        out_tile = out_tile * keep_scale
    lse_rows = tl.where(empty, -float("inf"), row_max * LN_2 + tl.log(tl.where(empty, 1.0, row_sum)))
    rows = tl.arange(0, C.BLOCK_M)
    out_base, lse_base = result_bases(
        out, lse, b, head, sequence.start_q, num_heads_q, seqlen_q, total_q, C.HEAD_DIM_V, C.VARLEN
    )
    store_tile(
        out_base, row_start, sequence.len_q, num_heads_q * C.HEAD_DIM_V, out_tile, C.BLOCK_M, C.HEAD_DIM_V,
        C.BLOCK_DV,
    )  # fmt: skip
    tl.store(lse_base + row_start + rows, lse_rows, mask=row_start + rows < sequence.len_q)
