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
"""

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import load_tile
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
    natural_softmax_step,
    result_bases,
    softmax_step,
    store_tile,
    to_natural,
    with_sink,
)

ForwardPointers = attention_pointers("ForwardPointers", "q k v out lse", __name__)


# ``pointers`` hold integers as well: sizes of a block mask's lists and of captured tensors. One kernel serves
# all of them, as it serves all lengths.
@kernel(do_not_specialize=("pointers", "lengths"))
def forward_kernel(pointers, strides, lengths, numbers, C: tl.constexpr):
    """Compute out and lse of BLOCK_M rows of a head per program.

    Grid: (blocks of rows * heads * batch,). q, k, v have any strides; out and lse are contiguous.

    q [batch, seqlen_q, num_heads_q, HEAD_DIM], k [batch, seqlen_k, heads_kv, HEAD_DIM], v [..., HEAD_DIM_V].
    When VARLEN, they have no batch dimension. out is like q, with HEAD_DIM_V columns; lse is [batch,
    num_heads_q, seqlen_q] or [num_heads_q, total_q]. seqused_k [batch], sink [num_heads_q], masks and bias
    may be None.
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

    # Main loop.
    reached = reached_keys(start, sequence, call, C)
    acc, row_max, row_sum = walk(
        attend_blocks, (acc, row_max, row_sum), (q_tile, k, v), reached, block, call, OWNS_KEYS=False, C=C
    )

    # Epilogue. A row that saw no key has the sum 0: out 0 and lse -inf, not 0 / 0.
    empty = row_sum == 0.0
    out_tile = acc / tl.where(empty, 1.0, row_sum)[:, None]
    if C.HAS_DROPOUT:  # 1 / (1 - p) multiplies the rows once, instead of every P
        out_tile = out_tile * numbers.keep_scale
    natural_max = to_natural(row_max, C.has_natural_scores)
    lse_rows = tl.where(empty, -float("inf"), natural_max + tl.log(tl.where(empty, 1.0, row_sum)))
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


@triton.jit
def attend_blocks(
    state, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add key blocks ``first`` to ``last`` (exclusive) to the rows' running accumulator, maximum and sum.

    ``inputs``: the tile of q [BLOCK_M, BLOCK_D] of ``block``, and a :class:`Matrix` for each of k and v.
    ``listed``: the list of a block mask that ``first`` to ``last`` count in; None: they count key blocks.
    """
    acc, row_max, row_sum = state
    q, k, v = inputs
    # Only a masked run holds a partial last block: block_range ends run 1 at the last whole one.
    PAST_END: tl.constexpr = MASKED and not C.EVEN_N
    NATURAL: tl.constexpr = C.has_natural_scores
    for n in range(first, last):
        start = walked_block(listed, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        # Plain scores stay raw products: their scale is part of the exponent, a single FMA (softmax_step).
        if C.SCALED_SCORES or MASKED:
            keys = start + tl.arange(0, C.BLOCK_N)
            rows = block.start + tl.arange(0, C.BLOCK_M)
            at = score_indices(block, rows, keys, KEYS_FIRST=False)
            if C.SCALED_SCORES:
                scores, _ = modify_scores(scores, at, block, call, C, TO_LOG2=not NATURAL)
            if MASKED:
                seen = visible_scores(at, call, C)
                if PAST_END:
                    seen = seen & (keys < k.length)[None, :]
                scores = tl.where(seen, scores, -float("inf"))  # exp2(-inf) is exactly 0
        if NATURAL:
            p, row_max, alpha = natural_softmax_step(scores, row_max)
        else:
            p, row_max, alpha = softmax_step(
                scores, row_max, call.numbers.scale_log2, C.SCALED_SCORES, MASKED
            )  # fmt: skip
        # The sum is over P in float32, before it is rounded for the product and before dropout: lse belongs
        # to the softmax, not to what dropout keeps of it.
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if C.HAS_DROPOUT:
            p = kept_or_zero(p, dropout_mask(block, block.start, start, call, KEYS_FIRST=False, C=C), call)
        # Rows of V past the end load as zeros, since 0 times what lies there could be NaN.
        v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, row_max, row_sum
