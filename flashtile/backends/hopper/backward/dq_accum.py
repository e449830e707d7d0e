"""``dq_accum``, the fp32 accumulator of dQ, and the two partitions of the backward kernel that use it.

``accumulate_dq`` adds each step's dQ; ``postprocess`` converts sums that are complete to dQ. Programs take
blocks of keys head after head, so they work on few heads at a time. ``dq_accum`` has room for some more heads
than that, the *resident* heads; each later head reuses the memory of an earlier one, which therefore stays in
the L2 cache. FlashAttention zeroes and converts the whole accumulator in separate kernels (preprocess and
postprocess), which move it through DRAM.

    accumulate_dq, head h                        postprocess, head h
    wait: converted_parts[h - resident] == all   wait: added_blocks[h] == all
    TMA additions to dq_accum                    TMA loads from dq_accum; dQ = scale * sums in 16 bits
    signal added_blocks[h], per work tile        TMA stores of zeros to dq_accum
                                                 signal converted_parts[h], per part

Both sides are TMA, so a signal waits for the partition's TMA writes and releases (:func:`signal`), and a wait
acquires and fences the asynchronous proxy (:func:`wait_for`). With DETERMINISTIC, semaphores order the
additions to each block of rows in the same way.

The order is deadlock-free: a head's additions wait for the conversion of an earlier head, and a conversion
waits only for the additions to its own head. Programs take parts to convert one by one from a counter, as
they take blocks of keys. If they took fixed parts, two calls that share a GPU could wait for programs that
have no multiprocessor yet.

What the names of pieces mean, from large to small:

    part    the tiles of a key head that are converted at a time; a head has as many as work tiles
    tile    64 query rows of a head, all columns, in the order of wgmma's registers (``in_register_order``)
    chunk   up to POSTPROCESS_CHUNK floats of a tile, which one TMA load brings: one or two groups of 8 rows
    block   8 rows by 8 columns, 64 contiguous floats
    vector  8 columns of a row: 32 contiguous bytes here, 16 in a 16-bit dQ

The module is read from top to bottom: where sums lie, ``accumulate_dq``, ``postprocess``, the signals.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashtile.backends.hopper import bias as bias_tiles
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.backward import config
from flashtile.backends.hopper.backward.schedule import (
    blocks_of_head,
    count_tiles,
    dq_order,
    find_work_tile,
    group_size,
    head_and_block,
    head_of_batch,
    own_rows,
    padded_row,
    query_head,
    row_block,
    row_shift,
    sequence_of,
)
from flashtile.backends.hopper.compat import async_add, async_load, async_store, gluon, partition_barrier
from flashtile.backends.hopper.layouts import RAGGED_ROWS, WARPGROUP_ROWS
from flashtile.backends.hopper.pipeline import make_channel

POSTPROCESS_STAGES = gl.constexpr(config.POSTPROCESS_STAGES)
POSTPROCESS_WARPS = gl.constexpr(config.POSTPROCESS_WARPS)
VECTOR = gl.constexpr(8)
"""Columns of a row that are contiguous in ``dq_accum``; in a 16-bit dQ they take 16 bytes."""
BLOCK = gl.constexpr(64)
"""Floats of a block of 8 rows and 8 columns, which is contiguous in ``dq_accum``."""


class AccumSizes(NamedTuple):
    """Integers of the launch: the sizes of ``dq_accum`` and of rows of dQ."""

    row_blocks: Any
    """Blocks of padded query rows of a head."""
    total_heads: Any
    """Number of key heads, over all sequences of a dense batch."""
    resident_heads: Any
    """Key heads that ``dq_accum`` has room for. Head h + resident_heads reuses the memory of head h."""
    row_vectors: Any
    """Vectors of 8 columns in a row of dQ."""


class BackwardScalars(NamedTuple):
    """Numbers of a launch."""

    schedule: Any
    """:class:`~flashtile.backends.hopper.backward.schedule.BackwardSchedule`."""
    sizes: Any
    """:class:`AccumSizes`."""
    numbers: Any
    """:class:`~flashtile.backends.hopper.backward.kernel.BackwardNumbers`."""


class DqAccum(NamedTuple):
    """Pointers for the accumulation and conversion of dQ. Counters are 0 at the start."""

    sizes: Any
    dq_semaphores: Any
    """With DETERMINISTIC: for each block of padded rows, how many blocks of keys have added to it."""
    dq: Any
    next_part: Any
    """Counter of the parts that programs have taken to convert. A head has one part per work tile."""
    added_blocks: Any
    """For each key head, the number of work tiles that have added all of their dQ."""
    converted_parts: Any
    """For each key head, the number of its parts that have been converted, and zeroed in ``dq_accum``."""


@gluon.jit
def accum_of(sizes, pointers):
    """Return the :class:`DqAccum` of a launch.

    ``pointers.counters`` points to these counters, in this order: the counter of the work queue,
    ``next_part``, ``added_blocks`` (one per key head) and ``converted_parts`` (one per key head).
    """
    counters = pointers.counters
    added_blocks = counters + 2
    return DqAccum(
        sizes, pointers.dq_semaphores, pointers.dq, counters + 1, added_blocks,
        added_blocks + sizes.total_heads,
    )  # fmt: skip


@gluon.jit
def in_register_order(x):
    """Reorder an accumulator [64, N] to [N / 4, 256]: each row has one pair of registers of every thread.

    In wgmma's accumulator, row 16 w + 8 a + r and column 8 j + 2 t + b is register (j, a, b) of thread
    (w, r, t). In the new order, a store needs one address per thread and has no bank conflicts.
    ``dq_accum`` keeps this order, which ``dq_accum.convert_part`` undoes.
    """
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute((3, 1, 0, 2, 4, 5))
    return x.reshape([N // 4, 256])


# The partition that adds dQ.


@gluon.jit
def accumulate_dq(C: gl.constexpr, queue, shared, dq_add_desc, dbias_desc, pointers, accum):
    """One warp that adds both halves of dQ of each step to ``dq_accum``.

    With DETERMINISTIC, a step waits until all earlier additions to its block of dQ are signalled
    (``dq_order``). It signals its own additions one step later, when they have reached memory. If a step has
    to wait, it first signals the additions of the step before, so programs cannot deadlock.
    """
    DQ_COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == WARPGROUP_ROWS else C.BLOCK_D
    schedule = pointers.scalars.schedule
    num_tiles = count_tiles(C, pointers, schedule)
    blocks = blocks_of_head(C, pointers, schedule)
    i = 0
    t = 0
    # The slot of the queue is kept until the work tile's additions are signalled: the producer then runs at
    # most one work tile ahead of them.
    tile_index = pipeline.peek(queue, t, 1)
    # The block of dQ whose addition is not signalled yet; -1, in the type of the blocks' numbers, if there is
    # none.
    pending = tile_index * 0 - 1
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        rows = own_rows(C, tile_index, work, pointers, schedule)
        key_head, _ = head_and_block(C, tile_index, blocks, schedule)
        if not C.ONE_BLOCK:
            wait_until_zeroed(key_head, blocks << row_shift(C, schedule), accum)
        for g in range(group_size(C, schedule)):
            head = head_of_batch(C, work, g, schedule)
            for j in range(rows.count):
                m = row_block(C, rows, j)
                accum_block = m
                if not C.ONE_BLOCK:
                    row = accum_row(C, work, key_head, g, m * C.BLOCK_M, schedule, accum)
                    accum_block = row // C.BLOCK_M
                if C.STORES_DS:  # dS of this step, before its dQ: consumers write dS first
                    of_bias = query_head(C, work, g, schedule)
                    row = m * C.BLOCK_M
                    bias_tiles.store_ds(C, shared.bias, dbias_desc, shared.ds_full, work, of_bias, row, i)
                if C.DETERMINISTIC:
                    block = head * accum.sizes.row_blocks + padded_row(C, work, m * C.BLOCK_M) // C.BLOCK_M
                    order = dq_order(C, work, m, schedule)
                    if load_acquire(accum.dq_semaphores + block) < order:
                        if pending >= 0:  # others may wait for it before they signal
                            signal(accum.dq_semaphores + pending, 0)
                        pending = block * 0 - 1
                        wait_for(accum.dq_semaphores + block, order)
                    else:
                        proxy_fence()  # as in wait_for: the additions below are TMA's
                # One buffer for each consumer, so the phase is the parity of the step. TMA adds in fp32:
                # several programs have contributions to these rows, and the order of additions is free.
                # Half w of a block has 64 x DQ_COLUMNS floats, DQ_COLUMNS / 4 rows of in_register_order.
                for w in gl.static_range(2):
                    mbarrier.wait(shared.dq_full.index(w), i & 1)
                    half = shared.dq.index(w)
                    if C.ONE_BLOCK:
                        store_dq(C, w, dq_add_desc, work, query_head(C, work, g, schedule), m, half)
                    else:
                        async_add(dq_add_desc, [(accum_block * 2 + w) * (DQ_COLUMNS // 4), 0], half)
                if C.DETERMINISTIC:
                    # One step late: by now the additions of the step before have reached memory, so that the
                    # wait for them is short.
                    if pending >= 0:
                        signal(accum.dq_semaphores + pending, 2)  # all but the two additions above
                    pending = block
                # The halves are read in the order of their additions, so half 0 is free one wait earlier.
                tma.store_wait(1)
                mbarrier.arrive(shared.dq_empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(shared.dq_empty.index(1), count=1)
                i += 1
        # The last step of the work tile. The next work tile may wait for programs that wait for this signal.
        if C.DETERMINISTIC:  # noqa: SIM102 - a constexpr condition needs an if of its own
            if pending >= 0:
                signal(accum.dq_semaphores + pending, 0)
                pending = tile_index * 0 - 1
        # The wait for the writes is hidden here. Signalled in the next work tile instead, without a wait,
        # calls had 0.965 to 1.020 of the speed.
        if not C.ONE_BLOCK:
            signal(accum.added_blocks + key_head, 0)
        queue.release(t)
        t += 1
        tile_index = pipeline.peek(queue, t, 1)


@gluon.jit
def store_dq(C: gl.constexpr, W: gl.constexpr, dq_desc, work, head, m, half):
    """Store warpgroup W's half of dQ of block ``m`` by TMA; rows past the last query are not written."""
    # The halves of ``kernel.dq_product``: of the columns, or of 128 rows.
    column = 0
    row = m * C.BLOCK_M
    if C.BLOCK_M == WARPGROUP_ROWS:
        column = W * (C.BLOCK_D // 2)
    else:
        row += W * WARPGROUP_ROWS
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        async_store(dq_desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, head, column], half)
    else:
        async_store(dq_desc, [work.sequence, row, head, column], half)


@gluon.jit
def wait_until_zeroed(key_head, parts, accum):
    """Wait until the memory that a key head reuses in ``dq_accum`` has been zeroed, in ``parts`` parts.

    The first ``resident_heads`` heads do not wait, because the preprocess kernel zeroed their memory.
    """
    before = key_head - accum.sizes.resident_heads
    if before >= 0:
        wait_for(accum.converted_parts + before, parts)


@gluon.jit
def accum_row(C: gl.constexpr, work, key_head, g, row, schedule, accum):
    """Return the row of ``dq_accum`` for row ``row`` of a sequence and query head ``g`` of the key head."""
    head = key_head % accum.sizes.resident_heads * group_size(C, schedule) + g
    return head * (accum.sizes.row_blocks * C.BLOCK_M) + padded_row(C, work, row)


# The partition that converts the sums of complete heads.


class Chunks(NamedTuple):
    """Shared memory of the postprocess warps: a ring of chunks of ``dq_accum``, and a chunk of zeros."""

    tiles: Any
    full: Any
    zeros: Any


@gluon.jit
def make_chunks(accum_desc):
    """Allocate the :class:`Chunks` of ``accum_desc``. :func:`postprocess` fills the chunk of zeros."""
    # No empty barriers (READERS 0): the partition that loads a chunk is the one that reads it.
    ring = make_channel(accum_desc, POSTPROCESS_STAGES, 0, 1)
    zeros = gl.allocate_shared_memory(gl.float32, accum_desc.block_type.shape, accum_desc.layout)
    return Chunks(ring.tiles, ring.full, zeros)


@gluon.jit
def postprocess(C: gl.constexpr, chunks, accum_desc, pointers, schedule, accum, scale):
    """Postprocess warps: take parts of dQ one by one, and convert each when its head's sums are complete."""
    if not C.ONE_BLOCK:
        layout: gl.constexpr = gl.BlockedLayout(
            [1, 1, VECTOR], [4, 1, 8], [POSTPROCESS_WARPS, 1, 1], [2, 1, 0]
        )
        # The zeros are made once and stored wherever they are needed: TMA needs no registers for them.
        chunks.zeros.store(gl.full(accum_desc.block_type.shape, 0.0, gl.float32, layout))
        fence_async_shared()  # TMA stores these zeros, through the asynchronous proxy
        partition_barrier()
        # As many parts as work tiles, so that programs which share a block of keys also share the conversion.
        # Before, with 77 keys, one program converted thousands of rows after all others had ended.
        parts = blocks_of_head(C, pointers, schedule) << row_shift(C, schedule)
        i = 0
        part = gl.atomic_add(accum.next_part, 1)
        while part < parts * accum.sizes.total_heads:
            following = gl.atomic_add(accum.next_part, 1)  # early, to hide the latency of the atomic
            head = part // parts
            wait_for(accum.added_blocks + head, parts)
            i = convert_part(C, chunks, accum_desc, i, head, part % parts, pointers, schedule, accum, scale)
            # Signalled one part later, without a wait, calls had 0.968 to 1.009 of the speed.
            signal(accum.converted_parts + head, 0)
            part = following


@gluon.jit
def convert_part(C: gl.constexpr, chunks, accum_desc, i, key_head, part, pointers, schedule, accum, scale):
    """Convert part ``part`` (:func:`tile_of_part`) of a key head from ``dq_accum`` to dQ.

    The part's memory is then zeroed if a later head reuses it. In a 64-row tile of ``dq_accum``, columns 8 j
    to 8 j + 7 of row 16 w + 8 a + r are contiguous. They begin at float ((2 j + a) 4 + w) 64 + 8 r. A chunk
    is the piece of a tile that one TMA load brings: all columns of one or two groups of 8 rows. Each group
    is one pair (a, w). ``i`` counts the chunks that have been loaded. Returns the new ``i``.
    """
    COLUMNS: gl.constexpr = accum_desc.block_type.shape[0]
    GROUPS: gl.constexpr = accum_desc.block_type.shape[1]
    CHUNKS: gl.constexpr = WARPGROUP_ROWS // VECTOR // GROUPS
    # A chunk is [columns / 8, groups, 64]. A thread has one vector of a block, which it loads and stores
    # whole; eight threads have the block.
    layout: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [4, 1, 8], [POSTPROCESS_WARPS, 1, 1], [2, 1, 0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    element = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = group * 16 + element // VECTOR  # the groups of a chunk have the same a and successive w
    row_vectors = schedule.num_heads * group_size(C, schedule) * accum.sizes.row_vectors
    elements = (row * row_vectors + column) * VECTOR + element % VECTOR
    shift = row_shift(C, schedule)
    work, blocks = sequence_of(C, key_head, part >> shift, pointers, schedule)
    parts = blocks << shift
    share = part & ((1 << shift) - 1)
    own = (work.tile_in_head << shift) + share  # among those of the work tile's sequence
    tiles = (work.seqlen_q + WARPGROUP_ROWS - 1) // WARPGROUP_ROWS * group_size(C, schedule)
    count = (tiles - own + parts - 1) // parts * CHUNKS  # tiles of this part, as in tile_of_part
    reused = key_head + accum.sizes.resident_heads < accum.sizes.total_heads
    tile = accum_of_tile(C, 0, work, own, parts, key_head, schedule, accum)
    following, dq, rows = tile * 0, accum.dq, work.seqlen_q  # placeholders: the first chunk sets them
    # Prologue: as many chunks on their way as there are slots. Then each chunk that is read makes room for
    # one. A tile has at least four chunks and the ring three slots, so a chunk that is loaded ahead is of
    # this tile or of the next.
    for n in range(min(count, POSTPROCESS_STAGES)):
        load_chunk(chunks, accum_desc, i + n, tile, n)
    for n in range(count):
        c = n % CHUNKS
        if c == 0:
            tile = accum_of_tile(C, n // CHUNKS, work, own, parts, key_head, schedule, accum)
            following = accum_of_tile(C, n // CHUNKS + 1, work, own, parts, key_head, schedule, accum)
            dq, rows = dq_of_tile(C, n // CHUNKS, work, own, parts, schedule, accum)
        slot = i % POSTPROCESS_STAGES
        mbarrier.wait(chunks.full.index(slot), (i // POSTPROCESS_STAGES) & 1)
        # softmax_scale multiplies the sums once, and before they are rounded.
        values = chunks.tiles.index(slot).load(layout) * scale
        values = values.to(dq.dtype.element_ty)
        partition_barrier()  # all warps have read the chunk, so its slot and its place in dq_accum are free
        if reused:  # no head comes after the last ones
            async_store(accum_desc, [tile, c * GROUPS, 0], chunks.zeros)
        if n + POSTPROCESS_STAGES < count:
            later = c + POSTPROCESS_STAGES
            load_chunk(
                chunks,
                accum_desc,
                i + POSTPROCESS_STAGES,
                following if later >= CHUNKS else tile,
                later % CHUNKS,
            )
        first = c * GROUPS % 4 * 16 + c * GROUPS // 4 * VECTOR  # row 16 w + 8 a of the chunk's first group
        inside = (row < rows - first) & (column < accum.sizes.row_vectors)
        # Streamed (.cs): this kernel does not read dQ again, and ``dq_accum`` should stay in the L2 cache. At
        # a length of 512 and head_dim 128 that is 449 instead of 459 us.
        gl.store(dq + first * row_vectors * VECTOR + elements, values, mask=inside, cache_modifier=".cs")
        i += 1
    return i


@gluon.jit
def tile_of_part(t, work, part, parts):
    """Return (query head of the group, first row) of the ``t``-th tile of a part.

    A part is the share of dQ that the postprocess warps convert at a time. Each key head of a sequence has
    ``parts`` parts, one for each work tile, so programs that share a block of keys also share the conversion.
    The 64-row tiles of dQ are assigned to the parts in turn, so part ``part`` has tiles ``part``,
    ``part + parts`` and so on.
    """
    tiles = max((work.seqlen_q + WARPGROUP_ROWS - 1) // WARPGROUP_ROWS, 1)
    tile = part + t * parts
    return tile // tiles, tile % tiles * WARPGROUP_ROWS


@gluon.jit
def accum_of_tile(C: gl.constexpr, t, work, part, parts, key_head, schedule, accum):
    """Return where the ``t``-th tile of a part (:func:`tile_of_part`) begins in ``dq_accum``.

    The result is in units of 64 x 8 elements.
    """
    g, row = tile_of_part(t, work, part, parts)
    return accum_row(C, work, key_head, g, row, schedule, accum) // WARPGROUP_ROWS * (C.BLOCK_D // VECTOR)


@gluon.jit
def dq_of_tile(C: gl.constexpr, t, work, part, parts, schedule, accum):
    """Return (pointer to the first element in dQ, rows up to the sequence's end) for the ``t``-th tile of a
    part (:func:`tile_of_part`)."""
    g, row = tile_of_part(t, work, part, parts)
    token = to_int64(work.start_q + row)
    if not C.VARLEN:
        token += to_int64(work.sequence) * work.seqlen_q
    heads = schedule.num_heads * group_size(C, schedule)
    vector = (token * heads + query_head(C, work, g, schedule)) * accum.sizes.row_vectors
    return accum.dq + vector * VECTOR, work.seqlen_q - row


@gluon.jit
def to_int64(number):
    """Convert to int64, since tensors may have more elements than 32 bits can count."""
    return number.to(gl.int64)


@gluon.jit
def load_chunk(chunks, accum_desc, i, tile, c):
    """Load chunk ``c`` of a tile of ``dq_accum`` by TMA, as the ``i``-th write to the ring of chunks."""
    slot = i % POSTPROCESS_STAGES
    barrier = chunks.full.index(slot)
    mbarrier.expect(barrier, accum_desc.block_type.nbytes)
    async_load(accum_desc, [tile, c * accum_desc.block_type.shape[1], 0], barrier, chunks.tiles.index(slot))


# Signals between programs, of what TMA has written.


@gluon.jit
def signal(counter, LATER: gl.constexpr):
    """Add 1 to ``counter`` once all TMA writes of this partition, except the last LATER, have reached
    memory."""
    wait_for_writes(LATER)
    partition_barrier()  # the thread that issued the TMA writes need not be the one that adds
    # Releases what the barrier has ordered before it, to programs that acquire the counter.
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def wait_for(counter, count):
    """Wait until ``counter`` has received ``count`` signals.

    Writes that other programs made before these signals are then visible, also to TMA operations.
    """
    seen = load_acquire(counter)
    while seen < count:  # without a sleep: 64 to 500 ns of sleep between polls gained nothing
        seen = load_acquire(counter)
    proxy_fence()  # TMA reads or adds next, through the asynchronous proxy


@gluon.jit
def load_acquire(counter):
    """Load a counter of :func:`signal` calls, with acquire semantics.

    Writes that other programs made before they signalled are then visible to this thread.
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_writes(LATER: gl.constexpr):
    """Wait until all TMA stores and additions of this thread, except the last LATER, have reached memory.

    ``tma.store_wait`` is weaker: it waits only until TMA has read the shared memory.
    """
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {LATER}; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(1)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def proxy_fence():
    """Make the memory writes that this thread has observed visible to its later TMA operations as well."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
