"""Step functions shared by several families of kernels: rows of a program, addresses of heads, scores.

A *row* is a query position and a *key* a key position within one sequence; ``offset = seqlen_k - seqlen_q``
aligns them at the bottom right: row ``i`` stands at key ``i + offset``.
"""

import triton.language as tl

from flashtile.backends.common.jit import triton
from flashtile.backends.common.tiles import LN_2, LOG2_E, Matrix, row_of_head, row_of_token

LARGE = tl.constexpr(2.0**27)
"""From this magnitude on, scores of fp32 differ by at least 16, or not at all."""


@triton.jit
def used_length(seqused, b, length):
    """Return how many of the ``length`` tokens of sequence ``b`` are used, clamped to ``length``."""
    if seqused is None:
        return length
    else:
        return min(max(tl.load(seqused + b), 0), length)


@triton.jit
def first_token(pointer, strides, b, start):
    """Return the address of token ``start`` of batch entry ``b``, first head."""
    return pointer + b.to(tl.int64) * strides.batch + start * strides.token


@triton.jit
def head_of(pointer, strides, b, start, head, length):
    """Return the :class:`Matrix` of one head: ``length`` tokens from token ``start`` of batch entry ``b``."""
    base = first_token(pointer, strides, b, start) + head.to(tl.int64) * strides.head
    return Matrix(base, strides.token, length)


@triton.jit
def row_block(
    seqlen_q, num_heads_q, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
    SEQUENCES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Return (sequence, query head, first row) of a program; grid: (blocks of rows * heads * batch,)."""
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    # Blocks of rows vary fastest, so that programs of one head run at about the same time and find its keys
    # in L2. Under a causal mask the last rows see the most keys, so they are started first.
    m_block = pid % num_blocks
    if HAS_RIGHT:
        m_block = num_blocks - 1 - m_block
    b, head = sequence_and_head(pid // num_blocks, num_blocks, num_heads_q, SEQUENCES_FIRST)
    return b, head, m_block * BLOCK_M


@triton.jit
def sequence_and_head(i, num_blocks, num_heads, SEQUENCES_FIRST: tl.constexpr):
    """Return (sequence, head) of a program. ``i`` is the program's index divided by ``num_blocks``.

    Heads vary fastest with ``i``. With SEQUENCES_FIRST, sequences vary fastest.
    """
    # Sequences that share a head's bias read it from L2: the forward takes 830 instead of 903 us for a bias
    # (1, heads, S, S) at S 2048, D 64 on an H200.
    if SEQUENCES_FIRST:
        batch = tl.num_programs(0) // (num_blocks * num_heads)
        return i % batch, i // batch
    else:
        return i // num_heads, i % num_heads


@triton.jit
def result_bases(
    out_ptr, lse_ptr, b, head, start_q, num_heads_q, seqlen_q, total_q, HEAD_DIM_V: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Return (address in out, address in lse) of the first row of a sequence and head."""
    row = row_of_token(b, start_q, num_heads_q, seqlen_q, VARLEN)
    lse_row = row_of_head(b, head, start_q, num_heads_q, seqlen_q, total_q, VARLEN)
    return out_ptr + (row + head) * HEAD_DIM_V, lse_ptr + lse_row


@triton.jit
def store_tile(
    base,
    start,
    length,
    stride,
    tile,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write ``tile`` [BLOCK, BLOCK_D] to a contiguous output, from row ``start`` on.

    Rows from ``length`` on are not written.
    """
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    # 64 bits for the start, a scalar; 32 bits for the offsets within the tile, which are many.
    pointers = base + start.to(tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    inside = (start + rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    # Near zero, digits of 1 - 2 / (1 + e^2x) cancel. There, a polynomial in x^2 is as exact as fp32 can be.
    # It was fitted at Chebyshev nodes to |x| < 0.6. The errors of both formulas are below 1.7e-7.
    square = x * x
    series = 0.021116216321754266 - square * 0.006276390510260175
    series = -0.05387513883149152 + square * series
    series = 0.13332924012835118 + square * series
    series = x + x * square * (-0.33333330431516917 + square * series)
    # e^2x may overflow to inf, which gives 1, or underflow to 0, which gives -1.
    return tl.where(square < 0.36, series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2_E))))


@triton.jit
def softcap_and_alibi(
    scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr
):
    """Apply soft-cap and ALiBi to raw products: return (scores, the soft-cap's derivative).

    The scores are in natural units.
    """
    scores = scores * softmax_scale
    # Soft-cap comes before ALiBi, as in FlashAttention: the cap bounds products, not distances.
    if HAS_SOFTCAP:
        capped = tanh(scores / softcap)
        scores = softcap * capped
        softcap_grad = 1 - capped * capped
    else:  # a bias, and ALiBi, are constants of the derivative
        softcap_grad = tl.full([], 1.0, tl.float32)
    if HAS_ALIBI:
        scores = scores - slope * tl.abs(distance).to(tl.float32)
    return scores, softcap_grad


@triton.jit
def load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI: tl.constexpr):
    if HAS_ALIBI:
        return tl.load(alibi_slopes + b * alibi_stride_b + head)
    else:
        return 0.0


@triton.jit
def softmax_step(scores, row_max, scale_log2, SCALED_SCORES: tl.constexpr, MASKED: tl.constexpr):
    """Take a step of the online softmax: return (p, new maximum, factor that rescales earlier sums).

    scores and p are [BLOCK_M, BLOCK_N], the rest [BLOCK_M]; p is exp2(scores - new maximum). Scores are in
    log2 units with SCALED_SCORES. Otherwise they are raw products, which are scaled by ``scale_log2`` here.
    """
    if SCALED_SCORES:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # -inf: the row has seen no key yet, and -inf - (-inf) is NaN. With the shift 0, P and the factor of the
    # sums are exp2(-inf), which is 0. In a loop without a mask every row sees keys.
    if MASKED:
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        shift = new_max
    # Raw products are scaled within the exponent: one FMA per score. The maximum is scaled once per row,
    # which a positive scale allows, because it keeps the order of the products.
    if SCALED_SCORES:
        p = tl.exp2(scores - shift[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def log2_factor(top):
    """Return the factor of rows whose largest score is ``top``, from natural units to log2 units.

    The compiler makes FMAs of the exponents of P. They do not round the product that is rounded in the row's
    maximum, so exponents err by up to 2 ** -24 of the maximum. P then leaves the range of 16 bits if all
    scores of a row are large, for example -1e9. With a power of two, both are exact. In place of log2(e) it
    is as good for LARGE scores, because P is about 0 wherever a score differs from the maximum. And it is
    greater, so the converted maxima keep the order of the scores.
    """
    return tl.where(tl.abs(top) < LARGE, LOG2_E, 2.0)


@triton.jit
def natural_softmax_step(scores, row_max):
    """Take a step of the online softmax as :func:`softmax_step` does, for scores in natural units."""
    # Not scores * log2(e) before the maximum: LLVM contracts that product into the FMA of the exponent, but
    # not in the maximum. Rounded differently, P of a row of large scores would leave the range of 16 bits.
    top = tl.max(scores, 1)
    new_max = tl.maximum(row_max, top * log2_factor(top))
    # In loops without a mask as well: a bias or score_mod may be -inf for all keys of a row.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    # Which factor made new_max, it says itself: scores below LARGE become less than 2 LARGE in magnitude, as
    # log2(e) is 1.44, others become at least 2 LARGE.
    factor = tl.where(tl.abs(new_max) < 2 * LARGE, LOG2_E, 2.0)
    p = tl.exp2(scores * factor[:, None] - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def entropy_step(
    moment, scores, p, row_sum, old_max, new_max, alpha, scale_log2, SCALED_SCORES: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """Add a block to ``moment``, sum(P log2 P) of each row, before it is added to ``row_sum``.

    The other arguments are those and the results of the step of the softmax. P is relative to the maximum, so
    the logarithms of earlier P change with it: sum(P log2 P) then changes by the sum of P times the change.
    """
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    if NATURAL:
        log_p = scores * tl.where(tl.abs(new_max) < 2 * LARGE, LOG2_E, 2.0)[:, None] - shift[:, None]
    elif SCALED_SCORES:
        log_p = scores - shift[:, None]
    else:
        log_p = scores * scale_log2 - shift[:, None]
    # The logarithm of what is 0 is -inf, and 0 times -inf would be NaN. Far above -1000, exp2 is 0 as well.
    moment = alpha * (moment + tl.maximum(old_max - shift, -1000.0) * row_sum)
    return moment + tl.sum(p * tl.maximum(log_p, -1000.0), 1)


@triton.jit
def to_natural(row_max, NATURAL: tl.constexpr):
    """Return the maximum of rows in natural units. With NATURAL, :func:`log2_factor` converted the scores."""
    if NATURAL:
        return row_max * tl.where(tl.abs(row_max) < 2 * LARGE, LN_2, 0.5)
    else:
        return row_max * LN_2


@triton.jit
def with_sink(out, lse, sink):
    """Add the attention sink, a score without a value vector, to finished rows: return (out, lse).

    The sink is added last, so that a large sink does not reduce the precision of the probabilities. All is in
    natural units, because a product of a large sink and log2(e) may be infinite.
    """
    sink = sink.to(tl.float32)
    # A row that saw no key has lse -inf. Its weight becomes 0 and its lse the sink, also for a sink of -inf.
    difference = tl.where(lse == -float("inf"), float("inf"), sink - lse)
    weight = 1 / (1 + tl.exp(difference))
    # log(e^lse + e^sink) without overflow: the larger one, plus a term of at most log(2).
    lse = tl.maximum(lse, sink) + tl.log(1 + tl.exp(-tl.abs(difference)))
    return out * weight[:, None], lse


@triton.jit
def tangents_with_sink(out_tangent, lse_tangent, out, lse, sink):
    """Return the tangents of :func:`with_sink`'s results, given those of ``out`` and ``lse`` without sink.

    The weight of the keys is w = exp(lse - lse of the result), and its tangent w (1 - w) lse'.
    """
    difference = tl.where(lse == -float("inf"), float("inf"), sink.to(tl.float32) - lse)
    weight = 1 / (1 + tl.exp(difference))
    of_sink = 1 / (1 + tl.exp(-difference))  # 1 - w, whose digits are kept if w is close to 1
    out_tangent = (out_tangent + (of_sink * lse_tangent)[:, None] * out) * weight[:, None]
    return out_tangent, lse_tangent * weight


@triton.jit
def entropy_with_sink(entropy, lse, sink):
    """Add the sink as one more outcome to the entropy of rows whose ``lse`` is without it."""
    difference = tl.where(lse == -float("inf"), float("inf"), sink.to(tl.float32) - lse)
    of_keys = 1 / (1 + tl.exp(difference))
    of_sink = 1 / (1 + tl.exp(-difference))
    return entropy * of_keys + minus_p_log_p(of_keys) + minus_p_log_p(of_sink)


@triton.jit
def minus_p_log_p(p):
    return -p * tl.log(tl.where(p > 0.0, p, 1.0))
