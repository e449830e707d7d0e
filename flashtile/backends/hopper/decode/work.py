"""Which work tiles, and which parts of them, a program of attention over a cache computes."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.hopper import config
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.decode.schedule import (
    Lengths,
    Sequence,
    Sequences,
    WorkTile,
    load_sequence,
    reach_of,
    sequence_of,
    share_of,
    work_tile_at,
)

CHUNK = 256
"""Sequences that a program compares its own with at a time."""
FEW_ROWS = tl.constexpr(config.WARPGROUP_ROWS)
"""Up to so many of a sequence, its work tiles wait for memory; with more, they multiply."""


@triton.jit
def start_dependents():
    """The combining kernel may be placed; it waits for this kernel's end."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def balanced_tile(C: tl.constexpr, position, start, m_block, m_block_start, sequences, lengths):
    """(work tile, its n_blocks [n_begin, n_end), slot, parts of the work tile, and where the next one is).

    Parts are 0 unless these n_blocks are the first. A work tile's first part is the last work of its program,
    any other part the first.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    work, nth, m_block_end = work_tile_at(program, position, m_block, m_block_start, sequences, lengths, C)
    count = min(work.n_blocks - nth, start.end - position)
    splits = 0
    if nth == 0:
        splits = share_of(position + work.n_blocks - 1, programs, start.total) - program + 1
    position += count
    finished = position >= m_block_end
    m_block += finished.to(tl.int32)
    m_block_start = tl.where(finished, m_block_end, m_block_start)
    slot = 2 * program + (nth == 0).to(tl.int32)
    n_begin = work.keys.first // C.BLOCK_N + nth
    return work, n_begin, n_begin + count, slot, splits, position, m_block, m_block_start


@triton.jit
def splits_in_queue(C: tl.constexpr, table, splits):
    """Splits of each m_block that stand in the queue: of splits of a given size, no more than the longest
    sequence has, for a table of blocks may be far longer."""
    if C.SIZED_SPLITS:
        return tl.load(table + 2)
    else:
        return splits.num_splits


@triton.jit
def tiles_in_queue(C: tl.constexpr, table, lengths, splits):
    return tl.load(table) * lengths.num_heads_kv * splits_in_queue(C, table, splits)


@triton.jit
def queued_tile(C: tl.constexpr, tile_index, table, lengths, splits):
    """(work tile, its n_blocks [n_begin, n_end), slot, whether these are all) of the queue's ``tile_index``:
    heads side by side, split by split, m_block by m_block in the order of the table."""
    head_kv = tile_index % lengths.num_heads_kv
    in_queue = splits_in_queue(C, table, splits)
    split = tile_index // lengths.num_heads_kv % in_queue
    row = table + (1 + tile_index // lengths.num_heads_kv // in_queue) * TABLE_WIDTH
    m_block = tl.load(row)
    sequence = Sequence(
        tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    )
    b, m = sequence_of(m_block, lengths, C)
    num_rows, keys, n_blocks = reach_of(m, sequence, lengths, C)
    each = n_blocks
    if C.SPLIT:
        each = splits.split_n_blocks
        if splits.split_n_blocks == 0:
            each = max((n_blocks + splits.num_splits - 1) // splits.num_splits, 1)
    nth = split * each
    n_begin = keys.first // C.BLOCK_N + nth
    last = lengths.m_blocks_per_sequence - 1 - m
    slot = ((b * lengths.num_heads_kv + head_kv) * splits.num_splits + split) * lengths.m_blocks_per_sequence
    work = WorkTile(m_block, head_kv, sequence, num_rows, keys, n_blocks)
    return work, n_begin, n_begin + min(each, n_blocks - nth), slot + last, each >= n_blocks


@triton.jit
def count_m_blocks(sequence, lengths, C: tl.constexpr):
    """m_blocks of sequences."""
    return (sequence.len_q * lengths.group_size + C.BLOCK_M - 1) // C.BLOCK_M


@triton.jit
def has_few_rows(sequence, lengths):
    return sequence.len_q * lengths.group_size <= FEW_ROWS


@triton.jit
def place_in_queue(index, few, num_few, num_many):
    """Where the m_block stands that is number ``index`` of ``num_few`` of sequences with ``few`` rows, or of
    ``num_many`` of the others.

    Memory is idle while all programs multiply, and the tensor cores while all of them read. So the first half
    of the former is spread evenly among the latter. The second half ends the queue, for it is what fills up
    the time in which the last long work tiles end.
    """
    spread = (num_few // 2).to(tl.int64)
    if few:
        before = ((index + 1) * num_many.to(tl.int64) + spread - 1) // tl.maximum(spread, 1)
        before = tl.where(index < spread, tl.minimum(before, num_many), num_many)
    else:
        before = index * spread // tl.maximum(num_many, 1)
    return index + before.to(tl.int32)


@kernel(do_not_specialize=("batch", *Lengths._fields, "num_splits", "split_n_blocks"))
def table_kernel(
    table, cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, batch,
    m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
    window_left, window_right, num_splits, split_n_blocks, C: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Row 1 + rank of ``table``: an m_block and the :class:`schedule.Sequence` that it is of. Row 0: how many
    such rows there are, 0 for those that were taken from the queue, and the splits of each row.

    One program for each of ``batch`` sequences. Those with more keys come first, each from its last m_block,
    which may see the most keys, to its first; :func:`place_in_queue` merges those of few rows and the others.
    """
    sequences = Sequences(cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    b = tl.program_id(0)
    mine = load_sequence(b, True, sequences, lengths, C)
    few = has_few_rows(mine, lengths)
    rank = 0
    total = 0
    num_few = 0
    longest = 0
    for first in range(0, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        sequence = load_sequence(others, others < batch, sequences, lengths, C)
        counts = count_m_blocks(sequence, lengths, C)
        are_few = has_few_rows(sequence, lengths)
        before = (sequence.len_k > mine.len_k) | ((sequence.len_k == mine.len_k) & (others < b))
        rank += tl.sum(tl.where(before & (are_few == few), counts, 0))
        total += tl.sum(counts)
        num_few += tl.sum(tl.where(are_few, counts, 0))
        longest = max(longest, tl.max(tl.where(counts > 0, sequence.len_k, 0)))
    if b == 0:
        tl.store(table, total)
        tl.store(table + 1, 0)
        if split_n_blocks > 0:
            n_blocks = (longest + C.BLOCK_N - 1) // C.BLOCK_N
            num_splits = max(1, min(num_splits, (n_blocks + split_n_blocks - 1) // split_n_blocks))
        tl.store(table + 2, num_splits)
    count = count_m_blocks(mine, lengths, C)
    for first in range(0, count, CHUNK):
        nth = first + tl.arange(0, CHUNK)
        row = table + (1 + place_in_queue(rank + nth, few, num_few, total - num_few)) * WIDTH
        inside = nth < count
        tl.store(row, b * m_blocks_per_sequence + count - 1 - nth, mask=inside)
        tl.store(row + 1, mine.start_q, mask=inside)
        tl.store(row + 2, mine.len_q, mask=inside)
        tl.store(row + 3, mine.len_k, mask=inside)
        tl.store(row + 4, mine.leftpad, mask=inside)
        tl.store(row + 5, mine.fault, mask=inside)
