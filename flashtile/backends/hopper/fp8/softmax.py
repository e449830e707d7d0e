"""The FP8 forward's softmax: scores of one block of keys to P in e4m3, in wgmma's order of bytes.

Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608, section 3.3).

P stays in registers. In an accumulator, thread t of a quad holds columns 8 a + 2 t + i; as the left operand
of the next product it has to hold columns 16 a + 4 t + j. Nothing is moved: the keys of V^T are stored in the
order that P has, so that the same registers are right for both (``fp8.layout.key_order``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.constants import left_operand_layout

P_LOG2 = gl.constexpr(8.0)
"""The largest P of a row is 2 ** 8: e4m3 reaches from 2 ** -9 to 448."""
LEAST = gl.constexpr(2.0**-90)
"""The least value scale, and the least factor of scores, where an exact zero would make NaN of infinities."""


@gluon.jit
def by_byte(x):
    """[rows, N] -> four of [rows, N / 32, 2, 4]: columns that become bytes 0 to 3 of P's registers.

    Column 32 a + 16 b + 8 c + 2 t + i is byte 2 c + i of register (a, b) of thread t.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([M, N // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)))
    even_0, even_1 = gl.split(even)
    odd_0, odd_1 = gl.split(odd)
    return even_0, odd_0, even_1, odd_1


@gluon.jit
def pack(b0, b1, b2, b3):
    """Four numbers to the bytes of an int32, each rounded to the nearest e4m3, ties to even."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [b0, b1, b2, b3],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def as_operand(packed, product_layout: gl.constexpr):
    """int32 [rows, N / 32, 2, 4] -> e4m3 [rows, N], the same registers as the left operand of a product.

    P goes from step to step as integers: as bytes, the compiler would take every register apart and put it
    together again at the edge of the loop.
    """
    M: gl.constexpr = packed.shape[0]
    N: gl.constexpr = packed.shape[1] * 32
    layout: gl.constexpr = left_operand_layout(product_layout, 4)
    twice = gl.join(packed, packed)
    by_key = gl.convert_layout(gl.join(twice, twice).reshape([M, N]), layout, assert_trivial=True)
    # Four neighbours in this layout are four copies of one register: it is taken as it is.
    bytes_of = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [by_key], dtype=gl.int8, is_pure=False, pack=4
    )
    return bytes_of.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def log2(x):
    """log2 of a positive number, in one instruction, to 22 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sums_of(b0, b1, b2, b3):
    """[rows, 4]: what each of the four threads that share a row holds, summed without a shuffle."""
    return gl.sum(gl.sum((b0 + b1) + (b2 + b3), 2), 1)


@gluon.jit
def exponentials(C: gl.constexpr, s, m, scale, value_log2):
    """(P by its bytes, four numbers; its new row maximum; the factor for what was summed before).

    Args:
        s: [rows, N], raw products, or if C.HAS_SCORE_MOD scores in log2 units.
        m: [rows], maximum so far of score plus the value scale's logarithm.
        scale: [rows], positive: raw products to log2 units.
        value_log2: log2 of the block's value scale. P holds it, so that O is in units of 1; it is part of
            the maximum, so that P of the block that matters most to O spreads over e4m3's range.
    """
    top = gl.max(s, 1)
    if not C.HAS_SCORE_MOD:
        top = top * scale
    m_new = gl.maximum(m, top + value_log2)
    known = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has met no key yet
    shift = known - (value_log2 + P_LOG2)
    if C.HAS_SCORE_MOD:
        p = gl.exp2(s - shift[:, None])
    else:
        p = gl.exp2(s * scale[:, None] - shift[:, None])
    b0, b1, b2, b3 = by_byte(p)
    return b0, b1, b2, b3, m_new, gl.exp2(m - known)
