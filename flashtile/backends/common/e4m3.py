"""Conversions between FP8 e4m3 and wider dtypes, in hardware or by integer operations.

The hardware conversion needs compute capability 8.9 or higher; older GPUs and the interpreter use integer
operations. e4m3 (Micikevicius et al. 2022, arXiv:2209.05433) has a sign, four exponent bits with bias 7 and
three mantissa bits. Its largest value is 448, NaN is 0x7F, and there are no infinities.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.problems import fp8_layout


@triton.jit
def to_bfloat16(w):
    """Convert float8e4nv to bfloat16, exactly, including NaN.

    The conversion goes through float16 and float32, because the upper half of the float32 is the bfloat16.
    PTX can also convert float16 directly to bfloat16, at a quarter of the rate of float16 to float32.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, h<4>;
        .reg .b32 pair<2>, f<4>;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 pair0, low;
        cvt.rn.f16x2.e4m3x2 pair1, high;
        mov.b32 {h0, h1}, pair0;
        mov.b32 {h2, h3}, pair1;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        prmt.b32 $0, f0, f1, 0x7632;
        prmt.b32 $1, f2, f3, 0x7632;
        }""",
        "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


E4M3_MAX = tl.constexpr(fp8_layout.E4M3_MAX)


@triton.jit
def decode_bits(bits):
    """Convert e4m3 bits (uint8) to float16, exactly. NaN becomes 480, more than any finite e4m3."""
    wide = bits.to(tl.uint16)
    # Read as float16 with bias 15, the bits of exponent and mantissa give a value that is 2^8 times too
    # small. That holds for subnormal numbers as well.
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_number(bits):
    """Convert e4m3 bits (uint8) to float16, exactly. NaN stays NaN."""
    half = decode_bits(bits)
    return tl.where(tl.abs(half) == 480.0, float("nan"), half)


@triton.jit
def split_pairs(pairs, IN_SOFTWARE: tl.constexpr):
    """Convert pairs of e4m3, stored as uint16, to float16, exactly. Return (the low bytes, the high bytes).

    The hardware converts two adjacent bytes at a time. A 32-bit register holds two pairs. One permutation
    makes the two low bytes adjacent, and also the two high bytes. Two instructions then convert them.

    e4m3 is loaded as pairs because the loads of tensor-core operands can transpose tiles of 16-bit elements.
    """
    if IN_SOFTWARE:
        return decode_bits(pairs & 0xFF), decode_bits(pairs >> 8)
    else:
        low = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $1, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }""",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $1, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, high;
            }""",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        return low, high


@triton.jit
def encode_bits(x):
    """Convert float32 within +-448 to e4m3 bits (uint8), rounded to nearest, ties to even. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # change the exponent's bias from 127 to 7
    # Below 2^-6, e4m3 has steps of 2^-9. Adding 2^23 to the number of steps rounds that number to an integer
    # and puts the integer into the low bits of the float32.
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = steps.to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
