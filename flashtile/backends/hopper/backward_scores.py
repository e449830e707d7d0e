"""From products to probabilities in the Hopper backward, keys as rows: soft-cap, ALiBi, masks, roundings."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper import config

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
LOG2_E = gl.constexpr(1.4426950408889634)


class Numbers(NamedTuple):
    """Of the scores: softmax_scale, the same times log2(e), then 2 softmax_scale / softcap and softcap, both
    times log2(e); and a zero that the compiler does not know to be one."""

    scale: Any
    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    zero: Any


@gluon.jit
def row_of(vector, layout: gl.constexpr):
    return gl.expand_dims(vector.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def slope_of(C: gl.constexpr, work, g, pointers, schedule):
    """ALiBi's, of query head ``g`` of the key head, in log2 units."""
    slope = 0.0
    if C.ALIBI:
        head = work.head * C.GROUP + g
        slope = gl.load(pointers.alibi_slopes + work.sequence * schedule.alibi_stride + head) * LOG2_E
    return slope


@gluon.jit
def positions(C: gl.constexpr, W: gl.constexpr, m, work, s_layout: gl.constexpr):
    """Of this warpgroup's keys, and of the rows of block ``m`` among the keys."""
    keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    rows = gl.arange(0, C.BLOCK_M, layout=gl.SliceLayout(0, s_layout))
    keys += work.place * C.BLOCK_N + W * WARPGROUP_ROWS
    return keys[:, None], (rows + (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q))[None, :]


@gluon.jit
def bend(C: gl.constexpr, W: gl.constexpr, s, m, work, slope, numbers, s_layout: gl.constexpr):
    """(scores in log2 units, d bent / d scaled) from raw products, with soft-cap and ALiBi."""
    slack = 1.0
    if C.SOFTCAP:  # tanh(x) = 1 - 2 / (1 + e^2x), right at both infinities of the exponential
        capped = 1 - 2 / (1 + gl.exp2(s * numbers.softcap_rate))
        s = capped * numbers.softcap_log2
        slack = 1 - capped * capped
    else:
        s = s * numbers.scale_log2
    if C.ALIBI:
        keys, rows = positions(C, W, m, work, s_layout)
        s = s - slope * gl.abs(rows - keys).to(gl.float32)
    return s, slack


@gluon.jit
def mask(C: gl.constexpr, W: gl.constexpr, p, m, work, schedule, s_layout: gl.constexpr):
    """Zero for keys that a row does not see."""
    keys, rows = positions(C, W, m, work, s_layout)
    if not C.EVEN_N:
        p = gl.where(keys < work.seqlen_k, p, 0.0)
    if C.HAS_RIGHT:
        p = gl.where(keys <= rows + schedule.right, p, 0.0)
    if C.HAS_LEFT:
        p = gl.where(keys >= rows - schedule.left, p, 0.0)
    return p


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """fp32 to fp16 or bf16, two at a time whatever the compiler makes of the uses."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def widen(x):
    """fp16 or bf16 to fp32."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def settle(p):
    """p, computed by the time that this is reached.

    Left alone, the assembler moves a wait for a product above arithmetic that does not need it, which then
    overlaps with nothing. It does not move it above a nanosleep: here one that sleeps if a probability is
    negative.
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
