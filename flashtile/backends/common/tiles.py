"""Steps that kernels of all backends share: where a sequence lies and how its tiles are loaded, conversions
from and to e4m3, and dependent launches.

*e4m3* (Micikevicius et al. 2022, arXiv:2209.05433) is FP8 with a sign, four exponent bits with bias 7 and
three mantissa bits. Its largest value is 448, NaN is 0x7F, and there are no infinities. GPUs convert it in
hardware from compute capability 8.9 on; for older GPUs and the interpreter, the functions named ``bits`` and
``number`` do it with integer operations.

*Programmatic dependent launch* (compute capability 9.0 and up): a kernel's programs start before the previous
kernel has ended. Code before :func:`wait_for_dependencies` overlaps with the previous kernel, so it may only
read memory that no kernel writes. Every kernel that is launched this way has to wait: otherwise the kernel
after it could read memory that an earlier kernel has not written yet. In a kernel that is launched as usual,
these functions do nothing.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import triton
from flashtile.problems import common, fp8_layout

LOG2_E = tl.constexpr(common.LOG2_E)
LN_2 = tl.constexpr(common.LN_2)


@triton.jit
def sequence(cu_seqlens, b, seqlen, total, VARLEN: tl.constexpr):
    """Return (first row, length) of sequence ``b``, clamped to the tensor.

    The first row is 0 if sequences are not packed.
    """
    if VARLEN:
        start = min(max(tl.load(cu_seqlens + b), 0), total)
        end = min(max(tl.load(cu_seqlens + b + 1), start), total)
        return start.to(tl.int64), end - start
    else:
        return tl.zeros([], tl.int64), seqlen


@triton.jit
def row_of_token(b, start, heads, seqlen, VARLEN: tl.constexpr):
    """Return the index of the first head of a sequence's first token, int64.

    The index counts rows of a tensor that is viewed as (tokens * heads, head_dim).
    """
    if VARLEN:
        return start * heads
    else:
        return b.to(tl.int64) * seqlen * heads


@triton.jit
def row_of_head(b, head, start, heads, seqlen, total, VARLEN: tl.constexpr):
    """Return the index of a head's first token in a tensor of row statistics, int64.

    The tensor has shape (batch, heads, seqlen), or (heads, total) if VARLEN.
    """
    if VARLEN:
        return head.to(tl.int64) * total + start
    else:
        return (b.to(tl.int64) * heads + head) * seqlen


@triton.jit
def tile_index(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the row numbers within a tile, [BLOCK].

    They are int64 if WIDE, for tiles that span 2^31 elements or more.
    """
    index = tl.arange(0, BLOCK)
    if WIDE:
        index = index.to(tl.int64)
    return index


class Matrix(NamedTuple):
    """One head of one sequence in memory: ``length`` rows, ``stride`` elements apart."""

    base: Any
    stride: Any
    length: Any


@triton.jit
def load_tile(
    matrix, start, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, ONCE: tl.constexpr = False,
):  # fmt: skip
    """Load a tile [BLOCK, BLOCK_D]: the rows from ``start`` on.

    Elements past the last row (if MASKED) and past column HEAD_DIM are 0. If ONCE, the rows are read only
    once, so they are the first that the caches evict.
    """
    policy: tl.constexpr = "evict_first" if ONCE else ""
    rows = tile_index(BLOCK, WIDE)
    columns = tl.arange(0, BLOCK_D)
    stride = matrix.stride
    pointers = matrix.base + start.to(tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        inside_rows = start + rows < matrix.length
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=inside_rows[:, None], other=0.0, eviction_policy=policy)
        else:
            inside = inside_rows[:, None] & (columns < HEAD_DIM)[None, :]
            return tl.load(pointers, mask=inside, other=0.0, eviction_policy=policy)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, eviction_policy=policy)
        else:
            return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0, eviction_policy=policy)


@triton.jit
def to_bfloat16(w):
    """Convert float8e4nv to bfloat16, exactly, including NaN.

    The conversion goes through float16 and float32, because the upper half of the float32 is the bfloat16.
    PTX can also convert float16 directly to bfloat16, at a quarter of the rate of float16 to float32. With
    this conversion, products of 8 rows with weights in e4m3 are 1.65 times as fast as in bf16 on an H200, and
    with that one 1.31 to 1.41 times.
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


CAPABILITY = (9, 0)


@triton.jit
def wait_for_dependencies():
    """Wait until the previous kernels have ended and their writes are visible."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def launch_dependents():
    """Let the next kernel start, once all programs of this kernel have called this function or ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines of these addresses to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
