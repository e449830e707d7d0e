"""The portable kernels with functions of the user's, and along the lists of a block mask.

The steps are those of the kernels without functions (``forward``, ``backward_dkdv``, ``backward_dq``), which
call the functions where they modify and hide scores. Sequences are dense. A block mask's partial blocks run
with C, its full ones with FULL, which is C without ``MASK_MOD``. Without a block mask all blocks within the
window are partial: one loop, which compiles in half the time of three.
"""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import LN_2, Matrix, load_tile
from flashtile.backends.portable.arguments import Block, Lengths, Numbers
from flashtile.backends.portable.backward_dkdv import dkdv_blocks
from flashtile.backends.portable.backward_dq import dq_blocks
from flashtile.backends.portable.forward import attend_blocks, sink_step
from flashtile.backends.portable.mods.arguments import INTEGERS, Captured, Lists
from flashtile.backends.portable.tiles import block_range, load_slope, result_bases, row_block, store_tile


@triton.jit
def walk(lists, b, head, own, num_own, num_others, IS_FULL: tl.constexpr, C: tl.constexpr):
    """(blocks to visit, list) of block ``own`` of ``num_own``; within the lists whatever they say."""
    place = ((b % lists.batch) * lists.heads + head % lists.heads).to(tl.int64) * num_own + own
    if IS_FULL:
        count, listed = tl.load(lists.full_num_blocks + place), lists.full_indices
    else:
        count, listed = tl.load(lists.num_blocks + place), lists.indices
    return min(max(count, 0), num_others) * C.PARTS, listed + place * num_others


@triton.jit
def head_rows(pointer, stride_b, stride_s, stride_h, b, head, length):
    return Matrix(pointer + b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h, stride_s, length)


@kernel(do_not_specialize=INTEGERS)
def forward_kernel(
    q, k, v, out, lse, alibi_slopes, sink, captured_0, captured_1, captured_2, captured_3, captured_4,
    captured_5, captured_6, captured_7, num_blocks, indices, full_num_blocks, full_indices, q_stride_b,
    q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    list_batch, list_heads, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9,
    size_10, size_11, size_12, size_13, size_14, size_15, alibi_stride, num_heads_q, group_size, seqlen_q,
    seqlen_k, window_left, window_right, softmax_scale, scale_log2, softcap, C: tl.constexpr, FULL:
    tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows * heads * batch,). Shapes as in the kernel without functions."""
    lengths = Lengths(
        alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, 0, 0, window_left, window_right, 0, 0
    )
    numbers = Numbers(softmax_scale, scale_log2, softcap, 1.0)
    lists = Lists(num_blocks, indices, full_num_blocks, full_indices, list_batch, list_heads)
    captured = Captured(
        captured_0, captured_1, captured_2, captured_3, captured_4, captured_5, captured_6, captured_7,
        None, None, None, None, None, None, None, None, size_0, size_1, size_2, size_3, size_4, size_5,
        size_6, size_7, size_8, size_9, size_10, size_11, size_12, size_13, size_14, size_15,
    )  # fmt: skip
    b, head, row_start = row_block(seqlen_q, num_heads_q, C.HAS_RIGHT, C.BLOCK_M)
    head_kv = head // group_size
    offset = seqlen_k - seqlen_q
    q_rows = head_rows(q, q_stride_b, q_stride_s, q_stride_h, b, head, seqlen_q)
    keys = head_rows(k, k_stride_b, k_stride_s, k_stride_h, b, head_kv, seqlen_k)
    values = head_rows(v, v_stride_b, v_stride_s, v_stride_h, b, head_kv, seqlen_k)
    slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)

    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    q_tile = load_tile(q_rows, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    EDGES: tl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N
    if C.OWN > 0:
        own, num_own = row_start // C.OWN, tl.cdiv(seqlen_q, C.OWN)
        num_others = tl.cdiv(seqlen_k, C.BLOCK_N * C.PARTS)
        count, listed = walk(lists, b, head, own, num_own, num_others, True, C)
        block = Block(b, head, row_start, offset, slope, captured, listed)
        acc, row_max, row_sum = attend_blocks(
            acc, row_max, row_sum, q_tile, keys, values, 0, count, block, lengths, numbers, None, EDGES, FULL
        )
        count, listed = walk(lists, b, head, own, num_own, num_others, False, C)
        block = Block(b, head, row_start, offset, slope, captured, listed)
        acc, row_max, row_sum = attend_blocks(
            acc, row_max, row_sum, q_tile, keys, values, 0, count, block, lengths, numbers, None, True, C
        )
    else:
        block = Block(b, head, row_start, offset, slope, captured, None)
        first, _, _, last = block_range(
            row_start, min(row_start + C.BLOCK_M, seqlen_q), offset, seqlen_k, window_left, window_right,
            C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
        )  # fmt: skip
        acc, row_max, row_sum = attend_blocks(
            acc, row_max, row_sum, q_tile, keys, values, first, last, block, lengths, numbers, None, True,
            C,
        )  # fmt: skip

    if sink is not None:
        acc, row_max, row_sum = sink_step(acc, row_max, row_sum, tl.load(sink + head).to(tl.float32))
    empty = row_sum == 0.0
    out_tile = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse_rows = tl.where(empty, -float("inf"), row_max * LN_2 + tl.log(tl.where(empty, 1.0, row_sum)))
    rows = tl.arange(0, C.BLOCK_M)
    start = tl.zeros([], tl.int64)
    out_base, lse_base = result_bases(out, lse, b, head, start, num_heads_q, seqlen_q, 0, C.HEAD_DIM_V, False)
    store_tile(
        out_base, row_start, seqlen_q, num_heads_q * C.HEAD_DIM_V, out_tile, C.BLOCK_M, C.HEAD_DIM_V,
        C.BLOCK_DV,
    )  # fmt: skip
    tl.store(lse_base + row_start + rows, lse_rows, mask=row_start + rows < seqlen_q)


@kernel(do_not_specialize=("padded_rows", *INTEGERS))
def dkdv_kernel(
    q, k, v, dout, neg_lse, neg_delta, dk, dv, alibi_slopes, captured_0, captured_1, captured_2, captured_3,
    captured_4, captured_5, captured_6, captured_7, num_blocks, indices, full_num_blocks, full_indices,
    padded_rows, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h, list_batch, list_heads, size_0, size_1, size_2, size_3, size_4, size_5, size_6,
    size_7, size_8, size_9, size_10, size_11, size_12, size_13, size_14, size_15, alibi_stride, num_heads_q,
    group_size, seqlen_q, seqlen_k, window_left, window_right, softmax_scale, scale_log2, softcap, C:
    tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of keys * key/value heads * batch,). The lists are those of blocks of keys."""
    lengths = Lengths(
        alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, 0, 0, window_left, window_right, 0, 0
    )
    numbers = Numbers(softmax_scale, scale_log2, softcap, 1.0)
    lists = Lists(num_blocks, indices, full_num_blocks, full_indices, list_batch, list_heads)
    captured = Captured(
        captured_0, captured_1, captured_2, captured_3, captured_4, captured_5, captured_6, captured_7,
        None, None, None, None, None, None, None, None, size_0, size_1, size_2, size_3, size_4, size_5,
        size_6, size_7, size_8, size_9, size_10, size_11, size_12, size_13, size_14, size_15,
    )  # fmt: skip
    num_blocks_k = tl.cdiv(seqlen_k, C.BLOCK_N)
    num_heads_kv = num_heads_q // group_size
    pid = tl.program_id(0)
    key_start = (pid % num_blocks_k) * C.BLOCK_N
    head_kv = (pid // num_blocks_k) % num_heads_kv
    b = (pid // num_blocks_k) // num_heads_kv
    b64 = b.to(tl.int64)
    offset = seqlen_k - seqlen_q
    keys = head_rows(k, k_stride_b, k_stride_s, k_stride_h, b, head_kv, seqlen_k)
    values = head_rows(v, v_stride_b, v_stride_s, v_stride_h, b, head_kv, seqlen_k)
    dout_base = dout + b64 * seqlen_q * num_heads_q * C.HEAD_DIM_V
    key_offset = b64 * seqlen_k * num_heads_kv + head_kv

    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    k_tile = load_tile(keys, key_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
    v_tile = load_tile(values, key_start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    WINDOWED: tl.constexpr = C.HAS_LEFT or C.HAS_RIGHT
    first, _, _, last = block_range(
        key_start, min(key_start + C.BLOCK_N, seqlen_k), -offset, seqlen_q, window_right, window_left,
        C.HAS_RIGHT, C.HAS_LEFT, C.BLOCK_M,
    )  # fmt: skip
    for g in range(group_size):
        head = head_kv * group_size + g
        slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
        q_rows = head_rows(q, q_stride_b, q_stride_s, q_stride_h, b, head, seqlen_q)
        dout_rows = Matrix(dout_base + head * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, seqlen_q)
        statistics = statistics_offset(b, head, 0, num_heads_q, padded_rows, False)
        if C.OWN > 0:
            own, num_own = key_start // C.OWN, tl.cdiv(seqlen_k, C.OWN)
            num_others = tl.cdiv(seqlen_q, C.BLOCK_M * C.PARTS)
            count, listed = walk(lists, b, head, own, num_own, num_others, True, C)
            block = Block(b, head, key_start, offset, slope, captured, listed)
            dk_tile, dv_tile = dkdv_blocks(
                dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, neg_lse + statistics,
                neg_delta + statistics, 0, count, block, lengths, numbers, None, WINDOWED, FULL,
            )  # fmt: skip
            count, listed = walk(lists, b, head, own, num_own, num_others, False, C)
            block = Block(b, head, key_start, offset, slope, captured, listed)
            dk_tile, dv_tile = dkdv_blocks(
                dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, neg_lse + statistics,
                neg_delta + statistics, 0, count, block, lengths, numbers, None, True, C,
            )  # fmt: skip
        else:
            block = Block(b, head, key_start, offset, slope, captured, None)
            dk_tile, dv_tile = dkdv_blocks(
                dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, neg_lse + statistics,
                neg_delta + statistics, first, last, block, lengths, numbers, None, True, C,
            )  # fmt: skip

    store_tile(
        dk + key_offset * C.HEAD_DIM, key_start, seqlen_k, num_heads_kv * C.HEAD_DIM, dk_tile * softmax_scale,
        C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv + key_offset * C.HEAD_DIM_V, key_start, seqlen_k, num_heads_kv * C.HEAD_DIM_V, dv_tile, C.BLOCK_N,
        C.HEAD_DIM_V, C.BLOCK_DV,
    )  # fmt: skip


@kernel(do_not_specialize=("padded_rows", *INTEGERS))
def dq_kernel(
    q, k, v, dout, neg_lse, neg_delta, dq, alibi_slopes, captured_0, captured_1, captured_2, captured_3,
    captured_4, captured_5, captured_6, captured_7, num_blocks, indices, full_num_blocks, full_indices,
    gradient_0, gradient_1, gradient_2, gradient_3, gradient_4, gradient_5, gradient_6, gradient_7,
    padded_rows, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h, list_batch, list_heads, size_0, size_1, size_2, size_3, size_4, size_5, size_6,
    size_7, size_8, size_9, size_10, size_11, size_12, size_13, size_14, size_15, alibi_stride, num_heads_q,
    group_size, seqlen_q, seqlen_k, window_left, window_right, softmax_scale, scale_log2, softcap, C:
    tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows * heads * batch,). Adds to the gradients of captured tensors, fp32, as well."""
    lengths = Lengths(
        alibi_stride, num_heads_q, group_size, seqlen_q, seqlen_k, 0, 0, window_left, window_right, 0, 0
    )
    numbers = Numbers(softmax_scale, scale_log2, softcap, 1.0)
    lists = Lists(num_blocks, indices, full_num_blocks, full_indices, list_batch, list_heads)
    captured = Captured(
        captured_0, captured_1, captured_2, captured_3, captured_4, captured_5, captured_6, captured_7,
        gradient_0, gradient_1, gradient_2, gradient_3, gradient_4, gradient_5, gradient_6, gradient_7,
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10, size_11,
        size_12, size_13, size_14, size_15,
    )  # fmt: skip
    b, head, row_start = row_block(seqlen_q, num_heads_q, C.HAS_RIGHT, C.BLOCK_M)
    head_kv = head // group_size
    offset = seqlen_k - seqlen_q
    q_rows = head_rows(q, q_stride_b, q_stride_s, q_stride_h, b, head, seqlen_q)
    keys = head_rows(k, k_stride_b, k_stride_s, k_stride_h, b, head_kv, seqlen_k)
    values = head_rows(v, v_stride_b, v_stride_s, v_stride_h, b, head_kv, seqlen_k)
    tile_offset = b.to(tl.int64) * seqlen_q * num_heads_q + head
    slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)

    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    q_tile = load_tile(q_rows, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    dout_rows = Matrix(dout + tile_offset * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, seqlen_q)
    dout_tile = load_tile(dout_rows, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
    statistics = statistics_offset(b, head, 0, num_heads_q, padded_rows, False)
    statistics += row_start + tl.arange(0, C.BLOCK_M)
    neg_lse_rows = tl.load(neg_lse + statistics)
    neg_delta_rows = tl.load(neg_delta + statistics)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    EDGES: tl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N
    if C.OWN > 0:
        own, num_own = row_start // C.OWN, tl.cdiv(seqlen_q, C.OWN)
        num_others = tl.cdiv(seqlen_k, C.BLOCK_N * C.PARTS)
        count, listed = walk(lists, b, head, own, num_own, num_others, True, C)
        block = Block(b, head, row_start, offset, slope, captured, listed)
        dq_tile = dq_blocks(
            dq_tile, q_tile, dout_tile, neg_lse_rows, neg_delta_rows, keys, values, 0, count, block, lengths,
            numbers, None, EDGES, FULL,
        )  # fmt: skip
        count, listed = walk(lists, b, head, own, num_own, num_others, False, C)
        block = Block(b, head, row_start, offset, slope, captured, listed)
        dq_tile = dq_blocks(
            dq_tile, q_tile, dout_tile, neg_lse_rows, neg_delta_rows, keys, values, 0, count, block, lengths,
            numbers, None, True, C,
        )  # fmt: skip
    else:
        block = Block(b, head, row_start, offset, slope, captured, None)
        first, _, _, last = block_range(
            row_start, min(row_start + C.BLOCK_M, seqlen_q), offset, seqlen_k, window_left, window_right,
            C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
        )  # fmt: skip
        dq_tile = dq_blocks(
            dq_tile, q_tile, dout_tile, neg_lse_rows, neg_delta_rows, keys, values, first, last, block,
            lengths, numbers, None, True, C,
        )  # fmt: skip
    store_tile(
        dq + tile_offset * C.HEAD_DIM, row_start, seqlen_q, num_heads_q * C.HEAD_DIM, dq_tile * softmax_scale,
        C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
