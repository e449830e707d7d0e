"""Combines partial results of work tiles like ``portable.decode.combine``, without searching for them.

In the portable kernel, each program searches the lengths of the whole batch for the parts to combine. With
many rows the search takes longer than combining. Here the attention kernel says which parts exist:

* A stream-K program that begins a work tile writes a *partial record*. There is one record for each work
  tile. If there are fewer programs than work tiles, there is one for each program: only the last work tile
  that a program begins can be continued by others.
* With a work queue, the queue's table lists the work tiles that were divided.

All other work tiles, also those whose rows see no key, were written by the attention kernel itself.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.hopper.decode.work import behind_partials, load_row
from flashtile.backends.portable.decode.combine import Parts, combine_rows
from flashtile.backends.portable.decode.schedule import (
    load_sequence,
    reach_of,
    sequence_of,
)

RECORD_WIDTH = tl.constexpr(8)
"""int32 numbers of a partial record: the six fields of :class:`PartialRecord`, and two that are not used."""


class PartialRecord(NamedTuple):
    """A work tile whose parts are to be combined, as written by the program that began it."""

    splits: Any
    """Number of parts of the work tile; 0 if the program began no work tile."""
    program: Any
    m_block: Any
    head_kv: Any
    num_rows: Any
    start_q: Any


@triton.jit
def write_partial_record(partial, record, lengths, splits, C: tl.constexpr):
    """Write ``record`` to its place in the memory after the partial results."""
    # BY_WORK_TILE: fewer work tiles than programs, so a record for each. Otherwise one for each program,
    # which may begin several work tiles: the last one overwrites the others, which are complete.
    index = record.program
    if C.BY_WORK_TILE:
        index = record.m_block * lengths.num_heads_kv + record.head_kv
    to = behind_partials(partial, splits, C) + index * RECORD_WIDTH
    tl.store(to, record.splits)
    tl.store(to + 1, record.program)
    tl.store(to + 2, record.m_block)
    tl.store(to + 3, record.head_kv)
    tl.store(to + 4, record.num_rows)
    tl.store(to + 5, record.start_q)


@kernel(do_not_specialize=("lengths", "splits", "row_blocks"))
def combine_recorded_kernel(pointers, lengths, splits, row_blocks, C: tl.constexpr):
    """Combine the parts of work tiles that several stream-K programs computed, and write out and lse.

    Each :class:`PartialRecord` in memory describes such a work tile. Grid: (row_blocks * partial records,). A
    row block is ROWS rows of a work tile.
    """
    first_row = tl.program_id(0) % row_blocks * C.ROWS
    index = tl.program_id(0) // row_blocks
    # Programs are placed while attention still runs (start_dependents). All that they read is written by it.
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    record = behind_partials(pointers.partial, splits, C) + index * RECORD_WIDTH
    count = tl.load(record)
    first_program = tl.load(record + 1)
    tl.debug_barrier()  # without it, the second load would wait for the first, behind the branch on ``count``
    if C.BY_WORK_TILE:
        # A work tile without rows has no record: its memory is uninitialised, so num_rows comes from lengths.
        b, m = sequence_of(index // lengths.num_heads_kv, lengths, C)
        head_kv = index % lengths.num_heads_kv
        sequence = load_sequence(b, True, pointers, lengths, C)
        num_rows, _, _ = reach_of(m, sequence, lengths, C)
        start_q = sequence.start_q
    else:
        b, m = sequence_of(tl.load(record + 2), lengths, C)
        head_kv = tl.load(record + 3)
        num_rows = tl.load(record + 4)
        start_q = tl.load(record + 5)
        num_rows = tl.where(count > 1, num_rows, 0)
    if first_row < num_rows:  # noqa: SIM102 - without rows, ``count`` is uninitialised
        if count > 1:
            # Each program has two slots. The first part of a work tile is in its program's second slot, any
            # other part is in its program's first slot: first slot 2 * first_program, then steps of 2, and 1
            # more for part 0.
            parts = Parts(b, m, head_kv, start_q, num_rows, count, 2 * first_program, 2, 1)
            combine_rows(parts, first_row, pointers, lengths, splits, C)


@kernel(do_not_specialize=("lengths", "splits", "row_blocks"))
def combine_divided_kernel(pointers, lengths, splits, row_blocks, C: tl.constexpr, WIDTH: tl.constexpr):
    """Combine the parts of divided work tiles, and write out and lse.

    The table of the work queue lists the divided work tiles. Grid: any number of programs, which loop over
    the row blocks. A row block is ROWS rows of a divided work tile. If no work tile is divided, the programs
    end immediately. The queue's counter is 0 again afterwards, so the next layer can use the table.
    """
    num_heads_kv = lengths.num_heads_kv
    table = behind_partials(pointers.partial, splits, C)
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) == 0:
        tl.store(table + 1, 0)
    units = tl.load(table + 2) * num_heads_kv * row_blocks
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        first_row = unit % row_blocks * C.ROWS
        head_kv = unit // row_blocks % num_heads_kv
        first = tl.load(table + (1 + unit // row_blocks // num_heads_kv) * WIDTH + 7)
        m_block, sequence, _, divided = load_row(table + first * WIDTH)
        b, m = sequence_of(m_block, lengths, C)
        num_rows, _, n_blocks = reach_of(m, sequence, lengths, C)
        # The last m_block of a sequence decides ``divided``. Others may have fewer n_blocks, and empty last
        # parts.
        each = (n_blocks + divided - 1) // divided
        count = (n_blocks + each - 1) // each
        if (count > 1) & (first_row < num_rows):
            # Slots are entries of the queue (``work.queued_tile``): rows of the table, heads side by side.
            start = (first - 1) * num_heads_kv + head_kv
            parts = Parts(b, m, head_kv, sequence.start_q, num_rows, count, start, num_heads_kv, 0)
            combine_rows(parts, first_row, pointers, lengths, splits, C)
