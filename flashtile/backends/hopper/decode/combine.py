"""Parts of work tiles joined as ``portable.decode.combine`` does, without its search.

There each program finds out by the lengths of the whole batch what there is to combine. With rows by the
hundred, that takes longer than combining. Here each balanced program of attention that begins a work tile
leaves a note: in a place of the work tile's, or where there are more of these than programs, in one of its
own, since then only its last one can have other parts. Of a queue, the table says what was divided.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.hopper.decode.work import behind_partials, load_row
from flashtile.backends.portable.decode.combine import Parts, combine_rows
from flashtile.backends.portable.decode.schedule import (
    load_sequence,
    reach_of,
    sequence_of,
)

NOTE_WIDTH = tl.constexpr(8)
"""int32 numbers of a note."""


class Note(NamedTuple):
    """A work tile, by the program that began it."""

    splits: Any
    """Its parts; 0 in the place of a program that began none."""
    program: Any
    m_block: Any
    head_kv: Any
    num_rows: Any
    start_q: Any


@triton.jit
def write_partial_record(partial, note, lengths, splits, C: tl.constexpr):
    """Leave ``note`` in its place."""
    place = note.program
    if C.BY_WORK_TILE:
        place = note.m_block * lengths.num_heads_kv + note.head_kv
    to = behind_partials(partial, splits, C) + place * NOTE_WIDTH
    tl.store(to, note.splits)
    tl.store(to + 1, note.program)
    tl.store(to + 2, note.m_block)
    tl.store(to + 3, note.head_kv)
    tl.store(to + 4, note.num_rows)
    tl.store(to + 5, note.start_q)


@kernel(do_not_specialize=("lengths", "splits", "row_blocks"))
def combine_noted_kernel(pointers, lengths, splits, row_blocks, C: tl.constexpr):
    """Grid: (row blocks * places of notes,). A row block is ROWS rows of a work tile."""
    first_row = tl.program_id(0) % row_blocks * C.ROWS
    place = tl.program_id(0) // row_blocks
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    note = behind_partials(pointers.partial, splits, C) + place * NOTE_WIDTH
    count = tl.load(note)
    first_program = tl.load(note + 1)
    if C.BY_WORK_TILE:
        # Nobody begins a work tile without rows, whose place holds anything.
        b, m = sequence_of(place // lengths.num_heads_kv, lengths, C)
        head_kv = place % lengths.num_heads_kv
        sequence = load_sequence(b, True, pointers, lengths, C)
        num_rows, _, _ = reach_of(m, sequence, lengths, C)
        start_q = sequence.start_q
    else:
        b, m = sequence_of(tl.load(note + 2), lengths, C)
        head_kv = tl.load(note + 3)
        num_rows = tl.load(note + 4)
        start_q = tl.load(note + 5)
        num_rows = tl.where(count > 1, num_rows, 0)
    if first_row < num_rows:  # noqa: SIM102 - what a place without rows holds is not looked at
        if count > 1:
            # The first part is in its program's second slot, the others are in their programs' first.
            parts = Parts(b, m, head_kv, start_q, num_rows, count, 2 * first_program, 2, 1)
            combine_rows(parts, first_row, pointers, lengths, splits, C)


@kernel(do_not_specialize=("lengths", "splits", "row_blocks"))
def combine_divided_kernel(pointers, lengths, splits, row_blocks, C: tl.constexpr, WIDTH: tl.constexpr):
    """Combine what the table divides. Grid: any number of programs, which end at once where that is nothing.
    A row block is ROWS rows of a work tile."""
    num_heads_kv = lengths.num_heads_kv
    table = behind_partials(pointers.partial, splits, C)
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    units = tl.load(table + 2) * num_heads_kv * row_blocks
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        first_row = unit % row_blocks * C.ROWS
        head_kv = unit // row_blocks % num_heads_kv
        first = tl.load(table + (1 + unit // row_blocks // num_heads_kv) * WIDTH + 7)
        m_block, sequence, _, divided = load_row(table + first * WIDTH)
        b, m = sequence_of(m_block, lengths, C)
        num_rows, _, n_blocks = reach_of(m, sequence, lengths, C)
        each = (n_blocks + divided - 1) // divided
        count = (n_blocks + each - 1) // each
        if (count > 1) & (first_row < num_rows):
            start = (first - 1) * num_heads_kv + head_kv
            parts = Parts(b, m, head_kv, sequence.start_q, num_rows, count, start, num_heads_kv, 0)
            combine_rows(parts, first_row, pointers, lengths, splits, C)
