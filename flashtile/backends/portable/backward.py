"""FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton, without atomics.

Two kernels recompute the probabilities from the saved log-sum-exp: one owns a block of keys and walks the rows that
reach it (dK, dV; all query heads of the group, so that GQA sums in registers), one owns a block of rows and walks
the keys (dQ). Seven products instead of five, but every gradient is summed by one program in one order: bitwise
reproducible. A small kernel prepares ``delta = rowsum(dO * O) - dlse`` for both (``dlse`` is the gradient into lse:
d lse / d s is the probability, so it joins the subtracted term).
"""

import triton
import triton.language as tl

from flashtile.backends.portable.tiles import (
    LOG2_E,
    RUNTIME_INTEGERS,
    bend_scores,
    block_range,
    load_slope,
    load_tile,
    sequence,
    store_tile,
    visible,
)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def delta_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    cu_seqlens_q,
    num_heads_q,
    seqlen_q,
    total_q,
    VARLEN: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid: (blocks of rows * heads * batch,). delta is shaped as lse; 0 for rows without keys."""
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    # Heads vary fastest: neighbouring programs read neighbouring memory.
    head = pid % num_heads_q
    row_start = (pid // num_heads_q) % num_blocks * BLOCK_M
    b = (pid // num_heads_q) // num_blocks
    start_q, len_q = sequence(cu_seqlens_q, b, seqlen_q, total_q, VARLEN)
    if row_start >= len_q:
        return
    b64 = b.to(tl.int64)
    if VARLEN:
        tile_offset = (start_q * num_heads_q + head) * HEAD_DIM_V
        row_offset = head.to(tl.int64) * total_q + start_q + row_start
    else:
        tile_offset = (b64 * seqlen_q * num_heads_q + head) * HEAD_DIM_V
        row_offset = (b64 * num_heads_q + head) * seqlen_q + row_start
    stride = num_heads_q * HEAD_DIM_V
    out = load_tile(out_ptr + tile_offset, row_start, len_q, stride, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, False)
    dout = load_tile(dout_ptr + tile_offset, row_start, len_q, stride, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    rows = tl.arange(0, BLOCK_M)
    inside = row_start + rows < len_q
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_offset + rows, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row_offset + rows, mask=inside, other=-float("inf"))
    tl.store(delta_ptr + row_offset + rows, tl.where(lse == -float("inf"), 0.0, delta), mask=inside)


@triton.jit
def load_statistics(lse_base, delta_base, row_start, len_q, BLOCK_M: tl.constexpr):
    """(lse in log2 units, delta) of BLOCK_M rows; +inf for rows without keys, so that their probabilities are 0."""
    rows = row_start + tl.arange(0, BLOCK_M)
    inside = rows < len_q
    lse = tl.load(lse_base + rows, mask=inside, other=float("inf"))
    delta = tl.load(delta_base + rows, mask=inside, other=0.0)
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E), delta


@triton.jit
def dkdv_blocks(
    dk,
    dv,
    k,
    v,
    q_base,
    dout_base,
    lse_base,
    delta_base,
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
    BENT: tl.constexpr,
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
    """Row blocks ``first`` to ``last`` (exclusive) of one query head into dk, dv of this block of keys."""
    for m in range(first, last):
        start = m * BLOCK_M
        q = load_tile(q_base, start, len_q, q_stride, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED, WIDE)
        lse, delta = load_statistics(lse_base, delta_base, start, len_q, BLOCK_M)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # S^T [BLOCK_N, BLOCK_M]
        slack = 1.0
        if BENT or MASKED:
            keys = key_start + tl.arange(0, BLOCK_N)
            rows = start + tl.arange(0, BLOCK_M)
            distance = keys[:, None] - (rows + offset)[None, :]
        if BENT:
            scores, slack = bend_scores(scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI)
        else:
            scores = scores * scale_log2
        p = tl.exp2(scores - lse[None, :])
        if MASKED and (HAS_LEFT or HAS_RIGHT):
            everywhere = tl.full([BLOCK_N, BLOCK_M], True, tl.int1)
            p = tl.where(visible(distance, window_left, window_right, HAS_LEFT, HAS_RIGHT, everywhere), p, 0.0)
        dout = load_tile(dout_base, start, len_q, dout_stride, BLOCK_M, HEAD_DIM_V, BLOCK_DV, MASKED, False)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_DV]
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # dP^T [BLOCK_N, BLOCK_M]
        ds = p * (dp - delta[None, :])
        if HAS_SOFTCAP:
            ds = ds * slack
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
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
    BENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (blocks of keys * key/value heads * batch,). Shapes as in the forward kernel; dout, dk, dv contiguous."""
    num_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    num_heads_kv = num_heads_q // group_size
    pid = tl.program_id(0)
    key_start = (pid % num_blocks) * BLOCK_N
    head_kv = (pid // num_blocks) % num_heads_kv
    b = (pid // num_blocks) // num_heads_kv

    start_q, len_q = sequence(cu_seqlens_q, b, seqlen_q, total_q, VARLEN)
    start_k, len_k = sequence(cu_seqlens_k, b, seqlen_k, total_k, VARLEN)
    if key_start >= len_k:
        return
    offset = len_k - len_q

    b64 = b.to(tl.int64)
    q_base = q_ptr + b64 * q_stride_b + start_q * q_stride_s
    k_base = k_ptr + b64 * k_stride_b + start_k * k_stride_s + head_kv.to(tl.int64) * k_stride_h
    v_base = v_ptr + b64 * v_stride_b + start_k * v_stride_s + head_kv.to(tl.int64) * v_stride_h
    if VARLEN:
        dout_base = dout_ptr + start_q * num_heads_q * HEAD_DIM_V
        row_offset = start_q
        head_stride = total_q
        key_offset = start_k * num_heads_kv + head_kv
    else:
        dout_base = dout_ptr + b64 * seqlen_q * num_heads_q * HEAD_DIM_V
        row_offset = b64 * num_heads_q * seqlen_q
        head_stride = seqlen_q
        key_offset = b64 * seqlen_k * num_heads_kv + head_kv

    k = load_tile(k_base, key_start, len_k, k_stride_s, BLOCK_N, HEAD_DIM, BLOCK_D, True, WIDE)
    v = load_tile(v_base, key_start, len_k, v_stride_s, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True, WIDE)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Seen from the keys, the window is mirrored: a key reaches window_right rows back and window_left ahead.
    first, full_first, full_last, last = block_range(
        key_start, min(key_start + BLOCK_N, len_k), -offset, len_q, window_right, window_left,
        HAS_RIGHT, HAS_LEFT, BLOCK_M,
    )  # fmt: skip
    dout_stride = num_heads_q * HEAD_DIM_V
    for g in range(group_size):
        head = head_kv * group_size + g
        slope = load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI)
        q_head = q_base + head.to(tl.int64) * q_stride_h
        dout_head = dout_base + head * HEAD_DIM_V
        lse_head = lse_ptr + row_offset + head.to(tl.int64) * head_stride
        delta_head = delta_ptr + row_offset + head.to(tl.int64) * head_stride
        if HAS_RIGHT:
            dk, dv = dkdv_blocks(
                dk, dv, k, v, q_head, dout_head, lse_head, delta_head, q_stride_s, dout_stride, first, full_first,
                key_start, offset, len_q, window_left, window_right, slope, softmax_scale, scale_log2, softcap,
                HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, BENT, True, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
                BLOCK_M, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
        dk, dv = dkdv_blocks(
            dk, dv, k, v, q_head, dout_head, lse_head, delta_head, q_stride_s, dout_stride, full_first, full_last,
            key_start, offset, len_q, window_left, window_right, slope, softmax_scale, scale_log2, softcap,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, BENT, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
            BLOCK_M, BLOCK_N, WIDE, PRECISION,
        )  # fmt: skip
        dk, dv = dkdv_blocks(
            dk, dv, k, v, q_head, dout_head, lse_head, delta_head, q_stride_s, dout_stride, full_last, last,
            key_start, offset, len_q, window_left, window_right, slope, softmax_scale, scale_log2, softcap,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, BENT, True, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
            BLOCK_M, BLOCK_N, WIDE, PRECISION,
        )  # fmt: skip

    store_tile(
        dk_ptr + key_offset * HEAD_DIM, key_start, len_k, num_heads_kv * HEAD_DIM, dk * softmax_scale,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv_ptr + key_offset * HEAD_DIM_V, key_start, len_k, num_heads_kv * HEAD_DIM_V, dv,
        BLOCK_N, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def dq_blocks(
    dq,
    q,
    dout,
    lse,
    delta,
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
    BENT: tl.constexpr,
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
        k = load_tile(k_base, start, len_k, k_stride, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, WIDE)
        v = load_tile(v_base, start, len_k, v_stride, BLOCK_N, HEAD_DIM_V, BLOCK_DV, MASKED, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        slack = 1.0
        if BENT or MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            rows = row_start + tl.arange(0, BLOCK_M)
            distance = keys[None, :] - (rows + offset)[:, None]
        if BENT:
            scores, slack = bend_scores(scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI)
        else:
            scores = scores * scale_log2
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            inside = (keys < len_k)[None, :]
            p = tl.where(visible(distance, window_left, window_right, HAS_LEFT, HAS_RIGHT, inside), p, 0.0)
        ds = p * (dp - delta[:, None])
        if HAS_SOFTCAP:
            ds = ds * slack
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
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
    BENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (blocks of rows * heads * batch,). Shapes as in the forward kernel; dout, dq contiguous."""
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    m_block = pid % num_blocks
    if HAS_RIGHT:
        m_block = num_blocks - 1 - m_block
    head = (pid // num_blocks) % num_heads_q
    b = (pid // num_blocks) // num_heads_q
    head_kv = head // group_size

    start_q, len_q = sequence(cu_seqlens_q, b, seqlen_q, total_q, VARLEN)
    start_k, len_k = sequence(cu_seqlens_k, b, seqlen_k, total_k, VARLEN)
    row_start = m_block * BLOCK_M
    if row_start >= len_q:
        return
    offset = len_k - len_q

    b64 = b.to(tl.int64)
    q_base = q_ptr + b64 * q_stride_b + start_q * q_stride_s + head.to(tl.int64) * q_stride_h
    k_base = k_ptr + b64 * k_stride_b + start_k * k_stride_s + head_kv.to(tl.int64) * k_stride_h
    v_base = v_ptr + b64 * v_stride_b + start_k * v_stride_s + head_kv.to(tl.int64) * v_stride_h
    if VARLEN:
        tile_offset = start_q * num_heads_q + head
        row_offset = head.to(tl.int64) * total_q + start_q
    else:
        tile_offset = b64 * seqlen_q * num_heads_q + head
        row_offset = (b64 * num_heads_q + head) * seqlen_q
    slope = load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI)

    q = load_tile(q_base, row_start, len_q, q_stride_s, BLOCK_M, HEAD_DIM, BLOCK_D, True, WIDE)
    dout = load_tile(
        dout_ptr + tile_offset * HEAD_DIM_V, row_start, len_q, num_heads_q * HEAD_DIM_V,
        BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, False,
    )  # fmt: skip
    lse, delta = load_statistics(lse_ptr + row_offset, delta_ptr + row_offset, row_start, len_q, BLOCK_M)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first, full_first, full_last, last = block_range(
        row_start, min(row_start + BLOCK_M, len_q), offset, len_k, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    if HAS_LEFT:
        dq = dq_blocks(
            dq, q, dout, lse, delta, k_base, v_base, k_stride_s, v_stride_s, first, full_first, row_start, offset,
            len_k, window_left, window_right, slope, softmax_scale, scale_log2, softcap, HAS_LEFT, HAS_RIGHT,
            HAS_SOFTCAP, HAS_ALIBI, BENT, True, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            WIDE, PRECISION,
        )  # fmt: skip
    dq = dq_blocks(
        dq, q, dout, lse, delta, k_base, v_base, k_stride_s, v_stride_s, full_first, full_last, row_start, offset,
        len_k, window_left, window_right, slope, softmax_scale, scale_log2, softcap, HAS_LEFT, HAS_RIGHT,
        HAS_SOFTCAP, HAS_ALIBI, BENT, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        WIDE, PRECISION,
    )  # fmt: skip
    dq = dq_blocks(
        dq, q, dout, lse, delta, k_base, v_base, k_stride_s, v_stride_s, full_last, last, row_start, offset,
        len_k, window_left, window_right, slope, softmax_scale, scale_log2, softcap, HAS_LEFT, HAS_RIGHT,
        HAS_SOFTCAP, HAS_ALIBI, BENT, True, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        WIDE, PRECISION,
    )  # fmt: skip
    store_tile(
        dq_ptr + tile_offset * HEAD_DIM, row_start, len_q, num_heads_q * HEAD_DIM, dq * softmax_scale,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
