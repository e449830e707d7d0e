"""dK and dV of FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

One program owns BLOCK_N keys of one key/value head. It walks the rows of every query head of its group that
reach these keys, so the gradients of GQA are summed in registers. It recomputes probabilities transposed:
S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO, dP^T = V dO^T, dS^T = P^T * (dP^T - delta), dK += dS^T Q.
There are no atomics: one program sums each gradient, in one order.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.tiles import Matrix, load_tile, row_of_token
from flashtile.backends.portable.attention.arguments import AttentionCall, attention_pointers
from flashtile.backends.portable.attention.program import (
    block_at,
    keys_of,
    own_keys,
    own_row,
    reaching_rows,
    statistics_of,
    values_of,
    walk,
    walked_block,
)
from flashtile.backends.portable.attention.scores import (
    dropout_mask,
    kept_or_zero,
    load_state,
    modify_scores,
    score_indices,
    visible_scores,
)
from flashtile.backends.portable.tiles import first_token, store_tile

DkdvPointers = attention_pointers("DkdvPointers", "q k v dout neg_lse neg_delta dk dv", __name__)


@triton.jit
def load_statistics(pointer, start, length, other, listed, C: tl.constexpr):
    """Load neg_lse or neg_delta of BLOCK_M rows from ``start`` on.

    Blocks that a block mask lists may extend past the end of the statistics. Rows from ``length`` on then get
    ``other``.
    """
    if listed is None:  # in Triton 3.6, adding the start to the rows instead of the pointer spills registers
        return tl.load(pointer + start + tl.arange(0, C.BLOCK_M))
    else:
        rows = start + tl.arange(0, C.BLOCK_M)
        return tl.load(pointer + rows, mask=rows < length, other=other)


@triton.jit
def dkdv_blocks(
    state, inputs, first, last, listed, block, call, WINDOWED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add row blocks ``first`` to ``last`` (exclusive) of one query head to dk, dv of the keys of ``block``.

    ``inputs``: tiles of k and v, a :class:`Matrix` for each of q and dout, and pointers to neg_lse and
    neg_delta of the first row. Rows past the end have neg_lse -inf and so probability 0. So scores are
    masked only for a window or a general mask (WINDOWED).
    """
    dk, dv = state
    k, v, q, dout, neg_lse, neg_delta = inputs
    for m in range(first, last):
        start = walked_block(listed, m, q.length, C.BLOCK_M, C) * C.BLOCK_M
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
        neg_lse_rows = load_statistics(neg_lse, start, q.length, -float("inf"), listed, C)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=C.PRECISION)  # S^T [BLOCK_N, BLOCK_M]
        if C.HAS_SCORE_MOD or WINDOWED:
            keys = block.start + tl.arange(0, C.BLOCK_N)
            rows = start + tl.arange(0, C.BLOCK_M)
            at = score_indices(block, rows, keys, KEYS_FIRST=True)
        if C.HAS_SCORE_MOD:
            scores, score_grad = modify_scores(scores, at, block, call, C)
            p = tl.exp2(scores + neg_lse_rows[None, :])
        else:
            p = tl.exp2(scores * call.numbers.scale_log2 + neg_lse_rows[None, :])
        if WINDOWED:
            p = tl.where(visible_scores(at, call, C), p, 0.0)
        if C.GUARD_SCORES:  # SCORE_MOD may return NaN for rows past the end
            p = tl.where(neg_lse_rows[None, :] == -float("inf"), 0.0, p)
        dout_tile = load_tile(dout, start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
        kept_p = p
        if C.HAS_DROPOUT:
            kept = dropout_mask(block, start, block.start, call, True, C)
            kept_p = kept_or_zero(p, kept, call)
        kept_p = kept_p.to(dout_tile.dtype)
        dv = tl.dot(kept_p, dout_tile, dv, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_DV]
        # neg_delta is loaded late: it broadcasts along columns, so each thread holds many of its values.
        neg_delta_rows = load_statistics(neg_delta, start, q.length, 0.0, listed, C)
        dp = tl.dot(v, tl.trans(dout_tile), input_precision=C.PRECISION)  # dP^T [BLOCK_N, BLOCK_M]
        if C.HAS_DROPOUT:
            dp = tl.where(kept, dp * call.numbers.keep_scale, 0.0)
        ds = p * (dp + neg_delta_rows[None, :])
        if C.HAS_SOFTCAP or C.SCORE_MOD is not None:
            ds = ds * score_grad
        if C.GUARD_FACTORS:  # score_grad need not be finite where a score is hidden
            ds = tl.where(p == 0.0, 0.0, ds)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@kernel(do_not_specialize=("pointers", "padded_rows", "lengths"))
def dkdv_kernel(pointers, padded_rows, strides, lengths, numbers, C: tl.constexpr):
    """Compute dk and dv of BLOCK_N keys of a head per program.

    Grid: (blocks of keys * key/value heads * batch,). Shapes are those of the forward kernel. dout, dk and dv
    are contiguous. ``common.preprocess`` has written neg_lse and neg_delta. dk and dv of keys that
    ``seqused_k`` excludes are not written. A block mask has a list of row blocks for each key block.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    sequence, head_kv, start = own_keys(call, C)
    if start >= sequence.len_k:
        return
    num_heads_q, num_heads_kv = lengths.num_heads_q, lengths.num_heads_q // lengths.group_size
    q_token = first_token(pointers.q, strides.q, sequence.b, sequence.start_q)
    k = keys_of(sequence, head_kv, call)
    v = values_of(sequence, head_kv, call)
    dout_row = pointers.dout + own_row(sequence, call, C) * C.HEAD_DIM_V
    key = row_of_token(sequence.b, sequence.start_k, num_heads_kv, lengths.seqlen_k, C.VARLEN) + head_kv

    BLOCK_N: tl.constexpr = C.BLOCK_N  # Triton does not accept a field of C in a shape
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
    v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    reaching = reaching_rows(start, sequence, call, C)
    for g in range(lengths.group_size):
        head = head_kv * lengths.group_size + g
        block = block_at(start, sequence, head, call, C)
        q = Matrix(q_token + head.to(tl.int64) * strides.q.head, strides.q.token, sequence.len_q)
        dout = Matrix(dout_row + head * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, sequence.len_q)
        statistics = statistics_of(sequence, head, padded_rows, call, C)
        inputs = (k_tile, v_tile, q, dout, pointers.neg_lse + statistics, pointers.neg_delta + statistics)
        dk, dv = walk(dkdv_blocks, (dk, dv), inputs, reaching, block, call, True, C)

    if C.HAS_DROPOUT:
        dv = dv * numbers.keep_scale
    store_tile(
        pointers.dk + key * C.HEAD_DIM, start, sequence.len_k, num_heads_kv * C.HEAD_DIM,
        dk * numbers.softmax_scale, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
    store_tile(
        pointers.dv + key * C.HEAD_DIM_V, start, sequence.len_k, num_heads_kv * C.HEAD_DIM_V, dv, C.BLOCK_N,
        C.HEAD_DIM_V, C.BLOCK_DV,
    )  # fmt: skip
