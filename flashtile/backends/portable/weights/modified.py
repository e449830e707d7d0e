"""Attention weights of calls with functions of the user's, and along the lists of a block mask."""

import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import load_tile
from flashtile.backends.portable.arguments import Block, Lengths, Numbers
from flashtile.backends.portable.mods.arguments import INTEGERS, Captured, Lists
from flashtile.backends.portable.mods.kernels import head_rows, walk
from flashtile.backends.portable.tiles import block_range, load_slope, row_block
from flashtile.backends.portable.weights.steps import load_shifts, store_top, walk_keys, walk_rows


@kernel(do_not_specialize=INTEGERS)
def modified_weights_kernel(
    q, k, lse, weights, indices, alibi_slopes, captured_0, captured_1, captured_2, captured_3, captured_4,
    captured_5, captured_6, captured_7, num_blocks, listed_blocks, full_num_blocks, full_indices, q_stride_b,
    q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    list_batch, list_heads, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9,
    size_10, size_11, size_12, size_13, size_14, size_15, alibi_stride, num_heads_q, group_size, seqlen_q,
    seqlen_k, window_left, window_right, softmax_scale, scale_log2, softcap, C: tl.constexpr, FULL:
    tl.constexpr,
):  # fmt: skip
    """Grid and shapes as in the kernel without functions; the lists are those of what a program owns."""
    lengths = Lengths(
        alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, 0, 0, window_left, window_right, 0, 0
    )
    numbers = Numbers(softmax_scale, scale_log2, softcap, 1.0)
    lists = Lists(num_blocks, listed_blocks, full_num_blocks, full_indices, list_batch, list_heads)
    captured = Captured(
        captured_0, captured_1, captured_2, captured_3, captured_4, captured_5, captured_6, captured_7,
        None, None, None, None, None, None, None, None, size_0, size_1, size_2, size_3, size_4, size_5,
        size_6, size_7, size_8, size_9, size_10, size_11, size_12, size_13, size_14, size_15,
    )  # fmt: skip
    BY_KEYS: tl.constexpr = C.FORM == "columns"
    if BY_KEYS:
        b, head, start = row_block(seqlen_k, num_heads_q, False, C.BLOCK_N)
    else:
        b, head, start = row_block(seqlen_q, num_heads_q, C.HAS_RIGHT, C.BLOCK_M)
    offset = seqlen_k - seqlen_q
    q_rows = head_rows(q, q_stride_b, q_stride_s, q_stride_h, b, head, seqlen_q)
    keys = head_rows(k, k_stride_b, k_stride_s, k_stride_h, b, head // group_size, seqlen_k)
    slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
    b_and_head = b.to(tl.int64) * num_heads_q + head
    lse_rows = lse + b_and_head * seqlen_q

    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    if BY_KEYS:
        k_tile = load_tile(keys, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        sums = tl.zeros([BLOCK_N], tl.float32)
        if C.OWN > 0:
            own, num_own = start // C.OWN, tl.cdiv(seqlen_k, C.OWN)
            num_others = tl.cdiv(seqlen_q, C.BLOCK_M * C.PARTS)
            count, listed = walk(lists, b, head, own, num_own, num_others, True, C)
            block = Block(b, head, start, offset, slope, captured, listed)
            sums = walk_rows(
                sums, q_rows, k_tile, lse_rows, seqlen_k, 0, count, block, lengths, numbers, None, FULL
            )
            count, listed = walk(lists, b, head, own, num_own, num_others, False, C)
            block = Block(b, head, start, offset, slope, captured, listed)
            sums = walk_rows(
                sums, q_rows, k_tile, lse_rows, seqlen_k, 0, count, block, lengths, numbers, None, C
            )
        else:
            block = Block(b, head, start, offset, slope, captured, None)
            first, _, _, last = block_range(
                start, min(start + C.BLOCK_N, seqlen_k), -offset, seqlen_q, window_right, window_left,
                C.HAS_RIGHT, C.HAS_LEFT, C.BLOCK_M,
            )  # fmt: skip
            sums = walk_rows(
                sums, q_rows, k_tile, lse_rows, seqlen_k, first, last, block, lengths, numbers, None, C
            )
        places = start + tl.arange(0, C.BLOCK_N)
        tl.store(weights + b_and_head * seqlen_k + places, sums, mask=places < seqlen_k)
    else:
        q_tile = load_tile(q_rows, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        shifts = load_shifts(lse_rows, start + tl.arange(0, C.BLOCK_M), seqlen_q)
        all_weights = weights + b_and_head * seqlen_q * seqlen_k
        COLUMNS: tl.constexpr = C.BLOCK_TOP if C.FORM == "top" else 1
        best = tl.full([BLOCK_M, COLUMNS], -1, tl.int64)
        if C.OWN > 0:
            own, num_own = start // C.OWN, tl.cdiv(seqlen_q, C.OWN)
            num_others = tl.cdiv(seqlen_k, C.BLOCK_N * C.PARTS)
            count, listed = walk(lists, b, head, own, num_own, num_others, True, C)
            block = Block(b, head, start, offset, slope, captured, listed)
            best = walk_keys(
                best, q_tile, shifts, keys, all_weights, seqlen_q, 0, count, block, lengths, numbers, None,
                FULL,
            )  # fmt: skip
            count, listed = walk(lists, b, head, own, num_own, num_others, False, C)
            block = Block(b, head, start, offset, slope, captured, listed)
            best = walk_keys(
                best, q_tile, shifts, keys, all_weights, seqlen_q, 0, count, block, lengths, numbers, None, C
            )
        else:
            block = Block(b, head, start, offset, slope, captured, None)
            first, _, _, last = block_range(
                start, min(start + C.BLOCK_M, seqlen_q), offset, seqlen_k, window_left, window_right,
                C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
            )  # fmt: skip
            best = walk_keys(
                best, q_tile, shifts, keys, all_weights, seqlen_q, first, last, block, lengths, numbers,
                None, C,
            )  # fmt: skip
        if C.FORM == "top":
            store_top(weights, indices, b_and_head * seqlen_q, best, start, seqlen_q, C)
