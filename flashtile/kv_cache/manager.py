"""PagedAttention's memory manager (Kwon et al. 2023, arXiv:2309.06180, section 4).

Keys and values of a sequence live in blocks of ``block_size`` tokens anywhere in a pool; its row of the
block table lists them in order. Blocks are taken as the sequence grows, shared when it is forked, copied at
the first write to a block that somebody else holds too, and given back one by one. The manager decides;
bytes are moved by its caller (:class:`flashtile.kv_cache.PagedKVCache`), which is told what to copy.

A block is written to only while ``refs`` of it is 1. A fork of its sequence makes it 2, and so does the
prefix cache when it remembers the block, so that neither ever sees another's tokens.

Nothing here needs a GPU. Nothing is thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import index
from typing import NoReturn

import torch
from torch import Tensor

from flashtile.kv_cache.integrity import Invariant, Usage, check_integrity, usage
from flashtile.kv_cache.pool import BlockPool, OutOfBlocksError
from flashtile.kv_cache.prefix import as_tokens, chain
from flashtile.kv_cache.table import NOBODY, Batch, BlockTable

Copies = list[tuple[int, int]]
"""(source, destination) blocks. No destination is a source, too, so that they may be copied in any order."""

Growth = tuple[int, int, int]
"""(row, tokens before, tokens after) of a sequence that is appended to."""

MAX_SIZE = 2**30
"""Of every size: the sum of two lengths is an int32."""

NULL_BLOCK = 0
"""What evicted entries of a block table point to where there is a window: a block that nobody writes to."""


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise TypeError or ValueError for a size that is not an int from ``least`` on."""
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not least <= value <= MAX_SIZE:
        raise ValueError(f"{name} must be from {least} to {MAX_SIZE}, got {value}")


class BlockManager:
    """Sequences and their blocks.

    Args:
        num_blocks: blocks in the pool. With ``window_left`` one of them, block 0, is never given out.
        block_size: tokens a block.
        max_sequences: sequences that may exist at a time, those swapped out included.
        max_seqlen: tokens that a sequence may have.
        num_host_blocks: blocks of a second pool, which sequences can be swapped out to.
        window_left: earlier keys that a query sees beside its own position (``window_size[0]`` of the
            attention functions); blocks that no later query sees are given back. -1 keeps every block.

    Attributes:
        lengths: (max_sequences,) int32 on the CPU, tokens by row; 0 where there is no sequence.
        block_table: (max_sequences, ceil(max_seqlen / block_size)) int32 on the CPU, by row. Entries beyond a
            length are stale.
        pool, host_pool: the memories; ``host_pool`` has no blocks unless it was given some.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is allowed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_sequences: int,
        max_seqlen: int,
        num_host_blocks: int = 0,
        window_left: int = -1,
    ):
        for name, value, least in (
            ("num_blocks", num_blocks, 1 if window_left == -1 else 2),
            ("block_size", block_size, 1),
            ("max_sequences", max_sequences, 1),
            ("max_seqlen", max_seqlen, 1),
            ("num_host_blocks", num_host_blocks, 0),
            ("window_left", window_left, -1),
        ):
            check_size(name, value, least)
        self.block_size, self.max_seqlen, self.window_left = block_size, max_seqlen, window_left
        self.pool, self.host_pool = BlockPool(num_blocks), BlockPool(num_host_blocks)
        self.reserved = int(window_left >= 0)
        if self.reserved:
            self.pool.take()
        self.table = BlockTable(max_sequences, max_seqlen, block_size)
        self.lengths, self.block_table = self.table.lengths_tensor, self.table.entries_tensor
        self._refs = torch.frombuffer(self.pool.refs, dtype=torch.int32)

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences, the oldest first."""
        return tuple(self.table.rows)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, swapped out or not."""
        return self.table.lengths[self.table.row_anywhere(sequence)[0]]

    def blocks(self, sequence: int) -> list[int]:
        """The blocks of a sequence in order, ``NULL_BLOCK`` for those that the window has passed."""
        row = self.table.row(sequence)
        return [NULL_BLOCK] * self.table.evicted[row] + self.table.held(row)

    def is_swapped_out(self, sequence: int) -> bool:
        return self.table.row_anywhere(sequence)[1]

    def batch(self, sequences: Sequence[int]) -> Batch:
        """Resolve the sequences of a batch, once for many calls of :meth:`append_each`.

        Raises:
            ValueError: one does not exist, is swapped out or is there twice (it would be written to twice).
        """
        return self.table.batch(sequences)

    def create(self, tokens: Sequence[int] | Tensor = (), salt: bytes = b"") -> int:
        """A new sequence, which holds whatever is remembered of a prefix of ``tokens``.

        Whole blocks are found, and never the last token, whose query is still to be computed. The first
        ``length(sequence)`` tokens need no computation; append the others.

        Args:
            tokens: the prompt, (seqlen,) integers.
            salt: what else keys and values depend on, as it was given to :meth:`remember`.

        Returns:
            Its number, which is never used again.

        Raises:
            OutOfSequencesError: there are ``max_sequences`` already.
            ValueError: the prompt is longer than ``max_seqlen``.
        """
        tokens = as_tokens(tokens)
        if len(tokens) > self.max_seqlen:
            raise ValueError(f"tokens must be at most max_seqlen={self.max_seqlen} many, got {len(tokens)}")
        sequence, row = self.table.add()
        for column, digest in enumerate(chain(tokens[:-1], self.block_size, salt)):
            block = self.pool.find(digest)
            if block is None:
                break
            self.pool.hold(block)
            self.table.put(row, column, block)
            self.table.lengths[row] += self.block_size
        return sequence

    def fork(self, sequence: int) -> int:
        """A new sequence of the same content, which shares every block.

        Write what was appended to a sequence before forking it: the copy may be made at any time afterwards.

        Raises:
            OutOfSequencesError: there are ``max_sequences`` already.
        """
        row = self.table.row(sequence)
        twin, twin_row = self.table.add()
        self.pool.share(self.table.copy_row(row, twin_row))
        return twin

    def select(self, sequences: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The next beams: number i continues ``sequences[parents[i]]``.

        The first child of a sequence is that sequence itself, the others are forks; a sequence without a
        child is freed.
        """
        self.table.batch(sequences)
        for parent in parents:
            if not 0 <= parent < len(sequences):
                raise ValueError(f"parents must be from 0 to {len(sequences) - 1}, got {parent}")
        self.table.require_rows(len(parents) - len(sequences))
        chosen = set(parents)
        for i, sequence in enumerate(sequences):
            if i not in chosen:
                self.free(sequence)
        beams = []
        for parent in parents:
            beams.append(sequences[parent] if parent in chosen else self.fork(sequences[parent]))
            chosen.discard(parent)
        return beams

    def free(self, sequence: int) -> None:
        """Give back a sequence, swapped out or not, and the blocks that only it holds."""
        row, swapped_out = self.table.row_anywhere(sequence)
        pool = self.host_pool if swapped_out else self.pool
        pool.let_go(reversed(self.table.held(row)))  # a prefix is forgotten from its end
        self.table.remove(sequence, row)

    def append(self, sequence: int, num_tokens: int = 1) -> Copies:
        """Room for ``num_tokens`` more tokens.

        Returns:
            What to copy before anything is written and before the next operation: at most one pair.

        Raises:
            OutOfBlocksError: nothing has changed.
            ValueError: the sequence does not exist, is swapped out or would be longer than ``max_seqlen``.
        """
        table, size = self.table, self.block_size
        row = table.rows.get(sequence, NOBODY)
        if row < 0:
            table.refuse(sequence)
        num_tokens = index(num_tokens)
        length = table.lengths[row]
        end = length + num_tokens
        if num_tokens < 0 or end > self.max_seqlen:
            self._refuse_length(sequence, length, num_tokens)
        copies: Copies = []
        last = (length - 1) // size
        if (end - 1) // size != last or (
            length % size and num_tokens and self.pool.refs[table.entries[row * table.width + last]] > 1
        ):
            self._grow([(row, length, end)], copies)
        table.lengths[row] = end
        return copies

    def append_each(self, batch: Batch, num_tokens: int | Sequence[int] | Tensor = 1) -> Copies:
        """Room for more tokens in every sequence of a batch: in all of them or, if one is refused, in none.

        Args:
            num_tokens: one number for all, or (batch,) integers.

        Returns:
            What to copy before anything is written and before the next operation.

        Raises:
            OutOfBlocksError: nothing has changed.
            ValueError: as :meth:`append`.
        """
        table, size, rows = self.table, self.block_size, batch.rows
        table.check_batch(batch)
        counts = self._counts(batch, num_tokens)
        lengths = self.lengths.index_select(0, rows)
        ends = lengths + counts
        if len(batch) and int(ends.max()) > self.max_seqlen:
            i = int(ends.argmax())
            self._refuse_length(batch.sequences[i], int(lengths[i]), int(ends[i] - lengths[i]))
        room = lengths.neg() % size  # tokens that the last block still takes
        last = self.block_table.take(batch.starts + ((lengths - 1) // size).clamp_(0))
        shared = self._refs.index_select(0, last) > 1  # where a full block is, there is no room in any case
        work = ((room < counts) | shared) & (ends > lengths)
        copies: Copies = []
        chosen = work.nonzero().flatten()
        if len(chosen):
            columns = (rows[chosen].tolist(), lengths[chosen].tolist(), ends[chosen].tolist())
            self._grow(list(zip(*columns, strict=True)), copies)
        self.lengths.index_copy_(0, rows, ends)
        return copies

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens: after rejected speculation, or for another turn from there.

        Raises:
            ValueError: it has fewer tokens, or the next query would see a token that has been evicted.
        """
        table = self.table
        row, length = table.row(sequence), index(length)
        before, evicted = table.lengths[row], table.evicted[row]
        if not 0 <= length <= before:
            raise ValueError(f"length must be from 0 to {before} for sequence {sequence}, got {length}")
        if evicted and length - self.window_left < evicted * self.block_size:
            raise ValueError(
                f"length must be at least {evicted * self.block_size + self.window_left} for sequence "
                f"{sequence}, whose first {evicted} blocks are evicted, got {length}"
            )
        kept = -(-length // self.block_size) - evicted
        self.pool.let_go(reversed(table.held(row)[kept:]))
        table.lengths[row] = length

    def _grow(self, growths: list[Growth], copies: Copies) -> None:
        """Blocks for every growth, or OutOfBlocksError before anything has changed."""
        size, pool = self.block_size, self.pool
        # Each growth copies at most one block, and evicts first: only when it is close is it counted exactly.
        at_most = sum((end - 1) // size - (length - 1) // size + 1 for _, length, end in growths)
        if at_most > pool.available:
            self._require(growths)
        if self.window_left >= 0:
            for row, length, _ in growths:
                self._evict(row, length)
        table, refs = self.table, pool.refs
        left: dict[int, int] = {}  # sources are let go of at the end, lest one becomes a destination
        for row, length, end in growths:
            if length % size and end > length:
                column = length // size
                block = table.entries[row * table.width + column]
                if refs[block] - left.get(block, 0) > 1:
                    fresh = pool.take()
                    left[block] = left.get(block, 0) + 1
                    table.put(row, column, fresh)
                    copies.append((block, fresh))
            for column in range(-(-length // size), -(-end // size)):
                table.put(row, column, pool.take())
        pool.let_go(source for source, _ in copies)

    def _require(self, growths: list[Growth]) -> None:
        size, table, refs = self.block_size, self.table, self.pool.refs
        releases: Counter[int] = Counter()
        for row, length, _ in growths:
            releases.update(self._passed(row, length))
        needed, holders = 0, {block: refs[block] - count for block, count in releases.items()}
        for row, length, end in growths:
            needed += -(-end // size) - -(-length // size)
            if length % size and end > length:
                block = table.entries[row * table.width + length // size]
                count = holders.setdefault(block, refs[block])
                needed += count > 1
                holders[block] = max(1, count - 1)  # the last one writes in place
        available = self.pool.available_after(releases)
        if needed > available:
            what = f"appending to {len(growths)} sequence{'s' * (len(growths) != 1)}"
            raise OutOfBlocksError(what, needed, available, self.pool.num_blocks - self.reserved)

    def _passed(self, row: int, length: int) -> list[int]:
        """Blocks that the row holds and that no query from position ``length`` on sees."""
        if self.window_left < 0:
            return []
        count = max(0, length - self.window_left) // self.block_size
        return self.table.held(row)[: max(0, count - self.table.evicted[row])]

    def _evict(self, row: int, length: int) -> None:
        blocks = self._passed(row, length)
        self.pool.let_go(reversed(blocks))
        first = self.table.evicted[row]
        for column in range(first, first + len(blocks)):
            self.table.put(row, column, NULL_BLOCK)
        self.table.evicted[row] += len(blocks)

    def _counts(self, batch: Batch, num_tokens: int | Sequence[int] | Tensor) -> int | Tensor:
        if isinstance(num_tokens, int):
            if not 0 <= num_tokens <= self.max_seqlen:
                raise ValueError(f"num_tokens must be from 0 to {self.max_seqlen}, got {num_tokens}")
            return num_tokens
        counts = torch.as_tensor(num_tokens, device="cpu")
        if counts.dtype not in (torch.int32, torch.int64) and counts.numel() > 0:
            raise TypeError(f"num_tokens must be integers, got {counts.dtype}")
        if tuple(counts.shape) != (len(batch),):
            raise ValueError(
                f"num_tokens must have shape (batch,) = ({len(batch)},), got {tuple(counts.shape)}"
            )
        wrong = ((counts < 0) | (counts > self.max_seqlen)).nonzero().flatten()
        if len(wrong):
            i = int(wrong[0])
            self._refuse_length(batch.sequences[i], self.table.lengths[batch.rows[i]], int(counts[i]))
        return counts.int()

    def _refuse_length(self, sequence: int, length: int, num_tokens: int) -> NoReturn:
        room = self.max_seqlen - length
        raise ValueError(
            f"num_tokens must be from 0 to {room} for sequence {sequence} "
            f"({length} tokens of max_seqlen={self.max_seqlen}), got {num_tokens}"
        )

    def remember(self, sequence: int, tokens: Sequence[int] | Tensor, salt: bytes = b"") -> int:
        """Make the full blocks of a sequence findable by later calls of :meth:`create`.

        Call it when the keys and values of these tokens have been written, say after the prompt and before
        ``free``. The blocks outlive their holders until they are needed, the least recently used first.

        Args:
            tokens: the sequence's first tokens, at most ``length(sequence)``.
            salt: what else keys and values depend on (an adapter, an image, who may see it).

        Returns:
            Blocks that were not known before.
        """
        tokens, row = as_tokens(tokens), self.table.row(sequence)
        length = self.table.lengths[row]
        if len(tokens) > length:
            raise ValueError(f"tokens must be at most the {length} of sequence {sequence}, got {len(tokens)}")
        start, evicted, new = row * self.table.width, self.table.evicted[row], 0
        for column, digest in enumerate(chain(tokens, self.block_size, salt)):
            if column >= evicted:
                new += self.pool.remember(self.table.entries[start + column], digest)
        return new

    def forget(self) -> int:
        """Empty the prefix cache, as when the model's weights have changed.

        Returns:
            Blocks that were remembered.
        """
        return self.pool.forget()

    def swap_out(self, sequences: Sequence[int]) -> Copies:
        """Move sequences to the host's pool; what they share among themselves stays shared.

        Returns:
            (block, host block) pairs to copy before the next operation.

        Raises:
            OutOfBlocksError: the host's pool is too small; nothing has changed.
        """
        rows = self.table.batch(sequences).rows.tolist()
        return self._move(sequences, rows, self.pool, self.host_pool, "swapping out")

    def swap_in(self, sequences: Sequence[int]) -> Copies:
        """Bring sequences back; what they share among themselves stays shared.

        Returns:
            (host block, block) pairs to copy before the next operation.

        Raises:
            OutOfBlocksError: the pool is too small at the moment; nothing has changed.
        """
        rows = []
        for sequence in sequences:
            row, swapped_out = self.table.row_anywhere(sequence)
            if not swapped_out:
                raise ValueError(f"sequence {sequence} is not swapped out")
            rows.append(row)
        if len(set(rows)) != len(rows):
            raise ValueError(f"sequences must differ from one another, got {list(sequences)}")
        return self._move(sequences, rows, self.host_pool, self.pool, "swapping in")

    def _move(
        self, sequences: Sequence[int], rows: list[int], source: BlockPool, target: BlockPool, what: str
    ) -> Copies:
        table = self.table
        held = [table.held(row) for row in rows]
        blocks = dict.fromkeys(block for row in held for block in row)
        if len(blocks) > target.available:
            reserved = self.reserved if target is self.pool else 0
            what = f"{what} {len(rows)} sequence{'s' * (len(rows) != 1)}"
            raise OutOfBlocksError(what, len(blocks), target.available, target.num_blocks - reserved)
        moved: dict[int, int] = {}
        for sequence, row, old in zip(sequences, rows, held, strict=True):
            for column, block in enumerate(old, table.evicted[row]):
                if block in moved:
                    target.hold(moved[block])
                else:
                    moved[block] = target.take()
                table.put(row, column, moved[block])
            source.let_go(reversed(old))
            table.set_swapped_out(sequence, row, target is self.host_pool)
        return list(moved.items())

    def usage(self) -> Usage:
        """How much of the pool is used, by how many tokens, and what sharing saves."""
        return usage(self)

    def check_integrity(self) -> list[Invariant]:
        """Compare all the books. Costs O(blocks): for tests, and for finding a fault.

        Returns:
            Every invariant with its numbers.

        Raises:
            IntegrityError: naming each one that does not hold.
        """
        return check_integrity(self)
