"""Attention weights: all of them, their sums over rows, or the top of each row."""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import load_tile, row_of_head
from flashtile.backends.portable.attention.arguments import AttentionCall, attention_pointers
from flashtile.backends.portable.attention.program import (
    block_at,
    find_sequence,
    keys_of,
    own_rows,
    queries_of,
    reached_keys,
    reaching_rows,
    walk,
)
from flashtile.backends.portable.tiles import row_block
from flashtile.backends.portable.weights.steps import load_shifts, store_top, sum_rows, weigh_keys

WeightsPointers = attention_pointers("WeightsPointers", "q k lse weights indices")


@triton.jit
def column_sums(call, C: tl.constexpr):
    """Sums over rows for BLOCK_N keys. Grid: (blocks of keys * heads * batch,)."""
    pointers, lengths = call.pointers, call.lengths
    b, head, start = row_block(lengths.seqlen_k, lengths.num_heads_q, False, C.BLOCK_N)
    sequence = find_sequence(b, call, C)
    if start < sequence.len_k:
        q = queries_of(sequence, head, call)
        k = keys_of(sequence, head // lengths.group_size, call)
        block = block_at(start, sequence, head, call, C)
        row, key = first_places(sequence, head, call, C)
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        BLOCK_N: tl.constexpr = C.BLOCK_N  # a shape is made of constants, not of their fields
        sums = tl.zeros([BLOCK_N], tl.float32)
        reaching = reaching_rows(start, sequence, call, C)
        inputs = (q, k_tile, pointers.lse + row, sequence)
        sums = walk(sum_rows, sums, inputs, reaching, block, call, True, C)
        own = start + tl.arange(0, C.BLOCK_N)
        tl.store(pointers.weights + key + own, sums, mask=own < sequence.len_k)


@triton.jit
def row_weights(call, C: tl.constexpr):
    """All weights of BLOCK_M rows, or their top. Grid: (blocks of rows * heads * batch,)."""
    pointers, lengths = call.pointers, call.lengths
    sequence, head, head_kv, start = own_rows(call, C)
    if start < sequence.len_q:
        q = queries_of(sequence, head, call)
        k = keys_of(sequence, head_kv, call)
        block = block_at(start, sequence, head, call, C)
        row, _ = first_places(sequence, head, call, C)
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        shifts = load_shifts(pointers.lse + row, start + tl.arange(0, C.BLOCK_M), sequence.len_q)
        BLOCK_M: tl.constexpr = C.BLOCK_M
        COLUMNS: tl.constexpr = C.BLOCK_TOP if C.FORM == "top" else 1
        best = tl.full([BLOCK_M, COLUMNS], -1, tl.int64)
        of_head = sequence.b.to(tl.int64) * lengths.num_heads_q + head
        weights = pointers.weights + of_head * lengths.seqlen_q * lengths.seqlen_k
        reached = reached_keys(start, sequence, call, C)
        inputs = (q_tile, shifts, k, sequence, weights)
        best = walk(weigh_keys, best, inputs, reached, block, call, False, C)
        if C.FORM == "top":
            store_top(pointers.weights, pointers.indices, row, best, start, sequence.len_q, C)


@triton.jit
def first_places(sequence, head, call, C: tl.constexpr):
    """Where the rows, and the keys, of ``head`` start in tensors of heads by rows, or by keys."""
    lengths, b = call.lengths, sequence.b
    row = row_of_head(
        b, head, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q, lengths.total_q, C.VARLEN
    )
    key = row_of_head(
        b, head, sequence.start_k, lengths.num_heads_q, lengths.seqlen_k, lengths.total_k, C.VARLEN
    )
    return row, key


@kernel(do_not_specialize=("pointers", "lengths"))
def weights_kernel(pointers, strides, lengths, numbers, C: tl.constexpr):
    """Grid: (blocks of rows * heads * batch,), for "columns" (blocks of keys * heads * batch,).

    q and k as in the forward kernel; lse, weights and indices contiguous. Only what a program owns or meets
    within the window is written: weights come full of zeros, and indices of -1. The lists of a block mask are
    those of what a program owns.
    """
    call = AttentionCall(pointers, strides, lengths, numbers, 0, 0)
    if C.FORM == "columns":
        column_sums(call, C)
    else:
        row_weights(call, C)
