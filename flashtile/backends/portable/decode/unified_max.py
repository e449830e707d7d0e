"""The unified maximum of FlashDecoding++ (Hong et al. 2023, arXiv:2311.01282, section 3), on GPUs.

The number subtracted from scores need not be their maximum. Any number phi gives the same quotient, as long
as no sum overflows or is so small that it has lost bits. With phi given, no maximum is computed and nothing
is rescaled. The sums are checked once, at the end of a work tile. If they are out of range, the same program
computes the tile again with the online softmax.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.tiles import LOG2_E

MIN_SUM = tl.constexpr(2.0**-32)
"""Least accepted sum of a row's exponentials: terms that exp2 flushes to zero are below 2^-94 of it."""
MAX_SUM = tl.constexpr(2.0**120)
MIN_MEAN_FLOAT16 = tl.constexpr(2.0**-10)
"""Least accepted mean of the exponentials if they are rounded to float16, which has fewer bits below 2^-14.
Above 2^16 float16 is infinite, and so are the sums of values."""
MAX_FLOAT32 = tl.constexpr(2.0**16)
"""Bound on float32 sums and on their inverse, so that the logarithm is as exact as with online softmax."""
MIN_VALUE = tl.constexpr(2.0**-60)
"""Least accepted magnitude of the largest output sum of a tile. Smaller sums may lack terms that were flushed
to zero."""


@triton.jit
def load_shift(number, pointer, heads, exists, C: tl.constexpr):
    """Load phi, the number to subtract from scores, in log2 units: a scalar or [BLOCK_M].

    phi is rounded to an integer, so that its exp2 is exact.
    """
    phi = number
    if C.SOFTMAX_MAX == "head":
        phi = tl.load(pointer + heads, mask=exists, other=0.0)
    return tl.floor(phi * LOG2_E + 0.5)


@triton.jit
def shifted_exponentials(scores, shift, scale_log2, C: tl.constexpr, dtype: tl.constexpr):
    """Return exp2(scores - shift). Scores are in log2 units if C.HAS_SCORE_MOD, else raw products."""
    if C.SOFTMAX_MAX == "head":
        shift = shift[:, None]
    if not C.HAS_SCORE_MOD:
        scores = scores * scale_log2
    if dtype == tl.float32:
        # The difference of a score near zero and a large shift would lose bits of the score.
        p = tl.exp2(scores) * tl.exp2(-shift)
    else:
        p = tl.exp2(scores - shift)
    return p


@triton.jit
def is_in_range(acc, row_sum, exists, keys, operand: tl.constexpr):
    """Return whether acc and row_sum are as exact as with the online softmax, in all rows: one bool.

    acc [BLOCK_M, BLOCK_DV] and row_sum [BLOCK_M] are sums over ``keys`` keys. A row_sum of 0 is out of range:
    the row may have seen no key, or its terms may have been flushed to zero.
    """
    least = MIN_SUM
    most = MAX_SUM
    if operand == tl.float16:
        least = keys.to(tl.float32) * MIN_MEAN_FLOAT16
    elif operand == tl.float32:
        least = 1 / MAX_FLOAT32
        most = MAX_FLOAT32
    sums = (row_sum >= least) & (row_sum <= most)  # False for NaN
    size = tl.abs(acc)
    size = tl.where(size <= MAX_SUM, size, float("inf"))
    largest = tl.max(tl.max(tl.where(exists[:, None], size, 0.0), 1), 0)
    right = tl.min((sums | (exists == 0)).to(tl.int32), 0) != 0
    return right & (largest >= MIN_VALUE) & (largest <= MAX_SUM)


@triton.jit
def as_online(acc, row_max, row_sum):
    """Return (acc, row_max, row_sum) rescaled so that row_sum is 1 and row_max is the log-sum-exp in base 2.

    Rows without keys keep row_sum 0. A sink or the results over other keys can then be added, even if their
    scores are far from phi, the number that was subtracted from scores.
    """
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    new_max = tl.where(empty, -float("inf"), row_max + tl.log2(total))
    return acc / total[:, None], new_max, tl.where(empty, 0.0, 1.0)
