"""FP8 attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.3).

The schedule, the partitions and both overlaps are those of the 16-bit kernel (``hopper.forward``). This
kernel adds:

* e4m3 products at twice the rate (``fp8.attend``);
* scales (``fp8.scales``);
* P in e4m3 (``fp8.softmax``);
* V with contiguous keys, which e4m3 products require. Memory may hold V^T, with its keys in the order of P's
  registers. Otherwise the producer transposes each tile (``fp8.transpose``).
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_channel, make_ping_pong, make_ring
from flashtile.backends.hopper.compat import async_load, gluon
from flashtile.backends.hopper.forward.kernel import Output, load_keys, load_queries
from flashtile.backends.hopper.forward.schedule import consume, produce, tile_blocks
from flashtile.backends.hopper.fp8.attend import attend_tile
from flashtile.backends.hopper.fp8.scales import KEY_BLOCK, ScaleArrays
from flashtile.backends.hopper.fp8.transpose import transpose_tile, transposed_layout


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


class Fp8Call(NamedTuple):
    """Arguments of the launch that all partitions use, in the order of their first reads."""

    pointers: Any
    schedule: Any
    numbers: Any
    scales: Any


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


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, channels, ping_pong, output, call):
    """Consumer partition, warpgroup W: computes rows 64 W to 64 W + 63 of all query blocks of the program."""
    consume(C, attend_tile, queue, (W, channels, ping_pong, output), call)
    tma.store_wait(0)


@gluon.jit
def load_transposed(C: gl.constexpr, desc, work, n, barrier, slot):
    """Issue the TMA load of block ``n`` of V^T into ``slot``."""
    head, column = work.head_kv, n * C.BLOCK_N
    if C.VARLEN:
        first = work.start_k // KEY_BLOCK + work.sequence
        async_load(desc, [head, 0, first * KEY_BLOCK + column], barrier, slot)
    else:
        async_load(desc, [work.sequence, head, 0, column], barrier, slot)


@gluon.jit
def load_values(C: gl.constexpr, v_desc, work, n, i, v, v_rows):
    """Issue the TMA load of block ``n`` of v.

    It is the ``i``-th block of the channel ``v`` if V_TRANSPOSED, otherwise of ``v_rows``.
    """
    if C.V_TRANSPOSED:
        slot = v.acquire(i)
        mbarrier.expect(v.full.index(slot), v_desc.block_type.nbytes)
        load_transposed(C, v_desc, work, n, v.full.index(slot), v.tiles.index(slot))
    else:  # the slot is free: this partition has transposed its previous contents
        slot = i % C.STAGES
        mbarrier.expect(v_rows.full.index(slot), v_desc.block_type.nbytes)
        load_keys(C, v_desc, work, n, v_rows.full.index(slot), v_rows.tiles.index(slot))


@gluon.jit
def transpose_values(C: gl.constexpr, i, v, v_rows):
    """Transpose the ``i``-th block of ``v_rows`` into ``v``, which the consumers read."""
    rows = v_rows.tiles.index(v_rows.wait(i)).reshape([C.BLOCK_N, C.BLOCK_DV])
    slot = v.acquire(i)
    transpose_tile(rows, v.tiles.index(slot))
    fence_async_shared()
    mbarrier.arrive(v.full.index(slot), count=1)


@gluon.jit
def load_block(C: gl.constexpr, channels, descs, work, block, i, j, call):
    """Load q, k and v for query block ``block`` of a work tile; returns the new ``i``.

    A block of v that needs transposing is transposed after the load of the next block is issued.
    """
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    q, k, v, v_rows = channels
    q_desc, k_desc, v_desc = descs
    schedule = call.schedule
    n_begin, n_end = tile_blocks(C, work, block, schedule.window_left, schedule.window_right)
    for n in range(n_end - 1, n_begin - 1, -1):
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), k_desc.block_type.nbytes)
        load_keys(C, k_desc, work, n, k.full.index(slot), k.tiles.index(slot))
        if not C.V_TRANSPOSED:
            load_values(C, v_desc, work, n, i, v, v_rows)
            if i > 0:  # must precede q.acquire: consumers free q's slot after block i - 1
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
def producer(C: gl.constexpr, queue, channels, descs, call):
    """Producer partition: loads all tiles of q, k and v. It has one warp, or four if it transposes v."""
    i = produce(C, load_block, queue, (channels, descs), call)
    if not C.V_TRANSPOSED and i > 0:
        transpose_values(C, i - 1, channels.v, channels.v_rows)


@gluon_kernel(do_not_specialize=("schedule", "scale_strides"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers, scale_strides, C: gl.constexpr
):
    """FP8 forward. Grid: at most one program for each multiprocessor.

    Work tiles are assigned in ``serpentine_order``, or taken from the work queue, whose counter lies in
    ``table``.
    """
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, 1)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS if C.V_TRANSPOSED else 0, 1)
    # Without V_TRANSPOSED, the producer transposes the tiles in v_rows. A slot of v_rows is then free as soon
    # as the producer has transposed the slot's tile.
    v_rows = v
    if not C.V_TRANSPOSED:
        v_layout: gl.constexpr = transposed_layout(C.BLOCK_N)
        v_tiles = gl.allocate_shared_memory(v_desc.dtype, [C.STAGES, C.BLOCK_DV, C.BLOCK_N], v_layout)
        v = make_ring(v_tiles, C.STAGES, C.WARPGROUPS)
    ping_pong = make_ping_pong(C.WARPGROUPS if C.PING_PONG else 1)
    queue = work_queue.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
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
