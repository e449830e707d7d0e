"""Softmax of the FP8 forward: scores of one block of keys to P in e4m3, in the byte order of wgmma's operand.

Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608, section 3.3).

P stays in registers. In an accumulator, thread t of a quad holds columns 8 a + 2 t + i, with i < 2. In the
left operand of the next product it holds columns 16 a + 4 t + j, with j < 4. P is not moved between threads:
instead, the keys of V^T are stored in the order in which P's columns then appear (``fp8_layout.key_order``).
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import left_operand_layout

P_LOG2 = gl.constexpr(8.0)
"""P is scaled by 2 ** 8, so the largest P of a row is 256: e4m3 represents 2 ** -9 to 448."""
LEAST = gl.constexpr(2.0**-90)
"""Lower bound of value scales and of score factors. Zero times infinity would be NaN."""


@gluon.jit
def by_byte(x):
    """Split x [rows, N] into the values of bytes 0, 1, 2 and 3 of P's registers, each [rows, N / 32, 2, 4].

    Column 32 a + 16 b + 8 c + 2 t + i of x becomes byte 2 c + i of register (a, b) of thread t.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([M, N // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)))
    even_0, even_1 = gl.split(even)
    odd_0, odd_1 = gl.split(odd)
    return even_0, odd_0, even_1, odd_1


@gluon.jit
def pack(b0, b1, b2, b3):
    """Pack four float32 values into the bytes of an int32, each rounded to the nearest e4m3, ties to even."""
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
    """View int32 [rows, N / 32, 2, 4] as e4m3 [rows, N], the left operand of a product.

    The result is in the registers of ``packed``.

    P is carried between iterations as int32. If it were carried as bytes, the compiler would split and
    reassemble every register at the boundary of the loop.
    """
    M: gl.constexpr = packed.shape[0]
    N: gl.constexpr = packed.shape[1] * 32
    layout: gl.constexpr = left_operand_layout(product_layout, 4)
    twice = gl.join(packed, packed)
    by_key = gl.convert_layout(gl.join(twice, twice).reshape([M, N]), layout, assert_trivial=True)
    # Four adjacent elements in this layout are copies of one register: use its four bytes as the elements.
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
    """Return [rows, 4]: the partial sum of each of the four threads that share a row, without a shuffle."""
    return gl.sum(gl.sum((b0 + b1) + (b2 + b3), 2), 1)


@gluon.jit
def exponentials(C: gl.constexpr, s, m, scale, value_log2):
    """Return (P as four tensors, new m, factor for earlier sums and O). :func:`by_byte` defines the tensors.

    Args:
        s: [rows, N], raw products, or if C.HAS_SCORE_MOD scores in log2 units.
        m: [rows], maximum so far of score + value_log2.
        scale: [rows], positive factor from raw products to log2 units.
        value_log2: log2 of the block's value scale. P contains the value scale, so O needs no further scale.
            m contains the value scale as well, so that the block with the largest contributions to O uses
            e4m3's full range.
    """
    top = gl.max(s, 1)
    if not C.HAS_SCORE_MOD:
        top = top * scale
    m_new = gl.maximum(m, top + value_log2)
    known = gl.where(m_new == float("-inf"), 0.0, m_new)  # for rows that have seen no key yet
    shift = known - (value_log2 + P_LOG2)
    if C.HAS_SCORE_MOD:
        p = gl.exp2(s - shift[:, None])
    else:
        p = gl.exp2(s * scale[:, None] - shift[:, None])
    b0, b1, b2, b3 = by_byte(p)
    return b0, b1, b2, b3, m_new, gl.exp2(m - known)
