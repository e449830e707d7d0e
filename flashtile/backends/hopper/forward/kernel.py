"""Attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3) in Gluon.

A persistent program has two or three *consumer* warpgroups of 64 query rows each and one *producer* warp. The
producer moves tiles of q, k and v to shared memory by TMA. A consumer multiplies them on the tensor cores
(wgmma) and keeps its rows' running maximum, sum and output in registers. Two overlaps hide the softmax:

* within a warpgroup: the softmax of block j runs while the product P V of block j - 1 is in flight;
* between warpgroups: one multiplies while another computes exponentials. The warpgroups drift apart by
  themselves, or PING_PONG orders them.

Blocks of keys are visited from the last to the first: the blocks that the right edge of the mask cuts, then
those that every row sees, then those that the left edge cuts. Only cut blocks are masked.

This module has the producer, the consumers and the kernel that starts them. ``attend`` computes a tile in a
consumer, in the steps of ``products`` and ``scores``. ``schedule`` has the loops over a program's tiles,
``tiles`` the loads and stores.

The kernel does not serve fp32, nor head sizes that are not multiples of 8, whose rows TMA cannot address.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_channel, make_channels, make_ping_pong
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.forward.attend import attend_tile
from flashtile.backends.hopper.forward.schedule import ForwardCall, consume, produce, tile_blocks
from flashtile.backends.hopper.forward.tiles import Output, first_column, load_keys, load_queries
from flashtile.backends.hopper.modifiers import bias as bias_tiles
from flashtile.backends.hopper.modifiers.block_lists import key_block, listed_keys


class ForwardInputs(NamedTuple):
    """The tensors that the producer loads: their channels to the consumers, or their descriptors."""

    q: Any
    k: Any
    v: Any
    bias: Any


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, channels, ping_pong, output, call):
    """Warpgroup W: compute rows 64 W to 64 W + 63 of every block of query rows of this program."""
    consume(C, attend_tile, queue, (W, channels, ping_pong, output), call)
    tma.store_wait(0)


@gluon.jit
def load_k(C: gl.constexpr, k, desc, work, n, i):
    """Load block ``n`` of k, the ``i``-th in its channel, or in the channel of each part with K_BY_PARTS."""
    PARTS: gl.constexpr = C.D_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
    if C.K_BY_PARTS:
        for part in gl.static_range(PARTS):
            slot = k[part].acquire(i)
            full = k[part].full.index(slot)
            mbarrier.expect(full, desc.block_type.nbytes)
            load_keys(C, desc, work, n, full, k[part].tiles.index(slot), part * COLUMNS)
    else:
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), PARTS * desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            k_part = k.tiles.index(slot * PARTS + part)
            load_keys(C, desc, work, n, k.full.index(slot), k_part, part * COLUMNS)


@gluon.jit
def load_v(C: gl.constexpr, v, desc, work, n, i):
    """Load the work tile's columns of block ``n`` of v, the ``i``-th in its channel."""
    PARTS: gl.constexpr = C.DV_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_DV // PARTS
    slot = v.acquire(i)
    mbarrier.expect(v.full.index(slot), PARTS * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        v_part = v.tiles.index(slot * PARTS + part)
        column = first_column(C, work) + part * COLUMNS
        load_keys(C, desc, work, n, v.full.index(slot), v_part, column)


@gluon.jit
def load_block(C: gl.constexpr, channels, descs, work, block, i, j, call):
    """Load all that the consumers need for one block of query rows; returns the new ``i``."""
    q, k, v, bias = channels
    q_desc, k_desc, v_desc, bias_desc = descs
    schedule = call.schedule
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    PARTS: gl.constexpr = C.D_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
    n_begin, n_end = tile_blocks(C, work, block, schedule.window_left, schedule.window_right)
    if C.LISTED:
        listed = listed_keys(C, 1, work, block, call.pointers.lists)
        n_begin, n_end = 0, listed.count
    for n in range(n_end - 1, n_begin - 1, -1):
        key_number = n
        if C.LISTED:
            key_number, _ = key_block(C, listed, n)
        load_k(C, k, k_desc, work, key_number, i)
        if n == n_end - 1:  # the first keys may be loaded before q's tile is free
            slot = q.acquire(j)
            mbarrier.expect(q.full.index(slot), WARPGROUPS * PARTS * q_desc.block_type.nbytes)
            for w in gl.static_range(WARPGROUPS):
                for part in gl.static_range(PARTS):
                    q_part = q.tiles.index((slot * WARPGROUPS + w) * PARTS + part)
                    load_queries(C, w, q_desc, work, block, q.full.index(slot), q_part, part * COLUMNS)
        if C.HAS_BIAS:
            bias_tiles.load_rows(C, bias, bias_desc, work, block, key_number, i, schedule)
        if not C.K_BY_PARTS:
            load_v(C, v, v_desc, work, key_number, i)
        elif n < n_end - 1:
            load_v(C, v, v_desc, work, n + 1, i - 1)
        i += 1
    if C.K_BY_PARTS:
        load_v(C, v, v_desc, work, n_begin, i - 1)
    return i


@gluon.jit
def producer(C: gl.constexpr, queue, channels, descs, call):
    """One warp that loads all tiles for the consumers."""
    produce(C, load_block, queue, (channels, descs), call)


@gluon_kernel(do_not_specialize=("pointers", "schedule"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, bias_desc, pointers, schedule, numbers, C: gl.constexpr
):  # fmt: skip
    """Compute out and lse. Grid: at most PROGRAMS programs per multiprocessor.

    Work tiles are assigned in ``serpentine_order``, or taken from the work queue, whose counter is in
    ``pointers.table``. Arguments that a call lacks (a bias, a table, slopes, a sink) are None.
    """
    bias = bias_tiles.make_row_tiles(C, bias_desc)
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS * C.D_PARTS)
    if C.K_BY_PARTS:
        k = make_channels(k_desc, C.STAGES, C.WARPGROUPS, C.D_PARTS)
    else:
        k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, C.D_PARTS)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS, C.DV_PARTS)
    channels = ForwardInputs(q, k, v, bias)
    ping_pong = make_ping_pong(C.WARPGROUPS if C.PING_PONG else 1)
    queue = work_queue.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
    if C.Q_HOLDS_O:
        o_tiles = q.tiles
    else:
        O_TILES: gl.constexpr = 2 * C.WARPGROUPS if C.O_IN_PARTS else C.WARPGROUPS
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [O_TILES] + o_desc.block_type.shape, o_desc.layout)
    output = Output(o_tiles, o_desc)
    call = ForwardCall(pointers, schedule, numbers)
    descs = ForwardInputs(q_desc, k_desc, v_desc, bias_desc)
    if C.WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, channels, descs, call)),
            ],
            [1],
            [C.PRODUCER_REGISTERS],
        )
    elif C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (consumer, (C, 1, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, channels, descs, call)),
            ],
            [4, 1],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (consumer, (C, 1, queue, channels, ping_pong, output, call)),
                (consumer, (C, 2, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, channels, descs, call)),
            ],
            [4, 4, 1],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
