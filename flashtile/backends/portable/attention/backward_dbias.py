"""The gradient of an additive bias: dS = P * (dP - delta), summed over the bias's broadcast dimensions.

One program owns BLOCK_M by BLOCK_N elements of the bias. It walks the sequences, query heads and, if the bias
is the same for all rows, blocks of rows that share these elements. It loads its elements of the bias once. It
recomputes P and dP, which takes two products more than the gradients of q, k and v alone. In return each sum
has one fixed order, and neither atomics nor dS in memory are needed.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.tiles import Matrix, load_tile
from flashtile.backends.portable.attention.arguments import (
    AttentionCall,
    AttentionSequence,
    ScoreIndices,
    attention_pointers,
)
from flashtile.backends.portable.attention.program import (
    block_at,
    find_sequence,
    keys_of,
    own_row,
    queries_of,
    statistics_of,
    values_of,
)
from flashtile.backends.portable.attention.scores import (
    dropout_mask,
    load_broadcast,
    load_state,
    modify_scores,
    score_indices,
    visible_scores,
)
from flashtile.backends.portable.tiles import chunk_range

DbiasPointers = attention_pointers("DbiasPointers", "q k v dout neg_lse neg_delta dbias", __name__)


class BiasSizes(NamedTuple):
    """Batch size of the call, and the sizes of the bias, which are 1 where the bias broadcasts."""

    batch: Any
    bias_batch: Any
    bias_heads: Any
    bias_rows: Any


@triton.jit
def is_reached(row_start, key_start, sequence, call, C: tl.constexpr):
    """Return whether any row of a tile may see any of its keys, judged by lengths, window and chunks.

    The tile has BLOCK_M rows from ``row_start`` on and BLOCK_N keys from ``key_start`` on.
    """
    lengths = call.lengths
    offset = sequence.len_k - sequence.len_q
    reached = (row_start < sequence.len_q) & (key_start < sequence.len_k)
    if C.HAS_RIGHT:
        reached = reached & (key_start <= row_start + C.BLOCK_M - 1 + offset + lengths.window_right)
    if C.HAS_LEFT:
        reached = reached & (key_start + C.BLOCK_N > row_start + offset - lengths.window_left)
    if C.HAS_CHUNK:
        chunk_start, chunk_end = chunk_range(
            row_start + offset, row_start + C.BLOCK_M + offset, lengths.attention_chunk
        )
        reached = reached & (key_start < chunk_end) & (key_start + C.BLOCK_N > chunk_start)
    return reached


@triton.jit
def bias_gradient(bias, row_start, key_start, sequence, head, padded_rows, call, C: tl.constexpr):
    """Return dS [BLOCK_M, BLOCK_N] of one head. ``bias``: the tile of the bias, [BLOCK_M, BLOCK_N]."""
    head_kv = head // call.lengths.group_size
    block = block_at(row_start, sequence, head, call, C)
    rows = row_start + tl.arange(0, C.BLOCK_M)
    keys = key_start + tl.arange(0, C.BLOCK_N)
    q = queries_of(sequence, head, call)
    row = own_row(sequence, call, C) + head
    dout = Matrix(
        call.pointers.dout + row * C.HEAD_DIM_V, call.lengths.num_heads_q * C.HEAD_DIM_V, sequence.len_q
    )
    k, v = keys_of(sequence, head_kv, call), values_of(sequence, head_kv, call)
    statistics = statistics_of(sequence, head, padded_rows, call, C) + rows
    q_tile = load_tile(q, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    k_tile = load_tile(k, key_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
    v_tile = load_tile(v, key_start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
    dout_tile = load_tile(dout, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
    neg_lse = tl.load(call.pointers.neg_lse + statistics)
    neg_delta = tl.load(call.pointers.neg_delta + statistics)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=C.PRECISION)
    at = score_indices(block, rows, keys, KEYS_FIRST=False)
    scores, _ = modify_scores(scores, at, block, call, C, bias)
    p = tl.exp2(scores + neg_lse[:, None])
    p = tl.where(visible_scores(at, call, C), p, 0.0)
    if C.HAS_DROPOUT:
        kept = dropout_mask(block, row_start, key_start, call, False, C)
        dp = tl.where(kept, dp * call.numbers.keep_scale, 0.0)
    ds = p * (dp + neg_delta[:, None])
    if not C.EVEN_N:
        ds = tl.where((keys < sequence.len_k)[None, :], ds, 0.0)
    return ds


@kernel(do_not_specialize=("pointers", "sizes", "padded_rows", "lengths"))
def dbias_kernel(pointers, sizes, padded_rows, strides, lengths, numbers, C: tl.constexpr):
    """Compute the gradient of the bias, BLOCK_M by BLOCK_N elements per program.

    Grid: (blocks of keys * blocks of rows * bias_heads * bias_batch,). dbias [bias_batch, bias_heads,
    bias_rows, seqlen_k] is contiguous. Other arguments are those of ``dq_kernel``.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    BLOCK_M: tl.constexpr = C.BLOCK_M  # Triton does not accept a field of C in a shape
    BLOCK_N: tl.constexpr = C.BLOCK_N
    key_blocks = tl.cdiv(lengths.seqlen_k, BLOCK_N)
    row_blocks = tl.cdiv(sizes.bias_rows, BLOCK_M)
    pid = tl.program_id(0)
    key_start = (pid % key_blocks) * BLOCK_N
    own_block = (pid // key_blocks) % row_blocks
    own_head = (pid // (key_blocks * row_blocks)) % sizes.bias_heads
    own_sequence = pid // (key_blocks * row_blocks * sizes.bias_heads)
    # The program sums over all sequences, heads and row blocks that share its elements of the bias.
    sequences = sizes.batch // sizes.bias_batch
    heads = lengths.num_heads_q // sizes.bias_heads
    blocks = 1
    if not C.BIAS_HAS_ROWS:
        blocks = tl.cdiv(lengths.seqlen_q, BLOCK_M)

    # If all sequences have the same length, one loop covers sequences and heads, so its loads pipeline.
    ALIKE: tl.constexpr = not C.VARLEN and pointers.seqused_q is None and pointers.seqused_k is None
    rounds = heads
    if ALIKE:
        rounds = heads * sequences
        sequences = 1

    ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    keys = key_start + tl.arange(0, BLOCK_N)
    own_rows = own_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # All rows that are summed over share this bias, since it is broadcast along them.
    own = ScoreIndices(own_sequence, own_head, own_rows[:, None], keys[None, :], 0, 0)
    own_bias = load_broadcast(pointers.bias, strides.bias, own, lengths, C.BIAS_HAS_ROWS, 0.0, C)
    for i in range(sequences):
        first = find_sequence(own_sequence + i, call, C)
        for m in range(blocks):
            row_start = (own_block + m) * BLOCK_M
            # A loop of zero rounds instead of a branch: the accumulator stays in its registers.
            for n in range(tl.where(is_reached(row_start, key_start, first, call, C), rounds, 0)):
                b = own_sequence + i + n // heads
                sequence = AttentionSequence(b, first.start_q, first.start_k, first.len_q, first.len_k)
                ds += bias_gradient(
                    own_bias, row_start, key_start, sequence, own_head + n % heads, padded_rows, call, C
                )

    row_stride = lengths.seqlen_k
    if C.EVEN_N:
        row_stride = tl.multiple_of(row_stride, 16)
    first_row = (own_sequence.to(tl.int64) * sizes.bias_heads + own_head) * sizes.bias_rows
    elements = pointers.dbias + first_row * row_stride + keys
    dtype: tl.constexpr = pointers.dbias.dtype.element_ty
    if C.BIAS_HAS_ROWS:
        inside = (own_rows < sizes.bias_rows)[:, None] & (keys < lengths.seqlen_k)[None, :]
        addresses = elements[None, :] + own_rows.to(tl.int64)[:, None] * row_stride
        tl.store(addresses, ds.to(dtype), mask=inside)
    else:
        tl.store(elements, tl.sum(ds, 0).to(dtype), mask=keys < lengths.seqlen_k)
