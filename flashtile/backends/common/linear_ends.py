"""What follows a product y = x W^T, on its sums in float32: the ends that all kernels of products share.

A program's sums are of *places* of the output. Where two rows of W make one place (SwiGLU's gate and up) or
two that belong together (a pair that rotary embedding turns), the program computes both: ``HALVES`` is 2.
These functions create no tensors of their own, so that Gluon kernels, whose tensors have layouts, call them
as Triton kernels do.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

PLAIN, SWIGLU, ROTARY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""ROTARY is that of queries, keys and values: embedding (if ROTARY_DIM > 0) and the append to a cache."""


@dataclass(frozen=True)
class EndVariant:
    """What the ends are compiled for."""

    END: int
    NORM: bool
    BIAS: bool
    RESIDUAL: bool
    CHANNEL_SCALES: bool
    """Of the rows of W."""
    HEAD_DIM: int = 0
    ROTARY_DIM: int = 0
    INTERLEAVED: bool = False
    PAGE_SIZE: int = 0
    HAS_SLOTS: bool = False
    """Whether places in the cache come from slots, else from a block table."""
    X_SCALES: bool = False
    NEXT_NORM: bool = False
    """Whether the result is prepared for a norm; END is PLAIN."""


class EndPointers(NamedTuple):
    """Tensors of the ends; None for each that a call does not have."""

    y: Any
    bias: Any
    residual: Any
    scales: Any
    cos: Any
    sin: Any
    positions: Any
    slots: Any
    block_table: Any
    k_cache: Any
    v_cache: Any
    x_scale: Any
    next_norm_weight: Any
    scaled: Any
    """y times that weight, in the layout of y."""
    squares: Any
    """float32 (parts, rows of a tile): sums of squares of y that each program leaves."""
    next_factor: Any


class EndSizes(NamedTuple):
    """Integers of the ends. Their values lead to no new compilation, but whether some are multiples of 16."""

    M: Any
    """Rows of x."""
    places: Any
    """Of a row of the output: N, or half of it where two rows of W make one or belong together."""
    y_stride: Any
    residual_stride: Any
    heads_q: Any
    heads_kv: Any
    angles: Any
    """Rows of the tables of cos and sin."""
    num_blocks: Any
    table_width: Any
    """Pages of a row of the block table."""
    k_block: Any
    """Strides of the caches, in elements: of pages, tokens and heads."""
    k_token: Any
    k_head: Any
    v_block: Any
    v_token: Any
    v_head: Any
    next_eps: Any


@triton.jit
def column_of(within, half, E: tl.constexpr):
    """Column of its head that the first or second element of pair ``within`` has.

    Pairs of what is embedded lie one half apart, or side by side if INTERLEAVED; columns behind them too.
    """
    HALF: tl.constexpr = E.ROTARY_DIM // 2
    if E.INTERLEAVED or HALF == 0:
        return 2 * within + half
    elif E.ROTARY_DIM == E.HEAD_DIM:
        return within + half * HALF
    else:
        return tl.where(within < HALF, within + half * HALF, 2 * within + half)


@triton.jit
def row_of(place, half, sizes, E: tl.constexpr):
    """Row of W whose sum is the first or second half of a place."""
    if E.END == PLAIN:
        return place
    elif E.END == SWIGLU:
        return place + half * sizes.places
    else:
        PAIRS: tl.constexpr = E.HEAD_DIM // 2
        head = place // PAIRS
        return head * E.HEAD_DIM + column_of(place - head * PAIRS, half, E)


@triton.jit
def scaled(sums, row, inside, factor, pointers, E: tl.constexpr):
    """Sums times the factors of their rows of W and of x, plus bias."""
    if E.CHANNEL_SCALES:
        sums = sums * tl.load(pointers.scales + row, mask=inside, other=0.0)
    if E.NORM or E.X_SCALES:
        sums = sums * factor
    if E.BIAS:
        sums = sums + tl.load(pointers.bias + row, mask=inside, other=0.0).to(tl.float32)
    return sums


@triton.jit
def store_sums(sums, place, end, m, factor, pointers, sizes, E: tl.constexpr):
    """End of a product whose places are rows of W. place [n, 1], those before ``end`` count; m [1, rows],
    factor [1, rows]."""
    inside = place < end
    sums = scaled(sums, place, inside, factor, pointers, E)
    return store_places(sums, place, end, m, pointers, sizes, E)


@triton.jit
def store_scaled(y, place, end, m, pointers, sizes):
    """y, as it was stored, times the weight of the norm that follows; its squares."""
    inside = (place < end) & (m < sizes.M)
    wide = y.to(tl.float32)
    weight = tl.load(pointers.next_norm_weight + place, mask=place < end, other=0.0)
    at = m.to(tl.int64) * sizes.y_stride + place
    tl.store(pointers.scaled + at, (wide * weight.to(tl.float32)).to(y.dtype), mask=inside)
    return tl.where(inside, wide * wide, 0.0)


@triton.jit
def load_squares(part, m, first, parts, rows, squares):
    """Those of parts ``first + part`` [n, 1]; m [1, rows] counts within the tile."""
    at = (first + part) * rows + m
    return tl.load(squares + at, mask=first + part < parts, other=0.0, cache_modifier=".cg")


@triton.jit
def store_factor(square, m, pointers, sizes):
    """The factor of the norm that follows, by the sums of squares [rows] of all parts."""
    factor = tl.rsqrt(square / sizes.places + sizes.next_eps)
    tl.store(pointers.next_factor + m, factor, mask=m < sizes.M)


@triton.jit
def store_places(out, place, end, m, pointers, sizes, E: tl.constexpr):
    """What was computed, plus the residual, to the output; it is returned as it was stored."""
    inside = (place < end) & (m < sizes.M)
    if E.RESIDUAL:
        at = m.to(tl.int64) * sizes.residual_stride + place
        out = out + tl.load(pointers.residual + at, mask=inside, other=0.0).to(tl.float32)
    at = m.to(tl.int64) * sizes.y_stride + place
    y = out.to(pointers.y.dtype.element_ty)
    tl.store(pointers.y + at, y, mask=inside)
    return y


class Destinations(NamedTuple):
    """Where rows of x [1, rows] go in the cache, and their positions."""

    position: Any
    page: Any
    token: Any
    written: Any


@triton.jit
def load_destinations(m, pointers, sizes, E: tl.constexpr):
    """:class:`Destinations` of rows of x; rows of no place in the cache are not ``written``."""
    position = m * 0
    if pointers.positions is not None:
        position = tl.load(pointers.positions + m, mask=m < sizes.M, other=-1)
    if E.END != ROTARY:
        return Destinations(position, position, position, position)
    elif E.HAS_SLOTS:
        slot = tl.load(pointers.slots + m, mask=m < sizes.M, other=-1).to(tl.int64)
        written = slot >= 0
        page = slot // E.PAGE_SIZE
        token = slot % E.PAGE_SIZE
        return Destinations(position, page, token, written & (page < sizes.num_blocks))
    else:
        at = position // E.PAGE_SIZE
        written = (position >= 0) & (at < sizes.table_width) & (m < sizes.M)
        table = pointers.block_table + m.to(tl.int64) * sizes.table_width
        page = tl.load(table + at, mask=written, other=-1).to(tl.int64)
        token = (position % E.PAGE_SIZE).to(tl.int64)
        return Destinations(position, page, token, written & (page >= 0) & (page < sizes.num_blocks))


@triton.jit
def store_pairs(first, second, place, end, m, factor, to, pointers, sizes, E: tl.constexpr):
    """End of a product with two rows of W to a place. ``to``: the :class:`Destinations` of ``m``."""
    inside = place < end
    first_row = row_of(place, 0, sizes, E)
    second_row = row_of(place, 1, sizes, E)
    first = scaled(first, first_row, inside, factor, pointers, E)
    second = scaled(second, second_row, inside, factor, pointers, E)
    if E.END == SWIGLU:
        store_places(first / (1.0 + tl.exp(-first)) * second, place, end, m, pointers, sizes, E)
    else:
        store_heads(first, second, place, end, m, to, pointers, sizes, E)


@triton.jit
def store_heads(first, second, place, end, m, to, pointers, sizes, E: tl.constexpr):
    """Pairs of queries to the output, of keys and values to the cache; those of no place in it are dropped.

    Rotary embedding (Su et al. 2021, arXiv:2104.09864) is computed on sums that are not rounded yet.
    """
    PAIRS: tl.constexpr = E.HEAD_DIM // 2
    HALF: tl.constexpr = E.ROTARY_DIM // 2
    head = place // PAIRS
    within = place - head * PAIRS
    inside = (place < end) & (m < sizes.M)
    is_q = head < sizes.heads_q
    is_k = (head >= sizes.heads_q) & (head < sizes.heads_q + sizes.heads_kv)
    is_v = head >= sizes.heads_q + sizes.heads_kv
    if HALF > 0:
        seen = (to.position >= 0) & (to.position < sizes.angles)
        turned = inside & (is_q | is_k) & (within < HALF) & seen
        at = to.position.to(tl.int64) * HALF + within
        cos = tl.load(pointers.cos + at, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(pointers.sin + at, mask=turned, other=0.0).to(tl.float32)
        first, second = first * cos - second * sin, second * cos + first * sin
    first_column = column_of(within, 0, E)
    second_column = column_of(within, 1, E)
    dtype: tl.constexpr = pointers.y.dtype.element_ty
    first = first.to(dtype)
    second = second.to(dtype)

    y = pointers.y + m.to(tl.int64) * sizes.y_stride + head * E.HEAD_DIM
    tl.store(y + first_column, first, mask=inside & is_q)
    tl.store(y + second_column, second, mask=inside & is_q)

    written = inside & to.written
    k = (
        pointers.k_cache
        + to.page * sizes.k_block
        + to.token * sizes.k_token
        + (head - sizes.heads_q) * sizes.k_head
    )
    tl.store(k + first_column, first, mask=written & is_k)
    tl.store(k + second_column, second, mask=written & is_k)
    head_v = head - sizes.heads_q - sizes.heads_kv
    v = pointers.v_cache + to.page * sizes.v_block + to.token * sizes.v_token + head_v * sizes.v_head
    tl.store(v + first_column, first, mask=written & is_v)
    tl.store(v + second_column, second, mask=written & is_v)
