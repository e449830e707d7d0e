"""tanh for soft-caps.

The hardware's tanh is as fast as an exponential, but has a relative error of up to 2 ** -11. Scores of
bfloat16 operands are less exact in PyTorch, which rounds them to 2 ** -9: for them the forward uses it, as
FlashAttention-3 does everywhere. Scores of float16 operands are more exact, and the backward squares the
tanh. Both use the exponential form, which takes two operations of the same unit and more instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

APPROXIMATE = gl.constexpr("{ .reg .f32 a; mul.ftz.f32 a, $1, $2; tanh.approx.f32 $0, a; }")
EXPONENTIAL = gl.constexpr(  # 1 - 2 / (1 + e^2x), right at both infinities of the exponential
    "{ .reg .f32 a; mul.ftz.f32 $0, $1, $2; mul.ftz.f32 a, $0, 0f4038AA3B; ex2.approx.ftz.f32 a, a; "
    "add.ftz.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 a, a; fma.rn.ftz.f32 $0, a, 0fC0000000, 0f3F800000; }"
)


@gluon.jit
def tanh_of(s, rate, APPROX: gl.constexpr):
    """tanh(s * rate), by the hardware's instruction if APPROX."""
    if APPROX:
        return gl.inline_asm_elementwise(
            APPROXIMATE, "=f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            EXPONENTIAL, "=&f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
        )
