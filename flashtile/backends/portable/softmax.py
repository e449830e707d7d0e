"""Steps of the online softmax over tiles of keys (Dao 2023, arXiv:2307.08691)."""

import triton
import triton.language as tl

from flashtile.backends.common.tiles import LOG2_E


@triton.jit
def softmax_step(scores, row_max, scale_log2, HAS_SCORE_MOD: tl.constexpr, MASKED: tl.constexpr):
    """scores [BLOCK_M, BLOCK_N], row_max [BLOCK_M] -> (probabilities over the new maximum, it, the old one's
    factor).

    Unless HAS_SCORE_MOD, the scores are raw products and ``scale_log2`` is folded into the exponent.
    """
    if HAS_SCORE_MOD:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    if MASKED:
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that has met no key yet
    else:
        shift = new_max
    if HAS_SCORE_MOD:
        p = tl.exp2(scores - shift[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def sink_step(acc, row_max, row_sum, sink):
    """Add the sink, a score without a value, to each row: return accumulator, maximum and sum.

    The sink is added last, so that a large sink does not reduce the precision of the probabilities.
    """
    new_max = tl.maximum(row_max, sink * LOG2_E)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha = tl.exp2(row_max - shift)
    return acc * alpha[:, None], new_max, row_sum * alpha + tl.exp2(sink * LOG2_E - shift)
