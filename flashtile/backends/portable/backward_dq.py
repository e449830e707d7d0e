"""dQ of FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

One program owns BLOCK_M rows of one query head and walks the keys that they reach, as the forward pass does:
S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta), dQ += dS K. Recomputing S and dP here and in
``backward_dkdv`` costs seven products instead of five, and buys gradients without atomics.
"""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import RUNTIME_INTEGERS, load_tile, sequence
from flashtile.backends.portable.tiles import (
    apply_score_mod,
    block_range,
    load_slope,
    row_block,
    store_tile,
    used_length,
    visible,
)


@triton.jit
def dq_blocks(
    dq,
    q,
    dout,
    neg_lse,
    neg_delta,
    k_base,
    v_base,
    k_stride,
    v_stride,
    first,
    last,
    row_start,
    offset,
    len_k,
    window_left,
    window_right,
    slope,
    softmax_scale,
    scale_log2,
    softcap,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr,
    EVEN_N: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Key blocks ``first`` to ``last`` (exclusive) into dq of this block of rows."""
    for n in range(first, last):
        start = n * BLOCK_N
        PAST_END: tl.constexpr = MASKED and not EVEN_N
        k = load_tile(k_base, start, len_k, k_stride, BLOCK_N, HEAD_DIM, BLOCK_D, PAST_END, WIDE)
        v = load_tile(v_base, start, len_k, v_stride, BLOCK_N, HEAD_DIM_V, BLOCK_DV, PAST_END, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if HAS_SCORE_MOD or MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            rows = row_start + tl.arange(0, BLOCK_M)
            distance = keys[None, :] - (rows + offset)[:, None]
        if HAS_SCORE_MOD:
            scores, softcap_grad = apply_score_mod(
                scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI
            )
            p = tl.exp2(scores + neg_lse[:, None])
        else:
            p = tl.exp2(scores * scale_log2 + neg_lse[:, None])
        if MASKED:
            seen = visible(distance, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            if PAST_END:
                seen = seen & (keys < len_k)[None, :]
            p = tl.where(seen, p, 0.0)
        ds = p * (dp + neg_delta[:, None])
        if HAS_SOFTCAP:
            ds = ds * softcap_grad
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    neg_lse_ptr,
    neg_delta_ptr,
    dq_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    alibi_slopes,
    padded_rows,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    alibi_stride_b,
    num_heads_q,
    group_size,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    window_left,
    window_right,
    softmax_scale,
    scale_log2,
    softcap,
    VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROW_PAD: tl.constexpr,
):
    """Grid: (blocks of rows * heads * batch,). Shapes as in the forward kernel; dout, dq contiguous; neg_lse
    and neg_delta as ``common.preprocess`` lays them out."""
    b, head, row_start = row_block(seqlen_q, num_heads_q, HAS_RIGHT, BLOCK_M)
    head_kv = head // group_size

    start_q, len_q = sequence(cu_seqlens_q, b, seqlen_q, total_q, VARLEN)
    start_k, len_k = sequence(cu_seqlens_k, b, seqlen_k, total_k, VARLEN)
    len_k = used_length(seqused_k, b, len_k)
    if row_start >= len_q:
        return
    offset = len_k - len_q

    b64 = b.to(tl.int64)
    q_base = q_ptr + b64 * q_stride_b + start_q * q_stride_s + head.to(tl.int64) * q_stride_h
    k_base = k_ptr + b64 * k_stride_b + start_k * k_stride_s + head_kv.to(tl.int64) * k_stride_h
    v_base = v_ptr + b64 * v_stride_b + start_k * v_stride_s + head_kv.to(tl.int64) * v_stride_h
    if VARLEN:
        tile_offset = start_q * num_heads_q + head
    else:
        tile_offset = b64 * seqlen_q * num_heads_q + head
    slope = load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI)

    q = load_tile(q_base, row_start, len_q, q_stride_s, BLOCK_M, HEAD_DIM, BLOCK_D, not EVEN_M, WIDE)
    dout = load_tile(
        dout_ptr + tile_offset * HEAD_DIM_V, row_start, len_q, num_heads_q * HEAD_DIM_V,
        BLOCK_M, HEAD_DIM_V, BLOCK_DV, not EVEN_M, False,
    )  # fmt: skip
    statistics = statistics_offset(b, head, start_q, num_heads_q, padded_rows, VARLEN, ROW_PAD)
    statistics += row_start + tl.arange(0, BLOCK_M)
    neg_lse = tl.load(neg_lse_ptr + statistics)
    neg_delta = tl.load(neg_delta_ptr + statistics)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first, full_first, full_last, last = block_range(
        row_start, min(row_start + BLOCK_M, len_q), offset, len_k, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    # The window's left edge, whole blocks, its right edge or the end of the sequence.
    for RUN in tl.static_range(3):
        if RUN == 1 or (RUN == 0 and HAS_LEFT) or (RUN == 2 and (HAS_RIGHT or not EVEN_N)):
            begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
            end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
            dq = dq_blocks(
                dq, q, dout, neg_lse, neg_delta, k_base, v_base, k_stride_s, v_stride_s, begin, end,
                row_start, offset, len_k, window_left, window_right, slope, softmax_scale, scale_log2, softcap,
                HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_SCORE_MOD, EVEN_N, RUN != 1, HEAD_DIM, HEAD_DIM_V,
                BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
    store_tile(
        dq_ptr + tile_offset * HEAD_DIM, row_start, len_q, num_heads_q * HEAD_DIM, dq * softmax_scale,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
