"""FP8 attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.3).

The schedule, the rings and both overlaps are those of the 16-bit kernel (``hopper.forward.kernel``, with a
drawing). What differs:

* Products of e4m3 run at twice the rate.
* Scales, of q by row, of k and v by block of keys, cost no operation per element. Those of q and k are folded
  into the softmax scale, by which scores are multiplied in any case. That of v is folded into the exponent of
  P; one factor per block removes it from the row's sum. They are loaded one block ahead of their use.
* P is in e4m3, in the byte order of wgmma's operand, and stays in registers. In an accumulator, thread t of
  a quad holds columns 8 a + 2 t + i, with i < 2. In the left operand of the next product it holds columns
  16 a + 4 t + j, with j < 4. P is not moved between threads: instead, the keys of V^T are stored in the order
  in which P's columns then appear (``fp8_layout.key_order``).
* Products of e4m3 need V with contiguous keys. Memory may hold V^T in that order. Otherwise the producer
  (then of four warps) transposes each tile, one tile behind its loads:

    producer       K2 V2 Q K1 V1 T2   K0 V0 T1   T0        T: rows of V -> V^T in the ring that consumers read
    consumer
      wgmma        [S2]         [S1][P2 V2]              [S0][P1 V1]             [P0 V0]
      softmax          (  P2  )     (   P1   )               (   P0   )

The module is read from top to bottom, as the 16-bit kernel: the kernel, the producer, a consumer's block of
queries, its loop over blocks of keys, the softmax, the scales, the transposition. ``C`` is the variant,
:class:`~flashtile.backends.hopper.fp8.config.Fp8Variant`, which explains each flag.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.compat import async_load, gluon, reinterpret
from flashtile.backends.hopper.forward.kernel import (
    Output,
    SoftmaxState,
    apply_score_mod,
    load_keys,
    load_queries,
    mask,
    mask_rows,
    own_queries,
    row_positions,
    rows_in,
    scale_rows,
    skip_blocks,
    start_qk,
    store_row,
    store_tile,
)
from flashtile.backends.hopper.forward.schedule import (
    Numbers,
    OwnBlocks,
    consume,
    own_range,
    produce,
    tile_blocks,
    whole_end,
)
from flashtile.backends.hopper.inline_asm import copy_registers, rescale
from flashtile.backends.hopper.layouts import (
    LN_2,
    WARPGROUP_ROWS,
    accumulator_layout,
    left_operand_layout,
)
from flashtile.backends.hopper.pipeline import make_channel, make_ping_pong, make_ring
from flashtile.problems import fp8_layout

QUERY_BLOCK = gl.constexpr(fp8_layout.QUERY_BLOCK)
KEY_BLOCK = gl.constexpr(fp8_layout.KEY_BLOCK)
GROUP = gl.constexpr(fp8_layout.KEY_GROUP)
P_LOG2 = gl.constexpr(8.0)
"""P is scaled by 2 ** 8, so the largest P of a row is 256: e4m3 represents 2 ** -9 to 448."""
LEAST = gl.constexpr(2.0**-90)
"""Lower bound of value scales and of score factors; 1 / LEAST is the upper bound of the factors. Zero times
infinity would be NaN. Sums of 256 products of e4m3 are below 2 ** 26, so all scores are finite."""


class Fp8ForwardPointers(NamedTuple):
    """Tensors that the kernel reads or writes without TMA. Unused pointers are never dereferenced."""

    lse: Any
    table: Any
    seqused_k: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any


class TilePointers(NamedTuple):
    """The pointers that are needed to find work tiles and to store lse."""

    lse: Any
    table: Any
    seqused_k: Any


class BlockScaleStrides(NamedTuple):
    """Strides of the scales between sequences, heads and blocks, in elements; 0 where a scale is shared."""

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
    """Memory of the scales, fp32, and their strides. Unused pointers are never dereferenced."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    strides: Any


class Fp8Call(NamedTuple):
    """Arguments of the launch that all partitions use, in the order of their first reads. The forward's
    schedule reads the first two, as those of its ``ForwardCall``."""

    pointers: Any
    """:class:`TilePointers`."""
    schedule: Any
    numbers: Any
    scales: Any
    """:class:`ScaleArrays`."""


class ProducerChannels(NamedTuple):
    """Channels that the producer loads into."""

    q: Any
    k: Any
    v: Any
    v_rows: Any
    """Channel of untransposed tiles of v, which the producer transposes into ``v``. If V_TRANSPOSED, it is
    ``v`` itself."""


class Fp8Inputs(NamedTuple):
    """One value for each of q, k and v: their channels to the consumers, or their descriptors."""

    q: Any
    k: Any
    v: Any


# As in the 16-bit kernel: other lengths and strides are not compiled anew.
@gluon_kernel(do_not_specialize=("schedule", "scale_strides"))
def fp8_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers, scale_strides, C: gl.constexpr
):
    """FP8 forward. Grid: at most one program for each multiprocessor.

    Work tiles are assigned in ``serpentine_order``, or taken from the work queue, whose counter lies in
    ``pointers.table``.
    """
    # Rings, as (descriptor, slots, readers, tiles per slot).
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, 1)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS if C.V_TRANSPOSED else 0, 1)
    # Without V_TRANSPOSED, the producer transposes the tiles in v_rows. A slot of v_rows is then free as soon
    # as the producer has transposed the slot's tile. So no other partition reports it free: 0 readers.
    v_rows = v
    if not C.V_TRANSPOSED:
        v_layout: gl.constexpr = transposed_layout(C.BLOCK_N)
        v_tiles = gl.allocate_shared_memory(v_desc.dtype, [C.STAGES, C.BLOCK_DV, C.BLOCK_N], v_layout)
        v = make_ring(v_tiles, C.STAGES, C.WARPGROUPS)
    ping_pong = make_ping_pong(C.WARPGROUPS) if C.PING_PONG else 0
    queue = pipeline.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
    # O is of 16 bits and q of 8, so O has tiles of its own instead of those of q.
    o_tiles = gl.allocate_shared_memory(o_desc.dtype, [C.WARPGROUPS] + o_desc.block_type.shape, o_desc.layout)
    call = Fp8Call(
        TilePointers(pointers.lse, pointers.table, pointers.seqused_k),
        schedule,
        numbers,
        ScaleArrays(pointers.q_scale, pointers.k_scale, pointers.v_scale, scale_strides),
    )
    channels = Fp8Inputs(q, k, v)
    loaded = ProducerChannels(q, k, v, v_rows)
    descs = Fp8Inputs(q_desc, k_desc, v_desc)
    output = Output(o_tiles, o_desc)
    # Partitions as in the 16-bit kernel; registers: ``config.REGISTERS``. No configuration has one consumer.
    if C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (consumer, (C, 1, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, loaded, descs, call)),
            ],
            [4, C.PRODUCER_WARPS],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (consumer, (C, 1, queue, channels, ping_pong, output, call)),
                (consumer, (C, 2, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, loaded, descs, call)),
            ],
            [4, 4, C.PRODUCER_WARPS],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )


# The producer.


@gluon.jit
def producer(C: gl.constexpr, queue, channels, descs, call):
    """Producer partition: loads all tiles of q, k and v. It has one warp, or four if it transposes v."""
    i = produce(C, load_block, queue, (channels, descs), call)
    # The transposition is one block behind the loads, across work tiles: the last block of all is left.
    if not C.V_TRANSPOSED and i > 0:
        transpose_values(C, i - 1, channels.v, channels.v_rows)


@gluon.jit
def load_block(C: gl.constexpr, channels, descs, work, block, i, j, call):
    """Load q, k and v for query block ``block`` of a work tile; returns the new ``i``.

    A block of v that needs transposing is transposed after the load of the next block is issued.
    """
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    q, k, v, v_rows = channels
    q_desc, k_desc, v_desc = descs
    schedule = call.schedule
    n_begin, n_end = tile_blocks(C, work, block, schedule.mask)
    for n in range(n_end - 1, n_begin - 1, -1):
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), k_desc.block_type.nbytes)
        load_keys(C, k_desc, work, n, k.full.index(slot), k.tiles.index(slot))
        if not C.V_TRANSPOSED:
            load_values(C, v_desc, work, n, i, v, v_rows)
            # Before q.acquire below: consumers free q's slot only after block i - 1, whose values they need.
            if i > 0:
                transpose_values(C, i - 1, v, v_rows)
        if n == n_end - 1:  # q after the first keys, because q's slot may not be free yet
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
def load_values(C: gl.constexpr, v_desc, work, n, i, v, v_rows):
    """Issue the TMA load of block ``n`` of v.

    It is the ``i``-th block of the channel ``v`` if V_TRANSPOSED, otherwise of ``v_rows``.
    """
    if C.V_TRANSPOSED:
        slot = v.acquire(i)
        mbarrier.expect(v.full.index(slot), v_desc.block_type.nbytes)
        barrier, tile = v.full.index(slot), v.tiles.index(slot)
        head, column = work.head_kv, n * C.BLOCK_N
        if C.VARLEN:  # V^T of a packed sequence begins at a block of its own, numbered as in tile_scales
            first = work.start_k // KEY_BLOCK + work.sequence
            async_load(v_desc, [head, 0, first * KEY_BLOCK + column], barrier, tile)
        else:
            async_load(v_desc, [work.sequence, head, 0, column], barrier, tile)
    else:
        # The slot is free: this partition has transposed its previous contents. All warps had fenced before
        # they met at the arrival (transpose_values), so TMA writes after their loads.
        slot = i % C.STAGES
        mbarrier.expect(v_rows.full.index(slot), v_desc.block_type.nbytes)
        load_keys(C, v_desc, work, n, v_rows.full.index(slot), v_rows.tiles.index(slot))


@gluon.jit
def transpose_values(C: gl.constexpr, i, v, v_rows):
    """Transpose the ``i``-th block of ``v_rows`` into ``v``, which the consumers read."""
    rows = v_rows.tiles.index(v_rows.wait(i)).reshape([C.BLOCK_N, C.BLOCK_DV])
    slot = v.acquire(i)
    transpose_tile(rows, v.tiles.index(slot))
    # wgmma reads V^T through the asynchronous proxy, and TMA writes the next rows over ``rows`` through it.
    fence_async_shared()
    mbarrier.arrive(v.full.index(slot), count=1)


# A consumer: one block of query rows.


class TileScales(NamedTuple):
    """Scales of one tile."""

    rows: Any
    """[rows]: factor of each row's raw products, still without the scale of k."""
    k: Any
    """Pointer to k's scale of the first block of keys; ``k_block`` is the stride to the next block's."""
    v: Any
    """Pointer to v's scale of the first block of keys; ``v_block`` is the stride to the next block's."""
    k_block: Any
    v_block: Any


class Fp8Tile(NamedTuple):
    """Inputs of the loops over blocks of keys, for 64 query rows: the fields of
    :class:`~flashtile.backends.hopper.forward.kernel.QueryTile`, and the scales."""

    q: Any
    q_registers: Any
    k: Any
    v: Any
    ping_pong: Any
    rows: Any
    scales: Any
    """:class:`~flashtile.backends.hopper.fp8.kernel.TileScales`."""
    numbers: Any


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, channels, ping_pong, output, call):
    """Warpgroup W: :func:`attend_tile` for rows 64 W to 64 W + 63 of every block of query rows."""
    consume(C, attend_tile, queue, (W, channels, ping_pong, output), call)
    tma.store_wait(0)  # the program's shared memory must not end before TMA has read it


@gluon.jit
def attend_tile(C: gl.constexpr, W: gl.constexpr, channels, ping_pong, output, work, block, i, j, call):
    """Compute and store out and lse of warpgroup W's 64 rows of query block ``block`` of ``work``.

    ``i`` counts the blocks of keys that have passed through the channels of k and v, ``j`` the blocks of
    queries that have passed through the channel of q. Returns the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    # One wgmma of e4m3 multiplies 32 columns (its K), twice as many as with 16 bits.
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N, 32)
    o_layout: gl.constexpr = accumulator_layout(C.BLOCK_DV, 32)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q, k, v = channels
    schedule = call.schedule

    first, last, n_begin, n_end, own = own_range(C, W, work, block, schedule)
    positions, head = row_positions(C, work, first, row_layout)
    rows = mask_rows(C, work, positions, 0.0, schedule)
    scales = tile_scales(C, work, positions, head, call)
    block_scales = load_scales(C, scales, own.end - 1)

    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, o_layout)
    # Sums of zeros, not zeros, so that l has the layout that sums_of returns in the loop.
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout)
    z0, z1, z2, z3 = by_byte(zeros)
    state = SoftmaxState(o, sums_of(z0, z1, z2, z3), m)

    i = skip_blocks(C, W, n_end - own.end, i, k, v, ping_pong)
    q_part, q_tile, q_registers = own_queries(C, W, q, j, s_layout)
    tile = Fp8Tile(q_tile, q_registers, k, v, ping_pong, rows, scales, call.numbers)
    end = own.end
    if C.HAS_RIGHT and C.BLOCK_N > ROWS:  # half of the last block, as in the 16-bit kernel
        end = whole_end(C, work, last, own.begin, own.end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        state, i, block_scales = attend_masked(C, W, HALF, tile, state, i, own.end, end, block_scales)
    own = OwnBlocks(own.begin, end, own.full_begin, own.full_end)
    state, i = attend_blocks(C, W, tile, state, i, own, block_scales)
    q.release(j)

    o, l, m, _, _ = state
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    # P has the factor 2 ** P_LOG2, and so have the sums. It cancels in O / sums.
    lse = (m - P_LOG2) * LN_2 + gl.log(sums)
    store_row(C, lse, work, head, positions, call.pointers.lse, schedule)
    i = skip_blocks(C, W, own.begin - n_begin, i, k, v, ping_pong)
    # Rows that see no key become 0. Their o may be NaN, because V may hold NaN after the last key.
    o = scale_rows(o, gl.where(sums > 0, 1 / sums, 0.0))
    o_sums = gl.convert_layout(sums, gl.SliceLayout(1, o_layout))
    o = gl.where((o_sums == 0)[:, None], 0.0, o)
    store_tile(C, W, (o.to(output.desc.dtype),), q, q_part, j, output, work, first)
    return i


# The loop over blocks of keys.


@gluon.jit
def attend_blocks(C: gl.constexpr, W: gl.constexpr, tile, state, i, blocks, block_scales):
    """Attend to all key blocks that the rows of a warpgroup see. ``blocks``: an :class:`OwnBlocks`.

    ``block_scales`` are the scales of (k, v) of the last block. Returns the new state and the new ``i``.
    """
    begin, end, full_begin, full_end = blocks
    k, v, ping_pong = tile.k, tile.v, tile.ping_pong
    first = end - 1
    if C.HAS_RIGHT:
        first = min(max(full_end, begin), end - 1)
        state, i, block_scales = attend_masked(C, W, C.BLOCK_N, tile, state, i, end, first + 1, block_scales)

    # Prologue: S and P of block ``first``, which may need a mask. The blocks after it do not.
    s, next_scales = block_products(C, W, C.BLOCK_N, tile, i, first)
    CUT: gl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N
    o, l, m, _, _ = state
    k_scale, v_scale = block_scales
    packed, m, l, alpha = fp8_softmax(C, s, first, m, l, tile, tile.rows, k_scale, v_scale, CUT)
    if C.HAS_RIGHT:  # else O is 0
        o = scale_rows(o, alpha)
    k_scale, v_scale = next_scales
    i += 1

    # Main loop: Q K^T of block n overlaps P V of block n + 1, whose P is packed in registers. The reasons for
    # the order of products, waits and releases are those of the 16-bit kernel's loop.
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N, 32)
    o_layout: gl.constexpr = o.type.layout
    full_begin = min(full_begin, first)
    for n in range(first - 1, full_begin - 1, -1):
        # P is converted before Q K^T is issued: between Q K^T and P V, the conversion would delay P V.
        p = as_operand(packed, o_layout)
        if C.PING_PONG:
            ping_pong.wait(W, i)
        s = start_qk(C, C.BLOCK_N, tile.q, tile.q_registers, k, i, s_layout)
        o = start_pv(C, p, v.tiles.index(v.wait(i - 1)), o)
        if C.PING_PONG:
            ping_pong.pass_on(W)
        next_scales = load_scales(C, tile.scales, n - 1)  # one block ahead, as in block_products
        s = warpgroup_mma_wait(1, deps=[s])  # P V may stay in flight during the softmax
        k.release(i)
        fresh, m, l, alpha = fp8_softmax(C, s, n, m, l, tile, tile.rows, k_scale, v_scale, False)
        o = warpgroup_mma_wait(0, deps=[o])
        packed = copy_registers(fresh)  # before the branches of rescale, past which ptxas would delay it
        v.release(i - 1)
        # Warps without a new maximum skip this: 15 to 17 % faster, since nothing else runs at this point.
        o = rescale(o, alpha)
        k_scale, v_scale = next_scales
        i += 1

    # Epilogue: P V of the last of these blocks, then the blocks that the left edge of the mask cuts. This P V
    # is waited for here; the 16-bit kernel stores lse meanwhile. The two were not compared.
    o = start_pv(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i - 1)), o)
    o = warpgroup_mma_wait(0, deps=[o])
    v.release(i - 1)
    state = SoftmaxState(o, l, m)
    if C.HAS_LEFT:
        block_scales = k_scale, v_scale
        state, i, block_scales = attend_masked(
            C, W, C.BLOCK_N, tile, state, i, full_begin, begin, block_scales
        )
    return state, i


@gluon.jit
def attend_masked(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, state, i, n_from, n_to, block_scales
):
    """Attend to the first ``WIDTH`` keys of blocks n_from - 1 down to n_to, with a mask.

    The two products of a block run one after the other. ``block_scales`` are the scales of block n_from - 1.
    Returns (state, new ``i``, scales of block n_to - 1).
    """
    row: gl.constexpr = gl.SliceLayout(1, accumulator_layout(WIDTH, 32))
    rows = rows_in(C, tile.rows, row)
    v = tile.v
    o, l, m, _, _ = state
    o_layout: gl.constexpr = o.type.layout
    k_scale, v_scale = block_scales
    # Q K^T and P V do not overlap here, as in the 16-bit kernel: cut blocks are few.
    for n in range(n_from - 1, n_to - 1, -1):
        s, next_scales = block_products(C, W, WIDTH, tile, i, n)
        packed, m_new, l, alpha = fp8_softmax(
            C, s, n, gl.convert_layout(m, row), l, tile, rows, k_scale, v_scale, True
        )
        m = gl.convert_layout(m_new, m.type.layout)
        o = start_pv(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i)), scale_rows(o, alpha))
        o = warpgroup_mma_wait(0, deps=[o])
        v.release(i)
        k_scale, v_scale = next_scales
        i += 1
    return SoftmaxState(o, l, m), i, (k_scale, v_scale)


@gluon.jit
def block_products(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, i, n):
    """Return (raw products with the first ``WIDTH`` keys of block ``n``, scales of block n - 1).

    Block ``n`` is the ``i``-th block that passes through k's channel.
    """
    if C.PING_PONG:
        tile.ping_pong.wait(W, i)
    s = start_qk(C, WIDTH, tile.q, tile.q_registers, tile.k, i, accumulator_layout(WIDTH, 32))
    if C.PING_PONG:
        tile.ping_pong.pass_on(W)
    next_scales = load_scales(C, tile.scales, n - 1)  # one block ahead, so that no softmax waits for memory
    s = warpgroup_mma_wait(0, deps=[s])
    tile.k.release(i)
    return s, next_scales


@gluon.jit
def start_pv(C: gl.constexpr, p, v_tile, o):
    """Start O += P V and return O before the product has ended.

    p: P [64, WIDTH]. v_tile: V^T with keys in P's order; only its first WIDTH keys are used.
    """
    WIDTH: gl.constexpr = p.shape[1]
    v = v_tile.reshape([C.BLOCK_DV, C.BLOCK_N])
    if WIDTH < C.BLOCK_N:  # P's order permutes keys within groups of 32, so the first half has the same keys
        v = v.slice(0, WIDTH, dim=1)
    # A view: memory holds V^T, since e4m3's right operand must have contiguous keys.
    return warpgroup_mma(p, v.permute((1, 0)), o, is_async=True)


# The softmax: from raw products to P in e4m3.


@gluon.jit
def fp8_softmax(C: gl.constexpr, s, n, m, l, tile, rows, k_scale, v_scale, MASK: gl.constexpr):
    """Return (packed P, new m, new l, factor for earlier O) of the raw products s [64, keys] of block ``n``.

    ``m`` has the maximum of each row so far, ``l`` the partial sums of its probabilities. ``m`` and ``rows``
    are in s's layout. MASK: apply the mask to the block.
    """
    s_layout: gl.constexpr = s.type.layout
    factor = gl.convert_layout(score_factor(C, tile.scales, k_scale), gl.SliceLayout(1, s_layout))
    # The inverse of the rounded logarithm, not of v_scale: what the exponent adds to P, the sum takes away.
    value_log2 = log2(gl.maximum(v_scale, LEAST))  # of a scale of 0: -inf
    inverse = gl.exp2(-value_log2)
    column = factor[:, None]
    s = apply_score_mod(C, s, n, rows, Numbers(column, column, tile.numbers.softcap_log2), s_layout)
    if MASK:
        s = mask(C, s, n, rows, s_layout)
    b0, b1, b2, b3, m, alpha = exponentials(C, s, m, factor, value_log2)
    # Summed in fp32 before the rounding to e4m3, and one factor for a row, not for each P.
    sums = sums_of(b0, b1, b2, b3)
    l = scale_rows(l, alpha) + gl.convert_layout(sums, l.type.layout) * inverse
    return pack(b0, b1, b2, b3), m, l, alpha


@gluon.jit
def exponentials(C: gl.constexpr, s, m, scale, value_log2):
    """Return (P as four tensors, new m, factor for earlier sums and O). :func:`by_byte` defines the tensors.

    Args:
        s: [rows, N], raw products, or if C.SCALED_SCORES scores in log2 units.
        m: [rows], maximum so far of score + value_log2.
        scale: [rows], positive factor from raw products to log2 units.
        value_log2: log2 of the block's value scale. P contains the value scale, so O needs no further scale.
            m contains the value scale as well, so that the block with the largest contributions to O uses
            e4m3's full range.
    """
    top = gl.max(s, 1)
    if not C.SCALED_SCORES:
        top = top * scale
    m_new = gl.maximum(m, top + value_log2)
    known = gl.where(m_new == float("-inf"), 0.0, m_new)  # for rows that have seen no key yet
    shift = known - (value_log2 + P_LOG2)
    if C.SCALED_SCORES:
        p = gl.exp2(s - shift[:, None])
    else:
        p = gl.exp2(s * scale[:, None] - shift[:, None])
    b0, b1, b2, b3 = by_byte(p)
    return b0, b1, b2, b3, m_new, gl.exp2(m - known)


@gluon.jit
def by_byte(x):
    """Split x [rows, N] into the values of bytes 0, 1, 2 and 3 of P's registers, each [rows, N / 32, 2, 4].

    Column 32 a + 16 b + 8 c + 2 t + i of x becomes byte 2 c + i of register (a, b) of thread t. Thread t has
    these four columns already, so nothing moves between threads. The keys of V^T are stored in the order that
    results (``fp8_layout.key_order``).
    """
    # Axes [rows, a, b, c, t, i] -> [rows, a, b, t, c, i], of which the last two are split.
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([M, N // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)))
    even_0, even_1 = gl.split(even)
    odd_0, odd_1 = gl.split(odd)
    return even_0, odd_0, even_1, odd_1


@gluon.jit
def pack(b0, b1, b2, b3):
    """Pack four float32 values into the bytes of an int32, each rounded to the nearest e4m3, ties to even."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [b0, b1, b2, b3],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def as_operand(packed, product_layout: gl.constexpr):
    """View int32 [rows, N / 32, 2, 4] as e4m3 [rows, N], the left operand of a product.

    The result is in the registers of ``packed``.

    P is carried between iterations as int32. If it were carried as bytes, the compiler would split and
    reassemble every register at the boundary of the loop.
    """
    M: gl.constexpr = packed.shape[0]
    N: gl.constexpr = packed.shape[1] * 32
    layout: gl.constexpr = left_operand_layout(product_layout, 4)
    twice = gl.join(packed, packed)
    by_key = gl.convert_layout(gl.join(twice, twice).reshape([M, N]), layout, assert_trivial=True)
    # Four adjacent elements in this layout are copies of one register: use its four bytes as the elements.
    # Assembly, because the compiler would unpack and repack them: 196 of 634 instructions of a step.
    bytes_of = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [by_key], dtype=gl.int8, is_pure=False, pack=4
    )
    return bytes_of.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def sums_of(b0, b1, b2, b3):
    """Return [rows, 4]: the partial sum of each of the four threads that share a row, without a shuffle."""
    return gl.sum(gl.sum((b0 + b1) + (b2 + b3), 2), 1)


@gluon.jit
def log2(x):
    """log2 of a positive number, in one instruction, to 22 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


# Scales.


@gluon.jit
def tile_scales(C: gl.constexpr, work, positions, head, call):
    """Return the :class:`TileScales` of 64 rows with these ``positions`` and query heads, both [rows]."""
    arrays, strides, numbers = call.scales, call.scales.strides, call.numbers
    q_index = work.sequence * strides.q_scale_batch + head // C.Q_SCALE_GROUP * strides.q_scale_head
    first_q = 0
    first_k = 0
    # Block i of packed sequence b has number cu_seqlens[b] // rows + b + i: unique, and found without the
    # host.
    if C.VARLEN and C.BLOCK_SCALES:
        first_q = work.start_q // QUERY_BLOCK + work.sequence
        first_k = work.start_k // KEY_BLOCK + work.sequence
    q_index += (first_q + positions // QUERY_BLOCK) * strides.q_scale_block
    if C.HAS_Q_SCALE:  # rows past the end have no scale
        q_scale = gl.load(arrays.q_scale + q_index, mask=positions < work.seqlen_q, other=1.0)
    else:
        q_scale = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, positions.type.layout)
    if C.SOFTCAP:
        q_scale = q_scale * numbers.softcap_rate
    else:
        q_scale = q_scale * numbers.scale_log2
    k_index = work.sequence * strides.k_scale_batch + work.head_kv * strides.k_scale_head
    v_index = work.sequence * strides.v_scale_batch + work.head_kv * strides.v_scale_head
    return TileScales(
        q_scale,
        arrays.k_scale + (k_index + first_k * strides.k_scale_block),
        arrays.v_scale + (v_index + first_k * strides.v_scale_block),
        strides.k_scale_block,
        strides.v_scale_block,
    )


@gluon.jit
def load_scales(C: gl.constexpr, scales, n):
    """Return (scale of k, scale of v) of key block ``n``, or of block 0 if n < 0.

    A scale that the call lacks is 1.0.
    """
    block = gl.maximum(n, 0) * C.BLOCK_N // KEY_BLOCK  # the load ahead of the last block is not used
    k_scale, v_scale = gl.to_tensor(1.0), gl.to_tensor(1.0)
    if C.HAS_K_SCALE:
        k_scale = gl.load(scales.k + block * scales.k_block)
    if C.HAS_V_SCALE:
        v_scale = gl.load(scales.v + block * scales.v_block)
    return k_scale, v_scale


@gluon.jit
def score_factor(C: gl.constexpr, scales, k_scale):
    """Return the factor [rows] by which raw products Q K^T are multiplied.

    Without C.SCALED_SCORES, the factor also multiplies masked scores, which are -inf. The factor is then
    clamped to be positive and finite, because 0 times -inf is NaN. With it, scores are scaled before they are
    masked.
    """
    factor = scales.rows * k_scale
    if not C.SCALED_SCORES:
        factor = gl.minimum(gl.maximum(factor, LEAST), 1 / LEAST)
    return factor


# Transposition of V in shared memory.


@gluon.jit
def transpose_tile(rows, transposed):
    """Transpose e4m3 ``rows`` [N, D] into ``transposed`` [D, N]. Both are in shared memory.

    FlashAttention-3 (section 3.3) uses LDSM.T and STSM. They move 16-bit units, each two adjacent columns of
    a row of V. A register then holds two keys of two columns. Exchanging bytes between two registers gives
    one register for each column, with four keys. These are the keys that one register of P holds, so the
    keys of ``transposed`` are in P's order (``fp8_layout.key_order``) without a further step.
    """
    N: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    loaded: gl.constexpr = pair_layout(D // 2, gl.num_warps())
    source = reinterpret(rows, gl.int16, [N, D // 2], words(D))
    target = reinterpret(transposed, gl.int16, [D, N // 2], words(N))
    for group in gl.static_range(N // GROUP):
        # x[d, key] holds columns 2 d and 2 d + 1 of one row. Below, the axes a, b, t and c stand for key
        # 16 a + 8 b + 2 t + c of the group.
        x = source.slice(group * GROUP, GROUP, dim=0).permute((1, 0)).load(loaded)
        x = x.reshape([D // 2, 2, 2, 4, 2]).permute((0, 1, 3, 4, 2))  # [d, a, t, c, b]
        low_keys, high_keys = gl.split(x)
        even, odd = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
            "=r,=r,r,r",
            [low_keys, high_keys],
            dtype=(gl.int16, gl.int16),
            is_pure=True,
            pack=2,
        )  # even and odd columns, each [d, a, t, b]; an int16 holds the keys with c = 0 and c = 1
        y = gl.join(even, odd).permute((0, 4, 1, 2, 3)).reshape([D, GROUP // 2])
        target.slice(group * (GROUP // 2), GROUP // 2, dim=1).store(y)


@gluon.constexpr_function
def pair_layout(pairs, warps):
    """Layout of int16 [pairs of columns, GROUP keys] as LDSM.T distributes them over the threads."""
    key_registers = [[0, 1], [0, 8], [0, 16]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    rest = []
    step = 8
    while step < pairs:
        rest.append([step, 0])
        step *= 2
    of_warps = len(range(1, warps.bit_length()))  # log2(warps): bases that tell the warps apart
    return gl.DistributedLinearLayout(
        reg_bases=key_registers + rest[: len(rest) - of_warps],
        lane_bases=lanes,
        warp_bases=rest[len(rest) - of_warps :],
        block_bases=[],
        shape=[pairs, GROUP.value],
    )


@gluon.constexpr_function
def words(columns):
    """Shared layout of a tile with rows of ``columns`` bytes that TMA has written, in 16-bit elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns, 128), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def transposed_layout(block_n):
    """Shared layout of a tile [head_dim, BLOCK_N] of V^T, in 8-bit elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(block_n, 128), element_bitwidth=8, rank=2)
