"""Flat products for Hopper, y [M, N] = x [M, K] W [N, K]^T with up to 16 rows of x (FlashDecoding++, Hong et
al. 2023, arXiv:2311.01282, section 4). Reading W takes most of the time, so memory should never be idle:

* All programs read nearly the same number of rows of W, in tiles of nearly the same size. Programs, and
  tiles, differ by at most one *place*: an output column, or a pair of them that the epilogue combines
  (``common.linear``). Within a tile, each warp multiplies a part of K. The sums of the warps are added at the
  end of the tile, in a fixed order.
* A ring of asynchronous copies continues across the boundaries of tiles.
* Under programmatic dependent launch the kernel loads its first weights before it waits for the previous
  kernel.

Rows of W are the first operand of the tensor cores, and rows of x the second. So M is padded only to 8 or 16.
Copies are those of threads: a ring of TMA tiles for wgmma, with K divided among programs, reached 0.755 to
0.773 of the speed of reading at one row, where this kernel reaches 0.922.

A *chunk* is a range of WARPS * BLOCK_K columns of K; a slot of the ring holds one. All warps load and
multiply: there are no partitions, and the ring needs no mbarriers. A program with two tiles of three chunks
and STAGES 4; time runs to the right, and 0' is chunk 0 of the next tile:

    cp.async   W0 W1 W2    x0 x1 x2    0'   1'   2'
    waits for          PDL           0    1    2                                0'    1'    2'
    mma                               [0]  [1]  [2] sums of warps, store        [0']  [1']  [2'] ...

The module is read from top to bottom: the kernel, its ring, the rows of a program, the loads, the ends.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.common.linear import (
    PLAIN,
    EpilogueCall,
    ProductDepth,
    load_destinations,
    load_squares,
    row_of,
    store_factor,
    store_pairs,
    store_scaled,
    store_sums,
)
from flashtile.backends.common.tiles import launch_dependents, to_bfloat16, wait_for_dependencies
from flashtile.backends.hopper.compat import async_copy_to_shared, gluon, partition_barrier

COPY_BYTES = gl.constexpr(16)
"""Bytes of an asynchronous copy."""
PARTS_AT_ONCE = gl.constexpr(2048)
"""Sums of squares that are added at a time. Each program stores one for each row of x."""
BANK_BYTES = gl.constexpr(128)
"""Bytes that all banks of shared memory deliver per access."""


@dataclass(frozen=True)
class FlatVariant:
    """Constants of the product; those of its epilogue are ``EpilogueVariant``."""

    HALVES: int
    """Rows of W per place of the output."""
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    """Columns of a chunk that one warp multiplies."""
    EVEN_K: bool
    """Whether K is a multiple of WARPS * BLOCK_K."""
    STAGES: int
    WARPS: int
    AHEAD: bool
    """Whether weights may be loaded before the previous kernel has ended."""
    K_WIDTH: int
    """Number of adjacent elements along K that a thread holds of an operand: 2, or 4 if W is e4m3."""


class FlatRing(NamedTuple):
    """Buffers in shared memory, each of STAGES slots: for rows of W, rows of x, and weights of the norm."""

    w: Any
    x: Any
    norm_weight: Any


class FlatTiles(NamedTuple):
    """A program's share of the output: ``places`` output columns, or pairs of them, from ``begin`` on.

    These places are divided into ``count`` tiles, whose sizes differ by at most one place.
    """

    begin: Any
    places: Any
    count: Any


@gluon_kernel(do_not_specialize=("places", "sizes"))
def flat_kernel(
    pointers, depth, eps, places, strides, cache_strides, sizes, C: gl.constexpr, E: gl.constexpr
):
    """Compute y = x W^T for up to 16 rows of x.

    Grid: as many programs as the GPU runs at a time, and at most one per place. A place is an output column,
    or a pair of columns that the epilogue combines. The counter ``arrived`` is 0 before and after the kernel.
    """
    STAGES: gl.constexpr = C.STAGES
    WARPS: gl.constexpr = C.WARPS
    BLOCK_M: gl.constexpr = C.BLOCK_M
    BLOCK_N: gl.constexpr = C.BLOCK_N
    BLOCK_K: gl.constexpr = C.BLOCK_K
    K, M = depth.K, sizes.M
    x_type: gl.constexpr = pointers.x.dtype.element_ty
    w_type: gl.constexpr = pointers.w.dtype.element_ty
    # K and the strides are multiples of a vector (``LinearProblem.aligned``). The expressions
    # ``n // vector * vector`` below tell the compiler.
    of_x: gl.constexpr = vector_of(x_type)
    of_w: gl.constexpr = vector_of(w_type)
    depth = ProductDepth(K // of_w * of_w, depth.x_stride // of_x * of_x, depth.w_stride // of_w * of_w)
    call = EpilogueCall(pointers, places, strides, cache_strides, sizes)
    ring = make_ring(x_type, w_type, C, E)
    tiles = tiles_of(gl.program_id(0), gl.num_programs(0), places, C)
    chunks = gl.cdiv(K, WARPS * BLOCK_K)
    count = tiles.count * chunks

    # The chunk to load next. It runs ahead of the products, also into the next tile; ``offsets`` and ``mine``
    # are of its tile and change only with it.
    tile = 0
    chunk = 0
    offsets, mine = weight_rows(tiles, tile, depth, call, C, E)
    if not C.AHEAD:
        wait_for_dependencies()
    # Prologue. Weights do not depend on the previous kernel, so with AHEAD they are on their way before it
    # ends. One slot stays free: the one that is being multiplied. A group is committed for each slot, even an
    # empty one, so that the number of groups in flight is always the same.
    for s in gl.static_range(STAGES - 1):
        if s < count:
            load_weights(offsets, mine, chunk, s, pointers, ring, depth, C, E)
            tile, chunk, offsets, mine = next_chunk(
                tile, chunk, offsets, mine, chunks, tiles, depth, call, C, E
            )
        async_copy.commit_group()
    if C.AHEAD:  # x comes from the previous kernel
        wait_for_dependencies()
    for s in gl.static_range(STAGES - 1):
        if s < count:
            load_x(s % chunks, s, pointers, ring, depth, M, C)
        async_copy.commit_group()
    # The next kernel may load its weights; it waits for this one's end itself. After the last loads instead,
    # chains of products had 0.843 instead of 0.881 of the speed of reading (with an earlier ring).
    launch_dependents()

    # mma, not wgmma: each warp has a part of K, and wgmma would need all four at 64 rows of W. The first axis
    # of the layout is the warps.
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    w_operand: gl.constexpr = gl.DotOperandLayout(0, mma, C.K_WIDTH)
    x_operand: gl.constexpr = gl.DotOperandLayout(1, mma, C.K_WIDTH)
    of_sums: gl.constexpr = gl.SliceLayout(0, mma)
    x_squares = gl.zeros([WARPS, BLOCK_K, BLOCK_M], gl.float32, x_operand)
    factor = gl.full([BLOCK_M], 1.0, gl.float32, gl.SliceLayout(0, of_sums))
    if E.X_SCALES:
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, of_sums))
        factor = gl.load(pointers.x_scale + m, mask=m < M, other=0.0)
    of_stored: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, pairs_layout(C)))
    square = gl.zeros([BLOCK_M], gl.float32, of_stored)  # sums of squares of the stored results
    i = 0
    # Main loop: ``i`` counts chunks over all tiles, so that the ring runs on across their boundaries.
    for t in range(tiles.count):
        acc = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, mma)
        for _ in range(chunks):
            slot = i % STAGES
            # W and x of the first STAGES - 1 chunks are two groups each, but those of x are the later ones.
            # All but the last STAGES - 2 groups then include both of chunk i.
            async_copy.wait_group(STAGES - 2)
            partition_barrier()  # all copies have arrived, and all warps have read the previous slot
            # Into the slot that all warps have left; loads go out before the products.
            if i + STAGES - 1 < count:
                free = (i + STAGES - 1) % STAGES
                load_weights(offsets, mine, chunk, free, pointers, ring, depth, C, E)
                load_x(chunk, free, pointers, ring, depth, M, C)
                tile, chunk, offsets, mine = next_chunk(
                    tile, chunk, offsets, mine, chunks, tiles, depth, call, C, E
                )
            async_copy.commit_group()
            w_tile = ring.w.index(slot).load(w_operand)
            x_tile = ring.x.index(slot).permute((0, 2, 1)).load(x_operand)
            if E.NORM:
                if t == 0:  # x is the same for every tile
                    wide = x_tile.to(gl.float32)
                    x_squares += wide * wide
                # Multiplied again for each tile: x in the ring is as it was given.
                weight = ring.norm_weight.index(slot).permute((0, 2, 1)).load(x_operand)
                x_tile = x_tile * weight
            acc = mma_v2(as_numbers(w_tile, x_tile.dtype), x_tile, acc)
            i += 1
        # The norm's factor of a row multiplies the sums, not x: it is known only when all of x has passed.
        if E.NORM and t == 0:
            of_x_rows = gl.convert_layout(gl.sum(gl.sum(x_squares, 1), 0), gl.SliceLayout(0, of_sums))
            factor = gl.rsqrt(of_x_rows / K + eps)
        # The sum over the first axis is that of the warps: the only exchange between them, once a tile.
        square = finish(gl.sum(acc, 0), factor, square, tiles, t, call, C, E)
    if E.NEXT_NORM:
        leave_factor(square, call, C)


@gluon.constexpr_function
def vector_of(dtype):
    """Elements per asynchronous copy."""
    return COPY_BYTES.value * 8 // dtype.primitive_bitwidth


@gluon.jit
def make_ring(x_type: gl.constexpr, w_type: gl.constexpr, C: gl.constexpr, E: gl.constexpr):
    """Allocate the :class:`FlatRing`. Without NORM, its buffer of norm weights is unused and minimal."""
    STAGES: gl.constexpr = C.STAGES
    WARPS: gl.constexpr = C.WARPS
    BLOCK_M: gl.constexpr = C.BLOCK_M
    BLOCK_N: gl.constexpr = C.BLOCK_N
    BLOCK_K: gl.constexpr = C.BLOCK_K
    NORM_K: gl.constexpr = BLOCK_K if E.NORM else 4 * C.K_WIDTH
    of_x: gl.constexpr = ring_layout(C, x_type)
    of_w: gl.constexpr = ring_layout(C, w_type)
    return FlatRing(
        gl.allocate_shared_memory(w_type, [STAGES, WARPS, BLOCK_N, BLOCK_K], of_w),
        gl.allocate_shared_memory(x_type, [STAGES, WARPS, BLOCK_M, BLOCK_K], of_x),
        gl.allocate_shared_memory(x_type, [STAGES, WARPS, 1, NORM_K], of_x),
    )


@gluon.constexpr_function
def ring_layout(C, dtype):
    """Swizzled shared-memory layout of a slot of the ring.

    Four threads read 4 * K_WIDTH adjacent elements of a row at a time. The swizzle places these elements of
    adjacent rows in different banks.
    """
    unit = 4 * C.K_WIDTH
    units = C.BLOCK_K // unit
    per_line = BANK_BYTES.value * 8 // (unit * dtype.primitive_bitwidth)
    return gl.SwizzledSharedLayout(unit, max(per_line // units, 1), min(units, per_line), [2, 1, 0])


# Which rows of W a program reads.


@gluon.jit
def tiles_of(program, programs, places, C: gl.constexpr):
    """Return the :class:`FlatTiles` of a program.

    The places (output columns, or pairs of them) are shared equally: programs differ by at most one place.
    """
    # Equal shares without sums across programs. In whole tiles and a rest instead of tiles of equal sizes, a
    # last tile of 3 rows cost 5 us. int64, because the product of places and programs may exceed 32 bits.
    begin = (places.to(gl.int64) * program // programs).to(gl.int32)
    end = (places.to(gl.int64) * (program + 1) // programs).to(gl.int32)
    return FlatTiles(begin, end - begin, gl.cdiv(end - begin, C.BLOCK_N // C.HALVES))


@gluon.jit
def edge_of(tiles, t):
    """Return the first place (output column, or pair of columns) of tile ``t``."""
    return tiles.begin + tiles.places * t // tiles.count


@gluon.jit
def weight_rows(tiles, t, depth, call, C: gl.constexpr, E: gl.constexpr):
    """Return (offsets, mask) for loads of tile ``t``'s rows of W.

    offsets [WARPS, BLOCK_N, BLOCK_K] are those of the first chunk. mask [1, BLOCK_N, 1] is False for rows
    past the end of the tile.
    """
    dtype: gl.constexpr = call.pointers.w.dtype.element_ty
    layout: gl.constexpr = copy_layout(C, dtype)
    STEP: gl.constexpr = C.BLOCK_N // C.HALVES
    i = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    place = edge_of(tiles, t) + i % STEP
    # The first STEP rows of a tile are the first sums of its places, the others the second ones (``finish``).
    row = row_of(place, i // STEP, call.places, E)[None, :, None]
    offsets = row.to(gl.int64) * depth.w_stride + chunk_columns(C, dtype)
    return offsets, (place < edge_of(tiles, t + 1))[None, :, None]


@gluon.jit
def next_chunk(tile, chunk, offsets, mine, chunks, tiles, depth, call, C: gl.constexpr, E: gl.constexpr):
    """Return (tile, chunk, offsets, mine) of the chunk after ``chunk``, in this tile or the next."""
    chunk += 1
    if chunk == chunks:
        chunk = 0
        tile += 1
        offsets, mine = weight_rows(tiles, tile, depth, call, C, E)
    return tile, chunk, offsets, mine


# Loads.


@gluon.jit
def load_weights(offsets, mine, chunk, slot, pointers, ring, depth, C: gl.constexpr, E: gl.constexpr):
    """Start to copy a chunk of W, for the rows of one tile, and, if NORM, a chunk of the norm's weights."""
    copy(pointers.w, offsets, mine, chunk, ring.w.index(slot), depth, C)
    # The norm's weights do not depend on the previous kernel either.
    if E.NORM:
        columns = chunk_columns(C, pointers.norm_weight.dtype.element_ty)
        copy(pointers.norm_weight, columns, columns >= 0, chunk, ring.norm_weight.index(slot), depth, C)


@gluon.jit
def load_x(chunk, slot, pointers, ring, depth, M, C: gl.constexpr):
    """Start copies of a chunk of x. Rows past M become 0."""
    dtype: gl.constexpr = pointers.x.dtype.element_ty
    layout: gl.constexpr = copy_layout(C, dtype)
    m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    offsets = m.to(gl.int64) * depth.x_stride + chunk_columns(C, dtype)
    copy(pointers.x, offsets, m < M, chunk, ring.x.index(slot), depth, C)


@gluon.jit
def copy(source, offsets, mine, chunk, slot, depth, C: gl.constexpr):
    """Start asynchronous copies of a chunk into a slot.

    Elements outside of the mask ``mine``, or past the last column of K, become 0.
    """
    start = chunk * (C.WARPS * C.BLOCK_K)
    if not C.EVEN_K:
        mine = mine & (start + chunk_columns(C, source.dtype.element_ty) < depth.K)
    async_copy_to_shared(slot, source + start + offsets, mask=mine)


@gluon.jit
def chunk_columns(C: gl.constexpr, dtype: gl.constexpr):
    """Return the columns of a chunk, [WARPS, 1, BLOCK_K]. Warp w multiplies the columns of index w."""
    layout: gl.constexpr = copy_layout(C, dtype)
    warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    k = gl.arange(0, C.BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return warp[:, None, None] * C.BLOCK_K + k[None, None, :]


@gluon.constexpr_function
def copy_layout(C, dtype):
    """Layout of asynchronous copies of [WARPS, rows, BLOCK_K] into a slot."""
    # A warp copies the columns that it multiplies: adjacent lanes have adjacent vectors of a row.
    vector = vector_of(dtype)
    vectors = C.BLOCK_K // vector
    lanes = min(vectors, 32)
    return gl.BlockedLayout([1, 1, vector], [1, 32 // lanes, lanes], [C.WARPS, 1, 1], [2, 1, 0])


@gluon.jit
def as_numbers(w, dtype: gl.constexpr):
    """Convert W to the dtype of x. The conversion of e4m3 is exact."""
    if w.dtype == gl.float8e4nv and dtype == gl.bfloat16:
        return to_bfloat16(w)
    else:
        return w.to(dtype)


# The end of a tile, and of the program.


@gluon.jit
def finish(sums, factor, square, tiles, t, call, C: gl.constexpr, E: gl.constexpr):
    """Apply the epilogue to the sums of tile ``t`` and store the results.

    sums [BLOCK_N, BLOCK_M], factor [BLOCK_M] (scale of each row of x). If NEXT_NORM, the squares of this
    tile's results are added to ``square`` [BLOCK_M]. Returns ``square``.
    """
    STEP: gl.constexpr = C.BLOCK_N // C.HALVES
    pairs: gl.constexpr = pairs_layout(C)
    layout: gl.constexpr = gl.SliceLayout(2, pairs)
    place = edge_of(tiles, t) + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    # Places behind the tile's end become the first column past the output, so that one bound hides both.
    place = gl.where(place < edge_of(tiles, t + 1), place, call.places)[:, None]
    end = call.places
    m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, layout))[None, :]
    factor = gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :]
    if E.EPILOGUE == PLAIN:
        y = store_sums(gl.convert_layout(sums, layout), place, end, m, factor, call, E)
        if E.NEXT_NORM:
            square += gl.sum(store_scaled(y, place, end, m, call), 0)
    else:  # the two sums of a place side by side in a thread, which combines them
        both = sums.reshape([2, STEP, C.BLOCK_M]).permute((1, 2, 0))
        first, second = gl.split(gl.convert_layout(both, pairs))
        to = load_destinations(m, call.pointers, call.sizes, E)
        store_pairs(first, second, place, end, m, factor, to, call, E)
    return square


@gluon.constexpr_function
def pairs_layout(C):
    """Layout of a tile's sums [places, BLOCK_M, 2]: adjacent threads have adjacent places."""
    lanes = min(C.BLOCK_N // C.HALVES, 32)
    return gl.BlockedLayout([1, 1, 2], [lanes, 32 // lanes, 1], [1, C.WARPS, 1], [2, 0, 1])


@gluon.jit
def leave_factor(square, call, C: gl.constexpr):
    """Store a program's sums of squares ``square`` [BLOCK_M], one for each row of x.

    The last program to arrive adds the sums of all programs, in a fixed order. From the totals it stores the
    factor by which the next norm multiplies each row.
    """
    BLOCK_M: gl.constexpr = C.BLOCK_M
    PARTS: gl.constexpr = PARTS_AT_ONCE // BLOCK_M
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // BLOCK_M, BLOCK_M], [C.WARPS, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    # Stored without atomics, and added below in the order of programs: the same bits in every run.
    square = gl.convert_layout(square, gl.SliceLayout(0, layout))
    gl.store(call.pointers.squares + gl.program_id(0) * BLOCK_M + m, square)
    partition_barrier()  # all threads have stored before one of them counts the program as arrived
    if gl.atomic_add(call.pointers.arrived, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.store(call.pointers.arrived, 0)  # for the next launch
        part = gl.arange(0, PARTS, gl.SliceLayout(1, layout))[:, None]
        total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, layout))
        for first in range(0, gl.num_programs(0), PARTS):
            parts = load_squares(part, m[None, :], first, gl.num_programs(0), BLOCK_M, call.pointers.squares)
            total += gl.sum(parts, 0)
        store_factor(total, m, call)
