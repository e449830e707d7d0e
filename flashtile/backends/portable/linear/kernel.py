"""Products for few rows of x, y [M, N] = x [M, K] W [N, K]^T, with fused epilogues (FlashDecoding++, Hong et
al. 2023, arXiv:2311.01282, section 4).

Such a product is bound by reading W, so W is read once. product_kernel, one program for BLOCK_N rows of W,
BLOCK_M rows of x, and a split of K::

    prefetch the first AHEAD blocks of W to L2          W is no result of a kernel: before the wait
    wait for the previous kernel, let the next start    with dependent launch
    load the inputs of the epilogue                     their latency overlaps with the product
    for each block of K:    load W, x;  acc += W x^T    multiply_flat or multiply_gemv
    one split:    epilogue, store                       finish: norm, scales, bias, SwiGLU, rotary, residual
    several:      store acc; the last program to arrive adds all splits in their order, then the epilogue

At 64 rows of x the epilogue, in which memory rests, takes 2.8 of 59.5 us (28672 x 4096, H200). Reads of x do
not limit. Kernels with TMA, with tiles of 256 rows of W, or that prefetch the weight of the next product were
no faster.

*Flat* (DOT): rows of W are the first operand of the tensor cores. Rows of x are the second, so M is padded to
at least 8 instead of 64. *GEMV*: products are computed on the CUDA cores, and summed over columns of K only
at the end. RMSNorm of x needs no pass of its own: the loop also sums the squares of x, and the epilogue
multiplies by the factor. A *place* is an output column, or a pair of them
(:mod:`flashtile.backends.common.linear`).

epilogue_kernel applies the same epilogues to a product of torch, for more rows.

grouped_kernel is the flat product for a mixture of experts: each row of x with the weight of its expert. The
rows are sorted by expert, and each program multiplies a tile of one expert's rows. How many rows an expert
has is known on the device only, so the grid has room for every distribution of the rows, and programs without
rows end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.device import Target
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch, Launched
from flashtile.backends.common.linear import (
    PLAIN,
    EpilogueCall,
    EpilogueVariant,
    ProductDepth,
    load_destinations,
    load_squares,
    row_of,
    store_factor,
    store_pairs,
    store_scaled,
    store_sums,
)
from flashtile.backends.common.tiles import (
    decode_number,
    launch_dependents,
    prefetch,
    to_bfloat16,
    wait_for_dependencies,
)
from flashtile.backends.portable.config import family
from flashtile.backends.portable.fp8 import is_native
from flashtile.backends.portable.linear.config import DEFAULTS, MAX_FLAT_ROWS
from flashtile.hardware.linear_table import FLAT
from flashtile.problems import linear as problem
from flashtile.torch_private import FakeTensor

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

    # Prologue. ``tile`` counts the tiles of W through all blocks of rows of x.
    part = tl.program_id(0)
    split = part % splits
    tile = part // splits
    start = edge_of(tile % tiles, tiles, places, C)
    stop = edge_of(tile % tiles + 1, tiles, places, C)
    m = tile // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows of W in the tile: the first half of all pairs, then the second half (finish splits them again).
    i = tl.arange(0, BLOCK_N)
    place = start + i % STEP
    in_tile = place < stop
    row = row_of(place, i // STEP, places, E)
    blocks = tl.cdiv(K, C.BLOCK_K)
    first = blocks * split // splits
    last = blocks * (split + 1) // splits

    if C.AHEAD > 0:
        PER_LINE: tl.constexpr = LINE // (pointers.w.dtype.element_ty.primitive_bitwidth // 8)
        lines = first * C.BLOCK_K + tl.arange(0, C.AHEAD * C.BLOCK_K // PER_LINE) * PER_LINE
        # One prefetch for each line of the L2 cache. Addresses stay within W, because a prefetch has no mask.
        lines = tl.minimum(lines, K - 1)
        safe = tl.where(in_tile, row, 0).to(tl.int64)
        prefetch(pointers.w + safe[:, None] * depth.w_stride + lines[None, :])
    if C.DEPENDENT:
        wait_for_dependencies()
        # At once: to start the next kernel after the last load of W was slower for all shapes measured.
        launch_dependents()
    # Load the inputs of the epilogue early, so that their latency overlaps with the product. ``factor``
    # multiplies the sums of a row of x: its scale, or the norm's factor, which is known after the loop.
    factor = tl.zeros([BLOCK_M], tl.float32)
    if E.X_SCALES:
        factor = tl.load(pointers.x_scale + m, mask=m < M, other=0.0)
    to = load_destinations(m[None, :], pointers, sizes, E)

    # Main loop.
    if C.DOT:
        sums, square = multiply_flat(row, in_tile, m, first, last, pointers, depth, shares, M, C, E)
    else:
        sums, square = multiply_gemv(row, in_tile, m, first, last, pointers, depth, shares, M, C, E)

    # Epilogue: at once, or by the last program of the tile's splits.
    blocks_arrived = pointers.arrived
    if E.NEXT_NORM:  # its counters follow those of the tiles
        blocks_arrived += tl.num_programs(0) // splits
    if not C.SPLIT:
        if E.NORM:
            factor = tl.rsqrt(square / K + eps)
        finish(sums, factor, to, start, stop, m, tile, tiles, blocks_arrived, call, C, E)
    else:
        PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M  # the sums, and one row for the squares
        parts = pointers.partial + tile.to(tl.int64) * splits * PART
        own_sums, own_square = split_at(parts, split, C)
        tl.store(own_sums, sums)
        tl.store(own_square, square)
        # All threads have stored before the program counts as arrived: the barrier orders them within the
        # program, and acq_rel orders their stores before the loads of the program that arrives last.
        tl.debug_barrier()
        before = tl.atomic_add(pointers.arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(pointers.arrived + tile, 0)  # for the next launch, which shares the counters
            # Its own sums are loaded again as well: the order is that of the splits, whichever arrives last.
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            square = tl.zeros([BLOCK_M], tl.float32)
            # The loads of two splits are on their way together. One by one, each split would wait for L2.
            for p in tl.range(0, splits, loop_unroll_factor=2):
                its_sums, its_square = split_at(parts, p, C)
                # .cg: other multiprocessors wrote them, and an L1 cache is not told.
                sums += tl.load(its_sums, cache_modifier=".cg")
                square += tl.load(its_square, cache_modifier=".cg")
            if E.NORM:
                factor = tl.rsqrt(square / K + eps)
            finish(sums, factor, to, start, stop, m, tile, tiles, blocks_arrived, call, C, E)


@triton.jit
def edge_of(tile, tiles, places, C: tl.constexpr):
    """Return the first place (output column, or pair of columns) of a tile.

    The sizes of two tiles differ by at most C.UNIT places.
    """
    # Equal tiles instead of whole ones and a rest: 22016 rows of W lost 5 us to a last tile of 3 rows. Units
    # of 8 places, because epilogues of 16 bytes at a time save 1.5 of 38 us (4096 x 14336, 64 rows, H200).
    return (places.to(tl.int64) // C.UNIT * tile // tiles).to(tl.int32) * C.UNIT


@triton.jit
def multiply_flat(
    row, in_tile, m, first, last, pointers, depth, shares, M, C: tl.constexpr, E: tl.constexpr, missing=0
):  # fmt: skip
    """Return (sums [BLOCK_N, BLOCK_M], sums of squares of x [BLOCK_M]) over K blocks ``first`` to ``last``.

    ``last`` is exclusive. The squares are 0 unless E.NORM. ``missing``: rows that the blocks of
    scales before ``row`` would have if they were whole, and W does not have.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # A sum of squares for each column of a block, added up once after the loop: earlier, threads would have
    # to exchange them in each block.
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    x_rows = pointers.x + m.to(tl.int64)[None, :] * depth.x_stride
    for block in tl.range(first, last, num_stages=C.STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w = load_weights(pointers, row, in_tile, k, depth, C)
        inside = (m < M)[None, :]
        if not C.EVEN_K:
            inside = inside & (k < depth.K)[:, None]
        x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
        if E.NORM:  # RMSNorm: x * weight * rsqrt(mean(x^2) + eps), whose last factor is the same for a row
            wide = x.to(tl.float32)
            squares += wide * wide
            weight = tl.load(pointers.norm_weight + k, mask=k < depth.K, other=0.0).to(tl.float32)
            x = (wide * weight[:, None]).to(x.dtype)  # the norm's factor follows in the epilogue
        if C.BLOCK_SCALES:
            # A block of K never spans two blocks of scales, so one scale per row multiplies its products.
            scale = block_scales(pointers, row + missing, in_tile, block * BLOCK_K, shares)
            acc += tl.dot(as_numbers(w, x.dtype, C), x) * scale[:, None]
        else:
            acc = tl.dot(as_numbers(w, x.dtype, C), x, acc)
    return acc, tl.sum(squares, 0)


@triton.jit
def multiply_gemv(row, in_tile, m, first, last, pointers, depth, shares, M, C: tl.constexpr, E: tl.constexpr):
    """Compute the results of :func:`multiply_flat` on the CUDA cores."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    # A sum for each column of a block, for the same reason as multiply_flat's squares.
    acc = tl.zeros([BLOCK_N, BLOCK_M, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    x_rows = pointers.x + m.to(tl.int64)[:, None] * depth.x_stride
    for block in tl.range(first, last, num_stages=C.STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w = as_numbers(load_weights(pointers, row, in_tile, k, depth, C), tl.float32, C)
        inside = (m < M)[:, None]
        if not C.EVEN_K:
            inside = inside & (k < depth.K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if E.NORM:
            squares += x * x
            weight = tl.load(pointers.norm_weight + k, mask=k < depth.K, other=0.0).to(tl.float32)
            x = x * weight[None, :]
        if C.BLOCK_SCALES:
            w = w * block_scales(pointers, row, in_tile, block * BLOCK_K, shares)[:, None]
        acc += w[:, None, :] * x[None, :, :]
    return tl.sum(acc, 2), tl.sum(squares, 1)


@triton.jit
def load_weights(pointers, row, in_tile, k, depth, C: tl.constexpr):
    """Load a block [BLOCK_N, BLOCK_K] of W in the dtype that it is stored in."""
    addresses = pointers.w + row.to(tl.int64)[:, None] * depth.w_stride + k[None, :]
    mask = in_tile[:, None]
    if not C.EVEN_K:
        mask = mask & (k < depth.K)[None, :]
    # W is read once, so it is the first that the caches evict. x is read by all programs.
    return tl.load(addresses, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def as_numbers(w, dtype: tl.constexpr, C: tl.constexpr):
    """Convert W to ``dtype``, which represents e4m3 exactly."""
    if C.E4M3_BITS:
        return decode_number(w).to(dtype)
    elif w.dtype == tl.float8e4nv and dtype == tl.bfloat16:  # Triton's own conversion takes a slower unit
        return to_bfloat16(w)
    else:
        return w.to(dtype)


@triton.jit
def block_scales(pointers, row, in_tile, k_start, shares):
    """Return [BLOCK_N]: for each row of W, the scale of the block of W that contains column ``k_start``."""
    at = (row // SCALE_BLOCK).to(tl.int64) * shares.scale_stride + k_start // SCALE_BLOCK
    return tl.load(pointers.block_scale + at, mask=in_tile, other=0.0)


@triton.jit
def split_at(parts, p, C: tl.constexpr):
    """Return pointers for the sums [BLOCK_N, BLOCK_M] and squares [BLOCK_M] of split ``p`` of a tile."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return parts + p * PART + at, parts + p * PART + BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M)


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
    PARTS: tl.constexpr = 4096 // BLOCK_M  # sums per round of loads; 4096 was not measured against others
    index = tl.arange(0, BLOCK_M)
    squares = call.pointers.squares + tile // tiles * tiles * BLOCK_M
    tl.store(squares + tile % tiles * BLOCK_M + index, square)
    tl.debug_barrier()  # as for the splits of product_kernel
    if tl.atomic_add(arrived + tile // tiles, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        tl.store(arrived + tile // tiles, 0)
        part = tl.arange(0, PARTS)[:, None]
        total = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, tiles, PARTS):
            total += tl.sum(load_squares(part, index[None, :], first, tiles, BLOCK_M, squares), 0)
        store_factor(total, m, call)


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


@kernel()
def norm_kernel(x, weight, y, stride, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute RMSNorm of rows x (M, K) for torch's product: y = x * weight * rsqrt(mean(x^2) + eps).

    Grid: (M,). The result is rounded once, as torch rounds it.
    """
    # A row stays in the registers of its program. torch's kernel reads it twice: 256 rows of 4,096 take it
    # 5.0 us on an H200 in a graph, this one 2.3; 2,048 rows 9.2 and 6.9. One to four times as many warps are
    # as fast.
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    numbers = tl.load(x + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    # Loaded before the sum, for which the threads wait for one another.
    weights = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers, 0) / K + eps)
    tl.store(y + row * K + k, (numbers * factor * weights).to(y.dtype.element_ty), mask=k < K)


MIN_ROWS = 8
"""Least BLOCK_M of a grouped product: the columns of a tensor core's product."""
WIDE_TILE = (128, 64, 8, 4)
"""(BLOCK_N, BLOCK_K, num_warps, num_stages) for experts with many rows, on GPUs with enough shared memory.

Not measured against others."""


class GroupedPointers(NamedTuple):
    """Tensors of a grouped product."""

    x: Any
    w: Any
    """(experts * N, K)"""
    y: Any
    bias: Any
    """(experts * N,), or None."""
    scales: Any
    """float32 (experts * N,), a scale for each row of w, or None."""
    block_scale: Any
    """float32, for each expert a scale for each block of 128 x 128 of its weight, or None."""
    rows: Any
    """int64: row of x for each sorted row if GATHER, else its row of y. The other tensor has sorted rows."""
    ends: Any
    """int32, for each expert the end of its range of sorted rows."""


class GroupedSizes(NamedTuple):
    """Integers of a grouped product. The kernel is not specialized on them."""

    N: Any
    rows: Any
    experts: Any
    scale_stride: Any
    """Row stride of block_scale."""


@kernel(do_not_specialize=("sizes",))
def grouped_kernel(
    pointers, depth, sizes, C: tl.constexpr, E: tl.constexpr, GATHER: tl.constexpr, EXPERTS: tl.constexpr
):
    """Multiply sorted rows by the weights of their experts.

    Grid: (blocks of rows * tiles of W,); tiles vary fastest. EXPERTS is a power of two of at least
    ``sizes.experts``.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    tiles = tl.cdiv(sizes.N, BLOCK_N)
    block = tl.program_id(0) // tiles
    expert = tl.arange(0, EXPERTS)
    exists = expert < sizes.experts
    end = tl.load(pointers.ends + expert, mask=exists, other=0)
    begin = tl.load(pointers.ends + expert - 1, mask=exists & (expert > 0), other=0)
    blocks = tl.where(exists, tl.cdiv(end - begin, BLOCK_M), 0)
    # Which expert's rows the block has: counts of blocks by expert, summed up. Every program finds it by
    # itself, so no kernel has to prepare a list.
    after = tl.cumsum(blocks, 0)
    before = after - blocks
    if block < tl.sum(blocks, 0):  # the grid has room for any distribution of the rows
        # One expert is True in ``chosen``; the sums pick its numbers.
        chosen = (before <= block) & (block < after)
        number = tl.sum(tl.where(chosen, expert, 0), 0)
        stop = tl.sum(tl.where(chosen, end, 0), 0)
        start = tl.sum(tl.where(chosen, begin + (block - before) * BLOCK_M, 0), 0)
        m = start + tl.arange(0, BLOCK_M)
        inside = m < stop
        row = tl.load(pointers.rows + m, mask=inside, other=0).to(tl.int32)
        x_row = tl.where(inside, row if GATHER else m, sizes.rows)  # multiply_flat masks row sizes.rows
        n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        in_tile = n < sizes.N
        w_row = number * sizes.N + n
        last = tl.cdiv(depth.K, C.BLOCK_K)
        # Blocks of scales begin with an expert's first row, as if all experts had whole blocks of rows.
        missing = number * (tl.cdiv(sizes.N, SCALE_BLOCK) * SCALE_BLOCK - sizes.N)
        sums, _ = multiply_flat(
            w_row, in_tile, x_row, 0, last, pointers, depth, sizes, sizes.rows, C, E, missing
        )
        if E.CHANNEL_SCALES:
            sums *= tl.load(pointers.scales + w_row, mask=in_tile, other=0.0)[:, None]
        if E.BIAS:
            sums += tl.load(pointers.bias + w_row, mask=in_tile, other=0.0).to(tl.float32)[:, None]
        y_row = m if GATHER else row
        y = pointers.y + y_row.to(tl.int64)[None, :] * sizes.N + n[:, None]
        tl.store(y, sums.to(y.dtype.element_ty), mask=in_tile[:, None] & inside[None, :])


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    ends: Tensor,
    gather: bool,
    scale: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts.

    Args:
        x: float16 or bfloat16. (tokens, K) if ``gather``, else (sorted rows, K).
        weight: (experts, N, K), contiguous, in the dtype of x or in e4m3.
        bias: (experts, N) in the dtype of x, or None.
        rows: (sorted rows,) int64: the row of x of each sorted row if ``gather``, else its row of the result.
        ends: (experts,) int32, the end of each expert's range of sorted rows.
        gather: True: rows of x are gathered, and the result is sorted. False: x is sorted, and the rows of
            the result are scattered.
        scale: float32, contiguous, with a weight in e4m3: (experts, N) for a scale for each row, or
            (experts, N / 128, K / 128), rounded up, for a scale for each block.
        invariant: sum in one order for every number of rows: always with the largest tile.

    Returns:
        (sorted rows, N) in the dtype of x.
    """
    experts, N, K = weight.shape
    y = x.new_empty(len(rows), N)
    if len(rows) == 0 or isinstance(x, FakeTensor):
        return y
    scales = 0 if scale is None else scale.dim() - 1
    variant, num_warps = _variant(
        x.device, MAX_FLAT_ROWS * experts if invariant else len(rows), experts, K, scales
    )
    # Each expert with rows may have one block that is not full.
    blocks = len(rows) // variant.BLOCK_M + min(experts, len(rows))
    by_row, by_block = (scale if scales == dims else None for dims in (1, 2))
    w = weight.view(torch.uint8) if variant.E4M3_BITS else weight
    pointers = GroupedPointers(x, w, y, bias, by_row, by_block, rows, ends)
    depth = ProductDepth(K, x.stride(0), K)
    sizes = GroupedSizes(N, len(rows), experts, triton.cdiv(K, problem.SCALE_BLOCK))
    grouped_kernel[(blocks * triton.cdiv(N, variant.BLOCK_N),)](
        pointers, depth, sizes, variant, _epilogue(bias is not None, scales), gather,
        triton.next_power_of_2(experts), num_warps=num_warps,
    )  # fmt: skip
    return y


def grouped_ahead(
    device: torch.device | Target,
    dtype: torch.dtype,
    shape: Sequence[int],
    bias: bool,
    gather: bool,
    scales: int = 0,
) -> list[Launched]:
    """Return the launches of all kernels of :func:`grouped_linear` for a weight, to compile them ahead.

    Args:
        dtype: dtype of x.
        shape: (experts, N, K) of the weight.
        scales: with a weight in e4m3, 1 for scales of rows and 2 for scales of blocks; else 0.
    """
    experts, N, K = shape
    x, rows, ends, scale = (
        torch.empty(1, K, dtype=kind, device="meta")
        for kind in (dtype, torch.int64, torch.int32, torch.float32)
    )
    scalars = ProductDepth(K, K, K), GroupedSizes(N, 1, experts, triton.cdiv(K, problem.SCALE_BLOCK))
    found = []
    for mean_rows in (8, 16, 32, 64):  # each BLOCK_M from MIN_ROWS to MAX_FLAT_ROWS
        variant, num_warps = _variant(device, mean_rows * experts, experts, K, scales)
        w = x.to(torch.uint8 if variant.E4M3_BITS else torch.float8_e4m3fn) if scales else x
        of_rows, of_blocks = (scale if scales == dims else None for dims in (1, 2))
        tensors = x, w, x, x if bias else None, of_rows, of_blocks, rows, ends
        constants = variant, _epilogue(bias, scales), gather, triton.next_power_of_2(experts)
        options: dict[str, Any] = {"pointers": GroupedPointers, "num_warps": num_warps}
        found.append((CachedLaunch(grouped_kernel, 1, scalars, constants, None, **options), tensors))
    return found


def _epilogue(bias: bool, scales: int) -> EpilogueVariant:
    return EpilogueVariant(PLAIN.value, NORM=False, BIAS=bias, RESIDUAL=False, CHANNEL_SCALES=scales == 1)


def _variant(
    device: torch.device | Target, rows: int, experts: int, K: int, scales: int
) -> tuple[ProductVariant, int]:
    """Return (constants, number of warps). BLOCK_M is an expert's mean rows, rounded up, or 64."""
    block_m = min(max(triton.next_power_of_2(triton.cdiv(rows, experts)), MIN_ROWS), MAX_FLAT_ROWS)
    name = family(device)
    wide = block_m == MAX_FLAT_ROWS and name != "other"
    block_n, block_k, num_warps, stages = WIDE_TILE if wide else DEFAULTS[name, FLAT]
    variant = ProductVariant(
        DOT=True, HALVES=1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, SPLIT=False,
        EVEN_K=K % block_k == 0, BLOCK_SCALES=scales == 2, E4M3_BITS=scales > 0 and not is_native(device),
        DEPENDENT=False, AHEAD=0, UNIT=1,
    )  # fmt: skip
    return variant, num_warps
