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
def soft_cap(C: gl.constexpr, s, numbers):
    """(raw products, soft-capped, in log2 units; d capped / d scaled)."""
    slack = 1.0
    if C.SOFTCAP:  # tanh(x) = 1 - 2 / (1 + e^2x), right at both infinities of the exponential
        capped = 1 - 2 / (1 + gl.exp2(s * numbers.softcap_rate))
        s = capped * numbers.softcap_log2
        slack = 1 - capped * capped
    else:
        s = s * numbers.scale_log2
    return s, slack


@gluon.jit
def bend(C: gl.constexpr, W: gl.constexpr, s, m, work, slope, numbers, s_layout: gl.constexpr):
    """(scores in log2 units, d bent / d scaled) from raw products, with soft-cap and ALiBi."""
    s, slack = soft_cap(C, s, numbers)
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
