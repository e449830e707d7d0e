"""dK and dV of FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

One program owns BLOCK_N keys of one key/value head and walks the rows that reach them, of every query head of
its group (so GQA sums in registers), recomputing probabilities transposed: S^T = K Q^T, P^T = exp(S^T - lse),
dV += P^T dO, dP^T = V dO^T, dS^T = P^T * (dP^T - delta), dK += dS^T Q. No atomics: one program sums each
gradient, in one order.
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
    store_tile,
    used_length,
    visible,
)


@triton.jit
def dkdv_blocks(
    dk,
    dv,
    k,
    v,
    q_base,
    dout_base,
    neg_lse_base,
    neg_delta_base,
    q_stride,
    dout_stride,
    first,
    last,
    key_start,
    offset,
    len_q,
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
    EVEN_M: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Row blocks ``first`` to ``last`` (exclusive) of one query head into dk, dv of this block of keys.

    Rows past the end load as zeros that no key reaches, so only the window needs a mask (WINDOWED).
    """
    for m in range(first, last):
        start = m * BLOCK_M
        q = load_tile(q_base, start, len_q, q_stride, BLOCK_M, HEAD_DIM, BLOCK_D, not EVEN_M, WIDE)
        neg_lse = tl.load(neg_lse_base + start + tl.arange(0, BLOCK_M))
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # S^T [BLOCK_N, BLOCK_M]
        if HAS_SCORE_MOD or WINDOWED:
            keys = key_start + tl.arange(0, BLOCK_N)
            rows = start + tl.arange(0, BLOCK_M)
            distance = keys[:, None] - (rows + offset)[None, :]
        if HAS_SCORE_MOD:
            scores, softcap_grad = apply_score_mod(
                scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI
            )
            p = tl.exp2(scores + neg_lse[None, :])
        else:
            p = tl.exp2(scores * scale_log2 + neg_lse[None, :])
        if WINDOWED:
            p = tl.where(visible(distance, window_left, window_right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        dout = load_tile(
            dout_base, start, len_q, dout_stride, BLOCK_M, HEAD_DIM_V, BLOCK_DV, not EVEN_M, False
        )
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_DV]
        # Loaded late: it runs along the columns, where a thread holds many of it.
        neg_delta = tl.load(neg_delta_base + start + tl.arange(0, BLOCK_M))
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # dP^T [BLOCK_N, BLOCK_M]
        ds = p * (dp + neg_delta[None, :])
        if HAS_SOFTCAP:
            ds = ds * softcap_grad
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    neg_lse_ptr,
    neg_delta_ptr,
    dk_ptr,
    dv_ptr,
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
    """Grid: (blocks of keys * key/value heads * batch,). Shapes as in the forward kernel; dout, dk, dv
    contiguous; neg_lse and neg_delta as ``common.preprocess`` lays them out. Keys that are not used are not
    written."""
    num_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    num_heads_kv = num_heads_q // group_size
    pid = tl.program_id(0)
    key_start = (pid % num_blocks) * BLOCK_N
    head_kv = (pid // num_blocks) % num_heads_kv
    b = (pid // num_blocks) // num_heads_kv

    start_q, len_q = sequence(cu_seqlens_q, b, seqlen_q, total_q, VARLEN)
    start_k, len_k = sequence(cu_seqlens_k, b, seqlen_k, total_k, VARLEN)
    len_k = used_length(seqused_k, b, len_k)
    if key_start >= len_k:
        return
    offset = len_k - len_q

    b64 = b.to(tl.int64)
    q_base = q_ptr + b64 * q_stride_b + start_q * q_stride_s
    k_base = k_ptr + b64 * k_stride_b + start_k * k_stride_s + head_kv.to(tl.int64) * k_stride_h
    v_base = v_ptr + b64 * v_stride_b + start_k * v_stride_s + head_kv.to(tl.int64) * v_stride_h
    if VARLEN:
        dout_base = dout_ptr + start_q * num_heads_q * HEAD_DIM_V
        key_offset = start_k * num_heads_kv + head_kv
    else:
        dout_base = dout_ptr + b64 * seqlen_q * num_heads_q * HEAD_DIM_V
        key_offset = b64 * seqlen_k * num_heads_kv + head_kv

    k = load_tile(k_base, key_start, len_k, k_stride_s, BLOCK_N, HEAD_DIM, BLOCK_D, not EVEN_N, WIDE)
    v = load_tile(v_base, key_start, len_k, v_stride_s, BLOCK_N, HEAD_DIM_V, BLOCK_DV, not EVEN_N, WIDE)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Seen from the keys, the window is mirrored: a key reaches window_right rows back and window_left ahead.
    first, full_first, full_last, last = block_range(
        key_start, min(key_start + BLOCK_N, len_k), -offset, len_q, window_right, window_left,
        HAS_RIGHT, HAS_LEFT, BLOCK_M,
    )  # fmt: skip
    if not HAS_LEFT:
        full_last = last
    for g in range(group_size):
        head = head_kv * group_size + g
        slope = load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI)
        q_head = q_base + head.to(tl.int64) * q_stride_h
        dout_head = dout_base + head * HEAD_DIM_V
        statistics = statistics_offset(b, head, start_q, num_heads_q, padded_rows, VARLEN, ROW_PAD)
        # One edge of the window, the rows that reach every key of the block, the other edge.
        for RUN in tl.static_range(3):
            if RUN == 1 or (RUN == 0 and HAS_RIGHT) or (RUN == 2 and HAS_LEFT):
                begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
                end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
                dk, dv = dkdv_blocks(
                    dk, dv, k, v, q_head, dout_head, neg_lse_ptr + statistics, neg_delta_ptr + statistics,
                    q_stride_s, num_heads_q * HEAD_DIM_V, begin, end, key_start, offset, len_q,
                    window_left, window_right, slope, softmax_scale, scale_log2, softcap,
                    HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_SCORE_MOD, EVEN_M, RUN != 1,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WIDE, PRECISION,
                )  # fmt: skip

    store_tile(
        dk_ptr + key_offset * HEAD_DIM, key_start, len_k, num_heads_kv * HEAD_DIM, dk * softmax_scale,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv_ptr + key_offset * HEAD_DIM_V, key_start, len_k, num_heads_kv * HEAD_DIM_V, dv,
        BLOCK_N, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip
