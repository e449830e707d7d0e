"""Attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3) in Gluon.

A persistent program has two or three *consumer* warpgroups of 64 query rows each and one *producer* warp. The
producer moves tiles of q, k and v to shared memory by TMA. A consumer multiplies them on the tensor cores
(wgmma) and keeps its rows' running maximum, sum and output in registers. Two overlaps hide the softmax:

* within a warpgroup: the softmax of block j runs while the product P V of block j - 1 is in flight;
* between warpgroups: one multiplies while another exponentiates. They drift apart by themselves, or PING_PONG
  orders them.

Key blocks are walked from the last to the first: those that the mask's right edge cuts, those that every row
sees, those that the left edge cuts. Only cut blocks pay for a mask.

The partitions are here: producer, consumers, and the kernel that starts them. ``attend`` is what a consumer
does with a tile, in steps of ``products`` and ``scores``; ``schedule`` says which tiles a program computes,
``tiles`` how they come and go.

Not served here: fp32, and head sizes whose rows TMA cannot address (multiples of 8 only).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_channel, make_ping_pong
from flashtile.backends.hopper.forward.attend import attend_tile
from flashtile.backends.hopper.forward.schedule import (
    block_of_part,
    find_work_tile,
    leave_queue,
    next_tile,
    num_own_tiles,
    num_parts,
    query_blocks,
    serpentine_order,
    tile_blocks,
)
from flashtile.backends.hopper.forward.tiles import load_keys, load_queries
from flashtile.backends.hopper.modifiers import bias as bias_tiles
from flashtile.backends.hopper.modifiers.block_lists import key_block, listed_keys
from flashtile.backends.hopper.work_tiles import num_work_tiles


@gluon.jit
def attend_work_tile(
    C: gl.constexpr, W: gl.constexpr, tile_index, i, j, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers,
    schedule, numbers,
):  # fmt: skip
    """The blocks of query rows of a work tile; returns the new ``i`` and ``j`` of :func:`attend_tile`."""
    work = find_work_tile(C, tile_index, pointers, schedule)
    num_blocks = query_blocks(C, work, schedule)
    for part in range(num_parts(num_blocks, work.place, C.PAIRED)):
        block = block_of_part(num_blocks, work.place, part, C.PAIRED)
        i = attend_tile(
            C, W, work, block, i, j, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
        )
        j += 1
    return i, j


@gluon.jit
def consumer(
    C: gl.constexpr, W: gl.constexpr, queue, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule,
    numbers,
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
                C, W, tile_index, i, j, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
            )
            t += 1
            tile_index = work_queue.take(queue, t, 4)
    else:
        program, programs = gl.program_id(0), gl.num_programs(0)
        for t in range(num_own_tiles(program, programs, num_tiles)):
            tile_index = serpentine_order(t, program, programs)
            i, j = attend_work_tile(
                C, W, tile_index, i, j, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
            )
    tma.store_wait(0)


@gluon.jit
def load_block(
    C: gl.constexpr, work, block, i, j, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule
):
    """All that the consumers need for one block of query rows; returns the new ``i``."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    PARTS: gl.constexpr = C.D_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
    V_PARTS: gl.constexpr = C.DV_PARTS
    V_COLUMNS: gl.constexpr = C.BLOCK_DV // V_PARTS
    n_begin, n_end = tile_blocks(C, work, block, schedule.window_left, schedule.window_right)
    if C.LISTED:
        listed = listed_keys(C, 1, work, block, pointers.lists)
        n_begin, n_end = 0, listed.count
    for n in range(n_end - 1, n_begin - 1, -1):
        key_number = n
        if C.LISTED:
            key_number, _ = key_block(C, listed, n)
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), PARTS * k_desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            k_part = k.tiles.index(slot * PARTS + part)
            load_keys(C, k_desc, work, key_number, k.full.index(slot), k_part, part * COLUMNS)
        if n == n_end - 1:  # the first keys may come before q's tile is free
            slot = q.acquire(j)
            mbarrier.expect(q.full.index(slot), WARPGROUPS * PARTS * q_desc.block_type.nbytes)
            for w in gl.static_range(WARPGROUPS):
                for part in gl.static_range(PARTS):
                    q_part = q.tiles.index((slot * WARPGROUPS + w) * PARTS + part)
                    load_queries(C, w, q_desc, work, block, q.full.index(slot), q_part, part * COLUMNS)
        if C.HAS_BIAS:
            bias_tiles.load_rows(C, bias, bias_desc, work, block, key_number, i, schedule)
        slot = v.acquire(i)
        mbarrier.expect(v.full.index(slot), V_PARTS * v_desc.block_type.nbytes)
        for part in gl.static_range(V_PARTS):
            v_part = v.tiles.index(slot * V_PARTS + part)
            load_keys(C, v_desc, work, key_number, v.full.index(slot), v_part, part * V_COLUMNS)
        i += 1
    return i


@gluon.jit
def load_work_tile(
    C: gl.constexpr, tile_index, i, j, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule
):
    """Load the tiles that :func:`attend_work_tile` waits for."""
    work = find_work_tile(C, tile_index, pointers, schedule)
    num_blocks = query_blocks(C, work, schedule)
    for part in range(num_parts(num_blocks, work.place, C.PAIRED)):
        block = block_of_part(num_blocks, work.place, part, C.PAIRED)
        i = load_block(
            C, work, block, i, j, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule
        )
        j += 1
    return i, j


@gluon.jit
def producer(
    C: gl.constexpr, queue, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule
):  # fmt: skip
    """One warp that keeps the tiles of q, k and v coming."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    num_tiles = num_work_tiles(C, pointers, schedule)
    i = 0
    j = 0
    if C.QUEUED:
        t = 0
        tile_index = program
        work_queue.put(queue, t, tile_index)
        while tile_index < num_tiles:
            i, j = load_work_tile(
                C, tile_index, i, j, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule
            )
            t += 1
            # The atomic takes its time, while the consumers work on the tiles that are loaded.
            tile_index = next_tile(pointers, programs)
            work_queue.put(queue, t, tile_index)
        if C.HAS_MODS:  # others would spill more for it
            leave_queue(pointers, tile_index, num_tiles, programs)
    else:
        for t in range(num_own_tiles(program, programs, num_tiles)):
            tile_index = serpentine_order(t, program, programs)
            i, j = load_work_tile(
                C, tile_index, i, j, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule
            )


@gluon_kernel(do_not_specialize=("pointers", "schedule"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, bias_desc, pointers, schedule, numbers, C: gl.constexpr
):  # fmt: skip
    """Grid: one program for each multiprocessor at most.

    Work tiles are dealt out in ``serpentine_order``, or taken from the work queue, whose counter lies in
    ``pointers.table``. What a call does not have (a bias, a table, slopes, a sink) is None.
    """
    bias = bias_tiles.make_row_tiles(C, bias_desc)
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS * C.D_PARTS)
    k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, C.D_PARTS)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS, C.DV_PARTS)
    ping_pong = make_ping_pong(C.WARPGROUPS if C.PING_PONG else 1)
    queue = work_queue.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
    if C.Q_HOLDS_O:
        o_tiles = q.tiles
    else:
        O_TILES: gl.constexpr = 2 * C.WARPGROUPS if C.O_IN_PARTS else C.WARPGROUPS
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [O_TILES] + o_desc.block_type.shape, o_desc.layout)
    if C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (
                    C, 0, queue, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
                )),
                (consumer, (
                    C, 1, queue, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
                )),
                (producer, (C, queue, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule)),
            ],
            [4, 1],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (
                    C, 0, queue, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
                )),
                (consumer, (
                    C, 1, queue, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
                )),
                (consumer, (
                    C, 2, queue, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
                )),
                (producer, (C, queue, q, k, v, bias, q_desc, k_desc, v_desc, bias_desc, pointers, schedule)),
            ],
            [4, 4, 1],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )  # fmt: skip
