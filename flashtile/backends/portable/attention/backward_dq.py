"""dQ of FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

One program owns BLOCK_M rows of one query head and walks the keys that they reach, as the forward pass does:
S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta), dQ += dS K. Recomputing S and dP here and in
``backward_dkdv`` takes seven products instead of five, but the gradients need no atomics.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.tiles import Matrix, load_tile
from flashtile.backends.portable.attention.arguments import AttentionCall, attention_pointers
from flashtile.backends.portable.attention.program import (
    block_at,
    keys_of,
    own_row,
    own_rows,
    queries_of,
    reached_keys,
    statistics_of,
    values_of,
    walk,
    walked_block,
)
from flashtile.backends.portable.attention.scores import (
    add_gradients,
    dropout_mask,
    load_state,
    modify_scores,
    score_indices,
    visible_scores,
)
from flashtile.backends.portable.tiles import store_tile

DqPointers = attention_pointers("DqPointers", "q k v dout neg_lse neg_delta dq", __name__)


@triton.jit
def dq_blocks(
    dq, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add key blocks ``first`` to ``last`` (exclusive) to dq of the rows of ``block``.

    ``inputs``: tiles of q and dout, neg_lse and neg_delta [BLOCK_M], and a :class:`Matrix` for each of k and
    v.
    """
    q, dout, neg_lse, neg_delta, k, v = inputs
    PAST_END: tl.constexpr = MASKED and not C.EVEN_N
    for n in range(first, last):
        start = walked_block(listed, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
        v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
        products = tl.dot(q, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout, tl.trans(v_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.HAS_SCORE_MOD or MASKED:
            keys = start + tl.arange(0, C.BLOCK_N)
            rows = block.start + tl.arange(0, C.BLOCK_M)
            at = score_indices(block, rows, keys, KEYS_FIRST=False)
        if C.HAS_SCORE_MOD:
            scores, score_grad = modify_scores(products, at, block, call, C)
            p = tl.exp2(scores + neg_lse[:, None])
        else:
            p = tl.exp2(products * call.numbers.scale_log2 + neg_lse[:, None])
        if MASKED:
            seen = visible_scores(at, call, C)
            if PAST_END:
                seen = seen & (keys < k.length)[None, :]
            p = tl.where(seen, p, 0.0)
        if C.GUARD_SCORES:  # SCORE_MOD may return NaN for rows past the end
            p = tl.where(neg_lse[:, None] == -float("inf"), 0.0, p)
        if C.HAS_DROPOUT:
            kept = dropout_mask(block, block.start, start, call, False, C)
            dp = tl.where(kept, dp * call.numbers.keep_scale, 0.0)
        ds = p * (dp + neg_delta[:, None])
        if C.ADD_GRADIENTS is not None:
            add_gradients(ds, products, at, block, call, C)
        if C.HAS_SOFTCAP or C.SCORE_MOD is not None:
            ds = ds * score_grad
        if C.GUARD_FACTORS:  # score_grad need not be finite where a score is hidden
            ds = tl.where(p == 0.0, 0.0, ds)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


@kernel(do_not_specialize=("pointers", "padded_rows", "lengths"))
def dq_kernel(pointers, padded_rows, strides, lengths, numbers, C: tl.constexpr):
    """Compute dq of BLOCK_M rows of a head per program.

    Grid: (blocks of rows * heads * batch,). Shapes are those of the forward kernel. dout and dq are
    contiguous. ``common.preprocess`` has written neg_lse and neg_delta. With C.ADD_GRADIENTS, the kernel also
    adds to the fp32 gradients of captured tensors.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    sequence, head, head_kv, start = own_rows(call, C)
    if start >= sequence.len_q:
        return
    q = queries_of(sequence, head, call)
    k = keys_of(sequence, head_kv, call)
    v = values_of(sequence, head_kv, call)
    row = own_row(sequence, call, C) + head
    block = block_at(start, sequence, head, call, C)

    BLOCK_M: tl.constexpr = C.BLOCK_M  # Triton does not accept a field of C in a shape
    BLOCK_D: tl.constexpr = C.BLOCK_D
    q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    dout = Matrix(pointers.dout + row * C.HEAD_DIM_V, lengths.num_heads_q * C.HEAD_DIM_V, sequence.len_q)
    dout_tile = load_tile(dout, start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
    statistics = statistics_of(sequence, head, padded_rows, call, C)
    statistics += start + tl.arange(0, C.BLOCK_M)
    neg_lse = tl.load(pointers.neg_lse + statistics)
    neg_delta = tl.load(pointers.neg_delta + statistics)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    reached = reached_keys(start, sequence, call, C)
    inputs = (q_tile, dout_tile, neg_lse, neg_delta, k, v)
    dq = walk(dq_blocks, dq, inputs, reached, block, call, False, C)
    store_tile(
        pointers.dq + row * C.HEAD_DIM, start, sequence.len_q,
        lengths.num_heads_q * C.HEAD_DIM, dq * numbers.softmax_scale, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
