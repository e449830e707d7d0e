"""The unified maximum of FlashDecoding++ (Hong et al. 2023, arXiv:2311.01282, section 3), on the card.

What is subtracted from scores need not be their maximum. Any number phi gives the same quotient, as long as
no sum overflows, and none is so small that it has lost bits. With phi known beforehand, no maximum is looked
for and nothing is rescaled. Whether the sums are in order is checked once, at the end of a work tile; if not,
the same program computes the tile again with the online softmax.
"""

import triton
import triton.language as tl

from flashtile.backends.common.tiles import LOG2_E

LEAST_SUM = tl.constexpr(2.0**-32)
"""Of a row's exponentials: what exp2 flushes to zero is then 2^-94 of it a key."""
MOST_SUM = tl.constexpr(2.0**120)
LEAST_MEAN_FLOAT16 = tl.constexpr(2.0**-10)
"""Of a row's exponentials where they are rounded to float16, which has fewer bits below 2^-14. Above 2^16 it
is infinite, and so are the sums of values."""
MOST_FLOAT32 = tl.constexpr(2.0**16)
"""Where sums must be right to float32's last bits, their logarithm must be as small as online sums'."""
LEAST_VALUE = tl.constexpr(2.0**-60)
"""Of the largest sum of values: in smaller ones terms may have been flushed to zero."""


@triton.jit
def load_shift(number, pointer, heads, exists, C: tl.constexpr):
    """phi in log2 units, one for all rows or [BLOCK_M]: a whole number, so that exp2 of it is exact."""
    phi = number
    if C.SOFTMAX_MAX == "head":
        phi = tl.load(pointer + heads, mask=exists, other=0.0)
    return tl.floor(phi * LOG2_E + 0.5)


@triton.jit
def shifted_exponentials(scores, shift, scale_log2, C: tl.constexpr, dtype: tl.constexpr):
    """exp2 of scores, in log2 units unless they are raw products, minus ``shift``."""
    if C.SOFTMAX_MAX == "head":
        shift = shift[:, None]
    if not C.HAS_SCORE_MOD:
        scores = scores * scale_log2
    if dtype == tl.float32:
        # Of a score near zero, the difference to a large shift would lose bits.
        p = tl.exp2(scores) * tl.exp2(-shift)
    else:
        p = tl.exp2(scores - shift)
    return p


@triton.jit
def is_in_range(acc, row_sum, exists, keys, operand: tl.constexpr):
    """Whether acc [BLOCK_M, BLOCK_DV] and row_sum [BLOCK_M] over this many keys are as good as online ones:
    one number.

    A row that has seen no key is not, since its sum may also have been too small.
    """
    least = LEAST_SUM
    most = MOST_SUM
    if operand == tl.float16:
        least = keys.to(tl.float32) * LEAST_MEAN_FLOAT16
    elif operand == tl.float32:
        least = 1 / MOST_FLOAT32
        most = MOST_FLOAT32
    sums = (row_sum >= least) & (row_sum <= most)  # not of NaN
    size = tl.abs(acc)
    size = tl.where(size <= MOST_SUM, size, float("inf"))
    largest = tl.max(tl.max(tl.where(exists[:, None], size, 0.0), 1), 0)
    right = tl.min((sums | (exists == 0)).to(tl.int32), 0) != 0
    return right & (largest >= LEAST_VALUE) & (largest <= MOST_SUM)


@triton.jit
def as_online(acc, row_max, row_sum):
    """(acc, row_max, row_sum) as the online softmax has them for one key: what is joined to them, a sink or
    other keys, may be far from phi."""
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    new_max = tl.where(empty, -float("inf"), row_max + tl.log2(total))
    return acc / total[:, None], new_max, tl.where(empty, 0.0, 1.0)
