"""Work partitioning of attention over a cache: the parts of work tiles that a program computes.

``portable.decode.schedule`` defines *m_block*, *n_block* and *work tile*. Two ways::

    STREAM_K   balanced_start: an equal share of the list of all n_blocks, or (even_start) of one work tile
               balanced_tile: the next part of the share; at most two parts are of divided work tiles
    queue      table_kernel: a row for each m_block, or for each part of a long one, longest sequences first
               queued_tile: an index from the queue's counter -> row, split, head

The rest of the kernel sees a part as n_blocks [n_begin, n_end) of a work tile, and a slot for its result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.hopper.work_tiles import CHUNK, UnwrittenSizes, fill_unwritten
from flashtile.backends.portable.decode.schedule import (
    Sequence,
    WorkTile,
    count_n_blocks,
    load_sequence,
    reach_of,
    sequence_of,
    share_of,
    share_start,
    stream_k_start,
    work_tile_at,
)

CHUNKS = 16, 256
"""Numbers of sequences whose lengths a program of the table kernel reads at a time: few or many. Only two, so
that batches of all sizes share two kernels."""

FILLED = tl.constexpr(CHUNK)
"""Vectors of 8 elements that a program of the table kernel fills at a time."""
LIMITS = tl.constexpr(16)
"""Number of candidates for the maximum n_blocks of a part that :func:`part_limit` compares."""
PART_COST = tl.constexpr(3.0)
"""Cost of a part's prologue and epilogue (4.6 us), in n_blocks of 128 keys and rows (1.6 us)."""
COMBINE_COST = tl.constexpr(8.0)
"""Cost of storing partial results and combining them, in n_blocks: 13 us. Parts cost 9 and 15 us of a call of
8 sequences of 8192 keys with 8 and 16 tokens."""
PARTS = tl.constexpr(65536)
"""A row of the work queue's table stores two integers in one: PARTS * (number of parts) + (index of the
part)."""


class TablePointers(NamedTuple):
    """Tensors of the kernel that fills the work queue's table; None for each that a call does not use."""

    out: Any
    """out and lse of packed sequences: the kernel fills their rows that no work tile writes."""
    lse: Any
    partial: Any
    cache_seqlens: Any
    cache_leftpad: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any


class Start(NamedTuple):
    """Where a stream-K program's share of all n_blocks begins and ends (``schedule.stream_k_start``)."""

    total: Any
    """Number of n_blocks of all shares. If work tiles are divided alike (:func:`even_start`), -1 times that
    of a part: :func:`balanced_tile` tells the two apart by the sign."""
    position: Any
    end: Any
    m_block: Any
    m_block_start: Any


@triton.jit
def behind_partials(partial, splits, C: tl.constexpr):
    """Return the int32 pointer to the memory after the partial results and their log-sum-exps.

    That memory holds the partial records of stream-K programs, or the table that :func:`table_kernel` fills.
    """
    floats = splits.slots.to(tl.int64) * splits.partial_rows * (C.HEAD_DIM_V + 1)
    return (partial + floats).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def start_dependents():
    """Allow the next kernel of the stream to start (programmatic dependent launch): its programs take free
    multiprocessors while this kernel still runs. It waits for the end of this kernel by itself."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_table():
    """Wait for the end of the kernel that fills the work queue's table."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def even_start(index, start, pointers, lengths, C: tl.constexpr):
    """Return the :class:`Start` of this program if all work tiles are divided alike, otherwise ``start``.

    Equal shares of all n_blocks may begin anywhere in a work tile, because m_blocks and sequences differ a
    little in length. A program then computes parts of two work tiles. Programs that read the same keys for
    different m_blocks, or keys of adjacent heads, drift apart. So if the grid has equally many programs for
    each work tile, each takes the same number of n_blocks, all of one work tile, and the last one what is
    left. This holds unless a program would then compute more than PART_COST n_blocks above the mean.

    A program without n_blocks has position == end.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    heads = lengths.num_heads_kv
    counts = count_n_blocks(index, pointers, lengths, C)  # of all heads
    # Programs for each work tile, and n_blocks for each of them in the longest m_block.
    parts = tl.maximum(programs // (lengths.m_blocks * heads), 1)
    each = (tl.max(counts, 0) // heads + parts - 1) // parts
    # Only where the grid divides evenly, and where no program gets much more than the mean.
    alike = (parts * lengths.m_blocks * heads == programs) & (each <= start.total / programs + PART_COST)
    # Programs are ordered by m_block, then head, then part. Positions count from the m_block's first n_block,
    # so ``m_block_start`` is 0.
    m_block = program // (parts * heads)
    n_blocks = tl.sum(tl.where(index == m_block, counts, 0), 0) // heads
    nth = program % parts * each
    position = program // parts % heads * n_blocks + nth
    end = position + tl.maximum(tl.minimum(each, n_blocks - nth), 0)
    return Start(
        tl.where(alike, -each, start.total),
        tl.where(alike, position, start.position),
        tl.where(alike, end, start.end),
        tl.where(alike, m_block, start.m_block),
        tl.where(alike, 0, start.m_block_start),
    )


@triton.jit
def balanced_start(index, pointers, lengths, C: tl.constexpr):
    """Return the :class:`Start` of this program. ``index``: the integers from 0 to SCAN_BLOCK (exclusive)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total, position, m_block, m_block_start = stream_k_start(index, program, programs, pointers, lengths, C)
    start = Start(total, position, share_start(program + 1, programs, total), m_block, m_block_start)
    if C.ONE_SCAN:  # otherwise there are more work tiles than programs
        start = even_start(index, start, pointers, lengths, C)
    return start


@triton.jit
def balanced_tile(C: tl.constexpr, position, start, m_block, m_block_start, pointers, lengths):
    """Find the next work of a stream-K program, which begins at n_block ``position`` of the batch.

    Returns (work tile, n_begin, n_end, slot, splits, position, m_block, m_block_start). The program computes
    n_blocks [n_begin, n_end) of the work tile. ``slot`` is for the partial result, if the work tile is
    divided. ``splits`` is the number of parts of the work tile if this is its first part, otherwise 0. The
    last three values locate the work after this one.

    The first part of a divided work tile is the last work of its program. Any other part is the first work of
    its program.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    work, nth, m_block_end = work_tile_at(program, position, m_block, m_block_start, pointers, lengths, C)
    count = min(work.n_blocks - nth, start.end - position)
    # The program with the first part knows which others have parts, and records it for combining: those up to
    # the program of the work tile's last n_block.
    splits = 0
    if nth == 0:
        if start.total < 0:
            splits = (work.n_blocks - start.total - 1) // -start.total
        else:
            splits = share_of(position + work.n_blocks - 1, programs, start.total) - program + 1
    position += count
    finished = position >= m_block_end
    m_block += finished.to(tl.int32)
    m_block_start = tl.where(finished, m_block_end, m_block_start)
    # Two slots a program: the second for the work tile that it begins, the first for one that it continues.
    slot = 2 * program + (nth == 0).to(tl.int32)
    n_begin = work.keys.first // C.BLOCK_N + nth
    return work, n_begin, n_begin + count, slot, splits, position, m_block, m_block_start


@triton.jit
def load_row(row):
    """Read (m_block, Sequence, index of a part, number of parts) from a row of the work queue's table.

    The row stands for one of the parts into which the m_block's work tiles are divided.
    """
    sequence = Sequence(
        tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    )
    part = tl.load(row + 6)
    return tl.load(row), sequence, part % PARTS, part // PARTS


@triton.jit
def queued_tile(C: tl.constexpr, tile_index, table, lengths, splits, WIDTH: tl.constexpr):
    """Return (work tile, n_begin, n_end, slot, whole) of entry ``tile_index`` of the queue.

    The entry stands for n_blocks [n_begin, n_end). ``whole`` says whether these are all n_blocks of the work
    tile. Entries are ordered by row of the table, then by split, then by head.
    """
    head_kv = tile_index % lengths.num_heads_kv
    split = tile_index // lengths.num_heads_kv % splits.num_splits
    row = tile_index // lengths.num_heads_kv // splits.num_splits
    m_block, sequence, part, parts = load_row(table + (1 + row) * WIDTH)
    b, m = sequence_of(m_block, lengths, C)
    num_rows, keys, n_blocks = reach_of(m, sequence, lengths, C)
    each = n_blocks  # of a part: all, unless work tiles are divided below
    # Fixed splits: the slot that the portable combining kernel reads, by sequence, head, split, and m_block
    # (from the last).
    # With DIVIDES, slots are entries of the queue, which ``combine_divided_kernel`` counts in the same way.
    last = lengths.m_blocks_per_sequence - 1 - m
    slot = ((b * lengths.num_heads_kv + head_kv) * splits.num_splits + split) * lengths.m_blocks_per_sequence
    slot += last
    if C.DIVIDES:
        split = part
        each = (n_blocks + parts - 1) // parts
        slot = tile_index
    elif C.SPLIT:
        each = splits.split_n_blocks
        if splits.split_n_blocks == 0:
            each = max((n_blocks + splits.num_splits - 1) // splits.num_splits, 1)
    nth = split * each
    n_begin = keys.first // C.BLOCK_N + nth
    work = WorkTile(m_block, head_kv, sequence, num_rows, keys, n_blocks)
    return work, n_begin, n_begin + min(each, n_blocks - nth), slot, each >= n_blocks


@triton.jit
def count_m_blocks(sequence, lengths, C: tl.constexpr):
    """Return (number of m_blocks, number of n_blocks for the last m_block) of each sequence.

    The last m_block sees the most keys.
    """
    count = (sequence.len_q * lengths.group_size + C.BLOCK_M - 1) // C.BLOCK_M
    _, _, n_blocks = reach_of(tl.maximum(count - 1, 0), sequence, lengths, C)
    return count, n_blocks


@triton.jit
def part_limit(batch, programs, slots, pointers, lengths, C: tl.constexpr, CHUNK: tl.constexpr):
    """Choose the maximum number of n_blocks in a part. Longer work tiles are divided into parts.

    Of LIMITS candidates, return the one with the smallest estimated time on ``programs`` programs, or the
    largest of several with equal times. The candidates are the n_blocks of the longest work tile, divided by
    1, 1.5, 2, 3, 4, 6 and so on. A candidate is excluded if the work tiles that it divides would have more
    than ``slots`` parts in total.

    The estimated time is the larger of two bounds, plus COMBINE_COST if any work tile is divided. The first
    bound is the mean load per program. The second bound is the time of the parts that are longer than half
    the limit, if each program computes one such part per round. Work tiles of similar lengths therefore stay
    whole, unless the last round would be almost empty.
    """
    index = tl.arange(0, LIMITS)
    longest = tl.full([], 1, tl.int32)
    # Two passes over the lengths: the candidates follow from the longest. Every program computes the same
    # limit, so that it needs no kernel of its own.
    for first in range(0, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        sequence = load_sequence(others, others < batch, pointers, lengths, C)
        _, n_blocks = count_m_blocks(sequence, lengths, C)
        longest = tl.maximum(longest, tl.max(n_blocks, 0))
    shares = (2 + index % 2) << (index // 2)  # twice the divisor: 2, 3, 4, 6, 8, 12 ...
    limits = (2 * longest + shares - 1) // shares
    # For each candidate: n_blocks with the costs of their parts, parts longer than half the limit, and parts
    # that need a slot.
    load = tl.zeros([LIMITS], tl.float32)
    long_parts = tl.zeros([LIMITS], tl.int32)
    divided = tl.zeros([LIMITS], tl.int32)
    for first in range(0, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        sequence = load_sequence(others, others < batch, pointers, lengths, C)
        count, n_blocks = count_m_blocks(sequence, lengths, C)
        tiles = (count * lengths.num_heads_kv)[None, :]
        n_blocks = n_blocks[None, :]
        parts = (n_blocks + limits[:, None] - 1) // limits[:, None]
        load += tl.sum(tiles * (n_blocks + PART_COST * parts), 1)
        long_parts += tl.sum(tl.where(2 * n_blocks > limits[:, None], tiles * parts, 0), 1)
        divided += tl.sum(tl.where(parts > 1, tiles * parts, 0), 1)
    rounds = (long_parts + programs - 1) // programs
    time = tl.maximum(rounds * (limits + PART_COST), load / programs)
    time += tl.where(divided > 0, COMBINE_COST, 0.0)
    time = tl.where(divided <= slots, time, float("inf"))
    # The first candidate divides nothing and needs no slot, so one is always left.
    return tl.max(tl.where(-time == tl.max(-time, 0), limits, 0), 0)


@kernel(do_not_specialize=("batch", "programs", "lengths", "splits"))
def table_kernel(
    pointers, batch, programs, lengths, splits, C: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Fill the table of the work queue, and of packed sequences the rows that no work tile writes.

    Grid: one program for each of ``batch`` sequences, and further ones that fill rows, while those find their
    place in the table.

    The table has int32 rows of WIDTH columns. Row 0 holds the number of rows that follow, the queue's counter
    (0), and the number D of m_blocks that are divided into several parts. Each further row is one part: its
    m_block, the :class:`schedule.Sequence`, the index of the part, and the number of parts of the m_block.

    Sequences are sorted by falling number of n_blocks, so the divided m_blocks, which have the most n_blocks,
    come first. The m_blocks of a sequence are in reverse order, because the last m_block may see the most
    keys. The parts of an m_block are consecutive.

    The last column has another meaning: rows 1 to D of this column list the divided m_blocks. Entry i is the
    index of the row that holds the first part of the i-th divided m_block.
    """
    if C.PDL:  # attention begins meanwhile, and waits for the end of this kernel before it reads the table
        start_dependents()
    table = behind_partials(pointers.partial, splits, C)
    b = tl.program_id(0)
    if C.VARLEN:  # noqa: SIM102 - Triton prunes an if only by a constant condition
        if b >= batch:
            heads = lengths.num_heads_kv * lengths.group_size
            fill_unwritten(
                pointers.out, None, None, pointers.lse,
                UnwrittenSizes(heads * C.HEAD_DIM_V // 8, 0, 0, heads, 0), pointers.cu_seqlens_q, None,
                batch, lengths.total_q, 0, b - batch, tl.num_programs(0) - batch, FILLED,
            )  # fmt: skip
            return
    mine = load_sequence(b, True, pointers, lengths, C)
    count, my_n_blocks = count_m_blocks(mine, lengths, C)
    limit = lengths.capacity  # of keys, and there are never more n_blocks: nothing is divided
    if C.DIVIDES:
        limit = part_limit(batch, programs, splits.slots, pointers, lengths, C, CHUNK)
    my_parts = tl.maximum((my_n_blocks + limit - 1) // limit, 1)
    # Each program finds the rows of its sequence by comparing its length with all others, which takes no
    # sort.
    rank = 0
    first_row = 1
    total = 0
    divided = 0
    for first in range(0, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        sequence = load_sequence(others, others < batch, pointers, lengths, C)
        counts, n_blocks = count_m_blocks(sequence, lengths, C)
        parts = tl.maximum((n_blocks + limit - 1) // limit, 1)
        before = (n_blocks > my_n_blocks) | ((n_blocks == my_n_blocks) & (others < b))  # equal ones by number
        rank += tl.sum(tl.where(before, counts, 0))
        first_row += tl.sum(tl.where(before, counts * parts, 0))
        total += tl.sum(counts * parts)
        divided += tl.sum(tl.where(parts > 1, counts, 0))
    # Row 0 is written by one program. The attention kernel waits for the end of this one (wait_for_table), so
    # it never counts before the counter is 0.
    if b == 0:
        tl.store(table, total)
        tl.store(table + 1, 0)
        tl.store(table + 2, divided)
    for first in range(0, count * my_parts, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        row = table + (first_row + entry) * WIDTH
        inside = entry < count * my_parts
        tl.store(row, b * lengths.m_blocks_per_sequence + count - 1 - entry // my_parts, mask=inside)
        tl.store(row + 1, mine.start_q, mask=inside)
        tl.store(row + 2, mine.len_q, mask=inside)
        tl.store(row + 3, mine.len_k, mask=inside)
        tl.store(row + 4, mine.leftpad, mask=inside)
        tl.store(row + 5, mine.fault, mask=inside)
        tl.store(row + 6, my_parts * PARTS + entry % my_parts, mask=inside)
        tl.store(table + (1 + rank + entry) * WIDTH + 7, first_row + entry * my_parts, mask=entry < count)
