"""Loads and stores of the Hopper forward: tiles of q, k, v and out by TMA, and lse."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flashtile.backends.hopper.columns import store_part
from flashtile.backends.hopper.compat import async_load, async_store, gluon
from flashtile.backends.hopper.constants import RAGGED_ROWS, WARPGROUP_ROWS
from flashtile.backends.hopper.forward.products import output_parts


class Output(NamedTuple):
    """Shared memory and descriptor through which the consumers store out."""

    tiles: Any
    """One tile for each consumer, or two with O_IN_PARTS; with Q_HOLDS_O, the tiles of q."""
    desc: Any


@gluon.jit
def first_column(C: gl.constexpr, work):
    """Return the first column of v and of the output that work tile ``work`` computes."""
    return work.head % C.COLUMN_SPLITS * C.BLOCK_DV


@gluon.jit
def load_keys(C: gl.constexpr, desc, work, n, barrier, slot, column=0):
    """Load block ``n`` of k or v by TMA, from ``column`` on; rows past the last key arrive as zeros."""
    row, head = n * C.BLOCK_N, work.head_kv
    if C.VARLEN or C.SEQUSED:
        end = work.start_k + work.seqlen_k
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_k + row, head, column], barrier, slot)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, slot)


@gluon.jit
def load_queries(
    C: gl.constexpr, w: gl.constexpr, desc, work, block, barrier, part, column: gl.constexpr = 0
):
    """Load the query rows of warpgroup ``w`` by TMA, from ``column`` on; rows past the last query arrive as
    zeros."""
    row, head = (block * C.BLOCK_M + w * WARPGROUP_ROWS) // C.PACK, work.head // C.COLUMN_SPLITS
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        row = RAGGED_ROWS - work.seqlen_q + row
        async_load(desc, [RAGGED_ROWS, end, row, head, column], barrier, part)
    elif C.PACK > 1:
        async_load(desc, [work.sequence, row, head, 0, column], barrier, part)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, part)


@gluon.jit
def store_rows(C: gl.constexpr, desc, work, row, part, column: gl.constexpr = 0):
    """Store a warpgroup's rows of the output by TMA, from ``column`` of the work tile's columns on; rows past
    the last query are not written."""
    head, column = work.head // C.COLUMN_SPLITS, first_column(C, work) + column
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        async_store(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, head, column], part)
    elif C.PACK > 1:
        async_store(desc, [work.sequence, row, head, 0, column], part)
    else:
        async_store(desc, [work.sequence, row, head, column], part)


@gluon.jit
def store_parts(C: gl.constexpr, W: gl.constexpr, o, output, work, row):
    """Store a warpgroup's rows by TMA, a few columns at a time (as many as the descriptor's block has).

    The parts alternate between two tiles of shared memory.
    """
    PART: gl.constexpr = output.desc.block_type.shape[-1]
    COUNT: gl.constexpr = (C.BLOCK_DV + PART - 1) // PART
    parts = output_parts(C, o, PART)
    for n in gl.static_range(COUNT):
        tile = output.tiles.index(2 * W + n % 2)
        # Wait for the previous store from this tile, which is the last store but one. For part 0 and an odd
        # COUNT it is the last store, that of the previous rows.
        tma.store_wait(0 if n == 0 and COUNT % 2 == 1 else 1)
        store_part(parts[n], tile)
        store_rows(C, output.desc, work, row, tile, n * PART)


@gluon.jit
def store_tile(C: gl.constexpr, W: gl.constexpr, o, q, q_part, j, output, work, first):
    """Store warpgroup W's rows of O by TMA, from row ``first`` on.

    The rows are written to shared memory before TMA stores them: to the tiles of q (Q_HOLDS_O), to small
    tiles a few columns at a time (O_IN_PARTS), or to a tile of their own. The queries are the ``j``-th block
    in the channel of q, and ``q_part`` is the index of the warpgroup's first tile of q. With Q_HOLDS_O, this
    function releases the block when the stores have read the tiles.
    """
    if C.Q_HOLDS_O and C.D_PARTS > 1:
        PART: gl.constexpr = output.desc.block_type.shape[-1]
        parts = output_parts(C, o, PART)
        for n in gl.static_range(C.BLOCK_DV // PART):
            store_part(parts[n], q.tiles.index(q_part + n))
            store_rows(C, output.desc, work, first, q.tiles.index(q_part + n), n * PART)
    elif C.O_IN_PARTS:
        store_parts(C, W, o, output, work, first)
    else:
        if C.Q_HOLDS_O:
            o_tile = q.tiles.index(q_part)
        else:
            o_tile = output.tiles.index(W)
            tma.store_wait(0)  # the tile may still hold the previous rows
        o_tile.reshape([WARPGROUP_ROWS, C.BLOCK_DV]).store(o)
        fence_async_shared()
        store_rows(C, output.desc, work, first, o_tile)
    if C.Q_HOLDS_O:
        tma.store_wait(0)
        q.release(j)


@gluon.jit
def store_lse(C: gl.constexpr, lse, work, head, positions, pointers, schedule):
    """Store lse (natural logarithm) of each row; rows past the last query are not written.

    Work tiles that divide the columns of v store the same lse.
    """
    if C.VARLEN:
        rows = head.to(gl.int64) * schedule.total_q + work.start_q + positions
    else:
        heads = schedule.num_heads // C.COLUMN_SPLITS * C.PACK
        head_of_batch = work.sequence.to(gl.int64) * heads + head
        rows = head_of_batch * schedule.seqlen_q + positions
    gl.store(pointers.lse + rows, lse, mask=positions < work.seqlen_q)
