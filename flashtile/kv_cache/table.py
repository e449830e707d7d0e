"""The block table: one row per sequence, in int32 memory shared by Python arrays and torch tensors.

Python code reads and writes single numbers through ``array``; torch views the same bytes as tensors. So an
operation on one sequence makes no tensor, and a step of a batch needs no loop.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.checks.conversions import as_int
from flashtile.kv_cache.pool import ArraysWithViews, OutOfSequencesError

NO_SEQUENCE = -1
NO_STEP = 0
NO_CHANGES = (
    torch.empty(0, dtype=torch.int64, device="cpu"),
    torch.empty(0, dtype=torch.int32, device="cpu"),
)


def as_ints(name: str, values: Iterable[int] | Tensor) -> array[int]:
    """Return ``values`` as an array of int64.

    Raises:
        TypeError, ValueError: ``values`` are not ints in one dimension; the message has ``name``.
    """
    if isinstance(values, Tensor):
        if values.dim() != 1:
            raise ValueError(f"{name} must be one-dimensional, got shape {tuple(values.shape)}")
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
            raise TypeError(f"{name} must be integers, got {values.dtype}")
        values = values.tolist()
    try:
        return array("q", [*values])
    except TypeError as error:
        raise TypeError(f"{name} must be integers in one dimension: {error}") from None
    except OverflowError:
        raise ValueError(f"{name} must be integers within int64") from None


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a batch and their rows. Valid until one of the sequences is freed or swapped out.

    ``ids``, ``rows`` and ``starts`` are (batch,) int64 on the CPU: the sequences, their rows of the block
    table, and the rows' offsets in the flattened table. ``owner`` identifies the manager that made the batch.
    """

    sequences: tuple[int, ...]
    ids: Tensor
    rows: Tensor
    starts: Tensor
    owner: object

    def __len__(self) -> int:
        return len(self.sequences)


class BlockTable(ArraysWithViews):
    """A table with rows for ``max_sequences`` sequences of up to ``max_seqlen`` tokens.

    Attributes:
        max_blocks: entries of a row.
        lengths: number of tokens of each row, 0 for free rows.
        written: number of tokens of each row whose keys and values are written, if the manager has tensors.
        skipped: number of leading blocks of each row that were released because the window has passed them.
        entries: all rows, flat; row r is ``entries[r * max_blocks : (r + 1) * max_blocks]``. Entries beyond a
            sequence's length are stale.
        sequence_of_row: sequence of each row. ``NO_SEQUENCE`` for a free row, and while the row's sequence is
            swapped out.
        step_of_row: number of the step that reserved the row's last tokens; only this step may write them.
        rows: maps each sequence to its row, or to ``~row`` while the sequence is swapped out. The order is
            that of creation.
        changed_from: maps a row to its first entry that :meth:`take_changes` has not reported.
        owner: identifies the table in its batches; a copy of the table has another owner.
    """

    def __init__(self, max_sequences: int, max_seqlen: int, block_size: int):
        self.max_sequences, self.max_seqlen, self.block_size = max_sequences, max_seqlen, block_size
        self.max_blocks = -(-max_seqlen // block_size)
        self.lengths, self.written, self.skipped = (array("i", bytes(4 * max_sequences)) for _ in range(3))
        self.entries = array("i", bytes(4 * max_sequences * self.max_blocks))
        self.sequence_of_row = array("q", [NO_SEQUENCE] * max_sequences)
        self.step_of_row = array("q", [NO_STEP] * max_sequences)
        self.rows: dict[int, int] = {}
        self.changed_from: dict[int, int] = {}
        self.free_rows = list(range(max_sequences - 1, -1, -1))
        self.owner = object()
        self._next_sequence, self._next_step = 0, NO_STEP + 1
        self.make_views()

    def make_views(self) -> None:
        self.lengths_tensor = torch.frombuffer(self.lengths, dtype=torch.int32)
        self.written_tensor = torch.frombuffer(self.written, dtype=torch.int32)
        self.entries_tensor = torch.frombuffer(self.entries, dtype=torch.int32).view(self.max_sequences, -1)
        self.sequences_tensor = torch.frombuffer(self.sequence_of_row, dtype=torch.int64)
        self.steps_tensor = torch.frombuffer(self.step_of_row, dtype=torch.int64)
        self.slices = memoryview(self.entries)

    def add(self) -> tuple[int, int]:
        """Add a sequence and return (its number, its row). Numbers are never reused."""
        self.require_rows(1)
        sequence, row = self._next_sequence, self.free_rows.pop()
        self._next_sequence += 1
        self.rows[sequence] = row
        self.sequence_of_row[row] = sequence
        return sequence, row

    def remove(self, sequence: int, row: int) -> None:
        self.lengths[row] = self.written[row] = self.skipped[row] = 0
        self.sequence_of_row[row], self.step_of_row[row] = NO_SEQUENCE, NO_STEP
        self.entries[row * self.max_blocks] = 0  # a batched step reads this entry even for an empty sequence
        self.changed_from.pop(row, None)
        self.free_rows.append(row)
        del self.rows[sequence]

    def require_rows(self, count: int) -> None:
        if count > len(self.free_rows):
            raise OutOfSequencesError(
                f"expected at most {len(self.free_rows)} more sequences, got {count}: "
                f"{len(self.rows)} of max_sequences={self.max_sequences} exist"
            )

    def row(self, sequence: int, swapped_out: bool = False) -> int:
        """Return the row of a resident sequence, or of a swapped-out sequence if ``swapped_out`` is True.

        Raises:
            ValueError: the sequence does not exist, or its state differs from ``swapped_out``.
        """
        sequence, row, found = self.find(sequence)
        if found != swapped_out:
            text = "is swapped out: swap it in first" if found else "is not swapped out"
            raise ValueError(f"sequence {sequence} {text}")
        return row

    def resolve(
        self, sequences: Iterable[int] | Tensor, swapped_out: bool = False
    ) -> tuple[array[int], list[int]]:
        """Return (sequences, their rows of the table).

        Raises:
            ValueError: as :meth:`row`, or a sequence is listed twice.
        """
        sequences = as_ints("sequences", sequences)
        rows = [self.row(sequence, swapped_out) for sequence in sequences]
        if len(set(rows)) != len(rows):
            twice = next(sequence for sequence, count in Counter(sequences).items() if count > 1)
            raise ValueError(f"sequences must differ from one another, got {twice} more than once")
        return sequences, rows

    def find(self, sequence: int) -> tuple[int, int, bool]:
        """Return (sequence as an int, its row, whether it is swapped out)."""
        if type(sequence) is not int:
            sequence = as_int("sequence", sequence)
        row = self.rows.get(sequence)
        if row is None:
            raise ValueError(
                f"sequence must be one that exists, got {sequence}: it was freed or never created"
            )
        return (sequence, row, False) if row >= 0 else (sequence, ~row, True)

    def set_swapped_out(self, sequence: int, row: int, swapped_out: bool) -> None:
        self.rows[sequence] = ~row if swapped_out else row
        self.sequence_of_row[row] = NO_SEQUENCE if swapped_out else sequence
        self.step_of_row[row] = NO_STEP
        if swapped_out:
            self.changed_from.pop(row, None)
        else:
            self.changed_from[row] = 0

    def num_blocks(self, row: int) -> int:
        """Return the number of valid entries of a row."""
        return -(-self.lengths[row] // self.block_size)

    def blocks(self, row: int) -> list[int]:
        """Return the blocks listed in a row of the table, in order, without those that were released."""
        start = row * self.max_blocks
        return self.slices[start + self.skipped[row] : start + self.num_blocks(row)].tolist()

    def set_block(self, row: int, column: int, block: int) -> None:
        self.entries[row * self.max_blocks + column] = block
        if column < self.changed_from.get(row, self.max_blocks):
            self.changed_from[row] = column

    def copy_row(self, source: int, target: int) -> list[int]:
        """Copy row ``source`` to the new row ``target``. Return the blocks that the two rows share."""
        length, skipped = self.lengths[source], self.skipped[source]
        begin, count = target * self.max_blocks, -(-length // self.block_size)
        entries = self.slices[source * self.max_blocks :][:count]
        self.slices[begin : begin + count] = entries
        self.lengths[target], self.skipped[target] = length, skipped
        self.written[target] = self.written[source]
        self.changed_from[target] = 0
        return entries[skipped:].tolist()

    def batch(self, sequences: Iterable[int] | Tensor) -> Batch:
        """Return the batch of these sequences. The errors are those of :meth:`BlockManager.batch`."""
        sequences, rows = self.resolve(sequences)
        indices = torch.tensor(rows, dtype=torch.int64, device="cpu")
        ids = torch.tensor(sequences.tolist(), dtype=torch.int64, device="cpu")
        return Batch(tuple(sequences), ids, indices, indices * self.max_blocks, self.owner)

    def check_batch(self, batch: Batch) -> None:
        """Raise if the batch is of another table, or if one of its sequences was freed or swapped out."""
        if not isinstance(batch, Batch):
            raise TypeError(f"batch must come from BlockManager.batch, got {type(batch).__name__}")
        if batch.owner is not self.owner:
            raise ValueError("batch must come from this manager, got another manager's")
        if not torch.equal(self.sequences_tensor.index_select(0, batch.rows), batch.ids):
            for sequence in batch.sequences:
                self.row(sequence)

    def begin_step(self, rows: Tensor) -> None:
        """Store the number of a new step in these rows.

        Only this step may write keys and values of the tokens that were reserved last in these rows.
        """
        self.steps_tensor.index_fill_(0, rows, self._next_step)
        self._next_step += 1

    def take_changes(self) -> tuple[Tensor, Tensor]:
        """Return the entries changed since the last call: (int64 indices in the flat table, int32 values)."""
        if not self.changed_from:
            return NO_CHANGES
        starts, counts = [], []
        for row, first in self.changed_from.items():
            starts.append(row * self.max_blocks + first)
            counts.append(max(0, self.num_blocks(row) - first))
        self.changed_from.clear()
        begins = torch.tensor(starts, dtype=torch.int64, device="cpu")
        sizes = torch.tensor(counts, dtype=torch.int64, device="cpu")
        begins -= sizes.cumsum(0) - sizes
        positions = begins.repeat_interleave(sizes)
        positions += torch.arange(len(positions), device="cpu")
        return positions, self.entries_tensor.view(-1)[positions]
