"""FP8 attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.3).

The schedule, the partitions and both overlaps are those of the 16-bit kernel (``hopper.forward``). New are
e4m3 products at twice the rate, scales, P in e4m3 (``fp8.softmax``) and V, which these products take only
with its keys contiguous: either it lies in memory as V^T, keys in the order of P's registers, or the producer
transposes each tile (``fp8.transpose``).

Scales cost nothing per element: those of q and k are part of the factor that every score has in any case,
that of v is an offset of the exponent, taken back from the row's sum by one factor per block. Each block's
scales are read one block ahead.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_channel, make_ping_pong, make_ring
from flashtile.backends.hopper.compat import async_load
from flashtile.backends.hopper.forward.attend import skip_blocks
from flashtile.backends.hopper.forward.products import qk_product, scale_rows
from flashtile.backends.hopper.forward.rows import mask_rows, own_rows, rows_in
from flashtile.backends.hopper.forward.schedule import (
    WARPGROUP_ROWS,
    Numbers,
    Pointers,
    Schedule,
    block_of_part,
    find_work_tile,
    next_tile,
    num_own_tiles,
    num_parts,
    own_range,
    query_blocks,
    snake_order,
    tile_blocks,
    whole_end,
)
from flashtile.backends.hopper.forward.scores import LN_2, apply_score_mod, mask
from flashtile.backends.hopper.forward.tiles import load_keys, load_queries, store_lse, store_rows
from flashtile.backends.hopper.fp8.softmax import (
    LEAST,
    P_LOG2,
    as_operand,
    by_byte,
    exponentials,
    log2,
    pack,
    sums_of,
)
from flashtile.backends.hopper.fp8.transpose import transpose_tile, transposed_layout
from flashtile.backends.hopper.inline_asm import copy_registers, rescale
from flashtile.backends.hopper.work_tiles import num_work_tiles
from flashtile.fp8 import layout

QUERY_BLOCK = gl.constexpr(layout.QUERY_BLOCK)
KEY_BLOCK = gl.constexpr(layout.KEY_BLOCK)


class ScaleStrides(NamedTuple):
    """Elements from the scale of one sequence, head and block to the next; 0 where they share a scale."""

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
    """Memory of the scales, fp32, and their strides. What a call has not is never followed."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    strides: Any


class TileScales(NamedTuple):
    """Scales of one tile."""

    rows: Any
    """[rows]: what raw products are multiplied by, but for the scale of their keys."""
    k: Any
    """Pointer to the scale of the first block of keys; the next ones follow at ``k_block``."""
    v: Any
    k_block: Any
    v_block: Any


@gluon.jit
def tile_scales(C: gl.constexpr, work, positions, head, arrays, numbers):
    """Those of 64 rows at ``positions`` of query heads ``head`` ([rows] each)."""
    strides = arrays.strides
    q_place = work.sequence * strides.q_scale_batch + head // C.Q_SCALE_GROUP * strides.q_scale_head
    first_q = 0
    first_k = 0
    if C.VARLEN and C.BLOCK_SCALES:
        first_q = work.start_q // QUERY_BLOCK + work.sequence
        first_k = work.start_k // KEY_BLOCK + work.sequence
    q_place += (first_q + positions // QUERY_BLOCK) * strides.q_scale_block
    if C.HAS_Q_SCALE:
        q_scale = gl.load(arrays.q_scale + q_place, mask=positions < work.seqlen_q, other=1.0)
    else:
        q_scale = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, positions.type.layout)
    if C.SOFTCAP:
        q_scale = q_scale * numbers.softcap_rate
    else:
        q_scale = q_scale * numbers.scale_log2
    head_kv = work.head // C.KV_GROUP
    k_place = work.sequence * strides.k_scale_batch + head_kv * strides.k_scale_head
    v_place = work.sequence * strides.v_scale_batch + head_kv * strides.v_scale_head
    return TileScales(
        q_scale,
        arrays.k_scale + (k_place + first_k * strides.k_scale_block),
        arrays.v_scale + (v_place + first_k * strides.v_scale_block),
        strides.k_scale_block,
        strides.v_scale_block,
    )


@gluon.jit
def load_scales(C: gl.constexpr, scales, n):
    """(k's, v's) scale of block ``n``, or of block 0 for one before it."""
    block = gl.maximum(n, 0) * C.BLOCK_N // KEY_BLOCK
    k_scale, v_scale = gl.to_tensor(1.0), gl.to_tensor(1.0)
    if C.HAS_K_SCALE:
        k_scale = gl.load(scales.k + block * scales.k_block)
    if C.HAS_V_SCALE:
        v_scale = gl.load(scales.v + block * scales.v_block)
    return k_scale, v_scale


@gluon.jit
def score_factor(C: gl.constexpr, scales, k_scale):
    """[rows]: what raw products are multiplied by. Kept positive and finite, or -inf would become NaN."""
    factor = scales.rows * k_scale
    if not C.HAS_SCORE_MOD:
        factor = gl.minimum(gl.maximum(factor, LEAST), 1 / LEAST)
    return factor


@gluon.jit
def value_scale(v_scale):
    """(log2 of a block's value scale, its inverse)."""
    exponent = log2(gl.maximum(v_scale, LEAST))
    return exponent, gl.exp2(-exponent)


@gluon.jit
def fp8_softmax(C: gl.constexpr, s, n, m, l, scales, k_scale, v_scale, rows, numbers, MASK: gl.constexpr,
                s_layout: gl.constexpr):  # fmt: skip
    """Raw products of block ``n`` to (P packed, new maximum, new sums, factor for O). ``m``: in s's rows."""
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    factor = gl.convert_layout(score_factor(C, scales, k_scale), row)
    value_log2, inverse = value_scale(v_scale)
    column = factor[:, None]
    s = apply_score_mod(C, s, n, rows, Numbers(column, column, numbers.softcap_log2), s_layout)
    if MASK:
        s = mask(C, s, n, rows, s_layout)
    b0, b1, b2, b3, m, alpha = exponentials(C, s, m, factor, value_log2)
    sums = sums_of(b0, b1, b2, b3)
    l = scale_rows(l, alpha) + gl.convert_layout(sums, l.type.layout) * inverse
    return pack(b0, b1, b2, b3), m, l, alpha


@gluon.jit
def pv_product(C: gl.constexpr, p, v_tile, o):
    """O += P V, left in flight. p: P of WIDTH keys; v_tile: V^T, keys in P's order."""
    WIDTH: gl.constexpr = p.shape[1]
    v = v_tile.reshape([C.BLOCK_DV, C.BLOCK_N])
    if WIDTH < C.BLOCK_N:
        v = v.slice(0, WIDTH, dim=1)
    return warpgroup_mma(p, v.permute((1, 0)), o, is_async=True)


@gluon.jit
def attend_uncut(
    C: gl.constexpr, W: gl.constexpr, o, l, m, packed, i, n_from, n_to, k_scale, v_scale, scales, q, q_head,
    k, v, ping_pong, rows, numbers, s_layout: gl.constexpr,
):  # fmt: skip
    """Blocks n_from - 1 down to n_to, which no edge of the mask cuts: Q K^T of each beside P V of the last
    one.

    ``k_scale`` and ``v_scale`` are those of block n_from - 1; returned are those of block n_to - 1.
    """
    o_layout: gl.constexpr = o.type.layout
    for n in range(n_from - 1, n_to - 1, -1):
        p = as_operand(packed, o_layout)  # here: between two products in flight, it would part them
        ping_pong.wait(W, i)
        s = qk_product(C, C.BLOCK_N, q, q_head, k.tiles.index(k.wait(i)), s_layout)
        o = pv_product(C, p, v.tiles.index(v.wait(i - 1)), o)
        ping_pong.pass_on(W)
        next_scales = load_scales(C, scales, n - 1)
        s = warpgroup_mma_wait(1, deps=[s])
        k.release(i)
        fresh, m, l, alpha = fp8_softmax(
            C, s, n, m, l, scales, k_scale, v_scale, rows, numbers, False, s_layout
        )
        o = warpgroup_mma_wait(0, deps=[o])
        packed = copy_registers(fresh)
        v.release(i - 1)
        o = rescale(o, alpha)
        k_scale, v_scale = next_scales
        i += 1
    return o, l, m, packed, i, k_scale, v_scale


@gluon.jit
def attend_cut(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, o, l, m, i, n_from, n_to, k_scale, v_scale, scales,
    q, q_head, k, v, ping_pong, rows, numbers,
):  # fmt: skip
    """Blocks n_from - 1 down to n_to under an edge of the mask, the first ``WIDTH`` keys of each.

    Without overlap, as in the 16-bit kernel. Scales as in :func:`attend_uncut`.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    o_layout: gl.constexpr = o.type.layout
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = rows_in(C, rows, row)
    for n in range(n_from - 1, n_to - 1, -1):
        ping_pong.wait(W, i)
        s = qk_product(C, WIDTH, q, q_head, k.tiles.index(k.wait(i)), s_layout)
        ping_pong.pass_on(W)
        next_scales = load_scales(C, scales, n - 1)
        s = warpgroup_mma_wait(0, deps=[s])
        k.release(i)
        packed, m_new, l, alpha = fp8_softmax(
            C, s, n, gl.convert_layout(m, row), l, scales, k_scale, v_scale, rows, numbers, True, s_layout
        )
        m = gl.convert_layout(m_new, m.type.layout)
        o = pv_product(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i)), scale_rows(o, alpha))
        o = warpgroup_mma_wait(0, deps=[o])
        v.release(i)
        k_scale, v_scale = next_scales
        i += 1
    return o, l, m, i, k_scale, v_scale


@gluon.jit
def attend_tile(
    C: gl.constexpr, W: gl.constexpr, work, block, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers,
    schedule, numbers, arrays,
):  # fmt: skip
    """64 rows of block ``block`` of ``work``, from shared memory to out and lse.

    ``i`` counts the program's blocks of keys, ``j`` its blocks of queries: the uses of their channels.
    Returns the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_DV, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)

    first, last, n_begin, n_end, my_begin, my_end, full_begin, full_end = own_range(
        C, W, work, block, schedule
    )
    positions, head = own_rows(C, work, first, row_layout)
    rows = mask_rows(C, work, positions, 0.0, schedule)
    scales = tile_scales(C, work, positions, head, arrays, numbers)
    k_scale, v_scale = load_scales(C, scales, my_end - 1)

    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, o_layout)
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout)
    z0, z1, z2, z3 = by_byte(zeros)
    l = sums_of(z0, z1, z2, z3)

    i = skip_blocks(n_end - my_end, i, k, v, ping_pong, W)
    q_part = q.wait(j) * C.WARPGROUPS + W
    q_tile = q.tiles.index(q_part).reshape([ROWS, C.BLOCK_D])
    q_head = q_tile
    if C.Q_IN_REGISTERS > 0:
        q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=4)
        q_head = q_tile.slice(0, C.Q_IN_REGISTERS, dim=1).load(q_layout)
    if C.HAS_RIGHT and C.BLOCK_N > ROWS:
        whole = whole_end(C, work, last, my_begin, my_end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        o, l, m, i, k_scale, v_scale = attend_cut(
            C, W, HALF, o, l, m, i, my_end, whole, k_scale, v_scale, scales, q_tile, q_head, k, v,
            ping_pong, rows, numbers,
        )  # fmt: skip
        my_end = whole
    n = my_end - 1
    if C.HAS_RIGHT:
        n = min(max(full_end, my_begin), my_end - 1)
        o, l, m, i, k_scale, v_scale = attend_cut(
            C, W, C.BLOCK_N, o, l, m, i, my_end, n + 1, k_scale, v_scale, scales, q_tile, q_head, k, v,
            ping_pong, rows, numbers,
        )  # fmt: skip

    # The first block of the pipeline, the only one of it that may be cut.
    ping_pong.wait(W, i)
    s = qk_product(C, C.BLOCK_N, q_tile, q_head, k.tiles.index(k.wait(i)), s_layout)
    ping_pong.pass_on(W)
    next_scales = load_scales(C, scales, n - 1)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(i)
    CUT: gl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N
    packed, m, l, alpha = fp8_softmax(C, s, n, m, l, scales, k_scale, v_scale, rows, numbers, CUT, s_layout)
    k_scale, v_scale = next_scales
    if C.HAS_RIGHT:
        o = scale_rows(o, alpha)
    i += 1
    full_begin = min(full_begin, n)
    o, l, m, packed, i, k_scale, v_scale = attend_uncut(
        C, W, o, l, m, packed, i, n, full_begin, k_scale, v_scale, scales, q_tile, q_head, k, v, ping_pong,
        rows, numbers, s_layout,
    )  # fmt: skip
    o = pv_product(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i - 1)), o)
    o = warpgroup_mma_wait(0, deps=[o])
    v.release(i - 1)
    if C.HAS_LEFT:
        o, l, m, i, k_scale, v_scale = attend_cut(
            C, W, C.BLOCK_N, o, l, m, i, full_begin, my_begin, k_scale, v_scale, scales, q_tile, q_head, k, v,
            ping_pong, rows, numbers,
        )  # fmt: skip
    q.release(j)

    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    lse = (m - P_LOG2) * LN_2 + gl.log(sums)
    store_lse(C, lse, work, head, positions, pointers, schedule)
    i = skip_blocks(my_begin - n_begin, i, k, v, ping_pong, W)
    # A row without keys met what lies behind the last one, which may be NaN.
    o = scale_rows(o, gl.where(sums > 0, 1 / sums, 0.0))
    o_sums = gl.convert_layout(sums, gl.SliceLayout(1, o_layout))
    o = gl.where((o_sums == 0)[:, None], 0.0, o)
    o_tile = o_tiles.index(W)
    tma.store_wait(0)  # of the tile before
    o_tile.reshape([ROWS, C.BLOCK_DV]).store(o.to(o_desc.dtype))
    fence_async_shared()
    store_rows(C, o_desc, work, first, o_tile)
    return i


@gluon.jit
def attend_work_tile(
    C: gl.constexpr, W: gl.constexpr, tile_index, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers,
    schedule, numbers, arrays,
):  # fmt: skip
    """The blocks of query rows of a work tile; returns the new ``i`` and ``j`` of :func:`attend_tile`."""
    work = find_work_tile(C, tile_index, pointers, schedule)
    num_blocks = query_blocks(C, work, schedule)
    for part in range(num_parts(num_blocks, work.place, C.PAIRED)):
        block = block_of_part(num_blocks, work.place, part, C.PAIRED)
        i = attend_tile(
            C, W, work, block, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers, arrays
        )
        j += 1
    return i, j


@gluon.jit
def consumer(
    C: gl.constexpr, W: gl.constexpr, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
    arrays,
):  # fmt: skip
    """Warpgroup W: rows 64 W to 64 W + 63 of every block that this program computes."""
    num_tiles = num_work_tiles(C, pointers, schedule)
    i = 0
    j = 0
    if C.QUEUED:
        t = 0
        tile_index = work_queue.take(queue, t, 4)
        while tile_index < num_tiles:
            i, j = attend_work_tile(
                C, W, tile_index, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                arrays,
            )  # fmt: skip
            t += 1
            tile_index = work_queue.take(queue, t, 4)
    else:
        program, programs = gl.program_id(0), gl.num_programs(0)
        for t in range(num_own_tiles(program, programs, num_tiles)):
            tile_index = snake_order(t, program, programs)
            i, j = attend_work_tile(
                C, W, tile_index, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                arrays,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def load_transposed(C: gl.constexpr, desc, work, n, barrier, slot):
    """TMA load of block ``n`` of V^T."""
    head, column = work.head // C.KV_GROUP, n * C.BLOCK_N
    if C.VARLEN:
        first = work.start_k // KEY_BLOCK + work.sequence
        async_load(desc, [head, 0, first * KEY_BLOCK + column], barrier, slot)
    else:
        async_load(desc, [work.sequence, head, 0, column], barrier, slot)


@gluon.jit
def load_values(C: gl.constexpr, v_desc, work, n, i, v, v_rows):
    """TMA load of block ``n`` of v, for use ``i``: to the consumers, or to be transposed for them."""
    if C.V_TRANSPOSED:
        slot = v.acquire(i)
        mbarrier.expect(v.full.index(slot), v_desc.block_type.nbytes)
        load_transposed(C, v_desc, work, n, v.full.index(slot), v.tiles.index(slot))
    else:  # transposed at least one block ago, by this partition
        slot = i % C.STAGES
        mbarrier.expect(v_rows.full.index(slot), v_desc.block_type.nbytes)
        load_keys(C, v_desc, work, n, v_rows.full.index(slot), v_rows.tiles.index(slot))


@gluon.jit
def transpose_values(C: gl.constexpr, i, v, v_rows):
    """Use ``i`` of v from rows to columns, for the consumers."""
    rows = v_rows.tiles.index(v_rows.wait(i)).reshape([C.BLOCK_N, C.BLOCK_DV])
    slot = v.acquire(i)
    transpose_tile(rows, v.tiles.index(slot))
    fence_async_shared()
    mbarrier.arrive(v.full.index(slot), count=1)


@gluon.jit
def load_block(C: gl.constexpr, work, block, i, j, q, k, v, v_rows, q_desc, k_desc, v_desc, schedule):
    """All that the consumers need for one block of query rows; returns the new ``i``.

    What is to be transposed follows one block behind what is loaded.
    """
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    n_begin, n_end = tile_blocks(C, work, block, schedule.window_left, schedule.window_right)
    for n in range(n_end - 1, n_begin - 1, -1):
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), k_desc.block_type.nbytes)
        load_keys(C, k_desc, work, n, k.full.index(slot), k.tiles.index(slot))
        if not C.V_TRANSPOSED:
            load_values(C, v_desc, work, n, i, v, v_rows)
            if i > 0:  # before q, whose tile is free only after the last block of the tile before
                transpose_values(C, i - 1, v, v_rows)
        if n == n_end - 1:  # the first keys may come before q's tile is free
            slot = q.acquire(j)
            mbarrier.expect(q.full.index(slot), WARPGROUPS * q_desc.block_type.nbytes)
            for w in gl.static_range(WARPGROUPS):
                part = q.tiles.index(slot * WARPGROUPS + w)
                load_queries(C, w, q_desc, work, block, q.full.index(slot), part)
        if C.V_TRANSPOSED:
            load_values(C, v_desc, work, n, i, v, v_rows)
        i += 1
    return i


@gluon.jit
def load_work_tile(
    C: gl.constexpr, tile_index, i, j, q, k, v, v_rows, q_desc, k_desc, v_desc, pointers, schedule
):
    """What :func:`attend_work_tile` waits for."""
    work = find_work_tile(C, tile_index, pointers, schedule)
    num_blocks = query_blocks(C, work, schedule)
    for part in range(num_parts(num_blocks, work.place, C.PAIRED)):
        block = block_of_part(num_blocks, work.place, part, C.PAIRED)
        i = load_block(C, work, block, i, j, q, k, v, v_rows, q_desc, k_desc, v_desc, schedule)
        j += 1
    return i, j


@gluon.jit
def producer(C: gl.constexpr, queue, q, k, v, v_rows, q_desc, k_desc, v_desc, pointers, schedule):
    """One warp that keeps the tiles of q, k and v coming; four if v is to be transposed."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    num_tiles = num_work_tiles(C, pointers, schedule)
    i = 0
    j = 0
    if C.QUEUED:
        t = 0
        tile_index = program
        work_queue.put(queue, t, tile_index, C.PRODUCER_WARPS)
        while tile_index < num_tiles:
            i, j = load_work_tile(
                C, tile_index, i, j, q, k, v, v_rows, q_desc, k_desc, v_desc, pointers, schedule
            )
            t += 1
            tile_index = next_tile(pointers, programs)
            work_queue.put(queue, t, tile_index, C.PRODUCER_WARPS)
    else:
        for t in range(num_own_tiles(program, programs, num_tiles)):
            tile_index = snake_order(t, program, programs)
            i, j = load_work_tile(
                C, tile_index, i, j, q, k, v, v_rows, q_desc, k_desc, v_desc, pointers, schedule
            )
    if not C.V_TRANSPOSED and i > 0:
        transpose_values(C, i - 1, v, v_rows)


@gluon_kernel(do_not_specialize=(*Schedule._fields, *ScaleStrides._fields))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, seqused_k, q_scale, k_scale, v_scale,
    num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
    window_right, scale_log2, softcap_rate, softcap_log2,
    q_scale_batch, q_scale_head, q_scale_block, k_scale_batch, k_scale_head, k_scale_block,
    v_scale_batch, v_scale_head, v_scale_block, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each multiprocessor at most.

    Work tiles are dealt out in ``snake_order``, or taken from the work queue, whose counter lies in
    ``table``.

    A pointer to what a call has not (a table, used lengths, a scale) is never followed.
    """
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, 1)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS if C.V_TRANSPOSED else 0, 1)
    v_rows = v  # a slot is free once the producer itself has transposed it
    if not C.V_TRANSPOSED:
        v_layout: gl.constexpr = transposed_layout(C.BLOCK_N)
        v_tiles = gl.allocate_shared_memory(v_desc.dtype, [C.STAGES, C.BLOCK_DV, C.BLOCK_N], v_layout)
        v = make_ring(v_tiles, C.STAGES, C.WARPGROUPS)
    ping_pong = make_ping_pong(C.WARPGROUPS if C.PING_PONG else 1)
    queue = work_queue.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
    o_tiles = gl.allocate_shared_memory(o_desc.dtype, [C.WARPGROUPS] + o_desc.block_type.shape, o_desc.layout)
    pointers = Pointers(lse, table, seqused_k, lse, lse)
    schedule = Schedule(
        num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
        window_right, 0,
    )  # fmt: skip
    numbers = Numbers(scale_log2, softcap_rate, softcap_log2)
    strides = ScaleStrides(
        q_scale_batch, q_scale_head, q_scale_block, k_scale_batch, k_scale_head, k_scale_block, v_scale_batch,
        v_scale_head, v_scale_block,
    )  # fmt: skip
    arrays = ScaleArrays(q_scale, k_scale, v_scale, strides)
    if C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                            arrays)),
                (consumer, (C, 1, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                            arrays)),
                (producer, (C, queue, q, k, v, v_rows, q_desc, k_desc, v_desc, pointers, schedule)),
            ],
            [4, C.PRODUCER_WARPS],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                            arrays)),
                (consumer, (C, 1, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                            arrays)),
                (consumer, (C, 2, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers,
                            arrays)),
                (producer, (C, queue, q, k, v, v_rows, q_desc, k_desc, v_desc, pointers, schedule)),
            ],
            [4, 4, C.PRODUCER_WARPS],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )  # fmt: skip
