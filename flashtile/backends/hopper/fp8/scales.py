"""Scales of e4m3 tiles in the Hopper forward: of q by row, of k and v by block of keys.

They cost no operation per element. Scales of q and k are folded into the softmax scale, by which scores are
multiplied in any case. The scale of v is folded into the exponent of P; one factor per block removes it from
the row's sum.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import WARPGROUP_ROWS
from flashtile.backends.hopper.fp8.softmax import LEAST, log2
from flashtile.problems import fp8_layout as layout

QUERY_BLOCK = gl.constexpr(layout.QUERY_BLOCK)
KEY_BLOCK = gl.constexpr(layout.KEY_BLOCK)


class BlockScaleStrides(NamedTuple):
    """Strides of the scales between sequences, heads and blocks, in elements; 0 where a scale is shared."""

    q_scale_batch: Any
    q_scale_head: Any
    q_scale_block: Any
    k_scale_batch: Any
    k_scale_head: Any
    k_scale_block: Any
    v_scale_batch: Any
    v_scale_head: Any
    v_scale_block: Any


class ScaleArrays(NamedTuple):
    """Memory of the scales, fp32, and their strides. Unused pointers are never dereferenced."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    strides: Any


class TileScales(NamedTuple):
    """Scales of one tile."""

    rows: Any
    """[rows]: factor of each row's raw products, still without the scale of k."""
    k: Any
    """Pointer to k's scale of the first block of keys; ``k_block`` is the stride to the next block's."""
    v: Any
    """Pointer to v's scale of the first block of keys; ``v_block`` is the stride to the next block's."""
    k_block: Any
    v_block: Any


@gluon.jit
def tile_scales(C: gl.constexpr, work, positions, head, call):
    """Return the :class:`TileScales` of 64 rows with these ``positions`` and query heads, both [rows]."""
    arrays, strides, numbers = call.scales, call.scales.strides, call.numbers
    q_index = work.sequence * strides.q_scale_batch + head // C.Q_SCALE_GROUP * strides.q_scale_head
    first_q = 0
    first_k = 0
    if C.VARLEN and C.BLOCK_SCALES:
        first_q = work.start_q // QUERY_BLOCK + work.sequence
        first_k = work.start_k // KEY_BLOCK + work.sequence
    q_index += (first_q + positions // QUERY_BLOCK) * strides.q_scale_block
    if C.HAS_Q_SCALE:
        q_scale = gl.load(arrays.q_scale + q_index, mask=positions < work.seqlen_q, other=1.0)
    else:
        q_scale = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, positions.type.layout)
    if C.SOFTCAP:
        q_scale = q_scale * numbers.softcap_rate
    else:
        q_scale = q_scale * numbers.scale_log2
    k_index = work.sequence * strides.k_scale_batch + work.head_kv * strides.k_scale_head
    v_index = work.sequence * strides.v_scale_batch + work.head_kv * strides.v_scale_head
    return TileScales(
        q_scale,
        arrays.k_scale + (k_index + first_k * strides.k_scale_block),
        arrays.v_scale + (v_index + first_k * strides.v_scale_block),
        strides.k_scale_block,
        strides.v_scale_block,
    )


@gluon.jit
def load_scales(C: gl.constexpr, scales, n):
    """Return (scale of k, scale of v) of key block ``n``, or of block 0 if n < 0.

    A scale that the call lacks is 1.0.
    """
    block = gl.maximum(n, 0) * C.BLOCK_N // KEY_BLOCK
    k_scale, v_scale = gl.to_tensor(1.0), gl.to_tensor(1.0)
    if C.HAS_K_SCALE:
        k_scale = gl.load(scales.k + block * scales.k_block)
    if C.HAS_V_SCALE:
        v_scale = gl.load(scales.v + block * scales.v_block)
    return k_scale, v_scale


@gluon.jit
def score_factor(C: gl.constexpr, scales, k_scale):
    """Return the factor [rows] by which raw products Q K^T are multiplied.

    Without C.HAS_SCORE_MOD, the factor also multiplies masked scores, which are -inf. The factor is then
    clamped to be positive and finite, because 0 times -inf is NaN.
    """
    factor = scales.rows * k_scale
    if not C.HAS_SCORE_MOD:
        factor = gl.minimum(gl.maximum(factor, LEAST), 1 / LEAST)
    return factor


@gluon.jit
def value_scale(v_scale):
    """Return (log2 of a block's value scale, inverse of the scale)."""
    exponent = log2(gl.maximum(v_scale, LEAST))
    return exponent, gl.exp2(-exponent)
