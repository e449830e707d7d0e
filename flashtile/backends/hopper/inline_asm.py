"""Inline assembly for steps between the products that the compiler would otherwise move or rewrite.

Three kinds: *pins*, which keep the order of the source (the assembler, ptxas, otherwise moves arithmetic
across waits); *waits for loads*, which an arrival at an mbarrier does not imply; and instructions that the
compiler does not choose (packed conversions, a rescaling that warps skip).
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon


@gluon.jit
def pin(x):
    """Return x unchanged, after a scheduling barrier. x [rows] or [rows, 4] has values >= 0.

    x is computed before the barrier, and everything that uses the result after it. The assembler (ptxas)
    moves arithmetic across waits and across products on which it does not depend. Steps that should overlap
    would then run one after the other. But the assembler moves nothing across ``nanosleep``. The
    ``nanosleep`` here is executed only for negative x, so never.
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
        is_pure=False,  # or the compiler itself would move it
        pack=2,  # one barrier for two registers, which are added so that it waits for both
    )


@gluon.jit
def to_16_bit(x, dtype: gl.constexpr):
    """Convert fp32 to fp16 or bf16, always two numbers with one instruction."""
    # The instruction's first source is the upper half of the register: the second number.
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
    """Convert fp16 or bf16 to fp32. Two bf16 numbers of a register are converted by a shift and a mask."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def rounded_product(x, factor):
    """Return x * factor in fp32, rounded. A product by * may be fused with the addition that follows it."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, factor], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def pin_16_bit(p):
    """Return p unchanged, after the scheduling barrier of :func:`pin`. p has 16-bit values >= 0.

    Each thread must hold at least 16 elements of p.
    """
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
    """Return x (16 bits, at least 16 numbers per thread) once it has been loaded from shared memory.

    When a thread arrives at a barrier, its earlier loads may still be in progress, for example because other
    warps compute exponentials. TMA waits only for the arrival, so it could overwrite data that have not been
    loaded yet. Here a ``nanosleep`` depends on the loaded data, and so follows the loads. The assembler moves
    nothing across it. The condition is that all data together are 0x7FC1FFC3, an arbitrary number; if they
    ever are, a sleep of 0 changes nothing.
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


@gluon.constexpr_function
def wait_asm(count):
    """Return PTX that copies ``count`` registers after a scheduling barrier that depends on all of them."""
    mixed = " ".join(f"xor.b32 all, all, ${count + n};" for n in range(1, count))
    copies = " ".join(f"mov.b32 ${n}, ${count + n};" for n in range(count))
    head = "{ .reg .pred never; .reg .b32 all; mov.b32 all, $" + str(count) + "; " + mixed
    return head + " setp.eq.u32 never, all, 0x7FC1FFC3; @never nanosleep.u32 0; " + copies + " }"


@gluon.constexpr_function
def wait_constraints(count):
    return ",".join(["=f"] * count + ["f"] * count)


@gluon.jit
def wait_for_numbers(x, NUMBERS: gl.constexpr = 2):
    """Return x (fp32, NUMBERS per thread) once it has been loaded, as :func:`wait_for_loads` does."""
    return gl.inline_asm_elementwise(
        wait_asm(NUMBERS), wait_constraints(NUMBERS), [x], dtype=gl.float32, is_pure=False, pack=NUMBERS
    )  # fmt: skip


@gluon.jit
def copy_registers(p):
    """Copy P (16 or 32 bits) to the registers that are the operand of the next product.

    Call this function after the wait for the previous product, which reads its operand from the same
    registers. The assembler does not move the copy to another place in the code.
    """
    # Not pure: the compiler would move a pure copy, or remove it.
    IN_REGISTER: gl.constexpr = 32 // p.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=IN_REGISTER
    )


RESCALED_TOGETHER = gl.constexpr(16)
"""Numbers that :func:`rescale` multiplies, or skips, after one branch. Not measured against others."""


@gluon.constexpr_function
def rescale_asm(count):
    """Return PTX that multiplies ``count`` numbers by their factors.

    Operand 3 * count is a flag, equal in all threads of a warp. If it is 0, the code multiplies nothing.
    """
    flag = 3 * count
    products = [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    head = "{ .reg .pred same; setp.eq.b32 same, $" + str(flag) + ", 0; @same bra.uni done; "
    return head + " ".join(products) + " done: }"


@gluon.constexpr_function
def rescale_constraints(count):
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count + ["r"] * count)


@gluon.jit
def rescale(o, alpha):
    """Return o [rows, n] times alpha [rows]. A warp skips this if the factors of all its rows are 1.

    In the j-th block of keys, a row has a new maximum with a probability of about 1 / j. After some blocks,
    most warps therefore skip the multiplication. The caller must have copied P to its registers
    (:func:`copy_registers`). Otherwise the assembler packs P only after the branches of this function.
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
    # ``vote`` makes the flag equal in a warp, so the branch is uniform (bra.uni) and no thread waits for
    # another.
    o_row: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    # Operands 0 to 15 are results and inputs at once: if the products are skipped, O is in its registers.
    return gl.inline_asm_elementwise(
        rescale_asm(RESCALED_TOGETHER),
        rescale_constraints(RESCALED_TOGETHER),
        [o, gl.convert_layout(alpha, o_row)[:, None], gl.convert_layout(changed, o_row)[:, None]],
        dtype=gl.float32,
        is_pure=False,
        pack=RESCALED_TOGETHER,
    )
