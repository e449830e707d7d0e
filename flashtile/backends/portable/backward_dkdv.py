"""dK and dV of FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

One program owns BLOCK_N keys of one key/value head and walks the rows that reach them, of every query head of
its group (so GQA sums in registers), recomputing probabilities transposed: S^T = K Q^T, P^T = exp(S^T - lse),
dV += P^T dO, dP^T = V dO^T, dS^T = P^T * (dP^T - delta), dK += dS^T Q. No atomics: one program sums each
gradient, in one order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import Matrix, load_tile
from flashtile.backends.portable.arguments import Block, CellStrides, Lengths, Mods, Numbers, Strides
from flashtile.backends.portable.tiles import (
    block_range,
    bounded,
    cells_of,
    chunk_range,
    find_sequence,
    head_of,
    kept_cells,
    kept_or_zero,
    load_slope,
    load_state,
    modify_scores,
    seen_cells,
    sequence_and_head,
    store_tile,
    walked_block,
)


class Pointers(NamedTuple):
    """Tensors of the kernel. From cu_seqlens_q on, None is one that the call does not have."""

    q: Any
    k: Any
    v: Any
    dout: Any
    neg_lse: Any
    neg_delta: Any
    dk: Any
    dv: Any
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
def load_statistics(pointer, start, length, other, block, C: tl.constexpr):
    """Of the rows from ``start`` on. Those of a list may lie past all that there is for the sequence."""
    if block.listed is None:  # the start is added to the pointer: with Triton 3.6 a sum of rows spills
        return tl.load(pointer + start + tl.arange(0, C.BLOCK_M))
    else:
        rows = start + tl.arange(0, C.BLOCK_M)
        return tl.load(pointer + rows, mask=rows < length, other=other)


@triton.jit
def dkdv_blocks(
    dk, dv, k, v, q, dout, neg_lse, neg_delta, first, last, block, lengths, numbers, mods, WINDOWED:
    tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Row blocks ``first`` to ``last`` (exclusive) of one query head into dk, dv of the keys of ``block``.

    k and v are tiles; q and dout are matrices in memory, neg_lse and neg_delta the addresses of their first
    row's. Rows past the end load as zeros that no key reaches, so only the window needs a mask (WINDOWED).
    """
    for m in range(first, last):
        start = walked_block(block, m, q.length, C.BLOCK_M, C) * C.BLOCK_M
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
        neg_lse_rows = load_statistics(neg_lse, start, q.length, -float("inf"), block, C)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=C.PRECISION)  # S^T [BLOCK_N, BLOCK_M]
        if C.HAS_SCORE_MOD or WINDOWED:
            keys = block.start + tl.arange(0, C.BLOCK_N)
            rows = start + tl.arange(0, C.BLOCK_M)
            cells = cells_of(block, rows, keys, KEYS_FIRST=True)
        if C.HAS_SCORE_MOD:
            scores, score_grad = modify_scores(scores, cells, block, lengths, numbers, mods, C)
            p = tl.exp2(scores + neg_lse_rows[None, :])
        else:
            p = tl.exp2(scores * numbers.scale_log2 + neg_lse_rows[None, :])
        if WINDOWED:
            seen = seen_cells(cells, block, lengths, mods, C)
            p = tl.where(seen, p, 0.0)
        if C.GUARD_SCORES:  # SCORE_MOD may make anything of rows past the end
            p = tl.where(neg_lse_rows[None, :] == -float("inf"), 0.0, p)
        dout_tile = load_tile(dout, start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
        kept_p = p
        if C.HAS_DROPOUT:
            kept = kept_cells(block, start, block.start, lengths, mods, True, C)
            kept_p = kept_or_zero(p, kept, numbers)
        kept_p = kept_p.to(dout_tile.dtype)
        dv = tl.dot(kept_p, dout_tile, dv, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_DV]
        # Loaded late: it runs along the columns, where a thread holds many of it.
        neg_delta_rows = load_statistics(neg_delta, start, q.length, 0.0, block, C)
        dp = tl.dot(v, tl.trans(dout_tile), input_precision=C.PRECISION)  # dP^T [BLOCK_N, BLOCK_M]
        if C.HAS_DROPOUT:
            dp = tl.where(kept, dp * numbers.keep_scale, 0.0)
        ds = p * (dp + neg_delta_rows[None, :])
        if C.HAS_SOFTCAP or C.SCORE_MOD is not None:
            ds = ds * score_grad
        if C.GUARD_FACTORS:  # score_grad need not be finite where a score is hidden
            ds = tl.where(p == 0.0, 0.0, ds)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@kernel(do_not_specialize=("padded_rows", *Lengths._fields))
def dkdv_kernel(
    q, k, v, dout, neg_lse, neg_delta, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
    key_padding_mask, bias, rng_state, seqused_q, key_bounds, padded_rows, q_stride_b, q_stride_s, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, mask_stride_b, mask_stride_h,
    mask_stride_q, mask_stride_k, padding_stride_b, padding_stride_k, bias_stride_b, bias_stride_h,
    bias_stride_q, bias_stride_k, alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, total_q, total_k,
    window_left, window_right, attention_chunk, drop_threshold, softmax_scale, scale_log2, softcap,
    keep_scale, C: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of keys * key/value heads * batch,). Shapes as in the forward kernel; dout, dk, dv
    contiguous; neg_lse and neg_delta as ``common.preprocess`` lays them out. Keys that are not used are not
    written."""
    pointers = Pointers(
        q, k, v, dout, neg_lse, neg_delta, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
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

    num_blocks = tl.cdiv(seqlen_k, C.BLOCK_N)
    num_heads_kv = num_heads_q // group_size
    pid = tl.program_id(0)
    key_start = (pid % num_blocks) * C.BLOCK_N
    b, head_kv = sequence_and_head(pid // num_blocks, num_blocks, num_heads_kv, C.SEQUENCES_FIRST)
    sequence = find_sequence(pointers, lengths, b, C)
    if key_start >= sequence.len_k:
        return
    offset = sequence.len_k - sequence.len_q
    b64 = b.to(tl.int64)
    q_base = q + b64 * q_strides.batch + sequence.start_q * q_strides.token
    keys = head_of(k, k_strides, b, sequence.start_k, head_kv, sequence.len_k)
    values = head_of(v, v_strides, b, sequence.start_k, head_kv, sequence.len_k)
    if C.VARLEN:
        dout_base = dout + sequence.start_q * num_heads_q * C.HEAD_DIM_V
        key_offset = sequence.start_k * num_heads_kv + head_kv
    else:
        dout_base = dout + b64 * seqlen_q * num_heads_q * C.HEAD_DIM_V
        key_offset = b64 * seqlen_k * num_heads_kv + head_kv

    BLOCK_N: tl.constexpr = C.BLOCK_N  # a shape is made of constants, not of their fields
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    k_tile = load_tile(keys, key_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
    v_tile = load_tile(values, key_start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Seen from the keys, the window is mirrored: a key reaches window_right rows back and window_left ahead.
    first, full_first, full_last, last = block_range(
        key_start, min(key_start + C.BLOCK_N, sequence.len_k), -offset, sequence.len_q, window_right,
        window_left, C.HAS_RIGHT, C.HAS_LEFT, C.BLOCK_M,
    )  # fmt: skip
    if C.HIDES:
        if C.HAS_CHUNK:
            chunk_start, chunk_end = chunk_range(
                key_start, min(key_start + C.BLOCK_N, sequence.len_k), lengths.attention_chunk
            )
            first = max(first, (chunk_start - offset) // C.BLOCK_M)
            last = min(last, (max(chunk_end - offset, 0) + C.BLOCK_M - 1) // C.BLOCK_M)
        full_last = first  # one run, which takes a mask throughout
        if C.HAS_PADDING:  # a block without a key that takes part has nothing to do
            first_keys, last_keys = bounded(
                key_start // C.BLOCK_N, key_start // C.BLOCK_N + 1, mods, b, C.BLOCK_N, C
            )
            last = first if first_keys >= last_keys else last
    elif not C.HAS_LEFT:
        full_last = last
    for g in range(group_size):
        head = head_kv * group_size + g
        slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
        block = Block(b, head, key_start, offset, slope, None, None)
        q_rows = Matrix(q_base + head.to(tl.int64) * q_strides.head, q_strides.token, sequence.len_q)
        dout_rows = Matrix(dout_base + head * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, sequence.len_q)
        statistics = statistics_offset(b, head, sequence.start_q, num_heads_q, padded_rows, C.VARLEN)
        # One edge of the window, the rows that reach every key of the block, the other edge.
        for RUN in tl.static_range(3):
            if (
                (RUN == 0 and C.HAS_RIGHT and not C.HIDES)
                or (RUN == 1 and not C.HIDES)
                or (RUN == 2 and (C.HAS_LEFT or C.HIDES))
            ):
                begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
                end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
                dk_tile, dv_tile = dkdv_blocks(
                    dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, neg_lse + statistics,
                    neg_delta + statistics, begin, end, block, lengths, numbers, mods, RUN != 1, C,
                )  # fmt: skip

    if C.HAS_DROPOUT:
        dv_tile = dv_tile * keep_scale
    store_tile(
        dk + key_offset * C.HEAD_DIM, key_start, sequence.len_k, num_heads_kv * C.HEAD_DIM,
        dk_tile * softmax_scale, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv + key_offset * C.HEAD_DIM_V, key_start, sequence.len_k, num_heads_kv * C.HEAD_DIM_V, dv_tile,
        C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV,
    )  # fmt: skip
