"""From raw products to probabilities in the Hopper backward, keys as rows: soft-cap, ALiBi, masks."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper import config
from flashtile.backends.hopper.columns import plus_columns
from flashtile.backends.hopper.mods.visits import visited_block
from flashtile.backends.hopper.soft_cap import tanh_of

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
LOG2_E = gl.constexpr(1.4426950408889634)


class Numbers(NamedTuple):
    """Floats of the launch, for scores in log2 units."""

    scale: Any
    """softmax_scale."""
    scale_log2: Any
    """softmax_scale * log2(e)."""
    softcap_rate: Any
    """softmax_scale / softcap."""
    softcap_log2: Any
    """softcap * log2(e)."""
    zero: Any
    """0.0, which the compiler must not know."""


@gluon.jit
def row_of(vector, layout: gl.constexpr):
    """A number for each query row, in shared memory, to [1, rows] in registers."""
    return gl.expand_dims(vector.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def slope_of(C: gl.constexpr, work, g, pointers, schedule):
    """ALiBi's slope of query head ``g`` of the key head, in log2 units; 0.0 without ALiBi."""
    slope = 0.0
    if C.ALIBI:
        head = work.head * C.GROUP + g
        slope = gl.load(pointers.alibi_slopes + work.sequence * schedule.alibi_stride + head) * LOG2_E
    return slope


@gluon.jit
def positions(C: gl.constexpr, W: gl.constexpr, m, work, s_layout: gl.constexpr):
    """(keys of this warpgroup [keys, 1], where rows of block ``m`` stand among the keys [1, rows])"""
    keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    rows = gl.arange(0, C.BLOCK_M, layout=gl.SliceLayout(0, s_layout))
    keys += work.place * C.BLOCK_N + W * WARPGROUP_ROWS
    return keys[:, None], (rows + (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q))[None, :]


@gluon.jit
def soft_cap(C: gl.constexpr, s, numbers):
    """(scores in log2 units, softcap_grad: d capped / d scaled) from raw products."""
    softcap_grad = 1.0
    if C.SOFTCAP:
        tanh = tanh_of(s, numbers.softcap_rate, False)
        s = tanh * numbers.softcap_log2
        softcap_grad = 1 - tanh * tanh
    else:
        s = s * numbers.scale_log2
    return s, softcap_grad


@gluon.jit
def apply_score_mod(
    C: gl.constexpr, W: gl.constexpr, s, m, work, slope, numbers, s_layout: gl.constexpr, mods=0
):  # fmt: skip
    """(scores in log2 units, their derivative by the scaled products) from raw products: soft-cap, then
    ALiBi; or SCORE_MOD, to which ``numbers.scale_log2`` leads in natural units."""
    s, softcap_grad = soft_cap(C, s, numbers)
    if C.LISTED:
        m, _ = visited_block(C, mods.visits, m)
    if C.SCORE_MOD is not None:
        keys, rows = positions(C, W, m, work, s_layout)
        s, own_grad = C.SCORE_MOD(s, mods.sequence, mods.head, rows - mods.offset, keys, mods.captured)
        s, softcap_grad = s * LOG2_E, own_grad
    if C.ALIBI:
        keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout)).to(gl.float32)
        first_key = work.place * C.BLOCK_N + W * WARPGROUP_ROWS
        between = (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q - first_key).to(gl.float32)
        s = s - slope * gl.abs(plus_columns(between - keys, C.BLOCK_M, s_layout))
    return s, softcap_grad


@gluon.jit
def mask(C: gl.constexpr, W: gl.constexpr, p, m, work, schedule, s_layout: gl.constexpr, mods=0):
    """P, but 0 for keys that a row does not see."""
    is_full = False
    if C.LISTED:
        m, is_full = visited_block(C, mods.visits, m)
    keys, rows = positions(C, W, m, work, s_layout)
    if C.MASK_MOD is not None:
        seen = C.MASK_MOD(mods.sequence, mods.head, rows - mods.offset, keys, mods.captured)
        p = gl.where(seen | is_full, p, 0.0)
    if not C.EVEN_N:
        p = gl.where(keys < work.seqlen_k, p, 0.0)
    if C.HAS_RIGHT:
        p = gl.where(keys <= rows + schedule.window_right, p, 0.0)
    if C.HAS_LEFT:
        p = gl.where(keys >= rows - schedule.window_left, p, 0.0)
    return p
