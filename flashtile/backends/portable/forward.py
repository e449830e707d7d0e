"""FlashAttention-2's forward pass (Dao 2023, arXiv:2307.08691, Algorithm 1) in portable Triton.

One program owns BLOCK_M rows of one query head and walks the keys that they reach in blocks of BLOCK_N:
blocks at the window's edges or the sequence's end with a mask, the blocks between them without. The
accumulator stays unscaled until the end and only the log-sum-exp is kept for the backward pass.
"""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import LN_2, LOG2_E, RUNTIME_INTEGERS, load_tile, sequence
from flashtile.backends.portable.tiles import (
    apply_score_mod,
    block_range,
    load_slope,
    result_bases,
    row_block,
    store_tile,
    used_length,
    visible,
)


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
    acc,
    row_max,
    row_sum,
    q,
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
    """Key blocks ``first`` to ``last`` (exclusive) into each row's running accumulator, maximum and sum."""
    for n in range(first, last):
        start = n * BLOCK_N
        PAST_END: tl.constexpr = MASKED and not EVEN_N
        k = load_tile(k_base, start, len_k, k_stride, BLOCK_N, HEAD_DIM, BLOCK_D, PAST_END, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if HAS_SCORE_MOD or MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            rows = row_start + tl.arange(0, BLOCK_M)
            distance = keys[None, :] - (rows + offset)[:, None]
            if HAS_SCORE_MOD:
                scores, _ = apply_score_mod(
                    scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI
                )
            if MASKED:
                seen = visible(distance, window_left, window_right, HAS_LEFT, HAS_RIGHT)
                if PAST_END:
                    seen = seen & (keys < len_k)[None, :]
                scores = tl.where(seen, scores, -float("inf"))
        p, row_max, alpha = softmax_step(scores, row_max, scale_log2, HAS_SCORE_MOD, MASKED)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_base, start, len_k, v_stride, BLOCK_N, HEAD_DIM_V, BLOCK_DV, PAST_END, WIDE)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, row_max, row_sum


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    alibi_slopes,
    sink,
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
):
    """Grid: (blocks of rows * heads * batch,). q, k, v as given; out and lse contiguous.

    q [batch, seqlen_q, num_heads_q, HEAD_DIM], k [batch, seqlen_k, heads_kv, HEAD_DIM], v [..., HEAD_DIM_V],
    without the batch when VARLEN; out like q; lse [batch, num_heads_q, seqlen_q] or [num_heads_q, total_q].
    seqused_k [batch] and sink [num_heads_q] may be None.
    """
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
    slope = load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI)

    q = load_tile(q_base, row_start, len_q, q_stride_s, BLOCK_M, HEAD_DIM, BLOCK_D, not EVEN_M, WIDE)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    first, full_first, full_last, last = block_range(
        row_start, min(row_start + BLOCK_M, len_q), offset, len_k, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    # The window's left edge, whole blocks, its right edge or the end of the sequence.
    for RUN in tl.static_range(3):
        if RUN == 1 or (RUN == 0 and HAS_LEFT) or (RUN == 2 and (HAS_RIGHT or not EVEN_N)):
            begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
            end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
            acc, row_max, row_sum = attend_blocks(
                acc, row_max, row_sum, q, k_base, v_base, k_stride_s, v_stride_s, begin, end, row_start,
                offset, len_k, window_left, window_right, slope, softmax_scale, scale_log2, softcap, HAS_LEFT,
                HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_SCORE_MOD, EVEN_N, RUN != 1, HEAD_DIM, HEAD_DIM_V,
                BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip

    if sink is not None:
        acc, row_max, row_sum = sink_step(acc, row_max, row_sum, tl.load(sink + head).to(tl.float32))
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = tl.where(empty, -float("inf"), row_max * LN_2 + tl.log(tl.where(empty, 1.0, row_sum)))
    rows = tl.arange(0, BLOCK_M)
    out_base, lse_base = result_bases(
        out_ptr, lse_ptr, b, head, start_q, num_heads_q, seqlen_q, total_q, HEAD_DIM_V, VARLEN
    )
    store_tile(out_base, row_start, len_q, num_heads_q * HEAD_DIM_V, out, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    tl.store(lse_base + row_start + rows, lse, mask=row_start + rows < len_q)
