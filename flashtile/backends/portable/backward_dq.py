"""dQ of FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

One program owns BLOCK_M rows of one query head and walks the keys that they reach, as the forward pass does:
S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta), dQ += dS K. Recomputing S and dP here and in
``backward_dkdv`` costs seven products instead of five, and buys gradients without atomics.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import Matrix, load_tile
from flashtile.backends.portable.arguments import Block, CellStrides, Lengths, Mods, Numbers, Strides
from flashtile.backends.portable.tiles import (
    add_gradients,
    block_range,
    bounded,
    cells_of,
    find_sequence,
    head_of,
    kept_cells,
    load_slope,
    load_state,
    modify_scores,
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
    dout: Any
    neg_lse: Any
    neg_delta: Any
    dq: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    alibi_slopes: Any
    mask: Any
    key_padding_mask: Any
    bias: Any
    rng_state: Any
    seqused_q: Any
    key_bounds: Any


@triton.jit
def dq_blocks(
    dq, q, dout, neg_lse, neg_delta, k, v, first, last, block, lengths, numbers, mods, MASKED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Key blocks ``first`` to ``last`` (exclusive) into dq of the rows of ``block``.

    q and dout are tiles, neg_lse and neg_delta [BLOCK_M]; k and v are matrices in memory.
    """
    PAST_END: tl.constexpr = MASKED and not C.EVEN_N
    for n in range(first, last):
        start = walked_block(block, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
        v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
        products = tl.dot(q, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout, tl.trans(v_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.HAS_SCORE_MOD or MASKED:
            keys = start + tl.arange(0, C.BLOCK_N)
            rows = block.start + tl.arange(0, C.BLOCK_M)
            cells = cells_of(block, rows, keys, KEYS_FIRST=False)
        if C.HAS_SCORE_MOD:
            scores, score_grad = modify_scores(products, cells, block, lengths, numbers, mods, C)
            p = tl.exp2(scores + neg_lse[:, None])
        else:
            p = tl.exp2(products * numbers.scale_log2 + neg_lse[:, None])
        if MASKED:
            seen = seen_cells(cells, block, lengths, mods, C)
            if PAST_END:
                seen = seen & (keys < k.length)[None, :]
            p = tl.where(seen, p, 0.0)
        if C.GUARD_SCORES:  # SCORE_MOD may make anything of rows past the end
            p = tl.where(neg_lse[:, None] == -float("inf"), 0.0, p)
        if C.HAS_DROPOUT:
            kept = kept_cells(block, block.start, start, lengths, mods, False, C)
            dp = tl.where(kept, dp * numbers.keep_scale, 0.0)
        ds = p * (dp + neg_delta[:, None])
        if C.ADD_GRADIENTS is not None:
            add_gradients(ds, products, cells, block, numbers, C)
        if C.HAS_SOFTCAP or C.SCORE_MOD is not None:
            ds = ds * score_grad
        if C.GUARD_FACTORS:  # score_grad need not be finite where a score is hidden
            ds = tl.where(p == 0.0, 0.0, ds)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


@kernel(do_not_specialize=("padded_rows", *Lengths._fields))
def dq_kernel(
    q, k, v, dout, neg_lse, neg_delta, dq, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
    key_padding_mask, bias, rng_state, seqused_q, key_bounds, padded_rows, q_stride_b, q_stride_s, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, mask_stride_b, mask_stride_h,
    mask_stride_q, mask_stride_k, padding_stride_b, padding_stride_k, bias_stride_b, bias_stride_h,
    bias_stride_q, bias_stride_k, alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, total_q, total_k,
    window_left, window_right, attention_chunk, drop_threshold, softmax_scale, scale_log2, softcap,
    keep_scale, C: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows * heads * batch,). Shapes as in the forward kernel; dout, dq contiguous; neg_lse
    and neg_delta as ``common.preprocess`` lays them out."""
    pointers = Pointers(
        q, k, v, dout, neg_lse, neg_delta, dq, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
        key_padding_mask, bias, rng_state, seqused_q, key_bounds,
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
    if C.VARLEN:
        tile_offset = sequence.start_q * num_heads_q + head
    else:
        tile_offset = b.to(tl.int64) * seqlen_q * num_heads_q + head
    slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
    block = Block(b, head, row_start, offset, slope, None, None)

    BLOCK_M: tl.constexpr = C.BLOCK_M  # a shape is made of constants, not of their fields
    BLOCK_D: tl.constexpr = C.BLOCK_D
    q_tile = load_tile(q_rows, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    dout_rows = Matrix(dout + tile_offset * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, sequence.len_q)
    dout_tile = load_tile(dout_rows, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
    statistics = statistics_offset(b, head, sequence.start_q, num_heads_q, padded_rows, C.VARLEN)
    statistics += row_start + tl.arange(0, C.BLOCK_M)
    neg_lse_rows = tl.load(neg_lse + statistics)
    neg_delta_rows = tl.load(neg_delta + statistics)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

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
            dq_tile = dq_blocks(
                dq_tile, q_tile, dout_tile, neg_lse_rows, neg_delta_rows, keys, values, begin, end, block,
                lengths, numbers, mods, RUN != 1, C,
            )  # fmt: skip
    store_tile(
        dq + tile_offset * C.HEAD_DIM, row_start, sequence.len_q, num_heads_q * C.HEAD_DIM,
        dq_tile * softmax_scale, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
