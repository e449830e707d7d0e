"""Attention of several query rows over a cache on Hopper: the forward's pipeline (``forward.kernel``) over
the schedule of decoding (``portable.decode.schedule``).

One or two *consumer* warpgroups of 64 rows each multiply by wgmma. *Loader* warps load keys and values by
TMA, at the pages that the block table names, or one by one (``loads``). The rows of a tile are query tokens
of PACK query heads that share a key head (PackGQA): row ``r`` is token ``r // PACK``, head ``r % PACK``. The
keys are read once for all of them.

    loader of k, 0   takes work tiles; page numbers, K; q of the work tile; invalid pages -> faults
    loader of k, 1   the other half of each block of keys, where a block has many pages
    loaders of v     the same for V
    consumer 0, 1    S = Q K^T, softmax, P V as in the forward; e4m3 tiles are converted first (``convert``)

    ring    slots     written by, full after            read by, empty after
    q       Q_STAGES  loader 0 of k: TMA                consumers: the part is complete
    k, v    STAGES    LOADERS loaders, a part each      consumers: the product, or the conversion
    faults  2         loader 0 of k, one word a part    consumers: before the result is stored
    queue   2         loader 0 of k, an index           consumers and the other loaders (without STREAM_K)

If STREAM_K, each program takes an equal range of consecutive n_blocks of the batch, which may begin and end
within work tiles. Otherwise programs take work tiles, or splits of them, from a queue. Work tiles of long
sequences come first. Parts of a work tile are stored as partial results, as in the portable kernel.

The module is read from top to bottom: the kernel, the loaders, a consumer, a part of a work tile, its rows,
its stores. ``i`` counts blocks of keys and ``j`` parts of work tiles since the start of the kernel.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_channel, make_ping_pong, make_ring
from flashtile.backends.hopper.compat import async_load, gluon, partition_barrier
from flashtile.backends.hopper.constants import LN_2, LOG2_E, WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.decode.combine import PartialRecord, write_partial_record
from flashtile.backends.hopper.decode.convert import (
    load_scales,
    make_reader,
    make_scales,
    query_operand,
    scales_of_head,
)
from flashtile.backends.hopper.decode.loads import (
    Source,
    faults_of,
    faults_of_keys,
    first_entry,
    gather_n_block,
    load_key_pages,
    load_n_block,
    load_pages,
)
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
    attend_blocks,
    finish_blocks,
    quad_sums,
    scale_rows,
    skip_blocks,
    zero_output,
)
from flashtile.backends.hopper.forward.schedule import OwnBlocks, own_blocks
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.decode.schedule import sequence_of, window_at


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


class CacheStrides(NamedTuple):
    """Strides between pages (rows of a dense cache), tokens and heads, in elements."""

    k_page: Any
    k_token: Any
    k_head: Any
    v_page: Any
    v_token: Any
    v_head: Any


class HopperDecodeCall(NamedTuple):
    """Arguments of the launch that all partitions use."""

    pointers: Any
    table: Any
    """Pointer to the work queue's table (``work.table_kernel``), after the partial results."""
    lengths: Any
    splits: Any
    cache: Any
    outer: Any


class Part(NamedTuple):
    """n_blocks [n_begin, n_end) of a work tile. Their result goes to ``out`` if ``whole``, otherwise to
    ``slot`` of the partial results."""

    work: Any
    n_begin: Any
    n_end: Any
    slot: Any
    whole: Any


class QueryLoads(NamedTuple):
    """Channels and descriptor of queries, which the first loader of k loads in addition to its keys."""

    q: Any
    """The channel of queries."""
    faults: Any
    """A channel of one int32 per part, nonzero if a page of the part is invalid."""
    desc: Any


class KeyLoads(NamedTuple):
    """Memory that the loaders of k, or those of v, read and write."""

    channel: Any
    desc: Any
    source: Any
    """If GATHER, the :class:`~flashtile.backends.hopper.decode.loads.Source` of k or v, otherwise 0."""
    offsets: Any
    """If GATHER, shared memory for the offsets of keys, otherwise 0."""
    scales: Any
    """:class:`~flashtile.backends.hopper.decode.convert.KeyScales`."""


@gluon_kernel(do_not_specialize=("lengths", "splits", "cache", "outer"))
def attend_kernel(
    q_desc, k_desc, v_desc, pointers, strides, lengths, splits, cache, outer, numbers, C: gl.constexpr
):
    """Attention over a cache. Grid: at most as many programs as run at a time.

    ``lengths`` count each group of PACK query heads as one key/value head.
    """
    if C.SPLIT:
        start_dependents()
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    k = make_key_channel(C, k_desc, C.BLOCK_D)
    v = make_key_channel(C, v_desc, C.BLOCK_DV)
    k_source = Source(pointers.k_cache, strides.k_page, strides.k_token, strides.k_head)
    k_loads = make_loads(C, k, k_desc, k_source)
    v_source = Source(pointers.v_cache, strides.v_page, strides.v_token, strides.v_head)
    v_loads = make_loads(C, v, v_desc, v_source)
    faults = work_queue.make_work_queue(C.WARPGROUPS)
    queries = QueryLoads(q, faults, q_desc)
    queue = 0 if C.STREAM_K else work_queue.make_work_queue(C.WARPGROUPS + 2 * C.LOADERS - 1)
    start = find_start(C, pointers, lengths)
    table = behind_partials(pointers.partial, splits, C)
    call = HopperDecodeCall(pointers, table, lengths, splits, cache, outer)
    dtype: gl.constexpr = gl.float16 if C.E4M3 and not C.KEY_SCALES else q_desc.dtype  # of P
    k_read = make_reader(C, False, k, k_loads.scales, gl.float16)
    v_read = make_reader(C, True, v, v_loads.scales, dtype)
    if C.PDL:
        wait_for_table()
    # The lists are written out: Triton 3.7 loses constants and functions of tuples put together by +.
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
            [C.CONSUMER_REGISTERS] + [C.LOADER_REGISTERS] * 4,
        )


@gluon.jit
def find_start(C: gl.constexpr, pointers, lengths):
    """Return the :class:`Start` of this program; all fields are 0 if not STREAM_K."""
    if C.STREAM_K:
        index = gl.arange(0, C.SCAN_BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
        return balanced_start(index, pointers, lengths, C)
    else:
        return Start(0, 0, 0, 0, 0)


@gluon.jit
def make_key_channel(C: gl.constexpr, desc, WIDTH: gl.constexpr):
    """Make the channel of k or v. A slot holds one n_block, which arrives in TMA loads of COPY_ROWS keys."""
    tiles = gl.allocate_shared_memory(desc.dtype, [C.STAGES, 1, 1, C.BLOCK_N, 1, WIDTH], desc.layout)
    return make_ring(tiles, C.STAGES, C.WARPGROUPS, C.LOADERS)


@gluon.jit
def make_loads(C: gl.constexpr, channel, desc, source):
    """Return the :class:`KeyLoads` of k or v.

    ``source`` locates k or v in memory. It is used only if GATHER; TMA loads use ``desc``.
    """
    scales = make_scales(C)
    if C.GATHER:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        return KeyLoads(
            channel, desc, source, gl.allocate_shared_memory(gl.int64, [C.BLOCK_N], layout), scales
        )
    else:
        return KeyLoads(channel, desc, 0, 0, scales)


# The loaders.


@gluon.jit
def loader(C: gl.constexpr, V: gl.constexpr, PART: gl.constexpr, queue, queries, keys, start, call):
    """Load k, or v if V, for the consumers. Several loaders share each n_block; this is loader number PART.

    A loader is a partition of one warp, or of two warps if GATHER. The first loader of k also loads q, and
    takes work tiles from the queue for all partitions.
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
            if n_begin < n_end:
                part = Part(work, n_begin, n_end, 0, False)
                i = load_part(C, V, PART, part, i, j, queries, keys, call)
                j += 1
    else:
        FIRST: gl.constexpr = not V and PART == 0
        program, programs = gl.program_id(0), gl.num_programs(0)
        num_tiles = gl.load(call.table) * call.lengths.num_heads_kv * call.splits.num_splits
        t = 0
        tile_index = program
        if FIRST:
            work_queue.put(queue, t, tile_index, C.LOADER_WARPS)
        else:
            tile_index = work_queue.take(queue, t, C.LOADER_WARPS)
        while tile_index < num_tiles:
            work, n_begin, n_end, _, _ = queued_tile(
                C, tile_index, call.table, call.lengths, call.splits, TABLE_WIDTH
            )
            if n_begin < n_end:
                part = Part(work, n_begin, n_end, 0, False)
                i = load_part(C, V, PART, part, i, j, queries, keys, call)
                j += 1
            t += 1
            if FIRST:
                tile_index = programs + gl.atomic_add(call.table + 1, 1)
                work_queue.put(queue, t, tile_index, C.LOADER_WARPS)
            else:
                tile_index = work_queue.take(queue, t, C.LOADER_WARPS)


@gluon.jit
def load_part(C: gl.constexpr, V: gl.constexpr, PART: gl.constexpr, part, i, j, queries, keys, call):
    """Load k, or v if V, for each n_block of a part of a work tile. Returns the new ``i``.

    Several loaders share an n_block; this is loader number PART. The first loader of k also loads queries and
    looks for invalid pages. ``i`` counts the n_blocks that the program has loaded, and ``j`` the parts of
    work tiles that it has loaded.
    """
    FIRST: gl.constexpr = not V and PART == 0
    work, n_begin, n_end, _, _ = part
    cache = call.cache
    channel, desc, source, offsets, scales = keys
    b, _ = sequence_of(work.m_block, call.lengths, C)
    entry, fault = first_entry(C, b, call)
    head = work.head_kv // C.KV_GROUP
    page_rows = cache.v_rows if V else cache.k_rows
    outside = fault
    descale = call.pointers.v_descale if V else call.pointers.k_descale
    descale_stride = call.outer.v_descale_stride if V else call.outer.k_descale_stride
    if FIRST and C.PAGE_SIZE != 0:
        if C.GATHER:
            outside = faults_of_keys(load_key_pages(C, entry, n_end - 1, work.keys), cache)
        else:
            outside = faults_of(C, entry, n_end - 1, work.keys, cache)
    before_queries = n_end - 1
    if C.Q_STAGES == 1:  # the only slot of q is released late, so first fill all slots of keys
        before_queries = max(n_end - gl.where(j > 0, C.STAGES, 1), n_begin)
    for n in range(n_end - 1, n_begin - 1, -1):
        # Load page numbers before waiting for a free slot, so the loads overlap the wait.
        if C.GATHER:
            pages = load_key_pages(C, entry, n, work.keys)
        else:
            pages = load_pages(C, PART, entry, n, work.keys)
        if FIRST and C.PAGE_SIZE != 0:
            if C.GATHER:
                outside = outside | faults_of_keys(pages, cache)
            else:
                outside = outside | faults_of(C, entry, n, work.keys, cache)
        scale = 0.0
        if PART == 0 and C.KEY_SCALES:
            scale = load_scales(C, descale, descale_stride, entry, n, work.keys, head, cache)
        slot = channel.acquire(i)  # the full barrier counts one arrival of each loader
        barrier, tile = channel.full.index(slot), channel.tiles.index(slot)
        if PART == 0 and C.KEY_SCALES:
            scales.arrived.index(slot).store(scale)
            partition_barrier()  # one thread arrives for all, after all have stored
        if C.GATHER:
            WIDTH: gl.constexpr = C.BLOCK_DV if V else C.BLOCK_D
            HEAD_DIM: gl.constexpr = C.HEAD_DIM_V if V else C.HEAD_DIM
            gather_n_block(
                C, WIDTH, HEAD_DIM, source, pages, n, work.keys, head, cache, offsets, barrier, tile
            )
        else:
            load_n_block(C, PART, desc, pages, page_rows, n, work.keys, head, cache, barrier, tile)
        if FIRST:  # noqa: SIM102 - FIRST is a constant, the other condition is not
            if n == before_queries:
                load_queries(C, work, j, queries, call)
        i += 1
    if FIRST:
        if C.PAGE_SIZE != 0:
            fault = fault | gl.max((outside != 0).to(gl.int32), 0)
        work_queue.put(queries.faults, j, fault, C.LOADER_WARPS)
    return i


@gluon.jit
def load_queries(C: gl.constexpr, work, j, queries, call):
    """Issue the TMA loads of the query rows of a work tile, as the ``j``-th write to the channel of q."""
    q, q_desc = queries.q, queries.desc
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    b, m = sequence_of(work.m_block, call.lengths, C)
    batch = 0 if C.VARLEN else b
    slot = q.acquire(j)
    mbarrier.expect(q.full.index(slot), WARPGROUPS * q_desc.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        token = work.sequence.start_q + (m * C.BLOCK_M + w * WARPGROUP_ROWS) // C.PACK
        coordinates = [batch, token, work.head_kv, 0, 0]
        async_load(q_desc, coordinates, q.full.index(slot), q.tiles.index(slot * WARPGROUPS + w))


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
                    if splits > 0:
                        record = PartialRecord(
                            splits, program, work.m_block, work.head_kv, work.num_rows, work.sequence.start_q
                        )
                        write_partial_record(call.pointers.partial, record, call.lengths, call.splits, C)
    else:
        num_tiles = gl.load(call.table) * call.lengths.num_heads_kv * call.splits.num_splits
        t = 0
        tile_index = work_queue.take(queue, t, 4)
        while tile_index < num_tiles:
            work, n_begin, n_end, slot, whole = queued_tile(
                C, tile_index, call.table, call.lengths, call.splits, TABLE_WIDTH
            )
            if n_begin < n_end:
                part = Part(work, n_begin, n_end, slot, whole)
                i = attend_part(C, W, part, i, j, q, k, v, faults, call, numbers)
                j += 1
            t += 1
            tile_index = work_queue.take(queue, t, 4)


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
    ping_pong = make_ping_pong(1)
    work, n_begin, n_end, _, _ = part
    lengths = call.lengths

    blocks = own_range(C, W, work, n_begin, n_end, lengths)
    own = own_rows(C, W, work, lengths, row_layout)
    slope = 0.0
    if C.ALIBI:
        b, _ = sequence_of(work.m_block, lengths, C)
        slope = gl.load(call.pointers.alibi_slopes + b * call.outer.alibi_stride + own.head) * LOG2_E
    rows = mask_rows(C, work, own, slope, call)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = zero_output(C)
    l = quad_sums(gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))

    i = skip_blocks(n_end - blocks.end, i, k, v, ping_pong, W)
    q_tile = q.tiles.index(q.wait(j) * C.WARPGROUPS + W).reshape([ROWS, C.BLOCK_D])
    v_scale = 1.0
    if C.E4M3:
        k_scale, v_scale = scales_of_head(C, work, call)
        q_tile, numbers = query_operand(C, q_tile, k, k_scale, numbers, row_layout)
    tile = QueryTile(q_tile, q_tile, k, v, ping_pong, rows, numbers)
    state, i = attend_blocks(C, W, tile, SoftmaxState(o, l, m), i, blocks)
    q.release(j)
    o, l, m = state
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    o = finish_blocks(C, v, i, o)
    i = skip_blocks(blocks.begin - n_begin, i, k, v, ping_pong, W)

    # Taken last: the loader knows of a part's faults only when it has issued all its loads.
    fault = work_queue.take(faults, j, 4) | work.sequence.fault
    sums = gl.where(fault == 0, sums, float("nan"))
    store_part(C, o[0], m, sums, v_scale, part, own, call)
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
def own_rows(C: gl.constexpr, W: gl.constexpr, work, lengths, layout: gl.constexpr):
    """Return the token, head and validity of each row of warpgroup W of a work tile, as :class:`OwnRows`."""
    index = W * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=layout)
    _, m = sequence_of(work.m_block, lengths, C)
    row = m * C.BLOCK_M + index
    return OwnRows(index, row // C.PACK, work.head_kv * C.PACK + row % C.PACK, index < work.num_rows)


@gluon.jit
def own_range(C: gl.constexpr, W: gl.constexpr, work, n_begin, n_end, lengths):
    """Return the n_blocks in [n_begin, n_end) that the rows of warpgroup W see, as :class:`OwnBlocks`.

    A warpgroup without valid rows gets one masked n_block, so it needs no special case.
    """
    _, m = sequence_of(work.m_block, lengths, C)
    first_row = m * C.BLOCK_M + W * WARPGROUP_ROWS
    num_rows = work.num_rows - W * WARPGROUP_ROWS
    first = first_row // C.PACK
    last = (first_row + min(num_rows, WARPGROUP_ROWS) - 1) // C.PACK
    sequence = work.sequence
    begin, end, full_begin, full_end = own_blocks(
        first, last, n_begin, n_end, sequence.len_q, sequence.len_k, lengths.window_left,
        lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
    )  # fmt: skip
    if C.HAS_LEFTPAD:
        padded = (sequence.leftpad + C.BLOCK_N - 1) // C.BLOCK_N
        full_begin = min(max(full_begin, padded), full_end)
    if lengths.attention_chunk is not None:  # edges of chunks cut blocks as well; own_blocks ignores them
        offset = sequence.len_k - sequence.len_q
        left, _ = window_at(last + offset, sequence.leftpad, lengths)
        _, right = window_at(first + offset, sequence.leftpad, lengths)
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
def mask_rows(C: gl.constexpr, work, own, slope, call):
    """Return a warpgroup's rows as ``forward.kernel.Rows``, with the ranges of keys that they see."""
    sequence, lengths = work.sequence, call.lengths
    offset = sequence.len_k - sequence.len_q
    in_keys = own.token + offset
    left, right = window_at(in_keys, sequence.leftpad, lengths)
    last_key = gl.full([WARPGROUP_ROWS], 0, gl.int32, in_keys.type.layout) + sequence.len_k - 1
    if C.HAS_RIGHT:
        last_key = gl.minimum(in_keys + right, last_key)
    tree = 0
    if C.HAS_TREE:
        b, _ = sequence_of(work.m_block, lengths, C)
        row = gl.where(own.exists, own.token * lengths.seqlen_q, -1)
        mask_of_sequence = call.pointers.tree_mask + b.to(gl.int64) * call.outer.tree_stride
        tree = Tree(mask_of_sequence, row, offset, sequence.len_q)  # type: ignore[assignment]
    first_key = in_keys - left
    if C.HAS_LEFTPAD:
        first_key = gl.maximum(first_key, sequence.leftpad)
    return Rows(in_keys, first_key, last_key, slope, tree, 0)


# The stores.


@gluon.jit
def store_part(C: gl.constexpr, o, m, sums, v_scale, part, own, call):
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
        sink = gl.load(call.pointers.sink + own.head).to(gl.float32) * LOG2_E
        top = gl.maximum(m, sink)
        shift = gl.where(top == float("-inf"), 0.0, top)
        with_sink = sums * gl.exp2(m - shift) + gl.exp2(sink - shift)
        sums = gl.where(part.whole, with_sink, sums)
        factor = gl.where(part.whole, gl.exp2(m - shift), factor)
        m = gl.where(part.whole, top, m)
    if C.DESCALE == "head" or C.DESCALE == "sequence":
        factor = factor * v_scale
    empty = sums == 0.0
    total = gl.where(empty, 1.0, sums)
    lse = gl.where(empty, float("-inf"), m + gl.log2(total))
    o = scale_rows(o, factor / total)
    if C.SPLIT:
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
    gl.store(call.pointers.lse + lse_rows, lse * LN_2, mask=rows.exists)
    store_rows(C, call.pointers.out, tokens * num_heads_q + rows.head, rows.exists, o)


@gluon.jit
def store_partial(C: gl.constexpr, o, lse, slot, rows, call):
    """Store o and lse (base 2) to ``slot`` of the partial results (``portable.decode.combine``)."""
    splits = call.splits
    partial = call.pointers.partial
    partial_rows = slot.to(gl.int64) * splits.partial_rows + rows.index
    partial_lse = partial + splits.slots.to(gl.int64) * splits.partial_rows * C.HEAD_DIM_V
    gl.store(partial_lse + partial_rows, lse, mask=rows.exists)
    store_rows(C, partial, partial_rows, rows.exists, o)


@gluon.jit
def store_rows(C: gl.constexpr, base, rows, exists, o):
    """Store the rows of o [64, BLOCK_DV] for which ``exists`` is true. Row i goes to row ``rows[i]`` of the
    matrix at ``base``."""
    layout: gl.constexpr = o.type.layout
    columns = gl.arange(0, C.BLOCK_DV, layout=gl.SliceLayout(0, layout))
    offsets = gl.convert_layout(rows, gl.SliceLayout(1, layout)) * C.HEAD_DIM_V
    exists = gl.convert_layout(exists, gl.SliceLayout(1, layout))
    inside = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    gl.store(base + offsets[:, None] + columns[None, :], o.to(base.dtype.element_ty), mask=inside)
