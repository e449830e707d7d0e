"""The block table: one row a sequence, in flat int32 memory that Python and torch see alike.

Python reads and writes single numbers through ``array``, torch the same bytes as tensors, so that a single
operation costs no tensor and a step of a whole batch no loop.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from flashtile.kv_cache.pool import OutOfSequencesError

NOBODY = -1
NOTHING = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences in the order of a batch, resolved once: it serves until one of them is freed or swapped out.

    ``ids``, ``rows`` and ``starts`` are (batch,) int64 on the CPU: the sequences, their rows of the block
    table, and where these start in the flattened table.
    """

    sequences: tuple[int, ...]
    ids: Tensor
    rows: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.sequences)


class BlockTable:
    """Rows for ``max_sequences`` sequences of up to ``max_seqlen`` tokens.

    Attributes:
        lengths: tokens by row, 0 where there is no sequence.
        evicted: by row, leading blocks that have been given back because the window has passed them.
        entries: all rows behind one another; row r is ``entries[r * width : (r + 1) * width]``. What lies
            beyond a sequence's length is stale.
        rows: row by sequence, in order of creation; ``~row`` while the sequence is swapped out.
        changed_from: by row, the first entry that :meth:`take_changes` has not reported.
    """

    def __init__(self, max_sequences: int, max_seqlen: int, block_size: int):
        self.max_sequences, self.max_seqlen, self.block_size = max_sequences, max_seqlen, block_size
        self.width = -(-max_seqlen // block_size)
        self.lengths = array("i", bytes(4 * max_sequences))
        self.evicted = array("i", bytes(4 * max_sequences))
        self.entries = array("i", bytes(4 * max_sequences * self.width))
        self.owners = array("q", [NOBODY] * max_sequences)
        self.lengths_tensor = torch.frombuffer(self.lengths, dtype=torch.int32)
        self.entries_tensor = torch.frombuffer(self.entries, dtype=torch.int32).view(max_sequences, -1)
        self.owners_tensor = torch.frombuffer(self.owners, dtype=torch.int64)
        self.slices = memoryview(self.entries)
        self.rows: dict[int, int] = {}
        self.changed_from: dict[int, int] = {}
        self.free_rows = list(range(max_sequences - 1, -1, -1))
        self._next_sequence = 0

    def add(self) -> tuple[int, int]:
        """(sequence, row) of a new sequence; its number is never used again."""
        self.require_rows(1)
        sequence, row = self._next_sequence, self.free_rows.pop()
        self._next_sequence += 1
        self.rows[sequence] = row
        self.owners[row] = sequence
        return sequence, row

    def remove(self, sequence: int, row: int) -> None:
        self.lengths[row] = self.evicted[row] = 0
        self.owners[row] = NOBODY
        self.entries[row * self.width] = 0  # a step of a batch looks at it even before there is a first token
        self.changed_from.pop(row, None)
        self.free_rows.append(row)
        del self.rows[sequence]

    def require_rows(self, count: int) -> None:
        if count > len(self.free_rows):
            raise OutOfSequencesError(
                f"{count} more sequences are too many: "
                f"{len(self.rows)} of max_sequences={self.max_sequences} exist"
            )

    def row(self, sequence: int) -> int:
        """The row of a sequence that is not swapped out."""
        row = self.rows.get(sequence, NOBODY)
        if row < 0:
            self.refuse(sequence)
        return row

    def row_anywhere(self, sequence: int) -> tuple[int, bool]:
        """(row, whether it is swapped out)."""
        row = self.rows.get(sequence)
        if row is None:
            self.refuse(sequence)
        return (row, False) if row >= 0 else (~row, True)

    def set_swapped_out(self, sequence: int, row: int, swapped_out: bool) -> None:
        self.rows[sequence] = ~row if swapped_out else row
        self.owners[row] = NOBODY if swapped_out else sequence
        if swapped_out:
            self.changed_from.pop(row, None)
        else:
            self.changed_from[row] = 0

    def refuse(self, sequence: int) -> NoReturn:
        if sequence in self.rows:
            raise ValueError(f"sequence {sequence} is swapped out: swap it in first")
        raise ValueError(f"sequence must be one that exists, got {sequence!r}: it was freed or never created")

    def count(self, row: int) -> int:
        """Entries of the row that mean something."""
        return -(-self.lengths[row] // self.block_size)

    def held(self, row: int) -> list[int]:
        """The blocks that the row's sequence holds, in order."""
        start = row * self.width
        return self.slices[start + self.evicted[row] : start + self.count(row)].tolist()

    def put(self, row: int, column: int, block: int) -> None:
        self.entries[row * self.width + column] = block
        if column < self.changed_from.get(row, self.width):
            self.changed_from[row] = column

    def copy_row(self, source: int, target: int) -> list[int]:
        """Let ``target``, a new row, say what ``source`` says. Returns the blocks that both hold."""
        length, evicted = self.lengths[source], self.evicted[source]
        begin, count = target * self.width, -(-length // self.block_size)
        entries = self.slices[source * self.width :][:count]
        self.slices[begin : begin + count] = entries
        self.lengths[target], self.evicted[target] = length, evicted
        self.changed_from[target] = 0
        return entries[evicted:].tolist()

    def batch(self, sequences: Sequence[int]) -> Batch:
        """Resolve the sequences of a batch.

        Raises:
            ValueError: one does not exist, is swapped out or is there twice (it would be written to twice).
        """
        rows = [self.row(sequence) for sequence in sequences]
        if len(set(rows)) != len(rows):
            twice = next(sequence for sequence, count in Counter(sequences).items() if count > 1)
            raise ValueError(f"sequences must differ from one another, got {twice} more than once")
        indices = torch.tensor(rows, dtype=torch.int64)
        return Batch(
            tuple(sequences), torch.tensor(sequences, dtype=torch.int64), indices, indices * self.width
        )

    def check_batch(self, batch: Batch) -> None:
        """Raise ValueError if a sequence of the batch has been freed or swapped out since."""
        if not torch.equal(self.owners_tensor.index_select(0, batch.rows), batch.ids):
            for sequence in batch.sequences:
                self.row(sequence)

    def take_changes(self) -> tuple[Tensor, Tensor]:
        """(positions in the flattened table, int64; what stands there now, int32) since the last call."""
        if not self.changed_from:
            return NOTHING
        starts, counts = [], []
        for row, first in self.changed_from.items():
            starts.append(row * self.width + first)
            counts.append(max(0, self.count(row) - first))
        self.changed_from.clear()
        begins, sizes = torch.tensor(starts, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
        begins -= sizes.cumsum(0) - sizes
        positions = begins.repeat_interleave(sizes)
        positions += torch.arange(len(positions))
        return positions, self.entries_tensor.view(-1)[positions]
