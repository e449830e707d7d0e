"""FP8 e4m3 to and from bits, for GPUs without the conversion (before compute capability 8.9) and the
interpreter.

e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): sign, four exponent bits with bias 7, three of mantissa,
largest 448, no infinities, NaN 0x7F.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def decode_bits(bits):
    """uint8 bits -> float16, exact; NaN becomes 480, which no finite e4m3 is."""
    wide = bits.to(tl.uint16)
    # The exponent and mantissa as float16's, whose bias is 15: 2^8 too small, subnormals included.
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode_bits(x):
    """float32 within +-448 -> uint8 bits, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # from bias 127 to 7
    # Below 2^-6 steps are 2^-9 wide; adding 2^23 rounds to an integer, held in the low bits.
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = steps.to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
