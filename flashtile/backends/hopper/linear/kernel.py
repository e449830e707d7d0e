"""Flat products for Hopper: y [M, N] = x [M, K] W [N, K]^T for M so small that the bytes of W decide
(FlashDecoding++, Hong et al. 2023, arXiv:2311.01282, section 4).

Rows of W are the first operand of the tensor cores and M, padded to 8 and not to 64, is the second. The
memory never rests:

* Every program reads equally many bytes: an equal range of rows, masked at its end, not tiles. Within a block
  the warps share K, and their sums are added at the end, in one order.
* A ring of asynchronous copies runs on over the edges of tiles.
* Under programmatic dependent launch the kernel asks for its first weights before it waits for the kernel
  before it, and lets the next one in when it has asked for its last.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flashtile.backends.common.dependent_launch import launch_dependents, wait_for_dependencies
from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.common.linear_ends import (
    PLAIN,
    EndPointers,
    EndSizes,
    row_of,
    store_pairs,
    store_sums,
)
from flashtile.backends.hopper.compat import partition_barrier


class Operands(NamedTuple):
    """Memory that the ring reads."""

    x: Any
    w: Any
    norm_weight: Any


class Ring(NamedTuple):
    """Shared memory: STAGES slots of rows of W, of rows of x, and of weights of the norm."""

    w: Any
    x: Any
    norm_weight: Any


class Work(NamedTuple):
    """A program's part: places ``begin`` to ``end`` and chunks of K from ``first`` to ``last``."""

    begin: Any
    end: Any
    first: Any
    last: Any


@gluon.constexpr_function
def copy_layout(C):
    vectors = C.BLOCK_K // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // vectors, vectors], [C.SHARED_K, C.SHARED_N, 1], [2, 1, 0])


@gluon.constexpr_function
def ring_layout(C):
    vectors = C.BLOCK_K // 8
    return gl.SwizzledSharedLayout(8, max(8 // vectors, 1), min(vectors, 8), [2, 1, 0])


@gluon.jit
def columns_of(chunk, layout: gl.constexpr, C: gl.constexpr):
    """[SHARED_K, 1, BLOCK_K]: the columns of a chunk, by warp."""
    part = gl.arange(0, C.SHARED_K, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    k = gl.arange(0, C.BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return chunk * (C.SHARED_K * C.BLOCK_K) + part[:, None, None] * C.BLOCK_K + k[None, None, :]


@gluon.jit
def rows_of(start, work, sizes, C: gl.constexpr, E: gl.constexpr):
    """(offsets in W, whether they are the program's) of a tile's rows, [1, BLOCK_N, 1]."""
    layout: gl.constexpr = copy_layout(C)
    i = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    place = start + i % (C.BLOCK_N // C.HALVES)
    row = row_of(place, i // (C.BLOCK_N // C.HALVES), sizes, E)
    return row[None, :, None], (place < work.end)[None, :, None]


@gluon.jit
def ask_for_weights(rows, mine, chunk, slot, operands, ring, K, w_stride, C: gl.constexpr, E: gl.constexpr):
    columns = columns_of(chunk, copy_layout(C), C)
    pointers = operands.w + (rows.to(gl.int64) * w_stride + columns)
    async_copy.async_copy_global_to_shared(ring.w.index(slot), pointers, mask=mine & (columns < K))
    if E.NORM:
        pointers = operands.norm_weight + columns
        async_copy.async_copy_global_to_shared(ring.norm_weight.index(slot), pointers, mask=columns < K)


@gluon.jit
def ask_for_x(chunk, slot, operands, ring, M, K, x_stride, C: gl.constexpr):
    layout: gl.constexpr = copy_layout(C)
    columns = columns_of(chunk, layout, C)
    m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    pointers = operands.x + (m.to(gl.int64) * x_stride + columns)
    async_copy.async_copy_global_to_shared(ring.x.index(slot), pointers, mask=(m < M) & (columns < K))


@gluon.jit
def finish(sums, start, end, factor, pointers, sizes, C: gl.constexpr, E: gl.constexpr):
    """The end of a tile. sums [BLOCK_N, BLOCK_M], factor [BLOCK_M]."""
    N: gl.constexpr = C.BLOCK_N // C.HALVES
    WARPS: gl.constexpr = C.SHARED_K * C.SHARED_N
    # Neighbouring places to neighbouring threads.
    pairs: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2], [min(N, 32), 32 // min(N, 32), 1], [1, WARPS, 1], [2, 0, 1]
    )
    layout: gl.constexpr = gl.SliceLayout(2, pairs)
    place = start + gl.arange(0, N, gl.SliceLayout(1, layout))
    place = gl.where(place < end, place, sizes.places)[:, None]
    m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, layout))[None, :]
    factor = gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :]
    if E.END == PLAIN:
        store_sums(gl.convert_layout(sums, layout), place, m, factor, pointers, sizes, E)
    else:
        both = sums.reshape([2, N, C.BLOCK_M]).permute((1, 2, 0))
        first, second = gl.split(gl.convert_layout(both, pairs))
        store_pairs(first, second, place, m, factor, pointers, sizes, E)


@gluon_kernel(
    do_not_specialize=(
        "M",
        *EndSizes._fields[1:2],
        "heads_q",
        "heads_kv",
        "angles",
        "num_blocks",
        "table_width",
    )
)
def flat_kernel(
    x,
    w,
    y,
    norm_weight,
    partial,
    arrived,
    bias,
    residual,
    scales,
    cos,
    sin,
    positions,
    slots,
    block_table,
    k_cache,
    v_cache,
    K,
    x_stride,
    w_stride,
    splits,
    eps,
    M,
    places,
    y_stride,
    residual_stride,
    heads_q,
    heads_kv,
    angles,
    num_blocks,
    table_width,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    C: gl.constexpr,
    E: gl.constexpr,
):
    operands = Operands(x, w, norm_weight)
    pointers = EndPointers(
        y, bias, residual, scales, cos, sin, positions, slots, block_table, k_cache, v_cache
    )
    sizes = EndSizes(
        M,
        places,
        y_stride,
        residual_stride,
        heads_q,
        heads_kv,
        angles,
        num_blocks,
        table_width,
        k_block,
        k_token,
        k_head,
        v_block,
        v_token,
        v_head,
    )
    STAGES: gl.constexpr = C.STAGES
    BLOCK_N: gl.constexpr = C.BLOCK_N
    BLOCK_M: gl.constexpr = C.BLOCK_M
    SHARED_K: gl.constexpr = C.SHARED_K
    BLOCK_K: gl.constexpr = C.BLOCK_K
    CHUNK: gl.constexpr = C.SHARED_K * C.BLOCK_K
    STEP: gl.constexpr = BLOCK_N // C.HALVES
    shared: gl.constexpr = ring_layout(C)
    ring = Ring(
        gl.allocate_shared_memory(w.dtype.element_ty, [STAGES, C.SHARED_K, BLOCK_N, C.BLOCK_K], shared),
        gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, C.SHARED_K, BLOCK_M, C.BLOCK_K], shared),
        gl.allocate_shared_memory(
            x.dtype.element_ty, [STAGES, C.SHARED_K, 1, C.BLOCK_K if E.NORM else 8], shared
        ),
    )
    groups = gl.num_programs(0) // splits
    group = gl.program_id(0) // splits
    split = gl.program_id(0) - group * splits
    chunks = gl.cdiv(K, CHUNK)
    work = Work(
        (places.to(gl.int64) * group // groups).to(gl.int32),
        (places.to(gl.int64) * (group + 1) // groups).to(gl.int32),
        chunks * split // splits,
        chunks * (split + 1) // splits,
    )
    count = gl.cdiv(work.end - work.begin, STEP) * (work.last - work.first)

    ask_start = work.begin
    ask_chunk = work.first
    rows, mine = rows_of(ask_start, work, sizes, C, E)
    if not C.AHEAD:
        wait_for_dependencies()
    for s in gl.static_range(STAGES - 1):
        if s < count:
            ask_for_weights(rows, mine, ask_chunk, s, operands, ring, K, w_stride, C, E)
            ask_chunk += 1
            if ask_chunk == work.last:
                ask_chunk = work.first
                ask_start += STEP
                rows, mine = rows_of(ask_start, work, sizes, C, E)
        async_copy.commit_group()
    if C.AHEAD:
        wait_for_dependencies()
    x_chunk = work.first
    for s in gl.static_range(STAGES - 1):
        if s < count:
            ask_for_x(x_chunk, s, operands, ring, M, K, x_stride, C)
            x_chunk += 1
            if x_chunk == work.last:
                x_chunk = work.first
        async_copy.commit_group()
    if C.TRIGGER == 1:
        launch_dependents()
    if count <= STAGES - 1:
        launch_dependents()

    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.SHARED_K, C.SHARED_N, 1], [1, 16, 8])
    w_operand: gl.constexpr = gl.DotOperandLayout(0, mma, C.K_WIDTH)
    x_operand: gl.constexpr = gl.DotOperandLayout(1, mma, C.K_WIDTH)
    start = work.begin
    j = 0
    while j < count:
        acc = gl.zeros([SHARED_K, BLOCK_N, BLOCK_M], gl.float32, mma)
        squares = gl.zeros([SHARED_K, BLOCK_K, BLOCK_M], gl.float32, x_operand)
        tile_end = j + work.last - work.first
        while j < tile_end:
            slot = j % STAGES
            async_copy.wait_group(STAGES - 2)
            partition_barrier()
            if j + STAGES - 1 < count:
                to = (j + STAGES - 1) % STAGES
                ask_for_weights(rows, mine, ask_chunk, to, operands, ring, K, w_stride, C, E)
                ask_for_x(ask_chunk, to, operands, ring, M, K, x_stride, C)
                ask_chunk += 1
                if ask_chunk == work.last:
                    ask_chunk = work.first
                    ask_start += STEP
                    rows, mine = rows_of(ask_start, work, sizes, C, E)
                if j + STAGES == count:
                    launch_dependents()
            async_copy.commit_group()
            w_tile = ring.w.index(slot).load(w_operand)
            x_tile = ring.x.index(slot).permute((0, 2, 1)).load(x_operand)
            if E.NORM:
                wide = x_tile.to(gl.float32)
                squares += wide * wide
                weight = ring.norm_weight.index(slot).permute((0, 2, 1)).load(x_operand)
                x_tile = (wide * weight.to(gl.float32)).to(x_tile.dtype)
            acc = mma_v2(w_tile.to(x_tile.dtype), x_tile, acc)
            j += 1
        sums = gl.sum(acc, 0)
        layout: gl.constexpr = sums.type.layout
        square = gl.convert_layout(gl.sum(gl.sum(squares, 1), 0), gl.SliceLayout(0, layout))
        if splits == 1:
            finish(sums, start, work.end, gl.rsqrt(square / K + eps), pointers, sizes, C, E)
        else:
            n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
            m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
            at = n[:, None] * BLOCK_M + m[None, :]
            PART: gl.constexpr = (BLOCK_N + 1) * BLOCK_M
            tiles = gl.cdiv(gl.cdiv(places, groups), STEP)  # of the largest group
            tile = group * tiles + (start - work.begin) // STEP
            parts = partial + tile.to(gl.int64) * splits * PART
            gl.store(parts + split * PART + at, sums)
            gl.store(parts + split * PART + BLOCK_N * BLOCK_M + m, square)
            partition_barrier()
            before = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
            partition_barrier()
            if before == splits - 1:
                sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
                square = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, layout))
                for p in range(splits):
                    sums += gl.load(parts + p * PART + at, cache_modifier=".cg")
                    square += gl.load(parts + p * PART + BLOCK_N * BLOCK_M + m, cache_modifier=".cg")
                gl.store(arrived + tile, 0)
                finish(sums, start, work.end, gl.rsqrt(square / K + eps), pointers, sizes, C, E)
        start += STEP
