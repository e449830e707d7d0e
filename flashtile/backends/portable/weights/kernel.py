"""Attention weights: all of them, their sums over rows, or the largest of each row (its *top*)."""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.tiles import LOG2_E, load_tile, row_of_head
from flashtile.backends.portable.attention.arguments import AttentionCall, attention_pointers
from flashtile.backends.portable.attention.steps import (
    block_at,
    find_sequence,
    keys_of,
    own_rows,
    queries_of,
    reached_keys,
    reaching_rows,
    walk,
    walked_block,
)
from flashtile.backends.portable.attention.steps import modify_scores, score_indices, visible_scores
from flashtile.backends.portable.tiles import row_block


@triton.jit
def load_shifts(lse, rows, length):
    """Load the lse of ``rows``, in log2 units, to subtract it from the scores.

    The lse of a row that sees no key is replaced by inf, so that its probabilities are 0.
    """
    shifts = tl.load(lse + rows, mask=rows < length, other=-float("inf")) * LOG2_E
    return tl.where(shifts == -float("inf"), float("inf"), shifts)


@triton.jit
def probabilities(scores, shifts, at, sequence, block, call, C: tl.constexpr):
    """Return (probabilities, visible), both [BLOCK_M, BLOCK_N], for the raw products ``scores``.

    ``visible`` says whether the row sees the key. The probabilities of other keys are 0.
    """
    if C.HAS_SCORE_MOD:
        scores, _ = modify_scores(scores, at, block, call, C)
    else:
        scores = scores * call.numbers.scale_log2
    seen = visible_scores(at, call, C) & (scores != -float("inf"))
    seen = seen & (at.rows < sequence.len_q) & (at.keys < sequence.len_k)
    return tl.where(seen, tl.exp2(scores - shifts[:, None]), 0.0), seen


@triton.jit
def join_top(best, p, seen, key_start, C: tl.constexpr):
    """Merge a tile's weights ``p`` into ``best`` [BLOCK_M, BLOCK_TOP], each row's largest weights so far.

    An entry of ``best`` is an int64. Its upper half holds the bits of a weight, which sort as integers in the
    same order as the weights. Its lower half is 0x7FFFFFFF minus the key, so the first key wins among equal
    weights. An empty entry is -1.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_TOP: tl.constexpr = C.BLOCK_TOP
    keys = key_start + tl.arange(0, C.BLOCK_N)
    bits = p.to(tl.int32, bitcast=True).to(tl.int64)
    own = tl.where(seen, (bits << 32) | (0x7FFFFFFF - keys).to(tl.int64)[None, :], -1)
    if C.BLOCK_N < C.BLOCK_TOP:
        TIMES: tl.constexpr = BLOCK_TOP // C.BLOCK_N
        first = (tl.arange(0, TIMES) == 0)[None, :, None]
        own = tl.reshape(tl.where(first, own[:, None, :], -1), [BLOCK_M, BLOCK_TOP])
    elif C.BLOCK_N > C.BLOCK_TOP:
        own = tl.topk(own, BLOCK_TOP)
    both = tl.reshape(tl.join(best, own), [BLOCK_M, 2 * BLOCK_TOP])
    return tl.topk(both, BLOCK_TOP)


@triton.jit
def weigh_keys(
    best, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Compute the weights of key blocks ``first`` to ``last`` (exclusive) for the rows of ``block``.

    With FORM "top", the weights are merged into ``best``, the largest weights of each row so far. Otherwise
    they are written to the last of ``inputs``: the weights [seqlen_q, seqlen_k] of this sequence and head.
    Returns ``best``.
    """
    q_tile, shifts, k, sequence, weights = inputs
    for n in range(first, last):
        start = walked_block(listed, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        at = score_indices(
            block, block.start + tl.arange(0, C.BLOCK_M), start + tl.arange(0, C.BLOCK_N), False
        )
        p, seen = probabilities(scores, shifts, at, sequence, block, call, C)
        if C.FORM == "top":
            best = join_top(best, p, seen, start, C)
        else:
            rows = (block.start + tl.arange(0, C.BLOCK_M)).to(tl.int64)[:, None]
            keys = start + tl.arange(0, C.BLOCK_N)[None, :]
            place = weights + rows * call.lengths.seqlen_k + keys
            inside = (rows < sequence.len_q) & (keys < k.length)
            tl.store(place, p.to(weights.dtype.element_ty), mask=inside)
    return best


@triton.jit
def sum_rows(
    sums, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add the weights of row blocks ``first`` to ``last`` (exclusive) to ``sums`` [BLOCK_N]."""
    q, k_tile, lse, sequence = inputs
    for m in range(first, last):
        start = walked_block(listed, m, q.length, C.BLOCK_M, C) * C.BLOCK_M
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        shifts = load_shifts(lse, start + tl.arange(0, C.BLOCK_M), q.length)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        at = score_indices(
            block, start + tl.arange(0, C.BLOCK_M), block.start + tl.arange(0, C.BLOCK_N), False
        )
        p, _ = probabilities(scores, shifts, at, sequence, block, call, C)
        sums += tl.sum(p, 0)
    return sums


@triton.jit
def store_top(weights, indices, first, best, row_start, len_q, C: tl.constexpr):
    """Write the largest weights of each row to ``weights``, and their keys to ``indices``.

    ``first``: index of the first row of this sequence and head in (batch, heads, seqlen).
    """
    rows = row_start + tl.arange(0, C.BLOCK_M)[:, None]
    columns = tl.arange(0, C.BLOCK_TOP)[None, :]
    place = (first + rows) * C.TOP + columns
    inside = (rows < len_q) & (columns < C.TOP)
    values = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    keys = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    tl.store(weights + place, tl.where(best < 0, 0.0, values), mask=inside)
    tl.store(indices + place, tl.where(best < 0, -1, keys), mask=inside)


WeightsPointers = attention_pointers("WeightsPointers", "q k lse weights indices", __name__)


@triton.jit
def column_sums(call, C: tl.constexpr):
    """Sum the weights of BLOCK_N keys over all rows. Grid: (blocks of keys * heads * batch,)."""
    pointers, lengths = call.pointers, call.lengths
    b, head, start = row_block(lengths.seqlen_k, lengths.num_heads_q, False, C.BLOCK_N)
    sequence = find_sequence(b, call, C)
    if start < sequence.len_k:
        q = queries_of(sequence, head, call)
        k = keys_of(sequence, head // lengths.group_size, call)
        block = block_at(start, sequence, head, call, C)
        row, key = first_places(sequence, head, call, C)
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        BLOCK_N: tl.constexpr = C.BLOCK_N  # Triton does not accept a field of C in a shape
        sums = tl.zeros([BLOCK_N], tl.float32)
        reaching = reaching_rows(start, sequence, call, C)
        inputs = (q, k_tile, pointers.lse + row, sequence)
        sums = walk(sum_rows, sums, inputs, reaching, block, call, True, C)
        own = start + tl.arange(0, C.BLOCK_N)
        tl.store(pointers.weights + key + own, sums, mask=own < sequence.len_k)


@triton.jit
def row_weights(call, C: tl.constexpr):
    """Compute all weights of BLOCK_M rows or, with FORM "top", the largest weights of each row.

    Grid: (blocks of rows * heads * batch,).
    """
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
    """Return (index of the first row, index of the first key) of this sequence and head.

    The indices count the elements of a contiguous tensor (batch, heads, seqlen), or (heads, total) with
    VARLEN.
    """
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
    """Compute attention weights in the form C.FORM. Grid: (blocks of rows * heads * batch,).

    With FORM "columns", the weights are summed over rows, and the grid is (blocks of keys * heads * batch,).
    The lists of a block mask then hold the row blocks of each key block. With other forms, they hold the key
    blocks of each row block.

    q and k are laid out as for the forward kernel. lse, weights and indices are contiguous. Elements outside
    of the visited blocks are not written: the caller fills weights with 0 and indices with -1.
    """
    call = AttentionCall(pointers, strides, lengths, numbers, 0, 0)
    if C.FORM == "columns":
        column_sums(call, C)
    else:
        row_weights(call, C)
