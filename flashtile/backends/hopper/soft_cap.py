"""tanh for soft-caps: a polynomial where scores are well below the cap, the exponential form elsewhere.

The exponential form needs two numbers of a unit that makes 16 in a cycle, beside the one that a softmax needs
anyway. A polynomial needs none. The hardware's ``tanh.approx`` needs one, but is off by up to 2 ** -11 of a
score, which lse shows.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TOGETHER = gl.constexpr(16)
"""Numbers of a thread that take the same branch, with those of its warp."""
SMALL = 0.5
"""Up to here a warp uses the polynomial, if all of its numbers are so small."""
COEFFICIENTS = (0.999999456, -0.333263176, 0.131902931, -0.0444021285)
"""Of ``tanh(x) = x P(x^2)`` up to ``SMALL``, the constant first: off by 6e-7 of tanh at most."""


def _hex(number: float) -> str:
    """As PTX writes a float32."""
    return "0f" + struct.pack(">f", number).hex().upper()


def _largest(count: int) -> str:
    """``m`` = the largest magnitude of registers $0 on; NaN if one is."""
    steps = ["abs.ftz.f32 m, $0;"]
    steps += [f"abs.ftz.f32 a, ${n}; max.NaN.ftz.f32 m, m, a;" for n in range(1, count)]
    return " ".join(steps)


def _polynomial(x: str) -> str:
    *rest, second, first = map(_hex, COEFFICIENTS)
    steps = [f"mul.ftz.f32 a, {x}, {x};", f"fma.rn.ftz.f32 m, a, {first}, {second};"]
    steps += [f"fma.rn.ftz.f32 m, m, a, {c};" for c in reversed(rest)]
    return " ".join([*steps, f"mul.ftz.f32 {x}, {x}, m;"])


def _exponential(x: str) -> str:
    """1 - 2 / (1 + e^2x), right at both infinities of the exponential."""
    return (
        f"mul.ftz.f32 a, {x}, {_hex(2.8853900817779268)}; ex2.approx.ftz.f32 a, a; "
        f"add.ftz.f32 a, a, {_hex(1)}; rcp.approx.ftz.f32 a, a; fma.rn.ftz.f32 {x}, a, {_hex(-2)}, {_hex(1)};"
    )


def tanh_assembly(count: int) -> str:
    """PTX: ``count`` numbers times their factors, to tanh of it. Operands: results, numbers, factors."""
    registers = [f"${n}" for n in range(count)]
    products = [f"mul.ftz.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    return " ".join(
        [
            "{ .reg .pred big; .reg .f32 m, a;",
            *products,
            _largest(count),
            f"setp.gtu.ftz.f32 big, m, {_hex(SMALL)}; vote.sync.any.pred big, big, 0xffffffff;",
            "@big bra.uni exponential;",
            *map(_polynomial, registers),
            "bra.uni done; exponential:",
            *map(_exponential, registers),
            "done: }",
        ]
    )


TANH = gl.constexpr(tanh_assembly(TOGETHER.value))
CONSTRAINTS = gl.constexpr(
    ",".join(["=f"] * TOGETHER.value + [str(n) for n in range(TOGETHER.value)] + ["f"] * TOGETHER.value)
)


EXPONENTIAL = gl.constexpr("{ .reg .f32 a; mul.ftz.f32 $0, $1, $2; " + _exponential("$0") + " }")


@gluon.jit
def tanh_of(s, rate):
    """tanh(s * rate) in the exponential form, number by number: where branches would cost registers."""
    return gl.inline_asm_elementwise(
        EXPONENTIAL, "=&f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def capped(s, rate):
    """tanh(s * rate), 16 numbers or more a thread."""
    return gl.inline_asm_elementwise(
        TANH, CONSTRAINTS, [s, rate], dtype=gl.float32, is_pure=False, pack=TOGETHER
    )
