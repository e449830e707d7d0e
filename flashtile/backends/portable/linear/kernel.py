"""Products for few rows of x, y [M, N] = x [M, K] W [N, K]^T, with fused epilogues (FlashDecoding++, Hong et
al. 2023, arXiv:2311.01282, section 4).

A program multiplies BLOCK_N rows of W over all of K or a split of it. *Flat* (DOT): rows of W are the first
operand of the tensor cores. Rows of x are the second, so M is padded to at least 8 instead of 64. *GEMV*:
products are computed on the CUDA cores, and summed over columns of K only at the end. The last program to
arrive adds the splits of a tile in a fixed order, so that sums are reproducible. A *place* is an output
column, or a pair of them (:mod:`flashtile.backends.common.linear_epilogue`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.dependent_launch import launch_dependents, prefetch, wait_for_dependencies
from flashtile.backends.common.e4m3 import decode_number, to_bfloat16
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.linear_epilogue import (
    PLAIN,
    EpilogueCall,
    load_destinations,
    load_squares,
    row_of,
    store_factor,
    store_pairs,
    store_scaled,
    store_sums,
)
from flashtile.problems import linear as problem

SCALE_BLOCK = tl.constexpr(problem.SCALE_BLOCK)
LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


@dataclass(frozen=True)
class ProductVariant:
    """Constants of the product kernel, except those of its epilogue."""

    DOT: bool
    HALVES: int
    """Rows of W per place: 1 if a place is an output column, 2 if it is a pair of columns."""
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    SPLIT: bool
    """Whether K is divided among several programs."""
    EVEN_K: bool
    """Whether every split of K consists of whole blocks."""
    BLOCK_SCALES: bool
    E4M3_BITS: bool
    """Whether W holds the bits of e4m3, which are decoded in software."""
    DEPENDENT: bool
    """Whether the kernel uses programmatic dependent launch: it may start before its predecessor ends."""
    AHEAD: int
    """Blocks of W to prefetch before the previous kernel has ended."""
    UNIT: int
    """A tile's number of places is a multiple of this, so that epilogues load and store vectors."""


class Shares(NamedTuple):
    """How the product is divided among programs. The kernel is not specialized on these integers."""

    scale_stride: Any
    """Row stride of the scales of W's blocks, in elements."""
    splits: Any
    """Number of splits of K."""
    tiles: Any


@triton.jit
def load_weights(pointers, row, mine, k, depth, C: tl.constexpr):
    """Load a block [BLOCK_N, BLOCK_K] of W in the dtype that it is stored in."""
    addresses = pointers.w + row.to(tl.int64)[:, None] * depth.w_stride + k[None, :]
    mask = mine[:, None]
    if not C.EVEN_K:
        mask = mask & (k < depth.K)[None, :]
    return tl.load(addresses, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def as_numbers(w, dtype: tl.constexpr, C: tl.constexpr):
    """Convert W to ``dtype``, which represents e4m3 exactly."""
    if C.E4M3_BITS:
        return decode_number(w).to(dtype)
    elif w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return to_bfloat16(w)
    else:
        return w.to(dtype)


@triton.jit
def block_scales(pointers, row, mine, k_start, shares):
    """Return [BLOCK_N]: for each row of W, the scale of the block of W that contains column ``k_start``."""
    at = (row // SCALE_BLOCK).to(tl.int64) * shares.scale_stride + k_start // SCALE_BLOCK
    return tl.load(pointers.block_scale + at, mask=mine, other=0.0)


@triton.jit
def multiply_flat(
    row, mine, m, first, last, pointers, depth, shares, M, C: tl.constexpr, E: tl.constexpr, missing=0
):  # fmt: skip
    """Return (sums [BLOCK_N, BLOCK_M], sums of squares of x [BLOCK_M]) over K blocks ``first`` to ``last``.

    ``last`` is exclusive. The squares are 0 unless E.NORM. ``missing``: rows that the blocks of
    scales before ``row`` would have if they were whole, and W does not have.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    x_rows = pointers.x + m.to(tl.int64)[None, :] * depth.x_stride
    for block in tl.range(first, last, num_stages=C.STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w = load_weights(pointers, row, mine, k, depth, C)
        inside = (m < M)[None, :]
        if not C.EVEN_K:
            inside = inside & (k < depth.K)[:, None]
        x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
        if E.NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            weight = tl.load(pointers.norm_weight + k, mask=k < depth.K, other=0.0).to(tl.float32)
            x = (wide * weight[:, None]).to(x.dtype)
        if C.BLOCK_SCALES:
            scale = block_scales(pointers, row + missing, mine, block * BLOCK_K, shares)
            acc += tl.dot(as_numbers(w, x.dtype, C), x) * scale[:, None]
        else:
            acc = tl.dot(as_numbers(w, x.dtype, C), x, acc)
    return acc, tl.sum(squares, 0)


@triton.jit
def multiply_gemv(row, mine, m, first, last, pointers, depth, shares, M, C: tl.constexpr, E: tl.constexpr):
    """Compute the results of :func:`multiply_flat` on the CUDA cores."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    x_rows = pointers.x + m.to(tl.int64)[:, None] * depth.x_stride
    for block in tl.range(first, last, num_stages=C.STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w = as_numbers(load_weights(pointers, row, mine, k, depth, C), tl.float32, C)
        inside = (m < M)[:, None]
        if not C.EVEN_K:
            inside = inside & (k < depth.K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if E.NORM:
            squares += x * x
            weight = tl.load(pointers.norm_weight + k, mask=k < depth.K, other=0.0).to(tl.float32)
            x = x * weight[None, :]
        if C.BLOCK_SCALES:
            w = w * block_scales(pointers, row, mine, block * BLOCK_K, shares)[:, None]
        acc += w[:, None, :] * x[None, :, :]
    return tl.sum(acc, 2), tl.sum(squares, 1)


@triton.jit
def edge_of(tile, tiles, places, C: tl.constexpr):
    """Return the first place (output column, or pair of columns) of a tile.

    The sizes of two tiles differ by at most C.UNIT places.
    """
    return (places.to(tl.int64) // C.UNIT * tile // tiles).to(tl.int32) * C.UNIT


@triton.jit
def finish(sums, factor, to, start, stop, m, tile, tiles, arrived, call, C: tl.constexpr, E: tl.constexpr):
    """Apply the epilogue to the sums of a tile, and store the results.

    ``to``: a slot in the KV cache for each row of x that the tile covers, as :class:`Destinations`.
    ``arrived``: counters of finished tiles, one for each block of rows of x.
    """
    STEP: tl.constexpr = C.BLOCK_N // C.HALVES
    BLOCK_M: tl.constexpr = C.BLOCK_M
    factor = factor[None, :]
    place = (start + tl.arange(0, STEP))[:, None]
    if E.EPILOGUE == PLAIN:
        y = store_sums(sums, place, stop, m[None, :], factor, call, E)
        if E.NEXT_NORM:
            square = tl.sum(store_scaled(y, place, stop, m[None, :], call), 0)
            leave_factor(square, m, tile, tiles, arrived, call, BLOCK_M)
    else:
        first, second = tl.split(sums.reshape([2, STEP, BLOCK_M]).permute((1, 2, 0)))
        store_pairs(first, second, place, stop, m[None, :], factor, to, call, E)


@triton.jit
def leave_factor(square, m, tile, tiles, arrived, call, BLOCK_M: tl.constexpr):
    """Store the sums of squares of a tile's results, one sum for each row, for the norm that follows.

    ``tiles`` tiles together cover a block of rows. The last of these tiles to arrive adds all sums in a fixed
    order, and stores the norm's factor of each row.
    """
    PARTS: tl.constexpr = 4096 // BLOCK_M
    index = tl.arange(0, BLOCK_M)
    squares = call.pointers.squares + tile // tiles * tiles * BLOCK_M
    tl.store(squares + tile % tiles * BLOCK_M + index, square)
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile // tiles, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        tl.store(arrived + tile // tiles, 0)
        part = tl.arange(0, PARTS)[:, None]
        total = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, tiles, PARTS):
            total += tl.sum(load_squares(part, index[None, :], first, tiles, BLOCK_M, squares), 0)
        store_factor(total, m, call)


@triton.jit
def split_at(parts, p, C: tl.constexpr):
    """Return pointers for the sums [BLOCK_N, BLOCK_M] and squares [BLOCK_M] of split ``p`` of a tile."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return parts + p * PART + at, parts + p * PART + BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def add_splits(parts, splits, C: tl.constexpr):
    """Return (sums, sums of squares) of a tile, added over all its splits of K in a fixed order."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for p in range(splits):
        its_sums, its_square = split_at(parts, p, C)
        sums += tl.load(its_sums, cache_modifier=".cg")
        square += tl.load(its_square, cache_modifier=".cg")
    return sums, square


@kernel(do_not_specialize=("shares", "places", "sizes"))
def product_kernel(
    pointers, depth, shares, eps, places, strides, cache_strides, sizes, C: tl.constexpr, E: tl.constexpr
):
    """Multiply x by W^T and apply the epilogue.

    Grid: (tiles of W * blocks of BLOCK_M rows of x * splits of K,); splits vary fastest.
    ``partial`` has room for the sums of every split of every tile. ``arrived`` holds a counter for each tile,
    followed by a counter for each block of rows of x. All counters are 0 before and after the kernel.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    STEP: tl.constexpr = BLOCK_N // C.HALVES
    call = EpilogueCall(pointers, places, strides, cache_strides, sizes)
    K, M, splits, tiles = depth.K, sizes.M, shares.splits, shares.tiles
    part = tl.program_id(0)
    split = part % splits
    tile = part // splits
    start = edge_of(tile % tiles, tiles, places, C)
    stop = edge_of(tile % tiles + 1, tiles, places, C)
    m = tile // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_N)
    place = start + i % STEP
    mine = place < stop
    row = row_of(place, i // STEP, places, E)
    blocks = tl.cdiv(K, C.BLOCK_K)
    first = blocks * split // splits
    last = blocks * (split + 1) // splits
    if C.AHEAD > 0:
        PER_LINE: tl.constexpr = LINE // (pointers.w.dtype.element_ty.primitive_bitwidth // 8)
        lines = first * C.BLOCK_K + tl.arange(0, C.AHEAD * C.BLOCK_K // PER_LINE) * PER_LINE
        lines = tl.minimum(lines, K - 1)
        safe = tl.where(mine, row, 0).to(tl.int64)
        prefetch(pointers.w + safe[:, None] * depth.w_stride + lines[None, :])
    if C.DEPENDENT:
        wait_for_dependencies()
        launch_dependents()
    # Load the inputs of the epilogue early, so that their latency overlaps with the product.
    factor = tl.zeros([BLOCK_M], tl.float32)
    if E.X_SCALES:
        factor = tl.load(pointers.x_scale + m, mask=m < M, other=0.0)
    to = load_destinations(m[None, :], pointers, sizes, E)
    if C.DOT:
        sums, square = multiply_flat(row, mine, m, first, last, pointers, depth, shares, M, C, E)
    else:
        sums, square = multiply_gemv(row, mine, m, first, last, pointers, depth, shares, M, C, E)
    blocks_arrived = pointers.arrived
    if E.NEXT_NORM:
        blocks_arrived += tl.num_programs(0) // splits
    if not C.SPLIT:
        if E.NORM:
            factor = tl.rsqrt(square / K + eps)
        finish(sums, factor, to, start, stop, m, tile, tiles, blocks_arrived, call, C, E)
    else:
        PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
        parts = pointers.partial + tile.to(tl.int64) * splits * PART
        own_sums, own_square = split_at(parts, split, C)
        tl.store(own_sums, sums)
        tl.store(own_square, square)
        tl.debug_barrier()
        before = tl.atomic_add(pointers.arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(pointers.arrived + tile, 0)
            sums, square = add_splits(parts, splits, C)
            if E.NORM:
                factor = tl.rsqrt(square / K + eps)
            finish(sums, factor, to, start, stop, m, tile, tiles, blocks_arrived, call, C, E)


@kernel(do_not_specialize=("sizes",))
def epilogue_kernel(
    pointers, sums_stride, places, strides, cache_strides, sizes, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to the result of torch's product.

    A place is an output column, or a pair of columns that the epilogue combines. Grid: one program for each
    pair of a block of BLOCK_P places and a block of BLOCK_M rows.

    The kernel is specialized on ``places``, the number of places. A load or store of 16 bytes covers eight
    elements, which must have the same mask. Triton knows this only if ``places`` is a multiple of 16.
    """
    call = EpilogueCall(pointers, places, strides, cache_strides, sizes)
    blocks = tl.cdiv(places, BLOCK_P)
    place = (tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    m = (tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    inside = (place < places) & (m < sizes.M)
    rows = pointers.x + m.to(tl.int64) * sums_stride
    first = tl.load(rows + row_of(place, 0, places, E), mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if E.X_SCALES:
        factor = tl.load(pointers.x_scale + m, mask=m < sizes.M, other=0.0)
    if E.EPILOGUE == PLAIN:
        store_sums(first, place, places, m, factor, call, E)
    else:
        second = tl.load(rows + row_of(place, 1, places, E), mask=inside, other=0.0).to(tl.float32)
        to = load_destinations(m, pointers, sizes, E)
        store_pairs(first, second, place, places, m, factor, to, call, E)
