"""Attention backward for Hopper, head sizes over 128: dK and dV, in Gluon.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 2), without dQ, which ``wide_dq`` computes. One
kernel of five products would have room only for tiles of 64 x 64, and its ``dq_accum`` would move as many
bytes as q and dO together: 50 bytes a cycle, twice what the L2 cache delivers. Two kernels compute seven
products instead of five, but move three quarters of the bytes. They accumulate only in registers, so the
results have the same bits in every run.

A work tile is 64 keys of a key head. Its program visits the query rows that see these keys, BLOCK_M at a
time, in every query head of the key head. Each of two *consumer* warpgroups accumulates one gradient. Its
64 x 256 elements in fp32 take half of the warpgroup's registers:

    values:  S^T = K Q^T     P^T = exp2(S^T - lse)       dV += P^T dO
    keys:    dP^T = V dO^T   dS^T = P^T (dP^T - delta)   dK += dS^T Q

P^T is computed once: ``values`` passes it to ``keys`` through shared memory and runs up to two steps ahead.
The tensor cores then multiply for ``keys`` while ``values`` computes exponentials:

    producer  1 warp: q with -lse, dO with -delta, for each step; k and v once per work tile
    values      [   S i   ] ( P i ) -> weights [  dV i  ]  [  S i+1  ] ( P i+1 ) -> weights [  dV i+1  ]
    keys                       [   dP i   ] ( dS i ) [   dK i   ]         [   dP i+1   ] ( dS i+1 ) ...

    ring      slots           written by                       released by
    q         STAGES+EXTRA_Q  TMA, with -lse                   values after S, keys after dK
    do        STAGES          TMA, with -delta                 keys after dP, values after dV
    k, v      1               TMA                              values, keys: the gradient is stored through it
    weights   2               values, one arrival              keys: P is in registers
    queue     2               producer, an index               values, keys

S and dP need only what TMA brings, dV needs P of the same warpgroup, dK needs P of the other.

Tiles in halves. 64 rows of 512 columns of two tensors, K and V here, q and dO in ``halves_dq``, take 128 KiB
of shared memory. What remains holds two and a half tiles of 32 rows. So for head sizes over 256 COLUMN_SPLITS
is 2: a tile consists of two tiles of 256 columns, its *halves*, and a ring has slots for three halves or for
two. A half is loaded again as soon as nothing reads it any more. Two work tiles have the same keys, each with
one half of the columns of dK and dV. The two halves of a step's tile are two writes to the ring. Both are
factors of S or dP. The half that comes last is called ``own``: it is also a factor of the gradient that a
warpgroup accumulates, so it is read for longer. With COLUMN_SPLITS 1, a tile is one write.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.backward.kernel import (
    BackwardDescriptors,
    Statistics,
    exponentials,
    key_modifiers,
    load_key_block,
    load_rows,
    mask_keys,
    row_of,
    scores_and_derivative,
    store_gradient,
    weights_of,
)
from flashtile.backends.hopper.backward.schedule import (
    count_tiles,
    find_work_tile,
    gradient_head,
    group_size,
    head_of_batch,
    own_part,
    own_row_blocks,
    padded_row,
    query_head,
    row_list,
)
from flashtile.backends.hopper.compat import async_load, gluon, reinterpret
from flashtile.backends.hopper.inline_asm import to_16_bit, to_fp32, wait_for_numbers
from flashtile.backends.hopper.layouts import (
    WARPGROUP_ROWS,
    accumulator_layout,
    add_products,
    product_of_rows,
    zero_sums,
)
from flashtile.backends.hopper.modifiers import visited_block
from flashtile.backends.hopper.pipeline import make_channel, make_ring
from flashtile.backends.hopper.work_tiles import slope_of


class DkvPointers(NamedTuple):
    """Pointers to memory that the kernel accesses without TMA descriptors; None for each that is not used.

    The table, ``seqused_k`` and the counter are int32.
    """

    table: Any
    """The tile table of packed sequences, whose work tiles are blocks of keys."""
    seqused_k: Any
    alibi_slopes: Any
    counters: Any
    """Counter of the work queue: work tiles that programs have taken; 0 at the start."""
    lists: Any
    """Lists of a block mask, as in :class:`~flashtile.backends.hopper.backward.schedule.BackwardPointers`."""
    captured: Any
    """Tensors that functions of scores and masks read, as there."""


class DkvTiles(NamedTuple):
    """Shared memory of a program: channels, and two numbers for each row of q and dO, -lse and -delta."""

    q: Any
    do: Any
    k: Any
    v: Any
    weights: Any
    """The channel of P^T, times the soft-cap's derivative, from ``values`` to ``keys``."""
    statistics: Any
    """:class:`~flashtile.backends.hopper.backward.kernel.Statistics`: -lse with q, -delta with dO."""


class Gradients(NamedTuple):
    """Shared memory through which dK and dV are stored, and their descriptors."""

    dk: Any
    dv: Any
    dk_desc: Any
    dv_desc: Any


@gluon_kernel(do_not_specialize=("pointers", "schedule"))
def dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dk_desc, dv_desc, pointers, schedule,
    numbers, C: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV.

    Grid: at most one program per multiprocessor; each takes work tiles from the work queue.
    """
    # Channels have (slots, readers, tiles of a slot).
    dtype: gl.constexpr = q_desc.dtype
    # An extra tile is one of q, which is read from the first product of a step, S, to the last, dK.
    DO_STAGES: gl.constexpr = C.STAGES * C.COLUMN_SPLITS
    Q_STAGES: gl.constexpr = DO_STAGES + C.EXTRA_Q
    q = make_channel(q_desc, Q_STAGES, 2, 1)
    do = make_channel(do_desc, DO_STAGES, 2, 1)
    # Only ``values`` reads k, and only ``keys`` reads v: one reader, and one slot, of all halves.
    k = make_channel(k_desc, 1, 1, C.COLUMN_SPLITS)
    v = make_channel(v_desc, 1, 1, C.COLUMN_SPLITS)
    # P is read back to registers, not by wgmma, so its layout is that of :func:`in_chunks`. With two slots,
    # ``values`` runs ahead.
    chunks: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = make_ring(gl.allocate_shared_memory(dtype, [2, C.BLOCK_M // 16, 1024], chunks), 2, 1)
    # The statistics have the slots of q and of dO, and no barriers of their own.
    neg_lse = gl.allocate_shared_memory(
        gl.float32, [Q_STAGES] + neg_lse_desc.block_type.shape, neg_lse_desc.layout
    )
    neg_delta = gl.allocate_shared_memory(
        gl.float32, [DO_STAGES] + neg_delta_desc.block_type.shape, neg_delta_desc.layout
    )
    # A warpgroup stores its gradient through the memory of its block of k or v, which it no longer reads: dV
    # through k, dK through v. That takes tiles of equal widths; if the widths differ, shared memory has room.
    if C.BLOCK_D == C.BLOCK_DV:
        dv = as_block_of(dv_desc, k.tiles.index(0))
        dk = as_block_of(dk_desc, v.tiles.index(0))
    else:
        dk = gl.allocate_shared_memory(dk_desc.dtype, dk_desc.block_type.shape, dk_desc.layout)
        dv = gl.allocate_shared_memory(dv_desc.dtype, dv_desc.block_type.shape, dv_desc.layout)
    queue = pipeline.make_work_queue(2)
    tiles = DkvTiles(q, do, k, v, weights, Statistics(neg_lse, neg_delta))
    gradients = Gradients(dk, dv, dk_desc, dv_desc)
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, None)
    # Each gradient, 64 x 256 in fp32, takes 128 of a consumer thread's 240 registers.
    gl.warp_specialize(
        [
            (consumer, (C, True, queue, tiles, gradients, pointers, schedule, numbers)),
            (consumer, (C, False, queue, tiles, gradients, pointers, schedule, numbers)),
            (producer, (C, queue, tiles, descs, pointers, schedule)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )


# The producer.


@gluon.jit
def producer(C: gl.constexpr, queue, tiles, descs, pointers, schedule):
    """Takes work tiles from the work queue and loads what they need."""
    q, do, k, v, _weights, statistics = tiles
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, _bias_desc = descs
    num_tiles = count_tiles(C, pointers, schedule)
    i = 0
    t = 0
    tile_index = gl.atomic_add(pointers.counters, 1)
    while tile_index < num_tiles:
        pipeline.put(queue, t, tile_index)
        work = find_work_tile(C, tile_index, pointers, schedule)
        own = own_part(C, tile_index)
        begin, end, _, _, listed = visited_rows(C, tile_index, work, pointers, schedule)
        if begin < end:
            # The first rows may be loaded before the tiles of keys are free. First what S needs, then dP.
            m = visited_row_block(C, listed, begin)
            load_step(C, i, m, 0, own, work, q_desc, neg_lse_desc, q, statistics.neg_lse, schedule)
            load_resident(C, t, work, k_desc, k)
            load_step(C, i, m, 0, own, work, do_desc, neg_delta_desc, do, statistics.neg_delta, schedule)
            load_resident(C, t, work, v_desc, v)
            i += 1
            count = end - begin
            for j in range(1, count * group_size(C, schedule)):
                m, g = visited_row_block(C, listed, begin + j % count), j // count
                load_step(C, i, m, g, own, work, q_desc, neg_lse_desc, q, statistics.neg_lse, schedule)
                load_step(C, i, m, g, own, work, do_desc, neg_delta_desc, do, statistics.neg_delta, schedule)
                i += 1
        else:  # no row sees these keys: nothing is loaded, but the consumers wait, and store zeros
            mbarrier.arrive(k.full.index(k.acquire(t)), count=1)
            mbarrier.arrive(v.full.index(v.acquire(t)), count=1)
        t += 1
        # The latency of the atomic is hidden: the consumers still work on the rows that are loaded.
        tile_index = gl.atomic_add(pointers.counters, 1)
    pipeline.put(queue, t, tile_index)  # an index past the last tile ends the consumers


@gluon.jit
def visited_rows(C: gl.constexpr, tile_index, work, pointers, schedule):
    """Return (begin, end, full_begin, full_end, listed), the blocks of query rows of a work tile.

    With a block mask they are positions in ``listed``, the work tile's :func:`row_list`. Otherwise they are
    :func:`own_row_blocks`, and ``listed`` is 0.
    """
    begin, end, full_begin, full_end = own_row_blocks(C, tile_index, work, schedule)
    listed = row_list(C, work, pointers, schedule)
    if C.LISTED:
        begin, end, full_begin, full_end = 0, listed.count, listed.masked_count, listed.count
    return begin, end, full_begin, full_end, listed


@gluon.jit
def visited_row_block(C: gl.constexpr, listed, m):
    """Return the block of query rows at ``m``, a position in ``listed`` if there is a block mask."""
    if C.LISTED:
        m, _is_full = visited_block(C, listed, m)
    return m


@gluon.jit
def load_step(C: gl.constexpr, i, m, g, own, work, desc, statistics_desc, ring, statistics, schedule):
    """Load block ``m`` of q or dO of query head ``g``, and the -lse or -delta of its rows, by TMA.

    This is for step ``i`` of the program. With COLUMN_SPLITS, the columns that are not the work tile's
    ``own`` ones come first.
    """
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    row, head = m * C.BLOCK_M, query_head(C, work, g, schedule)
    if C.COLUMN_SPLITS > 1:  # no reader keeps this half for its gradient, so its slot is free earlier
        slot = ring.acquire(2 * i)
        full = ring.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes)
        load_rows(C, desc, work, row, head, full, ring.tiles.index(slot), (1 - own) * COLUMNS)
    slot = ring.acquire(last_write(C, i))
    full = ring.full.index(slot)
    # The statistics of the rows arrive at the same barrier, so that they need none of their own.
    mbarrier.expect(full, desc.block_type.nbytes + statistics_desc.block_type.nbytes)
    load_rows(C, desc, work, row, head, full, ring.tiles.index(slot), own * COLUMNS)
    where = [head_of_batch(C, work, g, schedule), padded_row(C, work, row)]
    async_load(statistics_desc, where, full, statistics.index(slot))


@gluon.jit
def load_resident(C: gl.constexpr, t, work, desc, ring):
    """Load the block of k or v of the program's ``t``-th work tile by TMA."""
    PARTS: gl.constexpr = C.COLUMN_SPLITS
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    full = ring.full.index(ring.acquire(t))
    mbarrier.expect(full, PARTS * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        load_key_block(C, desc, work, full, ring.tiles.index(part), part * COLUMNS)


# The consumers.


@gluon.jit
def consumer(C: gl.constexpr, VALUES: gl.constexpr, queue, tiles, gradients, pointers, schedule, numbers):
    """``values`` if VALUES, which computes P and dV; otherwise ``keys``, which computes dS and dK."""
    num_tiles = count_tiles(C, pointers, schedule)
    resident = tiles.k if VALUES else tiles.v
    i = 0
    t = 0
    tile_index = pipeline.take(queue, t, 4)
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        begin, end, full_begin, full_end, listed = visited_rows(C, tile_index, work, pointers, schedule)
        own = own_part(C, tile_index)
        resident.wait(t)
        # As many columns as the gradient has, in steps of 64, not 256. With the columns that S and dP leave
        # out, that is 1.20 times as fast at head_dim 192.
        COLUMNS: gl.constexpr = C.BLOCK_DV if VALUES else C.BLOCK_D
        HEAD_DIM: gl.constexpr = C.HEAD_DIM_V if VALUES else C.HEAD_DIM
        sums = zero_sums(HEAD_DIM if C.COLUMN_SPLITS == 1 else COLUMNS // C.COLUMN_SPLITS)
        count = end - begin
        for j in range(count * group_size(C, schedule)):
            if VALUES:
                # All rows for one query head, then for the next. Without GROUPED there is one head, and no
                # division in the loop.
                m = begin + (j % count if C.GROUPED else j)
                g = j // count if C.GROUPED else 0
                slope = slope_of(C, work, query_head(C, work, g, schedule), pointers, schedule)
                cut = (m < full_begin) | (m >= full_end)
                # 0, here and below, is the first warpgroup of the main kernel: this one has all 64 keys.
                modifiers = key_modifiers(C, 0, work, g, 0, listed, pointers, schedule)
                sums = value_step(C, i, m, cut, work, own, slope, sums, tiles, schedule, numbers, modifiers)
            else:  # P brings the mask, the modifiers and the head with it
                sums = key_step(C, i, own, sums, tiles)
            i += 1
        head = gradient_head(C, tile_index, work, schedule)
        if VALUES:
            store_sums(C, gradients.dv_desc, work, head, own, gradients.dv, sums, 1.0, schedule)
        else:
            store_sums(C, gradients.dk_desc, work, head, own, gradients.dk, sums, numbers.scale, schedule)
        # TMA has read the memory of k (of v, for ``keys``), which the producer loads next.
        tma.store_wait(0)
        resident.release(t)
        t += 1
        tile_index = pipeline.take(queue, t, 4)


@gluon.jit
def value_step(C: gl.constexpr, i, m, cut, work, own, slope, dv, tiles, schedule, numbers, modifiers):
    """Return dV plus the contribution of the rows of block ``m``, or of the ``m``-th of a block mask's list.

    P^T, times the derivative of the soft-cap or SCORE_MOD, is passed to the other warpgroup.
    """
    q, do, k, _v, weights, statistics = tiles
    dtype: gl.constexpr = k.tiles.dtype
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    # From 0: a start at -lse, as in ``kernel``, was not measured here.
    s = gl.full([WARPGROUP_ROWS, C.BLOCK_M], 0.0, gl.float32, s_layout)
    s = product_of_tiles(k.tiles, q, i, own, s, C.HEAD_DIM)
    # Nothing else to overlap in this warpgroup: the other one multiplies meanwhile.
    s = warpgroup_mma_wait(0, deps=[s])
    slot = last_write(C, i) % q.STAGES
    s, softcap_grad = scores_and_derivative(C, 0, s, m, work, slope, numbers, s_layout, modifiers)
    p = exponentials(C, s, row_of(C, statistics.neg_lse.index(slot), s_layout))
    # After the exponentials: they have used -lse, which is in the same slot and may be overwritten from here
    # on.
    release_tile(C, q, i)
    if C.MASKED and cut:  # a uniform branch: steps that the mask does not cut pay only its test
        p = mask_keys(C, 0, p, m, work, schedule, s_layout, modifiers)
    # dS is the product of these weights and (dP - delta). They are passed on before dV, so that ``keys`` need
    # not wait for dV. Plain stores and loads need no fence, only the barrier.
    slot = weights.acquire(i)
    weights.tiles.index(slot).store(in_chunks(to_16_bit(weights_of(C, p, softcap_grad), dtype)))
    mbarrier.arrive(weights.full.index(slot), count=1)
    # dV needs only the columns that the work tile computes, which arrive last.
    do_tile = tile_of(do.tiles.index(do.wait(last_write(C, i))))
    dv = add_products(dv, to_16_bit(p, dtype), do_tile)
    do.release(last_write(C, i))
    return dv


@gluon.jit
def key_step(C: gl.constexpr, i, own, dk, tiles):
    """Return dK plus the contribution of the rows of step ``i``."""
    q, do, _k, v, weights, statistics = tiles
    dtype: gl.constexpr = v.tiles.dtype
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    chunks: gl.constexpr = in_chunks(gl.full([WARPGROUP_ROWS, C.BLOCK_M], 0.0, dtype, s_layout)).type.layout
    dp = gl.full([WARPGROUP_ROWS, C.BLOCK_M], 0.0, gl.float32, s_layout)
    dp = product_of_tiles(v.tiles, do, i, own, dp, C.HEAD_DIM_V)
    # Loaded while dP is in flight. The wait for dO, in product_of_tiles, was also for -delta.
    slot = last_write(C, i) % do.STAGES
    neg_delta = statistics.neg_delta.index(slot).reshape([C.BLOCK_M]).load(gl.SliceLayout(0, s_layout))
    dp = warpgroup_mma_wait(0, deps=[dp])
    # After the release, TMA may overwrite -delta, and an arrival does not wait for loads: 30 of 14,000 passes
    # had another dK. A thread has a quarter of the BLOCK_M numbers. Without EXTRA_Q no wait is needed: the
    # producer fills this step's slot of q before that of dO, and q is released only at the end of the step.
    if C.EXTRA_Q > 0:
        neg_delta = wait_for_numbers(neg_delta, C.BLOCK_M // 4)
    release_tile(C, do, i)
    slot = weights.wait(i)
    p = from_chunks(weights.tiles.index(slot).load(chunks), s_layout)
    # ``values`` writes the slot by plain stores, which come after this barrier as the loads come before it.
    weights.release(i)
    ds = to_16_bit(to_fp32(p) * (dp + neg_delta[None, :]), dtype)
    q_tile = tile_of(q.tiles.index(q.wait(last_write(C, i))))
    dk = add_products(dk, ds, q_tile)
    q.release(last_write(C, i))
    return dk


# P from one consumer to the other.


@gluon.jit
def in_chunks(x):
    """Reorder x [64, N] to [N / 16, 1024]: each row has 16 bytes of each of 128 threads.

    In wgmma's accumulator, row 16 w + 8 a + r and column 8 j + 2 t + b is register (j, a, b) of thread
    (w, r, t). In the new order, stores and loads have no bank conflicts.
    """
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 16, 2, 4, 2]).permute((3, 0, 2, 5, 4, 1, 6))
    return x.reshape([N // 16, 1024])


@gluon.jit
def from_chunks(x, layout: gl.constexpr):
    """Undo :func:`in_chunks`, in the accumulator's ``layout``."""
    COUNT: gl.constexpr = x.shape[0]
    x = x.reshape([COUNT, 4, 8, 4, 2, 2, 2]).permute((1, 5, 2, 0, 4, 3, 6))
    x = x.reshape([WARPGROUP_ROWS, 16 * COUNT])
    return gl.convert_layout(x, layout)


# Products with tiles that are one write to a ring, or two halves.


@gluon.jit
def tile_of(tile):
    """View a tile in the shape of its TMA block as [rows, columns]."""
    return tile.reshape([tile.shape[-3], tile.shape[-1]])


@gluon.jit
def last_write(C: gl.constexpr, i):
    """Return which write to a ring (from 0) is the last one of step ``i``'s tile."""
    return C.COLUMN_SPLITS * i + (C.COLUMN_SPLITS - 1)


@gluon.jit
def product_of_tiles(resident, ring, i, own, acc, HEAD_DIM: gl.constexpr):
    """Start the product of a resident tile with step ``i``'s tile in ``ring``, summed over HEAD_DIM columns.

    ``resident`` is one tile, or two halves. ``own`` is the half, 0 or 1, that is written last. When this
    returns, both halves have been written, and the product is in flight. ``acc`` may have any value.
    """
    # Always 0, but to the compiler it depends on the step. Otherwise it would keep the matrix descriptors of
    # the resident tile in registers.
    zero = i >> 30
    COLUMNS: gl.constexpr = resident.shape[-1]
    if resident.shape[0] == 1:
        moving = tile_of(ring.tiles.index(ring.wait(i)))
        return product_of_rows(tile_of(resident.index(zero)), moving, acc, HEAD_DIM, False)
    else:
        # The half that is written first is multiplied first. If the halves differ in columns, the right one
        # comes first, because the code must know how many columns a product sums, and ``own`` is known only
        # when it runs. The writes of step i are 2 i and 2 i + 1, so 4 i + 1 - write is the other one.
        ALIKE: gl.constexpr = HEAD_DIM == 2 * COLUMNS
        half = 1 - own if ALIKE else 1
        write = 2 * i if ALIKE else 2 * i + own
        moving = tile_of(ring.tiles.index(ring.wait(write)))
        if HEAD_DIM > COLUMNS:
            resting = tile_of(resident.index(half + zero))
            acc = product_of_rows(resting, moving, acc, HEAD_DIM - COLUMNS, False)
        moving = tile_of(ring.tiles.index(ring.wait(4 * i + 1 - write)))
        resting = tile_of(resident.index(1 - half + zero))
        return product_of_rows(resting, moving, acc, min(HEAD_DIM, COLUMNS), HEAD_DIM > COLUMNS)


@gluon.jit
def release_tile(C: gl.constexpr, ring, i):
    """Release step ``i``'s tile, as the one of two readers that reads all columns.

    The other reader reads only the half ``own``, so the release of the other half counts for both.
    """
    if C.COLUMN_SPLITS > 1:
        ring.release(2 * i, 2)
    ring.release(last_write(C, i))


# The stores of the gradients.


@gluon.jit
def store_sums(C: gl.constexpr, desc, work, head, own, tile, sums, factor, schedule):
    """Store a gradient by TMA: the tuple of accumulators ``sums`` (as from :func:`zero_sums`), scaled by
    ``factor``. With COLUMN_SPLITS there is one accumulator, for the part ``own`` of the columns."""
    COLUMNS: gl.constexpr = sums[0].shape[1]
    store_gradient(C, 0, desc, work, head, tile, sums[0] * factor, schedule, own * COLUMNS)
    if len(sums) > 1:
        store_gradient(C, 0, desc, work, head, tile, sums[1] * factor, schedule, COLUMNS)


@gluon.jit
def as_block_of(desc, tile):
    """View the start of a tile as a block of ``desc``, which may have another dtype or fewer columns."""
    # float32 parts of gradients (``sum_parts``), or narrower stores at head sizes of 129 to 192.
    if desc.block_type.shape == tile.shape:
        return tile
    else:
        NBYTES: gl.constexpr = WARPGROUP_ROWS * tile.shape[-1] * tile.dtype.primitive_bitwidth // 8
        BLOCKS: gl.constexpr = NBYTES // desc.block_type.nbytes
        return reinterpret(tile, desc.dtype, [BLOCKS] + desc.block_type.shape, desc.layout).index(0)
