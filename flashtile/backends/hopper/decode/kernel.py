"""Attention of several query rows over a KV cache on Hopper.

The pipeline is that of the forward (``forward.kernel``), the work that of decoding
(``portable.decode.schedule``). One or two *consumer* warpgroups of 64 rows each multiply by wgmma. *Loader*
warps bring keys and values, from the pages that the block table names. The rows of a tile are query tokens of
PACK query heads that share a key head (PackGQA): row ``r`` is token ``r // PACK``, head ``r % PACK``. The
keys are read once for all of them. TMA loads whole tokens, so it brings queries only where PACK divides 64.
Queries of other groups, such as the 7 heads of Qwen2.5, are copied row by row (COPIES_Q). One part of a work
tile, with key blocks 2, 1 and 0 and pages of half a block; time runs to the right:

    loader of k, 0   page K2a Q   page K1a      page K0a         faults: was any page invalid?
    loader of k, 1   page K2b     page K1b      page K0b
    loader of v, 0   page V2a     page V1a      page V0a
    loader of v, 1   page V2b     page V1b      page V0b
    consumer
      wgmma            [S2]       [S1][P2 V2]            [S0][P1 V1]            [P0 V0]
      softmax              ( P2 )     (  P1  )               (  P0  )
      O                                        *a                     *a                 /l, store

    page  entries of the block table, loaded while the slot is not yet free
    *a    O times exp(old m - new m)

    ring    slots     written by, full after             read by, empty after
    q       Q_STAGES  loader 0 of k: TMA or cp.async     consumers: S of the part's last block
    k, v    STAGES    LOADERS loaders, a part each       consumers: the product, or the conversion
    faults  2         loader 0 of k, one word a part     consumers: before the result is stored
    queue   2         loader 0 of k, an index            consumers and the other loaders (without STREAM_K)

TMA sees the cache as one long sequence of rows, in which pages (or rows of a dense cache) begin at a fixed
distance. A *copy* is a TMA load of COPY_ROWS contiguous keys. Its descriptor is that of packed sequences
(``tma.ragged_view``), whose bounds end at the copy's last valid key: rows after it arrive as zeros, so that
uninitialised memory of a page is never read. TMA loads need 16 or more contiguous keys. Smaller or odd pages,
and padding on the left that may end at any key, need an address for each key: with GATHER, loaders of two
warps copy keys one by one (cp.async).

wgmma multiplies e4m3 only by e4m3, and needs V transposed for it. Loaders of an FP8 cache therefore copy e4m3
tiles, at half the bytes, and the consumer converts them in shared memory (:class:`ConvertedChannel`), to
float16, in which e4m3 is exact, by one instruction for two values. Queries and P are then float16 as well.
Rows of bfloat16 queries are divided by a power of two to fit float16's range, and their scores multiplied by
it. If each block of the cache has a scale (KEY_SCALES), the scores of a key are multiplied by the scale of
its block; values are multiplied by theirs and rounded to the dtype of q, which P then has as well.

If STREAM_K, each program takes an equal range of consecutive blocks of keys of the batch, which may begin and
end within work tiles. Otherwise programs take work tiles, or splits of them, from a queue, those of long
sequences first. Parts of a work tile are stored as partial results, as in the portable kernel.

``i`` counts blocks of keys and ``j`` parts of work tiles since the start of the kernel, so slots and phases
follow from them and no ring is reset. The module is read from top to bottom: the arguments, the kernel, the
loaders, a consumer's part of a work tile, its rows, the conversion of FP8 tiles, the stores.

Words: an *m_block* is BLOCK_M query rows of a sequence, numbered through the batch; an *n_block* is BLOCK_N
keys; a *work tile* is an m_block and a key head; a *part* of it is a range of its n_blocks that one program
computes; a *slot* is memory for the partial result of a part. ``C`` is the variant,
:class:`~flashtile.backends.hopper.decode.config.HopperDecodeVariant`, which explains each flag.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.compat import (
    aggregate,
    async_copy_to_shared,
    async_load,
    gluon,
    partition_barrier,
    reinterpret,
)
from flashtile.backends.hopper.decode.combine import PartialRecord, write_partial_record
from flashtile.backends.hopper.decode.work import (
    Start,
    balanced_start,
    balanced_tile,
    behind_partials,
    queued_tile,
    start_dependents,
    wait_for_table,
)
from flashtile.backends.hopper.forward.kernel import (
    QueryTile,
    Rows,
    SoftmaxState,
    Tree,
    at_least,
    attend_blocks,
    finish_blocks,
    finite_log2,
    quad_sums,
    scale_rows,
    skip_blocks,
    zero_output,
)
from flashtile.backends.hopper.forward.schedule import Numbers, OwnBlocks, own_blocks
from flashtile.backends.hopper.inline_asm import to_16_bit
from flashtile.backends.hopper.layouts import LN_2, LOG2_E, RAGGED_ROWS, WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.masking import key_bounds
from flashtile.backends.hopper.pipeline import Channel, make_channel, make_ring
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.decode.attend import in_cache
from flashtile.backends.portable.decode.schedule import sequence_of
from flashtile.backends.portable.masking import window_at

GATHER_WARPS = gl.constexpr(2)
"""Warps of a loader that copies keys one by one. Four were as fast within noise."""


class HopperDecodePointers(NamedTuple):
    """Tensors of the call except q, which TMA loads; None for each that the call does not use."""

    out: Any
    lse: Any
    partial: Any
    cache_seqlens: Any
    cache_leftpad: Any
    cache_batch_idx: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    alibi_slopes: Any
    sink: Any
    k_descale: Any
    v_descale: Any
    tree_mask: Any
    prior_out: Any
    prior_lse: Any
    softmax_max: Any
    qv: Any
    k_cache: Any
    """None unless GATHER, like ``v_cache``. TMA loads use descriptors instead."""
    v_cache: Any
    q: Any
    """None unless COPIES_Q."""


class CacheRows(NamedTuple):
    """Integers that locate pages, or rows of a dense cache."""

    num_blocks: Any
    k_rows: Any
    """Distance between the beginnings of two pages of k, in rows."""
    v_rows: Any
    """Distance between the beginnings of two pages of v, in rows."""


class CacheStrides(NamedTuple):
    """Strides between pages (rows of a dense cache), tokens and heads, in elements. Of q only if COPIES_Q."""

    k_page: Any
    k_token: Any
    k_head: Any
    v_page: Any
    v_token: Any
    v_head: Any
    q_sequence: Any = None
    q_token: Any = None
    q_head: Any = None


class HopperDecodeCall(NamedTuple):
    """Arguments of the launch that all partitions use."""

    pointers: Any
    table: Any
    """Pointer to the work queue's table (``work.table_kernel``), after the partial results."""
    lengths: Any
    splits: Any
    cache: Any
    outer: Any


class Source(NamedTuple):
    """Memory of k, v or q: a pointer, and strides in elements between pages, tokens and heads."""

    base: Any
    page: Any
    """For q, between sequences."""
    token: Any
    head: Any


class QueryLoads(NamedTuple):
    """Channels and descriptor of queries, which the first loader of k loads in addition to its keys."""

    q: Any
    """The channel of queries."""
    faults: Any
    """A channel of one int32 per part, nonzero if a page of the part is invalid."""
    desc: Any
    source: Any
    """If COPIES_Q, the :class:`~flashtile.backends.hopper.decode.kernel.Source` of q, otherwise 0."""
    places: Any
    """If COPIES_Q, shared memory for the place of each row, otherwise 0: its token times 64 plus its head."""


class KeyLoads(NamedTuple):
    """Memory that the loaders of k, or those of v, read and write."""

    channel: Any
    desc: Any
    source: Any
    """If GATHER, the :class:`~flashtile.backends.hopper.decode.kernel.Source` of k or v, otherwise 0."""
    offsets: Any
    """If GATHER, shared memory for the offsets of keys, otherwise 0."""
    scales: Any
    """:class:`~flashtile.backends.hopper.decode.kernel.KeyScales`."""


class KeyScales(NamedTuple):
    """Shared memory for the scales of single keys, if KEY_SCALES."""

    arrived: Any
    """fp32 [STAGES, BLOCK_N]: scales of the keys in each slot of the channel."""
    in_use: Any
    """fp32 [BLOCK_N]: scales of the keys in the converted tile of k."""


# Lengths, pages and outer strides are plain numbers, so other values are not compiled anew.
@gluon_kernel(do_not_specialize=("lengths", "splits", "cache", "outer"))
def attend_kernel(
    q_desc, k_desc, v_desc, pointers, strides, lengths, splits, cache, outer, numbers, C: gl.constexpr
):
    """Attention over a cache. Grid: at most as many programs as run at a time.

    ``lengths`` count each group of PACK query heads as one key/value head, so ``head_kv`` is such a group.
    Its head in the cache is ``head_kv // KV_GROUP``.
    """
    if C.SPLIT:  # combining programs are placed before attention ends, and wait for its end themselves
        start_dependents()
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    k = make_key_channel(C, k_desc, C.BLOCK_D)
    v = make_key_channel(C, v_desc, C.BLOCK_DV)
    k_source = Source(pointers.k_cache, strides.k_page, strides.k_token, strides.k_head)
    k_loads = make_loads(C, k, k_desc, k_source)
    v_source = Source(pointers.v_cache, strides.v_page, strides.v_token, strides.v_head)
    v_loads = make_loads(C, v, v_desc, v_source)
    faults = pipeline.make_work_queue(C.WARPGROUPS)  # like the queue, a ring of single integers
    queries = QueryLoads(q, faults, q_desc, 0, 0)
    if C.COPIES_Q:
        q_source = Source(pointers.q, strides.q_sequence, strides.q_token, strides.q_head)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        places = gl.allocate_shared_memory(gl.int32, [C.BLOCK_M], plain)
        queries = QueryLoads(q, faults, q_desc, q_source, places)
    # Read by all partitions but the first loader of k, which writes.
    queue = 0 if C.STREAM_K else pipeline.make_work_queue(C.WARPGROUPS + 2 * C.LOADERS - 1)
    # The program's share is found once, by the four warps that run before the partitions begin, and handed to
    # all of them: the search reads the lengths of the whole batch.
    start = 0
    if C.STREAM_K:
        index = gl.arange(0, C.SCAN_BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
        start = balanced_start(index, pointers, lengths, C)
    table = behind_partials(pointers.partial, splits, C)
    call = HopperDecodeCall(pointers, table, lengths, splits, cache, outer)
    # wgmma's operands have one dtype: k that of the converted q, v that of P. With KEY_SCALES, values are
    # multiplied by their scales and rounded to the dtype of q.
    P_TYPE: gl.constexpr = gl.float16 if C.E4M3 and not C.KEY_SCALES else q_desc.dtype
    k_read = make_reader(C, False, k, k_loads.scales, gl.float16)
    v_read = make_reader(C, True, v, v_loads.scales, P_TYPE)
    if C.PDL:  # the kernel that fills the table ran meanwhile; nothing above reads the table
        wait_for_table()
    # Registers: ``config.REGISTERS`` has the reason of 240, 232, 216 and 40. The lists are written out for
    # each number of partitions: Triton 3.7 loses constants and functions of tuples put together by +.
    if C.WARPGROUPS == 1 and C.LOADERS == 1:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k_read, v_read, faults, start, call, numbers)),
                (loader, (C, False, 0, queue, queries, k_loads, start, call)),
                (loader, (C, True, 0, queue, queries, v_loads, start, call)),
            ],
            [C.LOADER_WARPS, C.LOADER_WARPS],
            [C.LOADER_REGISTERS, C.LOADER_REGISTERS],
        )
    elif C.WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k_read, v_read, faults, start, call, numbers)),
                (loader, (C, False, 0, queue, queries, k_loads, start, call)),
                (loader, (C, False, 1, queue, queries, k_loads, start, call)),
                (loader, (C, True, 0, queue, queries, v_loads, start, call)),
                (loader, (C, True, 1, queue, queries, v_loads, start, call)),
            ],
            [1, 1, 1, 1],
            [C.LOADER_REGISTERS, C.LOADER_REGISTERS, C.LOADER_REGISTERS, C.LOADER_REGISTERS],
        )
    elif C.LOADERS == 1:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k_read, v_read, faults, start, call, numbers)),
                (consumer, (C, 1, queue, q, k_read, v_read, faults, start, call, numbers)),
                (loader, (C, False, 0, queue, queries, k_loads, start, call)),
                (loader, (C, True, 0, queue, queries, v_loads, start, call)),
            ],
            [4, C.LOADER_WARPS, C.LOADER_WARPS],
            [C.CONSUMER_REGISTERS, C.LOADER_REGISTERS, C.LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k_read, v_read, faults, start, call, numbers)),
                (consumer, (C, 1, queue, q, k_read, v_read, faults, start, call, numbers)),
                (loader, (C, False, 0, queue, queries, k_loads, start, call)),
                (loader, (C, False, 1, queue, queries, k_loads, start, call)),
                (loader, (C, True, 0, queue, queries, v_loads, start, call)),
                (loader, (C, True, 1, queue, queries, v_loads, start, call)),
            ],
            [4, 1, 1, 1, 1],
            [C.CONSUMER_REGISTERS] + [C.LOADER_REGISTERS] * 4,  # plain integers may be added, functions not
        )


@gluon.jit
def make_key_channel(C: gl.constexpr, desc, WIDTH: gl.constexpr):
    """Make the channel of k or v. A slot holds one n_block, which arrives in TMA loads of COPY_ROWS keys."""
    # Not make_channel, whose tiles have the size of one load. Dimensions are those of the load's five
    # coordinates.
    tiles = gl.allocate_shared_memory(desc.dtype, [C.STAGES, 1, 1, C.BLOCK_N, 1, WIDTH], desc.layout)
    return make_ring(tiles, C.STAGES, C.WARPGROUPS, C.LOADERS)


@gluon.jit
def make_loads(C: gl.constexpr, channel, desc, source):
    """Return the :class:`KeyLoads` of k or v.

    ``source`` locates k or v in memory. It is used only if GATHER; TMA loads use ``desc``.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = KeyScales(0, 0)
    if C.KEY_SCALES:
        arrived = gl.allocate_shared_memory(gl.float32, [C.STAGES, C.BLOCK_N], layout)
        scales = KeyScales(arrived, gl.allocate_shared_memory(gl.float32, [C.BLOCK_N], layout))
    offsets = 0
    if C.GATHER:
        offsets = gl.allocate_shared_memory(gl.int64, [C.BLOCK_N], layout)
    else:
        source = 0
    return KeyLoads(channel, desc, source, offsets, scales)


@gluon.jit
def make_reader(C: gl.constexpr, V: gl.constexpr, raw, scales, dtype: gl.constexpr):
    """Return the channel from which the consumer reads k or v.

    It is ``raw``, or with E4M3 a channel that converts the tiles of ``raw`` to ``dtype``.
    """
    if C.E4M3:
        WIDTH: gl.constexpr = C.BLOCK_DV if V else C.BLOCK_D
        layout: gl.constexpr = operand_layout(C.BLOCK_N, WIDTH, dtype)
        tiles = gl.allocate_shared_memory(dtype, [1, C.BLOCK_N, WIDTH], layout)
        if C.KEY_SCALES:
            return ConvertedChannel(raw, tiles, scales.arrived, scales.in_use, C, V)
        else:  # the fields of an aggregate have types: ``tiles`` fills those that are not used
            return ConvertedChannel(raw, tiles, tiles, tiles, C, V)
    else:
        return raw


class Part(NamedTuple):
    """n_blocks [n_begin, n_end) of a work tile. Their result goes to ``out`` if ``whole``, otherwise to
    ``slot`` of the partial results."""

    work: Any
    n_begin: Any
    n_end: Any
    slot: Any
    whole: Any


# The loaders.


@gluon.jit
def loader(C: gl.constexpr, V: gl.constexpr, LOADER: gl.constexpr, queue, queries, keys, start, call):
    """Load k, or v if V, for the consumers. Several loaders share each n_block; this is loader number LOADER.

    A loader is a partition of one warp, or of two warps if GATHER. Two loaders share a block that takes many
    TMA loads, because one warp issues loads of small pages too slowly. The first loader of k also loads q,
    which S needs together with the first keys, and takes work tiles from the queue for all partitions.

    Every partition finds the work tile of an index by itself. If the first loader found it and told the
    others, calls of 64 rows took 3 % less time, but those of 256 and more 4 to 6 % more.
    """
    i = 0
    j = 0
    if C.STREAM_K:
        start = uniform_start(start)
        position, m_block, m_block_start = start.position, start.m_block, start.m_block_start
        while position < start.end:
            work, n_begin, n_end, _, _, position, m_block, m_block_start = balanced_tile(
                C, position, start, m_block, m_block_start, call.pointers, call.lengths
            )
            if n_begin < n_end:  # an m_block past the end of its sequence has no n_blocks
                part = Part(work, n_begin, n_end, 0, False)
                i = load_part(C, V, LOADER, part, i, j, queries, keys, call)
                j += 1
    else:
        FIRST: gl.constexpr = not V and LOADER == 0
        program, programs = gl.program_id(0), gl.num_programs(0)
        num_tiles = gl.load(call.table) * call.lengths.num_heads_kv * call.splits.num_splits
        t = 0
        tile_index = program
        if FIRST:
            pipeline.put(queue, t, tile_index, C.LOADER_WARPS)
        else:
            tile_index = pipeline.take(queue, t, C.LOADER_WARPS)
        while tile_index < num_tiles:
            work, n_begin, n_end, _, _ = queued_tile(
                C, tile_index, call.table, call.lengths, call.splits, TABLE_WIDTH
            )
            if n_begin < n_end:  # with fixed splits, a short work tile has splits without n_blocks
                part = Part(work, n_begin, n_end, 0, False)
                i = load_part(C, V, LOADER, part, i, j, queries, keys, call)
                j += 1
            t += 1
            if FIRST:
                # The first tile of a program is that of its number, so the counter starts after these. The
                # latency of the atomic is hidden: consumers still work on what is loaded. An index past the
                # last work tile ends all partitions.
                tile_index = programs + gl.atomic_add(call.table + 1, 1)
                pipeline.put(queue, t, tile_index, C.LOADER_WARPS)
            else:
                tile_index = pipeline.take(queue, t, C.LOADER_WARPS)


@gluon.jit
def load_part(C: gl.constexpr, V: gl.constexpr, LOADER: gl.constexpr, part, i, j, queries, keys, call):
    """Load k, or v if V, for each n_block of a part of a work tile. Returns the new ``i``.

    Several loaders share an n_block; this is number LOADER. The first loader of k also loads queries and
    looks for invalid pages. ``i`` counts the n_blocks that the program has loaded, and ``j`` the parts of
    work tiles that it has loaded.
    """
    FIRST: gl.constexpr = not V and LOADER == 0
    work, n_begin, n_end, _, _ = part
    cache = call.cache
    channel, desc, source, offsets, scales = keys
    b, _ = sequence_of(work.m_block, call.lengths, C)
    entry, fault = first_entry(C, b, call)
    head = work.head_kv // C.KV_GROUP
    page_rows = cache.v_rows if V else cache.k_rows
    # Nonzero if a page is invalid: a number that ``in_cache`` has to clamp differs from the result, by XOR.
    outside = fault
    descale = call.pointers.v_descale if V else call.pointers.k_descale
    descale_stride = call.outer.v_descale_stride if V else call.outer.k_descale_stride
    # One fault for each lane. The first block is looked at here, and again in the loop, because a loop keeps
    # the type of a variable.
    if FIRST and C.PAGE_SIZE != 0:
        if C.GATHER:
            last = load_key_pages(C, entry, n_end - 1, work.keys)
            outside = last ^ in_cache(last, cache.num_blocks)
        else:
            outside = faults_of(C, entry, n_end - 1, work.keys, cache)
    # q comes after the first keys, whose slots may be free while consumers still read the previous queries.
    # This is the block after which q is loaded. If q has one slot, it is released only after S of the
    # previous part: first fill all slots of keys. The same if threads copy q, because the loader waits for
    # these copies. A program's first part has no part before it.
    before_queries = n_end - 1
    if C.Q_STAGES == 1 or C.COPIES_Q:
        before_queries = max(n_end - gl.where(j > 0, C.STAGES, 1), n_begin)
    for n in range(n_end - 1, n_begin - 1, -1):  # from the last key, as the consumers: the mask cuts it first
        # Load page numbers before waiting for a free slot, so the loads overlap the wait.
        if C.GATHER:
            pages = load_key_pages(C, entry, n, work.keys)
        else:
            pages = load_pages(C, LOADER, entry, n, work.keys)
        if FIRST and C.PAGE_SIZE != 0:
            if C.GATHER:
                outside = outside | (pages ^ in_cache(pages, cache.num_blocks))
            else:
                outside = outside | faults_of(C, entry, n, work.keys, cache)
        scale = 0.0
        if LOADER == 0 and C.KEY_SCALES:
            scale = load_key_scales(C, descale, descale_stride, entry, n, work.keys, head, cache)
        # Each loader waits for the whole slot: its empty barrier counts consumers. The full barrier counts
        # one arrival of each loader, which ``expect`` makes, or the arrival of a loader that copies by
        # threads.
        slot = channel.acquire(i)
        barrier, tile = channel.full.index(slot), channel.tiles.index(slot)
        if LOADER == 0 and C.KEY_SCALES:
            scales.arrived.index(slot).store(scale)
            partition_barrier()  # one thread arrives for all, after all have stored
        if C.GATHER:
            WIDTH: gl.constexpr = C.BLOCK_DV if V else C.BLOCK_D
            HEAD_DIM: gl.constexpr = C.HEAD_DIM_V if V else C.HEAD_DIM
            gather_n_block(
                C, WIDTH, HEAD_DIM, source, pages, n, work.keys, head, cache, offsets, barrier, tile
            )
        else:
            load_n_block(C, LOADER, desc, pages, page_rows, n, work.keys, head, cache, barrier, tile)
        if FIRST:  # noqa: SIM102 - FIRST is a constant, the other condition is not
            if n == before_queries:
                load_queries(C, work, j, queries, call)
        i += 1
    if FIRST:
        if C.PAGE_SIZE != 0:  # reduced once for all blocks, not in the loop
            fault = fault | gl.max((outside != 0).to(gl.int32), 0)
        pipeline.put(queries.faults, j, fault, C.LOADER_WARPS)
    return i


@gluon.jit
def first_entry(C: gl.constexpr, b, call):
    """Return (entry, fault) of sequence ``b``.

    entry: pointer to the sequence's row of the block table, or the index of its row of a dense cache.
    fault: int32, nonzero if that index is outside of the cache.
    """
    fault = b * 0
    if C.PAGE_SIZE != 0:
        return call.pointers.block_table + b.to(gl.int64) * call.outer.table_stride, fault
    else:
        row = b
        if C.HAS_BATCH_IDX:
            given = gl.load(call.pointers.cache_batch_idx + b)
            row = in_cache(given, call.cache.num_blocks)
            fault = given ^ row
        return row, fault


@gluon.jit
def load_queries(C: gl.constexpr, work, j, queries, call):
    """Load the query rows of a work tile, as the ``j``-th write to the channel of q."""
    q, q_desc = queries.q, queries.desc
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    b, m = sequence_of(work.m_block, call.lengths, C)
    batch = 0 if C.VARLEN else b  # packed sequences are one sequence of the view, which start_q enters
    slot = q.acquire(j)
    if C.COPIES_Q:
        copy_queries(C, work, batch, m * C.BLOCK_M, q, slot, queries)
    else:
        # One barrier for all warpgroups' rows: rows past the last token arrive as zeros, so the bytes are the
        # same.
        mbarrier.expect(q.full.index(slot), WARPGROUPS * q_desc.block_type.nbytes)
        for w in gl.static_range(WARPGROUPS):
            token = work.sequence.start_q + (m * C.BLOCK_M + w * WARPGROUP_ROWS) // C.PACK
            # Rows of a packed neighbour may come with the last ones: they are computed, but not stored.
            coordinates = [batch, token, work.head_kv, 0, 0]
            async_load(q_desc, coordinates, q.full.index(slot), q.tiles.index(slot * WARPGROUPS + w))


@gluon.jit
def copy_queries(C: gl.constexpr, work, batch, first_row, q, slot, queries):
    """Copy the query rows of a work tile one by one into ``slot``, and arrive. Missing rows become zeros.

    ``first_row``: the tile's first row within the sequence, whose rows are those of all its tokens.
    """
    source = queries.source
    first_token = first_row // C.PACK
    index = gl.arange(0, C.BLOCK_M, layout=gl.BlockedLayout([1], [32], [C.LOADER_WARPS], [0]))
    row = first_row + index
    place = (row // C.PACK - first_token) * WARPGROUP_ROWS + row % C.PACK
    queries.places.store(gl.where(index < work.num_rows, place, -1))
    start = batch * source.page.to(gl.int64) + (work.head_kv * C.PACK) * source.head.to(gl.int64)
    start += (work.sequence.start_q + first_token) * source.token.to(gl.int64)
    AT_ONCE: gl.constexpr = QUERIES_OF_WARP * C.LOADER_WARPS
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    for w in gl.static_range(WARPGROUPS):
        tile = q.tiles.index(slot * WARPGROUPS + w).reshape([WARPGROUP_ROWS, C.BLOCK_D])
        places = queries.places.slice(w * WARPGROUP_ROWS, WARPGROUP_ROWS)
        copy_rows(C.LOADER_WARPS, AT_ONCE, C.HEAD_DIM, source, start, places, tile)
    arrive_with_copies(q.full.index(slot))


# Keys by TMA.


@gluon.jit
def num_to_load(C: gl.constexpr, position, keys):
    """Return the number of keys to load in the copy that begins at ``position``: those up to the last key.

    It is 0 if no query row sees a key of the copy. Keys before the first visible one are loaded with the
    others; the mask hides them.
    """
    count = gl.minimum(gl.maximum(keys.end - position, 0), C.COPY_ROWS)
    if C.HAS_LEFT:
        count = gl.where(position + C.COPY_ROWS > keys.first, count, 0)
    return count


@gluon.jit
def load_pages(C: gl.constexpr, LOADER: gl.constexpr, entry, n, keys):
    """Load the numbers of the pages that hold one loader's keys of n_block ``n``.

    LOADER is the loader's index. Returns a tuple of page numbers, one for each copy (a TMA load of COPY_ROWS
    keys). For a dense cache the tuple is ``(entry,)``, the sequence's row of the cache. An entry of the block
    table is read only if a row sees one of its keys.
    """
    if C.PAGE_SIZE == 0:
        return (entry,)
    else:
        COPIES: gl.constexpr = C.COPIES
        pages = ()
        for c in gl.static_range(COPIES):
            position = n * C.BLOCK_N + (LOADER * COPIES + c) * C.COPY_ROWS
            needed = num_to_load(C, position, keys) > 0
            page = gl.load(entry + position // C.PAGE_SIZE, mask=needed, other=0)
            pages = pages + (page,)  # type: ignore[assignment]
        return pages


@gluon.jit
def faults_of(C: gl.constexpr, entry, n, keys, cache):
    """Return int32 [32], all 0 if the pages of all copies of n_block ``n`` are in the cache."""
    # One lane for each copy of the block: at most 128 keys in copies of at least 16, so 8 of the 32 lanes.
    copy = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    position = n * C.BLOCK_N + copy * C.COPY_ROWS
    needed = (num_to_load(C, position, keys) > 0) & (copy < C.LOADERS * C.COPIES)
    pages = gl.load(entry + position // C.PAGE_SIZE, mask=needed, other=0)
    return pages ^ in_cache(pages, cache.num_blocks)


@gluon.jit
def load_n_block(
    C: gl.constexpr, LOADER: gl.constexpr, desc, pages, page_rows, n, keys, head, cache, barrier, tile
):  # fmt: skip
    """Issue one loader's TMA loads of n_block ``n`` of k or v into ``tile``.

    LOADER is the loader's index. Each loader loads an equal part of the keys. Keys after the last key that
    any row sees arrive as zeros.
    """
    COPIES: gl.constexpr = C.COPIES
    # A copy that no row sees is loaded as zeros, from outside its bounds, and counts its bytes like the
    # others.
    mbarrier.expect(barrier, desc.block_type.nbytes * COPIES)
    for c in gl.static_range(COPIES):
        position = n * C.BLOCK_N + (LOADER * COPIES + c) * C.COPY_ROWS
        rows = num_to_load(C, position, keys)
        if C.PAGE_SIZE == 0:
            start = pages[0] * page_rows + position
        else:  # clamped, so an invalid page reads memory of the cache; ``faults`` turns the result into NaN
            start = in_cache(pages[c], cache.num_blocks) * page_rows + position % C.PAGE_SIZE
        part = tile
        if C.COPY_ROWS < C.BLOCK_N:
            part = tile.slice((LOADER * COPIES + c) * C.COPY_ROWS, C.COPY_ROWS, dim=2)
        # Each copy is a ragged sequence of ``rows`` rows that ends at RAGGED_ROWS (``tma.ragged_view``).
        async_load(desc, [RAGGED_ROWS, start + rows, RAGGED_ROWS - rows, head, 0], barrier, part)


# Keys one by one: for pages that TMA cannot load, or loads slowly. With pages of 8 keys, a chunk of 1024
# tokens takes 1689 us by these copies and 2257 us by TMA.


LINE = gl.constexpr(gl.BlockedLayout([1], [32], [GATHER_WARPS.value], [0]))
"""Layout of one value per key, over the warps of a loader."""
KEYS_AT_ONCE = gl.constexpr(32)
"""Keys that a loader copies at a time. Not measured against other numbers."""
QUERIES_OF_WARP = gl.constexpr(8)
"""Query rows that each warp of a loader copies at a time. With 16, the loader spills twice as much."""


@gluon.jit
def load_key_pages(C: gl.constexpr, entry, n, keys):
    """Load the number of each key's page, for n_block ``n``, as int32 [BLOCK_N].

    A dense cache has no pages. The result is then ``entry``, the sequence's row of the cache, for every key.
    Entries of the block table whose keys no query row sees are not read.
    """
    position = n * C.BLOCK_N + gl.arange(0, C.BLOCK_N, layout=LINE)
    if C.PAGE_SIZE == 0:
        return position * 0 + entry
    else:
        return gl.load(entry + position // C.PAGE_SIZE, mask=is_seen(C, position, keys), other=0)


@gluon.jit
def is_seen(C: gl.constexpr, position, keys):
    """Whether positions are within ``keys``, the KeyRange that the rows of a work tile see."""
    seen = position < keys.end
    if C.HAS_LEFT:
        seen = seen & (position >= keys.first)
    return seen


@gluon.jit
def gather_n_block(
    C: gl.constexpr, WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr, source, pages, n, keys, head, cache,
    offsets, barrier, tile,
):  # fmt: skip
    """Copy n_block ``n`` of k or v into ``tile``, then arrive at ``barrier``. Keys that no row sees become 0.

    ``offsets``: int64 [BLOCK_N] in shared memory, through which threads exchange the offsets of keys.
    """
    BLOCK_N: gl.constexpr = C.BLOCK_N
    position = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=LINE)
    within = position
    if C.PAGE_SIZE != 0:
        within = position % C.PAGE_SIZE
    row = in_cache(pages, cache.num_blocks).to(gl.int64) * source.page + within.to(gl.int64) * source.token
    offsets.store(gl.where(is_seen(C, position, keys), row, -1))

    copy_rows(
        C.LOADER_WARPS, KEYS_AT_ONCE, HEAD_DIM, source, head.to(gl.int64) * source.head, offsets,
        tile.reshape([BLOCK_N, WIDTH]),
    )  # fmt: skip
    arrive_with_copies(barrier)


@gluon.jit
def copy_rows(
    WARPS: gl.constexpr, AT_ONCE: gl.constexpr, COLUMNS: gl.constexpr, source, start, rows, tile
):  # fmt: skip
    """Copy rows of COLUMNS elements to ``tile`` [rows, width] (cp.async), a row for each of ``rows``.

    ``rows`` are int64 offsets in elements, or int32 numbers, a token times 64 plus a head. Both count from
    ``source.base + start``. If a number is negative, and in columns of the tile beyond COLUMNS, the tile gets
    zeros. The numbers are in shared memory, because a thread finds those of a few rows but copies 16 bytes of
    many. Offsets of queries would not fit: two programs leave 500 bytes of a multiprocessor's shared memory.
    """
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    COPY: gl.constexpr = 128 // tile.dtype.primitive_bitwidth  # elements in 16 bytes
    # Neighbouring threads copy neighbouring 16 bytes of a row; ``multiple_of`` lets a copy be one
    # instruction. It marks the operation that made a value, so the addition is made here: of a mark on
    # ``start``, an argument, nothing is left after inlining, and Triton refuses to copy 2 bytes at a time.
    wide: gl.constexpr = gl.BlockedLayout([1, COPY], [32 * COPY // WIDTH, WIDTH // COPY], [WARPS, 1], [1, 0])
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
    base = gl.multiple_of(source.base + start, 16)  # bytes
    for part in gl.static_range(ROWS // AT_ONCE):
        row = rows.slice(part * AT_ONCE, AT_ONCE).load(gl.SliceLayout(1, wide))
        inside = (row >= 0)[:, None] & (columns < COLUMNS)[None, :]
        if row.dtype == gl.int32:
            token, head = row // WARPGROUP_ROWS, row % WARPGROUP_ROWS
            row = token.to(gl.int64) * source.token + head.to(gl.int64) * source.head
        addresses = base + gl.multiple_of(row, COPY)[:, None] + columns[None, :]
        to = tile.slice(part * AT_ONCE, AT_ONCE, dim=0)
        # Zeros where masked: P of hidden keys is 0, 0 NaN is NaN.
        async_copy_to_shared(to, addresses, mask=inside)


@gluon.jit
def arrive_with_copies(barrier):
    """Arrive at ``barrier`` once, when the loader's copies have arrived."""
    async_copy.commit_group()
    # Each thread waits for its copies, makes them visible to wgmma (which reads through the asynchronous
    # proxy), and arrive counts once, after all warps of the loader. So the copies of one slot are in flight.
    # An arrival by the copies themselves was built and right, but not timed.
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def load_key_scales(C: gl.constexpr, descale, stride, entry, n, keys, head, cache):
    """Load the scales of the keys of n_block ``n``, as fp32 [BLOCK_N].

    Each page of the cache has a scale; in a dense cache, each row (sequence) has one. Keys that no query row
    sees get 0. ``entry`` comes from :func:`first_entry`.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [C.LOADER_WARPS], [0])
    position = n * C.BLOCK_N + gl.arange(0, C.BLOCK_N, layout=line)
    seen = is_seen(C, position, keys)
    if C.PAGE_SIZE == 0:
        page = position * 0 + entry
    else:
        page = gl.load(entry + position // C.PAGE_SIZE, mask=seen, other=0)
    page = in_cache(page, cache.num_blocks).to(gl.int64)
    return gl.load(descale + page * stride + head, mask=seen, other=0.0)


# A consumer: its parts of work tiles.


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, q, k, v, faults, start, call, numbers):
    """Consumer partition, warpgroup W: computes rows 64 W to 64 W + 63 of all m_blocks of the program."""
    i = 0
    j = 0
    if C.STREAM_K:
        start = uniform_start(start)
        position, m_block, m_block_start = start.position, start.m_block, start.m_block_start
        program = gl.program_id(0)
        # There is a record for each program, as there are at least as many work tiles. Memory is not zeroed,
        # so each program first records that it began none.
        if W == 0 and not C.BY_WORK_TILE:
            write_partial_record(
                call.pointers.partial, PartialRecord(0, program, 0, 0, 0, 0), call.lengths, call.splits, C
            )
        while position < start.end:
            work, n_begin, n_end, slot, splits, position, m_block, m_block_start = balanced_tile(
                C, position, start, m_block, m_block_start, call.pointers, call.lengths
            )
            if n_begin < n_end:
                part = Part(work, n_begin, n_end, slot, splits == 1)
                i = attend_part(C, W, part, i, j, q, k, v, faults, call, numbers)
                j += 1
                if W == 0:  # noqa: SIM102 - W is a constant, the other condition is not
                    if splits > 0:  # the program that begins a work tile records it for the combining kernel
                        record = PartialRecord(
                            splits, program, work.m_block, work.head_kv, work.num_rows, work.sequence.start_q
                        )
                        write_partial_record(call.pointers.partial, record, call.lengths, call.splits, C)
    else:
        num_tiles = gl.load(call.table) * call.lengths.num_heads_kv * call.splits.num_splits
        t = 0
        tile_index = pipeline.take(queue, t, 4)
        while tile_index < num_tiles:
            work, n_begin, n_end, slot, whole = queued_tile(
                C, tile_index, call.table, call.lengths, call.splits, TABLE_WIDTH
            )
            if n_begin < n_end:
                part = Part(work, n_begin, n_end, slot, whole)
                i = attend_part(C, W, part, i, j, q, k, v, faults, call, numbers)
                j += 1
            t += 1
            tile_index = pipeline.take(queue, t, 4)


@gluon.jit
def uniform_start(start):
    """Return a :class:`Start` whose integers the compiler knows to be uniform (:func:`uniform`)."""
    return Start(
        uniform(start.total), uniform(start.position), uniform(start.end), uniform(start.m_block),
        uniform(start.m_block_start),
    )  # fmt: skip


@gluon.jit
def uniform(x):
    """Return the integer ``x`` in a form that the compiler knows to be uniform.

    ``x`` must be equal in all threads of a warp. Without this function, the compiler treats branches on ``x``
    as divergent. It then copies the operands of each product, and of each load, to uniform registers.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def attend_part(C: gl.constexpr, W: gl.constexpr, part, i, j, q, k, v, faults, call, numbers):
    """Compute and store warpgroup W's 64 rows of ``part``, a part of a work tile.

    ``i`` counts the n_blocks that have passed through the channels of k and v. ``j`` counts the parts of work
    tiles that the program has computed. Returns the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    work, n_begin, n_end, _, _ = part
    lengths = call.lengths

    # Prologue: what this warpgroup's rows see, and the online softmax before the first key.
    blocks = blocks_of_warpgroup(C, W, work, n_begin, n_end, lengths)
    own = rows_of_warpgroup(C, W, work, lengths, row_layout)
    slope = 0.0
    if C.ALIBI:
        b, _ = sequence_of(work.m_block, lengths, C)
        slope = gl.load(call.pointers.alibi_slopes + b * call.outer.alibi_stride + own.head) * LOG2_E
    rows = visible_rows(C, work, own, slope, call)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = zero_output(C)
    l = quad_sums(gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))

    # Main loop, the forward's. Blocks that only the other warpgroup sees are released before and after it.
    i = skip_blocks(C, W, n_end - blocks.end, i, k, v)
    q_tile = q.tiles.index(q.wait(j) * C.WARPGROUPS + W).reshape([ROWS, C.BLOCK_D])
    v_scale = 1.0
    if C.E4M3:
        k_scale, v_scale = scales_of_head(C, work, call)
        q_tile, numbers = query_operand(C, q_tile, k, k_scale, numbers, row_layout)
    # No columns of q are in registers; no half blocks and no ping-pong (0). None of these was measured in
    # decoding.
    tile = QueryTile(q_tile, q_tile, k, v, 0, rows, numbers)
    state, i = attend_blocks(C, W, tile, SoftmaxState(o, l, m), i, blocks)
    q.release(j)  # all S are complete; the last P V may be in flight

    # Epilogue.
    o, l, m, _, _ = state
    # The sums of four threads that share a row, added once.
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    o = finish_blocks(C, v, i, o)
    i = skip_blocks(C, W, blocks.begin - n_begin, i, k, v)

    # Taken last: the loader knows of a part's faults only when it has issued all its loads. Sums of NaN make
    # out and lse NaN, also after parts have been combined.
    fault = pipeline.take(faults, j, 4) | work.sequence.fault
    sums = gl.where(fault == 0, sums, float("nan"))
    store_result(C, o[0], m, sums, v_scale, part, own, call)  # one accumulator: BLOCK_DV is a power of two
    return i


class OwnRows(NamedTuple):
    """A warpgroup's rows; each field is [64]."""

    index: Any
    """Index of the row within the m_block."""
    token: Any
    """Query token within the sequence."""
    head: Any
    """Query head."""
    exists: Any
    """Whether the row is valid."""


@gluon.jit
def rows_of_warpgroup(C: gl.constexpr, W: gl.constexpr, work, lengths, layout: gl.constexpr):
    """Return the token, head and validity of each row of warpgroup W of a work tile, as :class:`OwnRows`."""
    index = W * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=layout)
    _, m = sequence_of(work.m_block, lengths, C)
    row = m * C.BLOCK_M + index
    return OwnRows(index, row // C.PACK, work.head_kv * C.PACK + row % C.PACK, index < work.num_rows)


@gluon.jit
def blocks_of_warpgroup(C: gl.constexpr, W: gl.constexpr, work, n_begin, n_end, lengths):
    """Return the n_blocks in [n_begin, n_end) that the rows of warpgroup W see, as :class:`OwnBlocks`.

    To the edges of the forward come padding, chunks and trees: blocks that they may cut are not full. A
    warpgroup without valid rows gets one masked n_block, so it needs no special case: the loops take at least
    one block.
    """
    _, m = sequence_of(work.m_block, lengths, C)
    first_row = m * C.BLOCK_M + W * WARPGROUP_ROWS
    num_rows = work.num_rows - W * WARPGROUP_ROWS
    first = first_row // C.PACK
    last = (first_row + min(num_rows, WARPGROUP_ROWS) - 1) // C.PACK
    sequence = work.sequence
    begin, end, full_begin, full_end = own_blocks(
        C, first, last, n_begin, n_end, sequence.len_q, sequence.len_k, lengths.mask
    )
    if C.HAS_LEFTPAD:  # memory before a sequence's first key may hold anything
        padded = (sequence.leftpad + C.BLOCK_N - 1) // C.BLOCK_N
        full_begin = min(max(full_begin, padded), full_end)
    if C.HAS_CHUNK:  # edges of chunks cut blocks as well; own_blocks ignores them
        offset = sequence.len_k - sequence.len_q
        left, _ = window_at(last + offset, sequence.leftpad, lengths.mask, C)
        _, right = window_at(first + offset, sequence.leftpad, lengths.mask, C)
        full_end = min(full_end, max((first + offset + right + 1) // C.BLOCK_N, begin))
        full_begin = min(max(full_begin, (last + offset - left + C.BLOCK_N - 1) // C.BLOCK_N), full_end)
    if C.HAS_TREE:  # the tree mask applies from the first new token on
        full_end = min(full_end, max(max(sequence.len_k - sequence.len_q, 0) // C.BLOCK_N, begin))
        full_begin = min(full_begin, full_end)
    if num_rows <= 0:
        begin = end - 1
        full_begin = begin
        full_end = begin
    return OwnBlocks(begin, end, full_begin, full_end)


@gluon.jit
def visible_rows(C: gl.constexpr, work, own, slope, call):
    """Return a warpgroup's rows as ``forward.kernel.Rows``, with the ranges of keys that they see."""
    sequence, lengths = work.sequence, call.lengths
    offset = sequence.len_k - sequence.len_q
    in_keys = own.token + offset
    first_key, last_key = key_bounds(C, in_keys, sequence.leftpad, sequence.len_k, lengths.mask)
    tree = 0
    if C.HAS_TREE:
        b, _ = sequence_of(work.m_block, lengths, C)
        row = gl.where(own.exists, own.token * lengths.seqlen_q, -1)
        mask_of_sequence = call.pointers.tree_mask + b.to(gl.int64) * call.outer.tree_stride
        tree = Tree(mask_of_sequence, row, offset, sequence.len_q)  # type: ignore[assignment]
    if C.HAS_LEFTPAD:
        first_key = gl.maximum(first_key, sequence.leftpad)
    return Rows(in_keys, first_key, last_key, slope, tree, 0)


# FP8 caches: the consumer converts tiles of e4m3 to 16 bits.


ELEMENTS = gl.constexpr(8192)
"""Elements of a tile that are converted at a time, 64 per thread; more would not fit the registers."""
COLUMNS = gl.constexpr(64)
"""Columns of queries that are converted at a time."""
EXPONENT = gl.constexpr(0x7F800000)
"""Exponent bits of a float32."""
# A float32 is sign, 8 bits of exponent (plus 127) and 23 of mantissa: the bits of a power of two 2 ** n are
# (n + 127) << 23, so powers are compared, bounded and inverted as integers.
LARGEST = gl.constexpr(253 << 23)
"""The bits of 2 ** 126, the largest power of two whose inverse is a normal float32."""
ONE = gl.constexpr(127 << 23)
"""The bits of 1.0."""
INVERSE = gl.constexpr(254 << 23)
"""This minus the bits of a power of two gives the bits of its inverse."""


class KeyNumbers(NamedTuple):
    """``forward.schedule.Numbers`` with one value per row, and the scales of the keys of the current tile."""

    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    key_scales: Any


@aggregate
class ConvertedChannel:
    """A channel of e4m3 tiles whose only reader, a warpgroup, converts each tile when it waits for it.

    ``tiles`` holds one converted tile. Products that read it must have ended before the next :meth:`wait`.
    ``arrived`` and ``in_use`` are those of :class:`KeyScales`; without KEY_SCALES they are unused.
    """

    raw: Channel
    tiles: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor
    in_use: gl.shared_memory_descriptor
    C: gl.constexpr
    V: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, raw, tiles, arrived, in_use, C, V):
        self.raw = raw
        self.tiles = tiles
        self.arrived = arrived
        self.in_use = in_use
        self.C = gl.constexpr(C)
        self.V = gl.constexpr(V)

    @gluon.jit
    def wait(self, i):
        """Wait for the ``i``-th tile and convert it. Returns its index in ``tiles``, which is always 0."""
        replace_tile(self.C, self.V, self.raw, i, self.tiles.index(0), self.arrived, self.in_use)
        return 0

    @gluon.jit
    def release(self, i):
        """Do nothing: :meth:`wait` has already released the slot of the ``i``-th tile."""


@gluon.jit
def replace_tile(C: gl.constexpr, V: gl.constexpr, raw, i, tile, arrived, in_use):
    """Wait for the ``i``-th tile in the channel ``raw``, and write it in 16 bits over ``tile``.

    The slot of ``raw`` is then released. With KEY_SCALES, values are multiplied by the scales of their keys.
    A tile of k is not scaled, which keeps it exact in float16: its scales are copied from ``arrived`` to
    ``in_use``, for the scores.
    """
    N: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    PARTS: gl.constexpr = max(1, N * WIDTH // ELEMENTS)
    ROWS: gl.constexpr = N // PARTS
    layout: gl.constexpr = bank_free_layout(WIDTH)
    slot = raw.wait(i)
    rows = raw.tiles.index(slot).reshape([N, WIDTH])
    # The scales are read before the release of the slot, after which a loader may overwrite them.
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if C.KEY_SCALES and not V:
        key_scales = arrived.index(slot).load(line)
    for part in gl.static_range(PARTS):
        x = rows.slice(part * ROWS, ROWS, dim=0).load(layout).to(gl.float16)
        if C.KEY_SCALES and V:
            scale = arrived.index(slot).slice(part * ROWS, ROWS).load(gl.SliceLayout(1, layout))
            x = to_16_bit(x.to(gl.float32) * scale[:, None], tile.dtype)
        # All warps synchronise before the first write, because the previous product of another warp may still
        # read the tile. A release also synchronises them. The fence orders this thread's loads from the slot
        # before the next TMA copy into it; TMA does not wait for ordinary loads by itself.
        # Without the fence, calls took 2 to 4 % less time, and outputs of 64 tokens were wrong. The forward's
        # bias has wait_for_loads for the same purpose; the two were not compared.
        if part == PARTS - 1:
            fence_async_shared()
            raw.release(i)
        elif part == 0:
            partition_barrier()
        tile.slice(part * ROWS, ROWS, dim=0).store(x)
    if C.KEY_SCALES and not V:  # readers of the previous scales have met at the barrier or release above
        in_use.store(key_scales)
    # Wgmma reads the converted tile through the asynchronous proxy, which sees no plain store.
    fence_async_shared()
    partition_barrier()  # each warp multiplies what all warps have written


@gluon.constexpr_function
def bank_free_layout(width):
    """Layout of [rows, width] for 128 threads, 8 adjacent elements each, without bank conflicts."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def operand_layout(rows, width, dtype):
    """Layout of a shared [rows, width] tile that wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


@gluon.jit
def scales_of_head(C: gl.constexpr, work, call):
    """Load the scales of k and v of a work tile, if DESCALE is "head" or "sequence"; otherwise 1.0."""
    pointers = call.pointers
    head = work.head_kv // C.KV_GROUP
    if C.DESCALE == "head":
        return gl.load(pointers.k_descale + head), gl.load(pointers.v_descale + head)
    elif C.DESCALE == "sequence":
        b, _ = sequence_of(work.m_block, call.lengths, C)
        b = b.to(gl.int64)
        k_scale = gl.load(pointers.k_descale + b * call.outer.k_descale_stride + head)
        return k_scale, gl.load(pointers.v_descale + b * call.outer.v_descale_stride + head)
    else:
        return 1.0, 1.0


@gluon.jit
def query_operand(C: gl.constexpr, q, k, k_scale, numbers, row_layout: gl.constexpr):
    """Return (q, numbers) for products with the tiles of ``k``.

    If q [64, BLOCK_D] has another dtype than these tiles, it is converted in place in shared memory. Each of
    its rows is then divided by a power of two, to fit the range of float16. The returned ``numbers``, which
    are factors of the scores, have one value per row. They include ``k_scale`` and the row's power of two.
    """
    ROWS: gl.constexpr = q.shape[0]
    dtype: gl.constexpr = k.tiles.dtype
    # Two passes over q, COLUMNS at a time: kept between them, it would take up to 128 registers of a thread.
    scale = gl.full([ROWS], 1.0, gl.float32, row_layout)
    if q.dtype != dtype:
        layout: gl.constexpr = bank_free_layout(COLUMNS)
        largest = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for part in gl.static_range(C.BLOCK_D // COLUMNS):
            x = q.slice(part * COLUMNS, COLUMNS, dim=1).load(layout)
            largest = gl.maximum(largest, gl.max(gl.abs(x.to(gl.float32)), 1))
        # The exponent bits alone are the largest power of two that is at most ``largest``. So the division is
        # exact, except for elements of at most 2 ** -24 of the largest.
        power = gl.minimum(largest.to(gl.int32, bitcast=True) & EXPONENT, LARGEST)
        power = gl.where(power == 0, ONE, power)
        inverse = (INVERSE - power).to(gl.float32, bitcast=True)
        scale = gl.convert_layout(power.to(gl.float32, bitcast=True), row_layout)
        converted = reinterpret(q, dtype, [ROWS, C.BLOCK_D], operand_layout(ROWS, C.BLOCK_D, dtype))
        for part in gl.static_range(C.BLOCK_D // COLUMNS):  # each thread writes what it has read
            x = q.slice(part * COLUMNS, COLUMNS, dim=1).load(layout).to(gl.float32)
            converted.slice(part * COLUMNS, COLUMNS, dim=1).store((x * inverse[:, None]).to(dtype))
        fence_async_shared()  # wgmma reads q through the asynchronous proxy
        q = converted
    scale = (scale * k_scale)[:, None]
    log2, rate = numbers.scale_log2 * scale, numbers.softcap_rate * scale
    if C.KEY_SCALES:
        return q, KeyNumbers(log2, rate, numbers.softcap_log2, k.in_use)
    else:
        return q, Numbers(log2, rate, numbers.softcap_log2)


# The stores.


@gluon.jit
def store_result(C: gl.constexpr, o, m, sums, v_scale, part, own, call):
    """Normalise and store the result of a part.

    If the part is the whole work tile, the result goes to out and lse, otherwise to the slot of the part in
    the partial results.

    Args:
        o: [64, BLOCK_DV], the accumulator of the output.
        m: [64], row maxima in log2 units.
        sums: [64], row sums.
    """
    factor = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, m.type.layout)
    if C.SINK:  # the sink is added once per row: here, or when parts are combined
        sink = finite_log2(gl.load(call.pointers.sink + own.head).to(gl.float32) * LOG2_E)
        top = gl.maximum(m, sink)
        shift = gl.where(top == float("-inf"), 0.0, top)
        with_sink = sums * gl.exp2(m - shift) + gl.exp2(sink - shift)
        sums = gl.where(part.whole, with_sink, sums)
        factor = gl.where(part.whole, gl.exp2(m - shift), factor)
        m = gl.where(part.whole, top, m)
    if C.DESCALE == "head" or C.DESCALE == "sequence":
        factor = factor * v_scale
    empty = sums == 0.0  # a row that sees no key: out 0, lse -inf
    total = gl.where(empty, 1.0, sums)
    lse = gl.where(empty, float("-inf"), m + gl.log2(total))
    o = scale_rows(o, factor / total)
    if C.SPLIT:  # otherwise the code for partial results is not compiled: it costs 4 to 6 %
        if part.whole:
            store_whole(C, o, lse, part.work, own, call)
        else:
            store_partial(C, o, lse, part.slot, own, call)
    else:
        store_whole(C, o, lse, part.work, own, call)


@gluon.jit
def store_whole(C: gl.constexpr, o, lse, work, rows, call):
    """Store normalised o [64, BLOCK_DV] and lse [64] of a whole work tile to out and lse.

    The argument ``lse`` is in base 2. It is stored in base e.
    """
    lengths = call.lengths
    num_heads_q = lengths.num_heads_kv * C.PACK
    b, _ = sequence_of(work.m_block, lengths, C)
    if C.VARLEN:
        tokens = work.sequence.start_q.to(gl.int64) + rows.token
        lse_rows = rows.head.to(gl.int64) * lengths.total_q + tokens
    else:
        tokens = b.to(gl.int64) * lengths.seqlen_q + rows.token
        lse_rows = (b.to(gl.int64) * num_heads_q + rows.head) * lengths.seqlen_q + rows.token
    lse = lse * LN_2
    if C.SINK:
        lse = at_least(lse, gl.load(call.pointers.sink + rows.head).to(gl.float32))
    gl.store(call.pointers.lse + lse_rows, lse, mask=rows.exists)
    store_matrix(C, call.pointers.out, tokens * num_heads_q + rows.head, rows.exists, o)


@gluon.jit
def store_partial(C: gl.constexpr, o, lse, slot, rows, call):
    """Store o and lse to ``slot`` of the partial results (``portable.decode.combine``).

    lse stays in base 2, in which combining takes its exponentials.
    """
    splits = call.splits
    partial = call.pointers.partial
    partial_rows = slot.to(gl.int64) * splits.partial_rows + rows.index
    partial_lse = partial + splits.slots.to(gl.int64) * splits.partial_rows * C.HEAD_DIM_V
    gl.store(partial_lse + partial_rows, lse, mask=rows.exists)
    store_matrix(C, partial, partial_rows, rows.exists, o)


@gluon.jit
def store_matrix(C: gl.constexpr, base, rows, exists, o):
    """Store the rows of o [64, BLOCK_DV] for which ``exists`` is true. Row i goes to row ``rows[i]`` of the
    matrix at ``base``."""
    # Plain stores. Stores by TMA, as in the forward, were not measured here.
    layout: gl.constexpr = o.type.layout
    columns = gl.arange(0, C.BLOCK_DV, layout=gl.SliceLayout(0, layout))
    offsets = gl.convert_layout(rows, gl.SliceLayout(1, layout)) * C.HEAD_DIM_V
    exists = gl.convert_layout(exists, gl.SliceLayout(1, layout))
    inside = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    gl.store(base + offsets[:, None] + columns[None, :], o.to(base.dtype.element_ty), mask=inside)
