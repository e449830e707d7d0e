"""Products for few rows of x, y [M, N] = x [M, K] W [N, K]^T, with their ends fused (FlashDecoding++, Hong et
al. 2023, arXiv:2311.01282, section 4).

A program multiplies BLOCK_N rows of W, of all of K or a split of it. *Flat* (DOT): rows of W are the first
operand of the tensor cores and M, padded to 8 or 16 and not to 64, is the second. *GEMV*: products on the
CUDA cores, kept apart by column and added at the end. Splits of a tile are added by the last program to
arrive, in their order, so that sums are reproducible.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.dependent_launch import launch_dependents, prefetch, wait_for_dependencies
from flashtile.backends.common.e4m3 import to_bfloat16
from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.linear_ends import (
    PLAIN,
    EndPointers,
    EndSizes,
    load_destinations,
    load_squares,
    row_of,
    store_factor,
    store_pairs,
    store_scaled,
    store_sums,
)
from flashtile.backends.portable.decode.e4m3 import decode_bits

SCALE_BLOCK = tl.constexpr(128)
LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, beside its end."""

    DOT: bool
    HALVES: int
    """Rows of W to a place of the output."""
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    SPLIT: bool
    """Whether programs share K."""
    EVEN_K: bool
    """Whether K is whole blocks, of every split."""
    BLOCK_SCALES: bool
    E4M3_BITS: bool
    """Whether W is bits of e4m3, to be decoded in software."""
    DEPENDENT: bool
    """Whether it is launched before the kernel before it has ended."""
    AHEAD: int
    """Blocks of W to ask for before that kernel has ended."""
    UNIT: int
    """Places that a tile has a multiple of, so that ends load and store them together."""


class Operands(NamedTuple):
    """Memory that the product reads."""

    x: Any
    w: Any
    norm_weight: Any
    scales: Any
    """Of the blocks of W."""


class Depth(NamedTuple):
    """Integers of the product. Values of those but strides lead to no new compilation."""

    K: Any
    x_stride: Any
    w_stride: Any
    scale_stride: Any
    splits: Any
    tiles: Any


@triton.jit
def load_weights(operands, row, mine, k, depth, C: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of W, as it is stored."""
    pointers = operands.w + row.to(tl.int64)[:, None] * depth.w_stride + k[None, :]
    mask = mine[:, None]
    if not C.EVEN_K:
        mask = mask & (k < depth.K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def as_numbers(w, dtype: tl.constexpr, C: tl.constexpr):
    """W in ``dtype``, in which e4m3 is exact."""
    if C.E4M3_BITS:
        half = decode_bits(w)
        return tl.where(tl.abs(half) == 480.0, float("nan"), half).to(dtype)
    elif w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return to_bfloat16(w)
    else:
        return w.to(dtype)


@triton.jit
def block_scales(operands, row, mine, k_start, depth):
    """[BLOCK_N]: of the block of W that each row is in."""
    at = (row // SCALE_BLOCK).to(tl.int64) * depth.scale_stride + k_start // SCALE_BLOCK
    return tl.load(operands.scales + at, mask=mine, other=0.0)


@triton.jit
def multiply_flat(row, mine, m, first, last, operands, depth, M, C: tl.constexpr, E: tl.constexpr):
    """(sums [BLOCK_N, BLOCK_M], sums of squares of x [BLOCK_M]) over blocks ``first`` to ``last`` of K."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    x_rows = operands.x + m.to(tl.int64)[None, :] * depth.x_stride
    for block in tl.range(first, last, num_stages=C.STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w = load_weights(operands, row, mine, k, depth, C)
        inside = (m < M)[None, :]
        if not C.EVEN_K:
            inside = inside & (k < depth.K)[:, None]
        x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
        if E.NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            weight = tl.load(operands.norm_weight + k, mask=k < depth.K, other=0.0).to(tl.float32)
            x = (wide * weight[:, None]).to(x.dtype)
        if C.BLOCK_SCALES:
            scale = block_scales(operands, row, mine, block * BLOCK_K, depth)
            acc += tl.dot(as_numbers(w, x.dtype, C), x) * scale[:, None]
        else:
            acc = tl.dot(as_numbers(w, x.dtype, C), x, acc)
    return acc, tl.sum(squares, 0)


@triton.jit
def multiply_gemv(row, mine, m, first, last, operands, depth, M, C: tl.constexpr, E: tl.constexpr):
    """The same on the CUDA cores."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    x_rows = operands.x + m.to(tl.int64)[:, None] * depth.x_stride
    for block in tl.range(first, last, num_stages=C.STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w = as_numbers(load_weights(operands, row, mine, k, depth, C), tl.float32, C)
        inside = (m < M)[:, None]
        if not C.EVEN_K:
            inside = inside & (k < depth.K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if E.NORM:
            squares += x * x
            weight = tl.load(operands.norm_weight + k, mask=k < depth.K, other=0.0).to(tl.float32)
            x = x * weight[None, :]
        if C.BLOCK_SCALES:
            w = w * block_scales(operands, row, mine, block * BLOCK_K, depth)[:, None]
        acc += w[:, None, :] * x[None, :, :]
    return tl.sum(acc, 2), tl.sum(squares, 1)


@triton.jit
def edge_of(tile, tiles, places, C: tl.constexpr):
    """The first place of a tile; all have equally many, or a UNIT less."""
    return (places.to(tl.int64) // C.UNIT * tile // tiles).to(tl.int32) * C.UNIT


@triton.jit
def finish(
    sums, factor, to, start, stop, m, tile, tiles, arrived, pointers, sizes, C: tl.constexpr, E: tl.constexpr
):
    """The end of a tile. ``arrived`` counts the tiles of each block of rows of x; ``to``: their
    :class:`Destinations`."""
    STEP: tl.constexpr = C.BLOCK_N // C.HALVES
    BLOCK_M: tl.constexpr = C.BLOCK_M
    factor = factor[None, :]
    place = (start + tl.arange(0, STEP))[:, None]
    if E.END == PLAIN:
        y = store_sums(sums, place, stop, m[None, :], factor, pointers, sizes, E)
        if E.NEXT_NORM:
            square = tl.sum(store_scaled(y, place, stop, m[None, :], pointers, sizes), 0)
            leave_factor(square, m, tile, tiles, arrived, pointers, sizes, BLOCK_M)
    else:
        first, second = tl.split(sums.reshape([2, STEP, BLOCK_M]).permute((1, 2, 0)))
        store_pairs(first, second, place, stop, m[None, :], factor, to, pointers, sizes, E)


@triton.jit
def leave_factor(square, m, tile, tiles, arrived, pointers, sizes, BLOCK_M: tl.constexpr):
    """Leave the sums of squares of a tile's places; the last tile of these rows of x to arrive adds up all,
    in their order."""
    PARTS: tl.constexpr = 4096 // BLOCK_M
    index = tl.arange(0, BLOCK_M)
    squares = pointers.squares + tile // tiles * tiles * BLOCK_M
    tl.store(squares + tile % tiles * BLOCK_M + index, square)
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile // tiles, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        tl.store(arrived + tile // tiles, 0)
        part = tl.arange(0, PARTS)[:, None]
        total = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, tiles, PARTS):
            total += tl.sum(load_squares(part, index[None, :], first, tiles, BLOCK_M, squares), 0)
        store_factor(total, m, pointers, sizes)


@kernel(
    do_not_specialize=(
        "M",
        "places",
        "heads_q",
        "heads_kv",
        "angles",
        "num_blocks",
        "table_width",
        "tiles",
        "splits",
    )
)
def product_kernel(
    x, w, y, norm_weight, block_scale, partial, arrived,
    bias, residual, scales, cos, sin, positions, slots, block_table, k_cache, v_cache,
    x_scale, next_norm_weight, scaled, squares, next_factor,
    K, x_stride, w_stride, scale_stride, splits, tiles, eps,
    M, places, y_stride, residual_stride, heads_q, heads_kv, angles, num_blocks, table_width,
    k_block, k_token, k_head, v_block, v_token, v_head, next_eps, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of places * blocks of BLOCK_M rows of x * splits of K,), splits fastest.

    ``partial`` has room for the sums of every split of every tile; ``arrived`` is a 0 for every tile, and
    behind them for every block of rows, before and after.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    STEP: tl.constexpr = BLOCK_N // C.HALVES
    operands = Operands(x, w, norm_weight, block_scale)
    depth = Depth(K, x_stride, w_stride, scale_stride, splits, tiles)
    pointers = EndPointers(
        y, bias, residual, scales, cos, sin, positions, slots, block_table, k_cache, v_cache, x_scale,
        next_norm_weight, scaled, squares, next_factor,
    )  # fmt: skip
    sizes = EndSizes(
        M, places, y_stride, residual_stride, heads_q, heads_kv, angles, num_blocks, table_width, k_block,
        k_token, k_head, v_block, v_token, v_head, next_eps,
    )  # fmt: skip
    part = tl.program_id(0)
    split = part % splits
    tile = part // splits
    start = edge_of(tile % tiles, tiles, places, C)
    stop = edge_of(tile % tiles + 1, tiles, places, C)
    m = tile // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_N)
    place = start + i % STEP
    mine = place < stop
    row = row_of(place, i // STEP, sizes, E)
    blocks = tl.cdiv(K, C.BLOCK_K)
    first = blocks * split // splits
    last = blocks * (split + 1) // splits
    if C.AHEAD > 0:
        PER_LINE: tl.constexpr = LINE // (w.dtype.element_ty.primitive_bitwidth // 8)
        lines = first * C.BLOCK_K + tl.arange(0, C.AHEAD * C.BLOCK_K // PER_LINE) * PER_LINE
        lines = tl.minimum(lines, K - 1)
        safe = tl.where(mine, row, 0).to(tl.int64)
        prefetch(w + safe[:, None] * w_stride + lines[None, :])
    if C.DEPENDENT:
        wait_for_dependencies()
        launch_dependents()
    # What the end needs beside its sums is asked for here, not when memory rests.
    factor = tl.zeros([BLOCK_M], tl.float32)
    if E.X_SCALES:
        factor = tl.load(x_scale + m, mask=m < M, other=0.0)
    to = load_destinations(m[None, :], pointers, sizes, E)
    if C.DOT:
        sums, square = multiply_flat(row, mine, m, first, last, operands, depth, M, C, E)
    else:
        sums, square = multiply_gemv(row, mine, m, first, last, operands, depth, M, C, E)
    blocks_arrived = arrived
    if E.NEXT_NORM:
        blocks_arrived += tl.num_programs(0) // splits
    if not C.SPLIT:
        if E.NORM:
            factor = tl.rsqrt(square / K + eps)
        finish(sums, factor, to, start, stop, m, tile, tiles, blocks_arrived, pointers, sizes, C, E)
    else:
        PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
        at = i[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile.to(tl.int64) * splits * PART
        tl.store(parts + split * PART + at, sums)
        tl.store(parts + split * PART + BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M), square)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(arrived + tile, 0)
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            square = tl.zeros([BLOCK_M], tl.float32)
            for p in range(splits):
                sums += tl.load(parts + p * PART + at, cache_modifier=".cg")
                its_square = parts + p * PART + BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M)
                square += tl.load(its_square, cache_modifier=".cg")
            if E.NORM:
                factor = tl.rsqrt(square / K + eps)
            finish(sums, factor, to, start, stop, m, tile, tiles, blocks_arrived, pointers, sizes, C, E)


@kernel(do_not_specialize=("M", "heads_q", "heads_kv", "angles", "num_blocks", "table_width"))
def end_kernel(
    sums, y, bias, residual, scales, cos, sin, positions, slots, block_table, k_cache, v_cache, x_scale,
    next_norm_weight, scaled, squares, next_factor, sums_stride,
    M, places, y_stride, residual_stride, heads_q, heads_kv, angles, num_blocks, table_width,
    k_block, k_token, k_head, v_block, v_token, v_head, next_eps,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The end alone, behind the library's product. Grid: (blocks of places * blocks of rows,).

    ``places`` is specialised: only if it is known to be a multiple of 16 are 16 bytes loaded and stored at a
    time, since their eight elements must share a mask.
    """
    pointers = EndPointers(
        y, bias, residual, scales, cos, sin, positions, slots, block_table, k_cache, v_cache, x_scale,
        next_norm_weight, scaled, squares, next_factor,
    )  # fmt: skip
    sizes = EndSizes(
        M, places, y_stride, residual_stride, heads_q, heads_kv, angles, num_blocks, table_width, k_block,
        k_token, k_head, v_block, v_token, v_head, next_eps,
    )  # fmt: skip
    blocks = tl.cdiv(places, BLOCK_P)
    place = (tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    m = (tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    inside = (place < places) & (m < M)
    rows = sums + m.to(tl.int64) * sums_stride
    first = tl.load(rows + row_of(place, 0, sizes, E), mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if E.X_SCALES:
        factor = tl.load(x_scale + m, mask=m < M, other=0.0)
    if E.END == PLAIN:
        store_sums(first, place, places, m, factor, pointers, sizes, E)
    else:
        second = tl.load(rows + row_of(place, 1, sizes, E), mask=inside, other=0.0).to(tl.float32)
        to = load_destinations(m, pointers, sizes, E)
        store_pairs(first, second, place, places, m, factor, to, pointers, sizes, E)
