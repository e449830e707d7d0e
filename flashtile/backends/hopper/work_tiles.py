"""Work tiles, the units of work that a persistent program computes one after another.

In the forward, a work tile is one or two blocks of query rows of a head. In the backward, it is a block of
keys of a key head. For packed sequences, a kernel lists the work tiles in a *tile table*, those of the
longest sequences first. The host never reads the lengths, so a captured CUDA graph can be replayed with other
lengths. The kernel knows the lengths, so it also fills the rows of results that no work tile writes
(:class:`Unwritten`).

The kernels' functions on integers can be called from Python through ``.fn`` (tests, documentation).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.layouts import LOG2_E

TABLE_WIDTH = gl.constexpr(8)
"""Integers in a row of the tile table of packed sequences (``tile_table``). Row 0 is a header: the number of
other rows, then the number of work tiles taken from the work queue."""
TAKEN = gl.constexpr(1)
"""Index, in the header, of the number of work tiles taken. In dense calls with a work queue, the header is
the only row."""


class WorkTile(NamedTuple):
    """A work tile: its sequence, head and blocks, and where the sequence lies in memory."""

    sequence: Any
    head: Any
    """A head of the schedule: in the forward a query head, in the backward a key head, or a part of one."""
    head_kv: Any
    """The head's key head in k and v."""
    tile_in_head: Any
    """Number of the work tile in its sequence and head. In the forward it counts from the longest to the
    shortest; in the backward it is the block of keys."""
    start_q: Any
    """First row of the sequence in q."""
    start_k: Any
    """First row of the sequence in k."""
    seqlen_q: Any
    seqlen_k: Any


@gluon.jit
def num_work_tiles(C: gl.constexpr, pointers, schedule):
    """Return the number of work tiles of the launch.

    For packed sequences, the tile table holds the number of work tiles of one head.
    """
    num_tiles = schedule.num_tiles
    if C.VARLEN:
        num_tiles = gl.load(pointers.table) * schedule.num_heads
    return num_tiles


@gluon.jit
def slope_of(C: gl.constexpr, work, head, pointers, schedule):
    """Return ALiBi's slope of a query head, in log2 units; 0.0 without ALiBi."""
    slope = 0.0
    if C.ALIBI:
        slope = gl.load(pointers.alibi_slopes + work.sequence * schedule.alibi_stride + head) * LOG2_E
    return slope


CHUNK = 256
"""Sequences that a program compares with its own at a time, rows of the table that it writes at a time, and
vectors of 8 elements that it fills at a time."""
TILES_BY_COST = tl.constexpr(16)
"""Rows of the table that a program writes at a time if it compares each of them with all sequences."""
FILLERS = 264
"""Programs that fill rows: two for each multiprocessor of an H200. In most calls no row is left to fill, and
they end at once. A fill of whole results, which programs then overwrite, writes as many bytes as the
attention itself: 268 MB, or 70 us, for 32,768 tokens of 32 heads of 128."""


class Unwritten(NamedTuple):
    """Results of a launch. Rows after the last sequence, which no work tile writes, get 0, and lse -inf.

    Statistics that follow lse in memory (``problems.attention.new_lse``) count as further heads of it.
    """

    first: Any = None
    """Results whose rows are those of the work tiles: out, or dk and dv. None for each that a call lacks."""
    second: Any = None
    others: Any = None
    """A result with the rows of the other side: dq. Work tiles are blocks of keys, so the rows of a sequence
    without keys get 0 as well."""
    lse: Any = None
    """(heads, total), fp32. After it come the heads of the largest scores and the entropies, if there are."""


class UnwrittenSizes(NamedTuple):
    """Vectors of 8 elements in a token of each result, and the heads of lse."""

    first: Any = 0
    second: Any = 0
    others: Any = 0
    heads: Any = 0
    """Heads that get -inf: those of lse and of the largest scores."""
    entropies: Any = 0
    """Heads of the entropy, which get 0."""


@triton.jit
def lengths(cu_seqlens, sequence, total, mask):
    """Return (first row, number of rows) of sequences, clamped to the ``total`` rows of the tensor."""
    # The host never reads cu_seqlens, so nothing has checked them. Clamped, they lead to rows of the tensor.
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence, mask=mask, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1, mask=mask, other=0), start), total)
    return start, end - start


@triton.jit
def key_lengths(cu_seqlens_k, seqused_k, sequence, total_k, mask, SEQUSED: tl.constexpr):
    """Return (first row, number of keys) of sequences in k. ``seqused_k`` may shorten the sequences."""
    start, length = lengths(cu_seqlens_k, sequence, total_k, mask)
    if SEQUSED:
        used = tl.load(seqused_k + sequence, mask=mask, other=0)
        length = tl.minimum(tl.maximum(used, 0), length)
    return start, length


@triton.jit
def num_tiles(seqlen_q, num_blocks, PAIRED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the number of work tiles per head for sequences of ``seqlen_q`` rows.

    A work tile is a block of rows, or a pair of blocks if PAIRED. A sequence has at most ``num_blocks``
    blocks.
    """
    count = tl.minimum(tl.cdiv(seqlen_q, BLOCK_M), num_blocks)
    if PAIRED:
        count = (count + 1) // 2
    return count


@triton.jit
def end_of_last(cu_seqlens, batch, total):
    """Return the row at which the last sequence ends, clamped to the tensor."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), total)


@triton.jit
def fill_rows(result, first, end, vectors, program, programs, CHUNK: tl.constexpr):
    """Fill rows [first, end) of a result with 0. ``programs`` programs fill CHUNK vectors in turn."""
    place = tl.arange(0, CHUNK)
    elements = tl.arange(0, 8)
    last = end.to(tl.int64) * vectors
    for vector in range(first.to(tl.int64) * vectors + program * CHUNK, last, programs * CHUNK):
        offsets = (vector + place)[:, None] * 8 + elements[None, :]
        zeros = tl.zeros_like(offsets).to(result.dtype.element_ty)
        tl.store(result + offsets, zeros, mask=(vector + place < last)[:, None])


@triton.jit
def fill_unwritten(
    first, second, others, lse, sizes, cu_seqlens_q, cu_seqlens_k, batch, total_q, total_k, program, programs,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Fill the rows of the fields of :class:`Unwritten` after the last sequence.

    ``programs`` programs take part; this is number ``program``.
    """
    end = end_of_last(cu_seqlens_q, batch, total_q)
    if first is not None:
        fill_rows(first, end, total_q, sizes.first, program, programs, CHUNK)
    if second is not None:
        fill_rows(second, end, total_q, sizes.second, program, programs, CHUNK)
    if others is not None:
        end_k = end_of_last(cu_seqlens_k, batch, total_k)
        fill_rows(others, end_k, total_k, sizes.others, program, programs, CHUNK)
    if lse is not None:
        for row in range(end + program * CHUNK, total_q, programs * CHUNK):
            rows = row + tl.arange(0, CHUNK)
            of_head = lse + rows
            for _ in range(sizes.heads):
                tl.store(of_head, tl.full([CHUNK], float("-inf"), tl.float32), mask=rows < total_q)
                of_head += total_q
            for _ in range(sizes.entropies):
                tl.store(of_head, tl.zeros([CHUNK], tl.float32), mask=rows < total_q)
                of_head += total_q


@kernel(do_not_specialize=("batch", "num_blocks", "total_q", "total_k", "capacity", "sizes"))
def tile_table_kernel(
    table,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    first,
    second,
    others,
    lse,
    batch,
    num_blocks,
    total_q,
    total_k,
    capacity,
    sizes,
    SEQUSED: tl.constexpr,
    PAIRED: tl.constexpr,
    BY_COST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fill ``table``, and the rows of results that no work tile writes.

    Grid: one program for each of ``batch`` sequences, and further ones that only fill rows.

    Row 0 is a header: the number of work tiles per head, then the counter of work tiles that have been taken
    from the work queue, which starts at 0. Each other row is a work tile: sequence, tile_in_head, start_q,
    start_k, seqlen_q, seqlen_k. In the backward, work tiles are blocks of keys, so the caller exchanges q and
    k. Sequences with more keys come first; with BY_COST, work tiles that more tiles of their sequence follow.
    Under a causal mask these are the work tiles that visit most.
    """
    b = tl.program_id(0)
    fill_unwritten(
        first, second, others, lse, sizes, cu_seqlens_q, cu_seqlens_k, batch, total_q, total_k, b,
        tl.num_programs(0), CHUNK,
    )  # fmt: skip
    if b >= batch:
        return
    start_q, seqlen_q = lengths(cu_seqlens_q, b, total_q, True)
    start_k, seqlen_k = key_lengths(cu_seqlens_k, seqused_k, b, total_k, True, SEQUSED)
    # Each program finds its rows of the table by comparing its length with all others, which takes no sort.
    rank = 0
    total = 0
    for done in range(0, batch, CHUNK):
        j = done + tl.arange(0, CHUNK)
        inside = j < batch
        _, others_q = lengths(cu_seqlens_q, j, total_q, inside)
        _, others_k = key_lengths(cu_seqlens_k, seqused_k, j, total_k, inside, SEQUSED)
        counts = tl.where(inside, num_tiles(others_q, num_blocks, PAIRED, BLOCK_M), 0)
        before = (others_k > seqlen_k) | ((others_k == seqlen_k) & (j < b))  # equal ones by number
        rank += tl.sum(tl.where(before, counts, 0))
        total += tl.sum(counts)
    if b == 0:
        tl.store(table, tl.minimum(total, capacity))
        tl.store(table + 1, 0)
    count = num_tiles(seqlen_q, num_blocks, PAIRED, BLOCK_M)
    if others is not None:  # noqa: SIM102 - Triton prunes an if only by a constant condition
        if count == 0:
            fill_rows(others, start_k, start_k + seqlen_k, sizes.others, 0, 1, CHUNK)
    TILES: tl.constexpr = TILES_BY_COST if BY_COST else CHUNK
    for done in range(0, count, TILES):
        tile = done + tl.arange(0, TILES)
        place = rank + tile
        if BY_COST:
            place = tl.zeros([TILES], tl.int32)
            following = (count - tile)[:, None]
            for first_of_chunk in range(0, batch, CHUNK):
                j = first_of_chunk + tl.arange(0, CHUNK)
                inside = j < batch
                _, others_q = lengths(cu_seqlens_q, j, total_q, inside)
                counts = tl.where(inside, num_tiles(others_q, num_blocks, PAIRED, BLOCK_M), 0)[None, :]
                # A sequence of n tiles has n - f tiles with more than f following ones, and one with f.
                equal = (counts >= following) & (j < b)[None, :]
                place += tl.sum(tl.maximum(counts - following, 0) + equal.to(tl.int32), 1)
        row = table + (1 + place) * WIDTH
        # At most the capacity: with invalid cu_seqlens, sequences may overlap and have more tiles than rows.
        inside = (tile < count) & (place < capacity)
        tl.store(row, b, mask=inside)
        tl.store(row + 1, tile, mask=inside)
        tl.store(row + 2, start_q, mask=inside)
        tl.store(row + 3, start_k, mask=inside)
        tl.store(row + 4, seqlen_q, mask=inside)
        tl.store(row + 5, seqlen_k, mask=inside)


class TileTable:
    """Allocates and fills tile tables for the calls of one signature.

    Args:
        batch: sequences.
        seqlen: rows of the longest sequence: queries in the forward, keys in the backward.
        total: rows of all sequences.
        total_others: rows of the other side: keys in the forward, queries in the backward.
        block: rows of a block.
        sizes: those of the results whose unwritten rows are filled.
        seqused: whether calls limit the number of used rows of each sequence on the other side.
        paired: whether a work tile is a pair of blocks, not one block.
        by_cost: whether the order is that of a causal mask, by work tiles and not by sequences.
    """

    def __init__(
        self,
        batch: int,
        seqlen: int,
        total: int,
        total_others: int,
        block: int,
        sizes: UnwrittenSizes,
        seqused: bool = False,
        paired: bool = False,
        by_cost: bool = False,
    ) -> None:
        self.capacity = capacity(total, batch, block)
        """Maximum number of work tiles of one head."""
        blocks = triton.cdiv(seqlen, block)
        scalars = (batch, blocks, total, total_others, self.capacity, sizes)
        constants = (seqused, paired, by_cost, block, TABLE_WIDTH.value, CHUNK)
        self._fill = CachedLaunch(tile_table_kernel, max(batch, FILLERS), scalars, constants, None)

    def __call__(
        self,
        cu_seqlens: Tensor | None,
        cu_seqlens_others: Tensor | None,
        seqused: Tensor | None,
        unwritten: Unwritten,
    ) -> Tensor:
        """Return a filled table: (1 + capacity, TABLE_WIDTH), int32, on the device of ``cu_seqlens``.

        The rows of ``unwritten`` that no work tile writes are filled.
        """
        assert cu_seqlens is not None
        table = cu_seqlens.new_empty(1 + self.capacity, TABLE_WIDTH.value)
        used = table if seqused is None else seqused
        self._fill(cu_seqlens.device, table, cu_seqlens, cu_seqlens_others, used, *unwritten)
        return table


def capacity(total: int, batch: int, block: int) -> int:
    """Return the maximum number of blocks in ``batch`` packed sequences with ``total`` rows in all."""
    return total // block + batch
