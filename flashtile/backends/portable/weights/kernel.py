"""Attention weights of calls without functions of the user's."""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import load_tile
from flashtile.backends.portable.arguments import Block, CellStrides, Lengths, Mods, Numbers, Strides
from flashtile.backends.portable.tiles import block_range, find_sequence, head_of, load_slope, row_block
from flashtile.backends.portable.weights.steps import load_shifts, store_top, walk_keys, walk_rows


class Pointers(NamedTuple):
    """Tensors of the kernel. From indices on, None is one that the call does not have."""

    q: Any
    k: Any
    lse: Any
    weights: Any
    indices: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    alibi_slopes: Any
    mask: Any
    key_padding_mask: Any
    bias: Any
    seqused_q: Any


@kernel(do_not_specialize=Lengths._fields)
def weights_kernel(
    q, k, lse, weights, indices, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask, key_padding_mask,
    bias, seqused_q, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, padding_stride_b,
    padding_stride_k, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, alibi_stride, num_heads_q,
    group_size, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, attention_chunk,
    drop_threshold, softmax_scale, scale_log2, softcap, keep_scale, C: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows * heads * batch,), for "columns" (blocks of keys * heads * batch,).

    q and k as in the forward kernel; lse, weights and indices contiguous. Only what a program owns or meets
    within the window is written: weights come full of zeros, and indices of -1.
    """
    pointers = Pointers(
        q, k, lse, weights, indices, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
        key_padding_mask, bias, seqused_q,
    )  # fmt: skip
    q_strides = Strides(q_stride_b, q_stride_s, q_stride_h)
    k_strides = Strides(k_stride_b, k_stride_s, k_stride_h)
    lengths = Lengths(
        alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, total_q, total_k, window_left,
        window_right, attention_chunk, drop_threshold,
    )  # fmt: skip
    numbers = Numbers(softmax_scale, scale_log2, softcap, keep_scale)
    mods = Mods(
        mask, CellStrides(mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k), key_padding_mask,
        padding_stride_b, padding_stride_k, None, bias,
        CellStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k), 0, 0,
    )  # fmt: skip
    BY_KEYS: tl.constexpr = C.FORM == "columns"
    if BY_KEYS:
        b, head, start = row_block(seqlen_k, num_heads_q, False, C.BLOCK_N)
    else:
        b, head, start = row_block(seqlen_q, num_heads_q, C.HAS_RIGHT, C.BLOCK_M)
    sequence = find_sequence(pointers, lengths, b, C)
    if start >= (sequence.len_k if BY_KEYS else sequence.len_q):
        return
    offset = sequence.len_k - sequence.len_q
    q_rows = head_of(q, q_strides, b, sequence.start_q, head, sequence.len_q)
    keys = head_of(k, k_strides, b, sequence.start_k, head // group_size, sequence.len_k)
    slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
    block = Block(b, head, start, offset, slope, None, None)
    b_and_head = b.to(tl.int64) * num_heads_q + head
    if C.VARLEN:
        first_row = head.to(tl.int64) * total_q + sequence.start_q
        first_key = head.to(tl.int64) * total_k + sequence.start_k
    else:
        first_row = b_and_head * seqlen_q
        first_key = b_and_head * seqlen_k

    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    if BY_KEYS:
        k_tile = load_tile(keys, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        first, _, _, last = block_range(
            start, min(start + C.BLOCK_N, sequence.len_k), -offset, sequence.len_q, window_right, window_left,
            C.HAS_RIGHT, C.HAS_LEFT, C.BLOCK_M,
        )  # fmt: skip
        sums = tl.zeros([BLOCK_N], tl.float32)
        sums = walk_rows(
            sums, q_rows, k_tile, lse + first_row, sequence.len_k, first, last, block, lengths, numbers, mods,
            C,
        )  # fmt: skip
        own = start + tl.arange(0, C.BLOCK_N)
        tl.store(weights + first_key + own, sums, mask=own < sequence.len_k)
    else:
        q_tile = load_tile(q_rows, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        shifts = load_shifts(lse + first_row, start + tl.arange(0, C.BLOCK_M), sequence.len_q)
        first, _, _, last = block_range(
            start, min(start + C.BLOCK_M, sequence.len_q), offset, sequence.len_k, window_left, window_right,
            C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
        )  # fmt: skip
        COLUMNS: tl.constexpr = C.BLOCK_TOP if C.FORM == "top" else 1
        best = tl.full([BLOCK_M, COLUMNS], -1, tl.int64)
        all_weights = weights + b_and_head * seqlen_q * seqlen_k
        best = walk_keys(
            best, q_tile, shifts, keys, all_weights, sequence.len_q, first, last, block, lengths, numbers,
            mods, C,
        )  # fmt: skip
        if C.FORM == "top":
            store_top(weights, indices, first_row, best, start, sequence.len_q, C)
