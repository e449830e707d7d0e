"""Parts of work tiles that balanced programs left, joined as ``portable.decode.combine`` does, without its
search.

There each program finds out by the lengths of the whole batch what there is to combine. With rows by the
hundred, that takes longer than combining. Here each attention program that begins a work tile leaves a note:
in a place of the work tile's, or where there are more of these than programs, in one of its own, since then
only its last one can have other parts.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.portable.decode.combine import combine_rows
from flashtile.backends.portable.decode.results import Splits
from flashtile.backends.portable.decode.schedule import (
    Lengths,
    Sequences,
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
def notes_in(partial, splits, C: tl.constexpr):
    """Where notes lie: behind the partial results and their log-sum-exps."""
    floats = splits.slots.to(tl.int64) * splits.partial_rows * (C.HEAD_DIM_V + 1)
    return (partial + floats).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def write_note(partial, note, lengths, splits, C: tl.constexpr):
    """Leave ``note`` in its place."""
    place = note.program
    if C.BY_WORK_TILE:
        place = note.m_block * lengths.num_heads_kv + note.head_kv
    to = notes_in(partial, splits, C) + place * NOTE_WIDTH
    tl.store(to, note.splits)
    tl.store(to + 1, note.program)
    tl.store(to + 2, note.m_block)
    tl.store(to + 3, note.head_kv)
    tl.store(to + 4, note.num_rows)
    tl.store(to + 5, note.start_q)


@kernel(do_not_specialize=(*Lengths._fields, *Splits._fields, "row_blocks"))
def combine_noted_kernel(
    partial_ptr, out_ptr, lse_ptr, sink_ptr, cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new,
    m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
    window_left, window_right, partial_rows, slots, num_splits, split_n_blocks, row_blocks, C: tl.constexpr,
):  # fmt: skip
    """Grid: (row blocks * places of notes,). A row block is ROWS rows of a work tile; with fewer
    ``row_blocks`` than rows, unless BY_WORK_TILE, each goes on behind the last one."""
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    partial = Splits(partial_rows, slots, num_splits, split_n_blocks)
    first_row = tl.program_id(0) % row_blocks * C.ROWS
    place = tl.program_id(0) // row_blocks
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    note = notes_in(partial_ptr, partial, C) + place * NOTE_WIDTH
    splits = tl.load(note)
    first_program = tl.load(note + 1)
    if C.BY_WORK_TILE:
        # Nobody begins a work tile without rows, whose place holds anything.
        b, m = sequence_of(place // num_heads_kv, lengths, C)
        head_kv = place % num_heads_kv
        sequences = Sequences(cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
        sequence = load_sequence(b, True, sequences, lengths, C)
        num_rows, _, _ = reach_of(m, sequence, lengths, C)
        start_q = sequence.start_q
    else:
        b, m = sequence_of(tl.load(note + 2), lengths, C)
        head_kv = tl.load(note + 3)
        num_rows = tl.load(note + 4)
        start_q = tl.load(note + 5)
        num_rows = tl.where(splits > 1, num_rows, 0)
    if first_row < num_rows:  # noqa: SIM102 - what a place without rows holds is not looked at
        if splits > 1:
            # The first part is in its program's second slot, the others are in their programs' first.
            slot = 2 * first_program
            if C.BY_WORK_TILE:
                combine_rows(
                    partial_ptr, out_ptr, lse_ptr, sink_ptr, None, None, b, m, head_kv, start_q, num_rows,
                    first_row, splits, slot, 2, 1, lengths, partial, C,
                )  # fmt: skip
            else:
                for row in range(first_row, num_rows, row_blocks * C.ROWS):
                    combine_rows(
                        partial_ptr, out_ptr, lse_ptr, sink_ptr, None, None, b, m, head_kv, start_q, num_rows,
                        row, splits, slot, 2, 1, lengths, partial, C,
                    )  # fmt: skip
