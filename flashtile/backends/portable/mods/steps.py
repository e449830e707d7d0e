"""Operations of users' functions that Triton lacks, or computes in another way than torch."""

import triton
import triton.language as tl

from flashtile.backends.portable.tiles import tanh

__all__ = [
    "element", "floor_div", "floor_div_by_positive", "floor_mod", "floor_mod_by_positive", "power", "sign",
    "tanh",
]  # fmt: skip


@triton.jit
def element(index, size):
    """Within a dimension whatever ``index`` says; a negative one counts from the end."""
    index = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def floor_div(a, b):
    """Rounded down; Triton's own division of ints rounds towards zero."""
    if (a + b).dtype.is_floating():
        return tl.floor(a / b)
    else:
        quotient = a // b
        return tl.where((quotient * b != a) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def floor_mod(a, b):
    """With the sign of ``b``."""
    return a - floor_div(a, b) * b


@triton.jit
def floor_div_by_positive(a, b):
    """:func:`floor_div` of ints, with fewer instructions."""
    quotient = a // b
    return tl.where(a < quotient * b, quotient - 1, quotient)


@triton.jit
def floor_mod_by_positive(a, b):
    remainder = a % b
    return tl.where(remainder < 0, remainder + b, remainder)


@triton.jit
def power(a, b):
    """``a ** b`` of floats, with torch's results for negative bases (whole exponents) and for 0 ** 0."""
    size = tl.exp2(tl.log2(tl.abs(a)) * b)
    is_whole = b == tl.floor(b)
    is_odd = is_whole & (b * 0.5 != tl.floor(b * 0.5))
    signed = tl.where(is_odd, -size, tl.where(is_whole, size, float("nan")))
    return tl.where(b == 0, 1.0, tl.where(a < 0, signed, size))


@triton.jit
def sign(a):
    return tl.where(a > 0, 1, tl.where(a < 0, -1, 0)).to(a.dtype)
