"""Inline assembly between the products, which the compiler would otherwise move or rewrite."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pin(x):
    """A scheduling barrier: x ([rows], or the [rows, 4] of sums) is computed before it, what needs x after
    it.

    The assembler moves arithmetic over waits and over products that it does not depend on, and what should
    overlap then runs one after the other. It moves nothing over an instruction that may sleep; this one
    never does for x >= 0.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred never;
        .reg .f32 both;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        add.f32 both, $2, $3;
        setp.lt.f32 never, both, 0f00000000;
        @never nanosleep.u32 0;
        }
        """,
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def to_16_bit(x, dtype: gl.constexpr):
    """fp32 to fp16 or bf16, always two numbers with one instruction."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def to_fp32(x):
    """fp16 or bf16 to fp32, bf16 by shifts and masks of register pairs."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def pin_16_bit(p):
    """:func:`pin` for p >= 0 in 16 bits, 16 numbers or more a thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .b32 some, all;
        or.b32 some, $8, $9; or.b32 all, $10, $11; or.b32 all, all, some;
        or.b32 some, $12, $13; or.b32 all, all, some; or.b32 some, $14, $15; or.b32 all, all, some;
        setp.lt.s32 never, all, 0;
        @never nanosleep.u32 0;
        mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11;
        mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15;
        }""", "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [p], dtype=p.dtype, is_pure=False, pack=16,
    )  # fmt: skip


@gluon.jit
def wait_for_loads(x):
    """x, in 16 bits and 16 numbers or more a thread, once all of it has come from shared memory.

    An arrival at a barrier does not wait for loads before it, nor does the copy by TMA that it sets free; and
    a load may wait long behind other warps' exponentials. Like :func:`pin`, this could sleep.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .b32 some, all;
        xor.b32 some, $8, $9; xor.b32 all, $10, $11; xor.b32 all, all, some;
        xor.b32 some, $12, $13; xor.b32 all, all, some; xor.b32 some, $14, $15; xor.b32 all, all, some;
        setp.eq.u32 never, all, 0x7FC1FFC3;
        @never nanosleep.u32 0;
        mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11;
        mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15;
        }""", "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [x], dtype=x.dtype, is_pure=False, pack=16,
    )  # fmt: skip


@gluon.jit
def wait_for_numbers(x):
    """:func:`wait_for_loads` for fp32, two numbers a thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .b32 all;
        xor.b32 all, $2, $3;
        setp.eq.u32 never, all, 0x7FC1FFC3;
        @never nanosleep.u32 0;
        mov.b32 $0, $2; mov.b32 $1, $3;
        }""", "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def copy_registers(p):
    """P, in 16 or 32 bits, copied here to registers that the product before has read until now."""
    IN_REGISTER: gl.constexpr = 32 // p.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=IN_REGISTER
    )


RESCALED_TOGETHER = gl.constexpr(16)


@gluon.constexpr_function
def rescale_asm(count):
    """``count`` numbers times their factors, unless the flag, the last operand, is 0 for the whole warp."""
    flag = 3 * count
    products = [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    head = "{ .reg .pred same; setp.eq.b32 same, $" + str(flag) + ", 0; @same bra.uni done; "
    return head + " ".join(products) + " done: }"


@gluon.constexpr_function
def rescale_constraints(count):
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count + ["r"] * count)


@gluon.jit
def rescale(o, alpha):
    """o [rows, n] times alpha [rows], skipped by each warp whose rows all have a factor of 1.

    After some blocks of keys most warps skip it: in block j, 1 row in j finds a new maximum. P has to be in
    its registers before (:func:`copy_registers`), or the assembler moves its packing behind the branches.
    """
    changed = gl.inline_asm_elementwise(
        """
        {
        .reg .pred other;
        setp.neu.f32 other, $2, 0f3F800000;
        setp.neu.or.f32 other, $3, 0f3F800000, other;
        vote.sync.any.pred other, other, 0xffffffff;
        selp.b32 $0, 1, 0, other;
        mov.b32 $1, $0;
        }
        """,
        "=r,=r,f,f",
        [alpha],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    o_row: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    return gl.inline_asm_elementwise(
        rescale_asm(RESCALED_TOGETHER),
        rescale_constraints(RESCALED_TOGETHER),
        [o, gl.convert_layout(alpha, o_row)[:, None], gl.convert_layout(changed, o_row)[:, None]],
        dtype=gl.float32,
        is_pure=False,
        pack=RESCALED_TOGETHER,
    )
