"""The gradient of an additive bias, dS = P * (dP - delta), summed over what the bias is broadcast along.

One program owns BLOCK_M by BLOCK_N cells of the bias and walks the sequences, query heads and, if the bias is
the same for all rows, blocks of rows that share them. It recomputes P and dP, two products more than the
gradients of q, k and v take, and buys a sum in one order, without atomics and without dS in memory. Its part
of the bias is loaded once.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import Matrix, load_tile
from flashtile.backends.portable.arguments import (
    Block,
    Cells,
    CellStrides,
    Lengths,
    Mods,
    Numbers,
    Strides,
)
from flashtile.backends.portable.tiles import (
    cells_of,
    chunk_range,
    find_sequence,
    head_of,
    kept_cells,
    load_cells,
    load_slope,
    load_state,
    modify_scores,
    seen_cells,
)


class Pointers(NamedTuple):
    """Tensors of the kernel. From cu_seqlens_q on, None is one that the call does not have."""

    q: Any
    k: Any
    v: Any
    dout: Any
    neg_lse: Any
    neg_delta: Any
    dbias: Any
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
def bias_gradient(
    q, k, v, dout, bias, neg_lse, neg_delta, rows, keys, key_start, block, lengths, numbers, mods, C:
    tl.constexpr,
):  # fmt: skip
    """dS [BLOCK_M, BLOCK_N]; q, k, v, dout and bias are tiles, neg_lse and neg_delta [BLOCK_M]."""
    scores = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
    dp = tl.dot(dout, tl.trans(v), input_precision=C.PRECISION)
    cells = cells_of(block, rows, keys, KEYS_FIRST=False)
    scores, _ = modify_scores(scores, cells, block, lengths, numbers, mods, C, bias)
    p = tl.exp2(scores + neg_lse[:, None])
    p = tl.where(seen_cells(cells, block, lengths, mods, C), p, 0.0)
    if C.HAS_DROPOUT:
        kept = kept_cells(block, block.start, key_start, lengths, mods, False, C)
        dp = tl.where(kept, dp * numbers.keep_scale, 0.0)
    return p * (dp + neg_delta[:, None])


INTEGERS = ("batch", "bias_batch", "bias_heads", "bias_rows", "padded_rows", *Lengths._fields)


@kernel(do_not_specialize=INTEGERS)
def dbias_kernel(
    q, k, v, dout, neg_lse, neg_delta, dbias, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
    key_padding_mask, bias, rng_state, seqused_q, key_bounds, batch, bias_batch, bias_heads, bias_rows,
    padded_rows, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, padding_stride_b,
    padding_stride_k, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, alibi_stride, num_heads_q,
    group_size, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, attention_chunk,
    drop_threshold, softmax_scale, scale_log2, softcap, keep_scale, C: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of keys * blocks of rows * bias_heads * bias_batch,). dbias [bias_batch, bias_heads,
    bias_rows, seqlen_k] contiguous; sizes of the bias are 1 where it is broadcast. The others as in the
    kernel of dQ."""
    pointers = Pointers(
        q, k, v, dout, neg_lse, neg_delta, dbias, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, mask,
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

    BLOCK_M: tl.constexpr = C.BLOCK_M  # a shape is made of constants, not of their fields
    BLOCK_N: tl.constexpr = C.BLOCK_N
    key_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    row_blocks = tl.cdiv(bias_rows, BLOCK_M)
    pid = tl.program_id(0)
    key_start = (pid % key_blocks) * BLOCK_N
    own_block = (pid // key_blocks) % row_blocks
    own_head = (pid // (key_blocks * row_blocks)) % bias_heads
    own_sequence = pid // (key_blocks * row_blocks * bias_heads)
    # What the bias has of its own is this program's; what it is broadcast along, all of it.
    sequences = batch // bias_batch
    heads = num_heads_q // bias_heads
    blocks = 1
    if not C.BIAS_HAS_ROWS:
        blocks = tl.cdiv(seqlen_q, BLOCK_M)

    # One loop over sequences and heads where sequences are alike: of its rounds several are loaded at once.
    ALIKE: tl.constexpr = not C.VARLEN and seqused_q is None and seqused_k is None
    rounds = heads
    if ALIKE:
        rounds = heads * sequences
        sequences = 1

    ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    keys = key_start + tl.arange(0, BLOCK_N)
    own_rows = own_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # What is summed over has the same bias: that is what it is broadcast along.
    own = Cells(own_sequence, own_head, own_rows[:, None], keys[None, :], 0, 0)
    own_bias = load_cells(bias, mods.bias_strides, own, lengths, C.BIAS_HAS_ROWS, 0.0, C)
    for i in range(sequences):
        sequence = find_sequence(pointers, lengths, own_sequence + i, C)
        offset = sequence.len_k - sequence.len_q
        for m in range(blocks):
            row_start = (own_block + m) * BLOCK_M
            reached = (row_start < sequence.len_q) & (key_start < sequence.len_k)
            if C.HAS_RIGHT:
                reached = reached & (key_start <= row_start + BLOCK_M - 1 + offset + window_right)
            if C.HAS_LEFT:
                reached = reached & (key_start + BLOCK_N > row_start + offset - window_left)
            if C.HAS_CHUNK:
                chunk_start, chunk_end = chunk_range(
                    row_start + offset, row_start + BLOCK_M + offset, attention_chunk
                )
                reached = reached & (key_start < chunk_end) & (key_start + BLOCK_N > chunk_start)
            rows = row_start + tl.arange(0, BLOCK_M)
            # A loop without rounds rather than a branch: the accumulator stays where it is.
            for n in range(tl.where(reached, rounds, 0)):
                b = own_sequence + i + n // heads
                head = own_head + n % heads
                slope = load_slope(alibi_slopes, alibi_stride, b, head, C.HAS_ALIBI)
                block = Block(b, head, row_start, offset, slope, None, None)
                head_kv = head // group_size
                q_rows = head_of(q, q_strides, b, sequence.start_q, head, sequence.len_q)
                k_rows = head_of(k, k_strides, b, sequence.start_k, head_kv, sequence.len_k)
                v_rows = head_of(v, v_strides, b, sequence.start_k, head_kv, sequence.len_k)
                if C.VARLEN:
                    first_row = sequence.start_q * num_heads_q + head
                else:
                    first_row = b.to(tl.int64) * seqlen_q * num_heads_q + head
                dout_rows = Matrix(
                    dout + first_row * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, sequence.len_q
                )
                statistics = statistics_offset(b, head, sequence.start_q, num_heads_q, padded_rows, C.VARLEN)
                statistics += rows
                q_tile = load_tile(q_rows, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
                k_tile = load_tile(k_rows, key_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
                v_tile = load_tile(
                    v_rows, key_start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE
                )
                dout_tile = load_tile(
                    dout_rows, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False
                )
                term = bias_gradient(
                    q_tile, k_tile, v_tile, dout_tile, own_bias, tl.load(neg_lse + statistics),
                    tl.load(neg_delta + statistics), rows, keys, key_start, block, lengths, numbers, mods, C,
                )  # fmt: skip
                if C.EVEN_N:
                    ds += term
                else:
                    ds += tl.where((keys < sequence.len_k)[None, :], term, 0.0)

    row_stride = seqlen_k
    if C.EVEN_N:
        row_stride = tl.multiple_of(row_stride, 16)
    cells = dbias + ((own_sequence.to(tl.int64) * bias_heads + own_head) * bias_rows) * row_stride + keys
    if C.BIAS_HAS_ROWS:
        inside = (own_rows < bias_rows)[:, None] & (keys < seqlen_k)[None, :]
        places = cells[None, :] + own_rows.to(tl.int64)[:, None] * row_stride
        tl.store(places, ds.to(dbias.dtype.element_ty), mask=inside)
    else:
        tl.store(cells, tl.sum(ds, 0).to(dbias.dtype.element_ty), mask=keys < seqlen_k)
