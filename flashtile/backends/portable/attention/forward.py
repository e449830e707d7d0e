"""FlashAttention-2's forward pass (Dao 2023, arXiv:2307.08691, Algorithm 1) in portable Triton.

One program owns BLOCK_M rows of one query head and walks the keys that they reach in blocks of BLOCK_N. It is
the only one that writes these rows, so programs depend on nothing::

    load Q                                            once; from here on everything is in registers
    m = -inf, l = 0, acc = 0                          float32
    for each run (edge | inside | edge):              steps.walk; edges of the window, or the last key block
        for each key block:                           attend_blocks, the paper's lines 7 to 10
            load K      S = Q K^T
                        mask, if the run is an edge   so blocks inside pay for no comparison
                        m' = max(m, rowmax S);  P = exp(S - m');  alpha = exp(m - m')
                        l = alpha l + rowsum P
            load V      acc = alpha acc + P V
    out = acc / l;  lse = m + log l                   lines 12 and 13; store

K and V of the next blocks are in flight during these products: Triton pipelines the loads of the loop over
``num_stages`` buffers of shared memory. The accumulator stays unscaled until the end, and only the
log-sum-exp is kept for the backward pass, not the maximum and the sum. Both are the paper's changes to
FlashAttention.

Scores come in three units, by ``C``:

=====================  ===============================  ====================================================
call                   scores                           step of the online softmax
=====================  ===============================  ====================================================
plain                  raw products                     softmax_step scales them within the exponent
soft-cap, ALiBi        log2 units, by modify_scores     softmax_step, also for a scale of 0 or less
bias, score_mod        natural units, by modify_scores  natural_softmax_step, exact for rows of large scores
=====================  ===============================  ====================================================

In forward mode (HAS_TANGENTS), q, k and v have tangents q', k' and v'. The same loop then also computes those
of the results::

    S' = scale (Q' K^T + Q K'^T), times the derivative of soft-cap and score_mod
    lse' = sum(P S') / l                              the mean of S' under the row's probabilities
    out' = sum(P (S' - lse') V + P V') / l

``acc'``, the sum of out', has the mean of the keys so far in place of lse', and is corrected when the mean
moves: acc' = alpha acc' + (mean - new mean) alpha acc + .... With 0 in its place and lse' out subtracted at
the end, P S' would be rounded to 16 bits for the product where P (S' - lse') is almost 0.
"""

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import LN_2, load_tile, row_of_head
from flashtile.backends.portable.attention.arguments import AttentionCall, attention_pointers
from flashtile.backends.portable.attention.steps import (
    block_at,
    dropout_mask,
    kept_or_zero,
    keys_of,
    load_state,
    modify_scores,
    own_rows,
    queries_of,
    reached_keys,
    score_indices,
    values_of,
    visible_scores,
    walk,
    walked_block,
)
from flashtile.backends.portable.tiles import (
    entropy_step,
    entropy_with_sink,
    head_of,
    natural_softmax_step,
    result_bases,
    softmax_step,
    store_tile,
    tangents_with_sink,
    to_natural,
    with_sink,
)

_OWN = "q k v out lse max_logits entropy"
ForwardPointers = attention_pointers("ForwardPointers", _OWN, __name__)
TangentPointers = attention_pointers(
    "TangentPointers", _OWN + " q_tangent k_tangent v_tangent out_tangent lse_tangent", __name__
)
"""Pointers of a call in forward mode. Each tangent has the strides of its tensor; those of q, k and v may be
None, which means 0."""


# ``pointers`` hold integers as well: sizes of a block mask's lists and of captured tensors. One kernel serves
# all of them, as it serves all lengths.
@kernel(do_not_specialize=("pointers", "lengths"))
def forward_kernel(pointers, strides, lengths, numbers, C: tl.constexpr):
    """Compute out and lse of BLOCK_M rows of a head per program.

    Grid: (blocks of rows * heads * batch,). q, k, v have any strides; out and lse are contiguous.

    q [batch, seqlen_q, num_heads_q, HEAD_DIM], k [batch, seqlen_k, heads_kv, HEAD_DIM], v [..., HEAD_DIM_V].
    When VARLEN, they have no batch dimension. out is like q, with HEAD_DIM_V columns; lse is [batch,
    num_heads_q, seqlen_q] or [num_heads_q, total_q], as are max_logits, the largest score of each row, and
    entropy, if they are not None. seqused_k [batch], sink [num_heads_q], masks and bias
    may be None. With HAS_TANGENTS, ``pointers`` are :class:`TangentPointers`.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    sequence, head, head_kv, start = own_rows(call, C)
    if start >= sequence.len_q:  # the grid has room for the longest sequence
        return

    # Prologue.
    q = queries_of(sequence, head, call)
    k = keys_of(sequence, head_kv, call)
    v = values_of(sequence, head_kv, call)
    block = block_at(start, sequence, head, call, C)
    # Triton (3.6 and 3.7) does not accept a field of C in a shape, so the kernels give such fields a name.
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    inputs = (q_tile, k, v)
    state = (acc, row_max, row_sum)
    if C.HAS_TANGENTS:
        state = (acc, row_max, row_sum, acc, row_sum)  # type: ignore[assignment]
        q_tangent, k_tangent, v_tangent = tangents_of(start, sequence, head, head_kv, call, C)
        inputs = (q_tile, k, v, q_tangent, k_tangent, v_tangent)  # type: ignore[assignment]
    if pointers.entropy is not None:
        state = (acc, row_max, row_sum, tl.zeros([BLOCK_M], tl.float32))  # type: ignore[assignment]

    # Main loop.
    reached = reached_keys(start, sequence, call, C)
    state = walk(attend_blocks, state, inputs, reached, block, call, OWNS_KEYS=False, C=C)
    acc, row_max, row_sum = state[0], state[1], state[2]

    # Epilogue. A row that saw no key has the sum 0: out 0 and lse -inf, not 0 / 0.
    empty = row_sum == 0.0
    out_tile = acc / tl.where(empty, 1.0, row_sum)[:, None]
    if C.HAS_DROPOUT:  # 1 / (1 - p) multiplies the rows once, instead of every P
        out_tile = out_tile * numbers.keep_scale
    natural_max = to_natural(row_max, C.has_natural_scores)
    lse_rows = tl.where(empty, -float("inf"), natural_max + tl.log(tl.where(empty, 1.0, row_sum)))
    if pointers.entropy is not None:  # log l - sum(P log P) / l
        entropy_rows = tl.log(tl.where(empty, 1.0, row_sum)) - state[3] * LN_2 / tl.where(empty, 1.0, row_sum)
        if pointers.sink is not None:
            entropy_rows = entropy_with_sink(entropy_rows, lse_rows, tl.load(pointers.sink + head))
    if C.HAS_TANGENTS:
        out_tangent = state[3] / tl.where(empty, 1.0, row_sum)[:, None]
        lse_tangent = state[4]
        if C.HAS_DROPOUT:
            out_tangent = out_tangent * numbers.keep_scale
        if pointers.sink is not None:
            out_tangent, lse_tangent = tangents_with_sink(
                out_tangent, lse_tangent, out_tile, lse_rows, tl.load(pointers.sink + head)
            )
    # Last, so that a large sink costs the probabilities no bits: as a maximum it would shrink every P.
    if pointers.sink is not None:
        out_tile, lse_rows = with_sink(out_tile, lse_rows, tl.load(pointers.sink + head))
    out_base, lse_base = result_bases(
        pointers.out, pointers.lse, sequence.b, head, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q,
        lengths.total_q, C.HEAD_DIM_V, C.VARLEN,
    )  # fmt: skip
    store_tile(
        out_base, start, sequence.len_q, lengths.num_heads_q * C.HEAD_DIM_V, out_tile, C.BLOCK_M,
        C.HEAD_DIM_V, C.BLOCK_DV,
    )  # fmt: skip
    rows = tl.arange(0, C.BLOCK_M)
    tl.store(lse_base + start + rows, lse_rows, mask=start + rows < sequence.len_q)
    if C.HAS_TANGENTS:
        out_base, lse_base = result_bases(
            pointers.out_tangent, pointers.lse_tangent, sequence.b, head, sequence.start_q,
            lengths.num_heads_q, lengths.seqlen_q, lengths.total_q, C.HEAD_DIM_V, C.VARLEN,
        )  # fmt: skip
        store_tile(
            out_base, start, sequence.len_q, lengths.num_heads_q * C.HEAD_DIM_V, out_tangent, C.BLOCK_M,
            C.HEAD_DIM_V, C.BLOCK_DV,
        )  # fmt: skip
        tl.store(lse_base + start + rows, lse_tangent, mask=start + rows < sequence.len_q)
    if pointers.max_logits is not None or pointers.entropy is not None:
        first = row_of_head(
            sequence.b, head, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q, lengths.total_q,
            C.VARLEN,
        )  # fmt: skip
        first += start
        if pointers.max_logits is not None:
            tl.store(pointers.max_logits + first + rows, natural_max, mask=start + rows < sequence.len_q)
        if pointers.entropy is not None:
            tl.store(pointers.entropy + first + rows, entropy_rows, mask=start + rows < sequence.len_q)


@triton.jit
def tangents_of(start, sequence, head, head_kv, call, C: tl.constexpr):
    """Return the tile of q's tangent, and those of k and v as :class:`Matrix`; 0 for each that is None."""
    pointers, strides = call.pointers, call.strides
    b, start_q, start_k, len_q, len_k = sequence
    q_tile, k, v = 0, 0, 0
    if pointers.q_tangent is not None:
        q = head_of(pointers.q_tangent, strides.q, b, start_q, head, len_q)
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    if pointers.k_tangent is not None:
        k = head_of(pointers.k_tangent, strides.k, b, start_k, head_kv, len_k)
    if pointers.v_tangent is not None:
        v = head_of(pointers.v_tangent, strides.v, b, start_k, head_kv, len_k)
    return q_tile, k, v


@triton.jit
def attend_blocks(
    state, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add key blocks ``first`` to ``last`` (exclusive) to the rows' running accumulator, maximum and sum.

    With an entropy, a fourth number of each row is sum(P log2 P), in units of 2 ** maximum as the sum. With
    tangents, the accumulator of out's tangent and the mean of S' follow.
    ``inputs``: the tile of q [BLOCK_M, BLOCK_D] of ``block``, and a :class:`Matrix` for each of k and v; then
    their tangents, as :func:`tangents_of` returns them.
    ``listed``: the list of a block mask that ``first`` to ``last`` count in; None: they count key blocks.
    """
    acc, row_max, row_sum = state[0], state[1], state[2]
    ENTROPY: tl.constexpr = call.pointers.entropy is not None
    if ENTROPY:
        moment = state[3]
    if C.HAS_TANGENTS:
        acc_tangent, mean = state[3], state[4]
    q, k, v = inputs[0], inputs[1], inputs[2]
    # Only a masked run holds a partial last block: block_range ends run 1 at the last whole one.
    PAST_END: tl.constexpr = MASKED and not C.EVEN_N
    NATURAL: tl.constexpr = C.has_natural_scores
    for n in range(first, last):
        start = walked_block(listed, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.HAS_TANGENTS:
            moved = tl.zeros_like(scores)
            if call.pointers.q_tangent is not None:
                moved = tl.dot(inputs[3], tl.trans(k_tile), moved, input_precision=C.PRECISION)
            if call.pointers.k_tangent is not None:
                k_tile = load_tile(inputs[4], start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
                moved = tl.dot(q, tl.trans(k_tile), moved, input_precision=C.PRECISION)
            moved = moved * call.numbers.softmax_scale
        # Plain scores stay raw products: their scale is part of the exponent, a single FMA (softmax_step).
        if C.SCALED_SCORES or MASKED:
            keys = start + tl.arange(0, C.BLOCK_N)
            rows = block.start + tl.arange(0, C.BLOCK_M)
            at = score_indices(block, rows, keys, KEYS_FIRST=False)
            if C.SCALED_SCORES:
                scores, score_grad = modify_scores(scores, at, block, call, C, TO_LOG2=not NATURAL)
                if C.HAS_TANGENTS:
                    moved = moved * score_grad
            if MASKED:
                seen = visible_scores(at, call, C)
                if PAST_END:
                    seen = seen & (keys < k.length)[None, :]
                scores = tl.where(seen, scores, -float("inf"))  # exp2(-inf) is exactly 0
        if ENTROPY:
            old_max = row_max
        if NATURAL:
            p, row_max, alpha = natural_softmax_step(scores, row_max)
        else:
            p, row_max, alpha = softmax_step(
                scores, row_max, call.numbers.scale_log2, C.SCALED_SCORES, MASKED
            )  # fmt: skip
        if ENTROPY:
            moment = entropy_step(
                moment, scores, p, row_sum, old_max, row_max, alpha, call.numbers.scale_log2, C.SCALED_SCORES,
                NATURAL,
            )  # fmt: skip
        # The sum is over P in float32, before it is rounded for the product and before dropout: lse belongs
        # to the softmax, not to what dropout keeps of it.
        if C.HAS_TANGENTS:
            total = mean * (row_sum * alpha)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if C.HAS_TANGENTS:
            if MASKED or NATURAL:  # a hidden score may move by infinity: products of unused tokens, score_mod
                moved = tl.where(p > 0.0, moved, 0.0)
            new_mean = (total + tl.sum(p * moved, 1)) / tl.where(row_sum == 0.0, 1.0, row_sum)
            moved = p * (moved - new_mean[:, None])
            acc_tangent = acc_tangent * alpha[:, None] + (mean - new_mean)[:, None] * acc
            mean = new_mean
        if C.HAS_DROPOUT:
            kept = dropout_mask(block, block.start, start, call, KEYS_FIRST=False, C=C)
            p = kept_or_zero(p, kept, call)
            if C.HAS_TANGENTS:
                moved = kept_or_zero(moved, kept, call)
        # Rows of V past the end load as zeros, since 0 times what lies there could be NaN.
        v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_DV]
        if C.HAS_TANGENTS:
            acc_tangent = tl.dot(moved.to(v_tile.dtype), v_tile, acc_tangent, input_precision=C.PRECISION)
            if call.pointers.v_tangent is not None:
                v_tile = load_tile(inputs[5], start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
                acc_tangent = tl.dot(p.to(v_tile.dtype), v_tile, acc_tangent, input_precision=C.PRECISION)
    if C.HAS_TANGENTS:
        return acc, row_max, row_sum, acc_tangent, mean
    elif ENTROPY:
        return acc, row_max, row_sum, moment
    else:
        return acc, row_max, row_sum
