"""tanh for soft-caps.

The hardware's tanh is as fast as an exponential, but has a relative error of up to 2 ** -11. The forward uses
it for bfloat16 operands, since PyTorch rounds their scores to 2 ** -9. FlashAttention-3 uses it everywhere.

For float16 operands, whose scores are more exact, the forward computes tanh from an exponential and a
reciprocal. The backward squares the tanh, so it uses this formula for both dtypes. The formula takes more
instructions. Two of them run on the unit that also computes the hardware's tanh.
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon

APPROXIMATE = gl.constexpr("{ .reg .f32 a; mul.ftz.f32 a, $1, $2; tanh.approx.f32 $0, a; }")
EXPONENTIAL = gl.constexpr(  # 1 - 2 / (1 + e^2x), exact also where e^2x is 0 or infinity
    "{ .reg .f32 a; mul.ftz.f32 $0, $1, $2; mul.ftz.f32 a, $0, 0f4038AA3B; ex2.approx.ftz.f32 a, a; "
    "add.ftz.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 a, a; fma.rn.ftz.f32 $0, a, 0fC0000000, 0f3F800000; }"
)


@gluon.jit
def tanh_of(s, rate, APPROX: gl.constexpr):
    """Return tanh(s * rate). With APPROX, use the hardware's tanh instruction."""
    if APPROX:
        return gl.inline_asm_elementwise(
            APPROXIMATE, "=f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            EXPONENTIAL, "=&f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
        )
