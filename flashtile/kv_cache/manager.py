"""PagedAttention's memory manager (Kwon et al. 2023, arXiv:2309.06180, section 4).

The keys and values of a sequence are in blocks of ``block_size`` tokens, anywhere in a pool. The sequence's
row of the block table lists its blocks in order. Blocks are allocated as the sequence grows, shared when it
is forked, copied on the first write to a shared block, and released one by one. The manager only decides
which blocks to copy. Its caller copies the data; :class:`flashtile.kv_cache.PagedKVCache` does so by itself.

A block may be written to only while its reference count is 1. A fork and the prefix cache each add a
reference, so no sequence overwrites a block that another uses.

Nothing here needs a GPU, and nothing is thread-safe. An operation that raises has changed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from flashtile.checks.conversions import as_int
from flashtile.kv_cache.integrity import Invariant, Usage, check_integrity, usage
from flashtile.kv_cache.pool import BlockPool, Copies, OutOfBlocksError, as_size, block_hashes
from flashtile.kv_cache.table import NO_SEQUENCE, NO_STEP, Batch, BlockTable, as_ints

Reservation = tuple[int, int, int]
"""(row, tokens before, tokens after) of a sequence for which at least one token is reserved."""

NULL_BLOCK = 0
"""With a window, entries of released blocks point to this block. Nothing writes to it."""


class BlockManager:
    """Sequences and their blocks.

    Args:
        num_blocks: blocks in the pool. With ``window_left`` one of them, block 0, is never allocated.
        block_size: tokens per block.
        max_sequences: maximum number of sequences, including swapped-out ones.
        max_seqlen: maximum number of tokens of a sequence.
        num_host_blocks: blocks of a second pool, to which sequences can be swapped out.
        window_left: number of earlier keys that a query sees in addition to its own position
            (``window_size[0]`` of the attention functions). Blocks that no later query sees are released. -1
            means no window.

    Attributes:
        pool, host_pool: the pools of blocks on the device and on the host.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> from flashtile.kv_cache import BlockManager
        >>> manager = BlockManager(num_blocks=8, block_size=4, max_sequences=2, max_seqlen=32)
        >>> first = manager.create()
        >>> manager.reserve(first, 6)  # two blocks, nothing to copy
        []
        >>> second = manager.fork(first)
        >>> copies = manager.reserve(second)  # the block of tokens 4 and 5 is shared: it is copied first
        >>> len(copies), manager.blocks(first)[0] == manager.blocks(second)[0]
        (1, True)
    """

    has_tensors: ClassVar[bool] = False
    """Whether :meth:`move` copies tensors. If so, reserved tokens count as written only after
    :meth:`mark_written`. Until then, their sequence cannot be forked or get further tokens."""

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
        window_left = as_size("window_left", window_left, -1)
        null_blocks = int(window_left >= 0)
        num_blocks = as_size("num_blocks", num_blocks, 1 + null_blocks)
        num_host_blocks = as_size("num_host_blocks", num_host_blocks, 0)
        self.block_size = as_size("block_size", block_size)
        self.max_seqlen, self.window_left = as_size("max_seqlen", max_seqlen), window_left
        self.table = BlockTable(as_size("max_sequences", max_sequences), self.max_seqlen, self.block_size)
        self.pool, self.host_pool = BlockPool(num_blocks, null_blocks), BlockPool(num_host_blocks)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens in each row of the block table, (max_sequences,) int32 on the CPU; 0 if free."""
        return self.table.lengths_tensor

    @property
    def block_table(self) -> Tensor:
        """The block table, (max_sequences, ceil(max_seqlen / block_size)) int32 on the CPU.

        Each row lists the blocks of one sequence. Entries beyond the sequence's length are stale.
        """
        return self.table.entries_tensor

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences, the oldest first."""
        return tuple(self.table.rows)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence, swapped out or not."""
        return self.table.lengths[self.table.find(sequence)[1]]

    def blocks(self, sequence: int) -> list[int]:
        """Return the blocks of a sequence in order.

        Blocks that were released because the window has passed them are returned as ``NULL_BLOCK``.
        """
        row = self.table.row(sequence)
        return [NULL_BLOCK] * self.table.skipped[row] + self.table.blocks(row)

    def is_swapped_out(self, sequence: int) -> bool:
        """Return whether a sequence is in the host's pool."""
        return self.table.find(sequence)[2]

    def batch(self, sequences: Iterable[int] | Tensor) -> Batch:
        """Look up the sequences of a batch in the block table.

        The result may be passed to any number of calls of :meth:`reserve_batch`.

        Raises:
            TypeError: the sequences are not integers.
            ValueError: a sequence does not exist, is swapped out, or is listed twice.
        """
        return self.table.batch(sequences)

    def create(self, tokens: Iterable[int] | Tensor = (), salt: bytes = b"") -> int:
        """Create a sequence that begins with the longest prefix of ``tokens`` in the prefix cache.

        The prefix consists of whole blocks. It never includes the last token, whose query must be computed.
        Keys and values of the first ``length(sequence)`` tokens exist already. The caller must reserve
        room for the other tokens with :meth:`reserve`.

        Args:
            tokens: the prompt, (seqlen,) integers.
            salt: the salt that was given to :meth:`cache_blocks`.

        Returns:
            The number of the sequence. Numbers are never reused.

        Raises:
            OutOfSequencesError: there are ``max_sequences`` already.
            TypeError: ``tokens`` are not integers, or ``salt`` is not bytes.
            ValueError: the prompt is longer than ``max_seqlen``.
        """
        tokens = as_ints("tokens", tokens)
        if len(tokens) > self.max_seqlen:
            raise ValueError(f"tokens: expected at most max_seqlen={self.max_seqlen}, got {len(tokens)}")
        table, found = self.table, []
        for block_hash in block_hashes(tokens[:-1], self.block_size, salt):
            if block_hash not in self.pool.block_of:
                break
            found.append(self.pool.block_of[block_hash])
        sequence, row = table.add()
        for column, block in enumerate(found):
            self.pool.acquire(block)
            table.set_block(row, column, block)
        table.lengths[row] = table.written[row] = len(found) * self.block_size
        return sequence

    def fork(self, sequence: int) -> int:
        """Create a copy of a sequence. The copy shares all blocks of the sequence.

        Write the reserved tokens of a sequence before you fork it. A shared block is copied only when one of
        the two sequences writes to it.

        Raises:
            OutOfSequencesError: there are ``max_sequences`` already.
            ValueError: the sequence does not exist or is swapped out.
        """
        return self._forks(sequence, 1)[0]

    def fork_many(self, sequence: int, count: int) -> list[int]:
        """Create ``count`` copies of a sequence, in less time than :meth:`fork` takes for each.

        Raises:
            OutOfSequencesError: there would be more than ``max_sequences``.
            TypeError, ValueError: ``count`` is no integer or negative, or as :meth:`fork`.
        """
        return self._forks(sequence, as_size("count", count, 0))

    def _forks(self, sequence: int, count: int) -> list[int]:
        table, forks = self.table, []
        row, blocks = table.row(sequence), list[int]()
        self._require_written(row)
        table.require_rows(count)
        for _ in range(count):
            child, child_row = table.add()
            blocks = table.copy_row(row, child_row)
            forks.append(child)
        self.pool.share(blocks, count)  # once for all: a prompt of 4,096 tokens has 256 blocks
        if forks:
            table.step_of_row[row] = NO_STEP
        return forks

    def select(self, sequences: Iterable[int] | Tensor, parents: Iterable[int] | Tensor) -> list[int]:
        """Return the next beams: beam i continues ``sequences[parents[i]]``.

        The first child of a sequence is the sequence itself; its other children are forks. A sequence without
        a child is freed.

        Raises:
            OutOfSequencesError, TypeError, ValueError: as :meth:`batch` and :meth:`fork`.
        """
        batch, parents = self.table.batch(sequences), as_ints("parents", parents)
        children = Counter(parents)
        for parent, count in children.items():
            if not 0 <= parent < len(batch):
                raise ValueError(f"parents must be from 0 to {len(batch) - 1}, got {parent}")
            if count > 1:
                self._require_written(self.table.row(batch.sequences[parent]))
        self.table.require_rows(len(parents) - len(batch))
        for i, sequence in enumerate(batch.sequences):
            if i not in children:
                self.free(sequence)
        beams = []
        for parent in parents:
            sequence = batch.sequences[parent]
            beams.append(sequence if parent in children else self.fork(sequence))
            children.pop(parent, None)
        return beams

    def free(self, sequence: int) -> None:
        """Free a sequence, swapped out or not, and the blocks that only it uses."""
        sequence, row, swapped_out = self.table.find(sequence)
        pool = self.host_pool if swapped_out else self.pool
        pool.release(reversed(self.table.blocks(row)))  # so that a prefix is evicted from its end
        self.table.remove(sequence, row)

    def reserve(self, sequence: int, num_tokens: int = 1) -> Copies:
        """Reserve room for ``num_tokens`` more tokens.

        Returns:
            At most one (source, destination) pair of blocks. The caller must copy the source to the
            destination before it writes tokens and before the next operation.

        Raises:
            OutOfBlocksError: there are too few blocks.
            ValueError: the sequence does not exist, is swapped out or would be longer than ``max_seqlen``.
        """
        if self.has_tensors:
            return self.reserve_batch(self.batch([as_int("sequence", sequence)]), num_tokens)
        table, size = self.table, self.block_size
        row = table.rows.get(sequence, NO_SEQUENCE) if type(sequence) is int else NO_SEQUENCE
        if row < 0:
            row = table.row(sequence)
        if type(num_tokens) is not int:
            num_tokens = as_int("num_tokens", num_tokens)
        length = table.lengths[row]
        end = length + num_tokens
        if num_tokens < 0 or end > self.max_seqlen:
            self._refuse_length(sequence, length, num_tokens)
        copies: Copies = []
        last = (length - 1) // size
        if (end - 1) // size != last or (
            length % size and num_tokens and self.pool.refs[table.entries[row * table.max_blocks + last]] > 1
        ):
            self._allocate([(row, length, end)], copies)
        table.lengths[row] = table.written[row] = end
        return copies

    def reserve_batch(self, batch: Batch, num_tokens: int | Iterable[int] | Tensor = 1) -> Copies:
        """Reserve room for more tokens in every sequence of a batch.

        If the tokens of one sequence cannot be reserved, an error is raised and nothing is reserved.

        Args:
            batch: result of :meth:`batch`.
            num_tokens: one number for all sequences, or (batch,) integers.

        Returns:
            (source, destination) pairs of blocks. The caller must copy each source to its destination before
            it writes tokens and before the next operation.

        Raises:
            OutOfBlocksError, ValueError: as :meth:`reserve`.
            TypeError: ``num_tokens`` are not integers.
        """
        table, size = self.table, self.block_size
        table.check_batch(batch)
        rows, counts = batch.rows, self._token_counts(batch, num_tokens)
        lengths = self.lengths.index_select(0, rows)
        ends = lengths + counts
        if len(batch) and int(ends.max()) > self.max_seqlen:
            i = int(ends.argmax())
            self._refuse_length(batch.sequences[i], int(lengths[i]), int(ends[i] - lengths[i]))
        if self.has_tensors and not torch.equal(table.written_tensor.index_select(0, rows), lengths):
            for row in rows.tolist():
                self._require_written(row)
        room = lengths.neg() % size  # free slots of the last block
        last = self.block_table.take(batch.starts + ((lengths - 1) // size).clamp_(0))
        shared = self.pool.refs_tensor.index_select(0, last) > 1  # has no effect if the block is full
        work = ((room < counts) | shared) & (ends > lengths)
        copies: Copies = []
        chosen = work.nonzero().flatten()
        if len(chosen):
            columns = (rows[chosen].tolist(), lengths[chosen].tolist(), ends[chosen].tolist())
            self._allocate(list(zip(*columns, strict=True)), copies)
        self.lengths.index_copy_(0, rows, ends)
        if self.has_tensors:
            table.begin_step(rows)
            self.move(copies, self.pool, self.pool)
        else:
            table.written_tensor.index_copy_(0, rows, ends)
        return copies

    def mark_written(self, batch: Batch) -> None:
        """Count all reserved tokens of these sequences as written.

        :meth:`PagedKVCache.attend` and :meth:`PagedKVCache.write` call this after the last layer. Call it
        yourself after a replayed CUDA graph or your own kernel has written keys and values.
        """
        self.table.check_batch(batch)
        self.table.written_tensor.index_copy_(0, batch.rows, self.lengths.index_select(0, batch.rows))

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first ``length`` tokens, for example after speculated tokens were rejected.

        Raises:
            ValueError: the sequence has fewer than ``length`` tokens, or the window of the next query would
                include tokens whose blocks were already released.
        """
        table = self.table
        row, length = table.row(sequence), as_int("length", length)
        before, skipped = table.lengths[row], table.skipped[row]
        if not 0 <= length <= before:
            raise ValueError(f"length must be from 0 to {before} for sequence {sequence}, got {length}")
        if skipped and length - self.window_left < skipped * self.block_size:
            raise ValueError(
                f"length must be at least {skipped * self.block_size + self.window_left} for sequence "
                f"{sequence}, whose first {skipped} blocks the window has passed, got {length}"
            )
        remaining = -(-length // self.block_size) - skipped
        self.pool.release(reversed(table.blocks(row)[remaining:]))
        table.lengths[row], table.written[row] = length, min(length, table.written[row])
        table.step_of_row[row] = NO_STEP

    def _allocate(self, reservations: list[Reservation], copies: Copies) -> None:
        """Allocate blocks for every reservation. Raise OutOfBlocksError before anything has changed."""
        size, pool = self.block_size, self.pool
        # Upper bound of the allocated blocks, because each reservation copies at most one block. The exact
        # number is computed only if this bound is too large.
        at_most = sum((end - 1) // size - (length - 1) // size + 1 for _, length, end in reservations)
        if at_most > pool.available:
            self._require_available(reservations)
        if self.window_left >= 0:
            for row, length, _ in reservations:
                self._skip_blocks(row, length)
        table, refs = self.table, pool.refs
        # Number of references that this call removes from each copied block. They are released at the end,
        # so that no source of a copy becomes a destination.
        left: dict[int, int] = {}
        for row, length, end in reservations:
            if length % size:
                column = length // size
                block = table.entries[row * table.max_blocks + column]
                if refs[block] - left.get(block, 0) > 1:
                    copy = pool.allocate()
                    left[block] = left.get(block, 0) + 1
                    table.set_block(row, column, copy)
                    copies.append((block, copy))
            for column in range(-(-length // size), -(-end // size)):
                table.set_block(row, column, pool.allocate())
        pool.release(source for source, _ in copies)

    def _require_available(self, reservations: list[Reservation]) -> None:
        size, table, refs = self.block_size, self.table, self.pool.refs
        releases: Counter[int] = Counter()
        for row, length, _ in reservations:
            releases.update(self._passed_blocks(row, length))
        needed, left = 0, {block: refs[block] - count for block, count in releases.items()}
        for row, length, end in reservations:
            needed += -(-end // size) - -(-length // size)
            if length % size:
                block = table.entries[row * table.max_blocks + length // size]
                count = left.setdefault(block, refs[block])
                needed += count > 1
                left[block] = max(1, count - 1)  # the last sequence that uses the block needs no copy
        available = self.pool.available_after(releases)
        if needed > available:
            total = self.pool.num_blocks - self.pool.null_blocks
            raise OutOfBlocksError("reserving for", len(reservations), needed, available, total)

    def _passed_blocks(self, row: int, length: int) -> list[int]:
        """Return the blocks of a row that no query at position ``length`` or later sees."""
        if self.window_left < 0:
            return []
        count = max(0, length - self.window_left) // self.block_size
        return self.table.blocks(row)[: max(0, count - self.table.skipped[row])]

    def _skip_blocks(self, row: int, length: int) -> None:
        blocks = self._passed_blocks(row, length)
        self.pool.release(reversed(blocks))
        first = self.table.skipped[row]
        for column in range(first, first + len(blocks)):
            self.table.set_block(row, column, NULL_BLOCK)
        self.table.skipped[row] += len(blocks)

    def _token_counts(self, batch: Batch, num_tokens: int | Iterable[int] | Tensor) -> int | Tensor:
        """Validate ``num_tokens``. Return one int for all sequences, or a tensor (batch,) int32."""
        if not isinstance(num_tokens, Iterable) or getattr(num_tokens, "ndim", 1) == 0:
            return as_size("num_tokens", num_tokens, 0, self.max_seqlen)
        counts = as_ints("num_tokens", num_tokens)
        if len(counts) != len(batch):
            raise ValueError(f"num_tokens must have shape (batch,) = ({len(batch)},), got ({len(counts)},)")
        for sequence, count in zip(batch.sequences, counts, strict=True):
            if not 0 <= count <= self.max_seqlen:
                self._refuse_length(sequence, self.length(sequence), count)
        return torch.tensor(counts.tolist(), dtype=torch.int32, device="cpu")

    def _refuse_length(self, sequence: int, length: int, num_tokens: int) -> NoReturn:
        room = self.max_seqlen - length
        raise ValueError(
            f"num_tokens must be from 0 to {room} for sequence {sequence} "
            f"({length} tokens of max_seqlen={self.max_seqlen}), got {num_tokens}"
        )

    def _require_written(self, row: int) -> None:
        table = self.table
        if table.written[row] < table.lengths[row]:
            raise ValueError(
                f"sequence {table.sequence_of_row[row]} has {table.lengths[row]} tokens, of which "
                f"{table.written[row]} are written: write the others in every layer, or truncate the sequence"
            )

    def cache_blocks(self, sequence: int, tokens: Iterable[int] | Tensor, salt: bytes = b"") -> int:
        """Add the full blocks of a sequence to the prefix cache, for later calls of :meth:`create`.

        Call this after the keys and values of these tokens have been written, for example after the prompt
        and before ``free``. Cached blocks outlive their sequences. They are evicted when blocks are needed,
        the least recently used first.

        Args:
            sequence: a resident sequence.
            tokens: the first tokens of the sequence. Their keys and values must have been written.
            salt: bytes that must be equal for a block to be reused. They identify anything else that keys and
                values depend on (an adapter, an image), or the tenant that may reuse the blocks.

        Returns:
            Number of blocks that are new to the prefix cache.
        """
        tokens, table = as_ints("tokens", tokens), self.table
        row = table.row(sequence)
        written = table.written[row]
        if len(tokens) > written:
            text = f"tokens: expected at most the {written} written tokens of sequence {sequence}"
            raise ValueError(f"{text}, got {len(tokens)}")
        start, skipped, new = row * table.max_blocks, table.skipped[row], 0
        for column, block_hash in enumerate(block_hashes(tokens, self.block_size, salt)):
            if column >= skipped:
                new += self.pool.cache_block(table.entries[start + column], block_hash)
        if written == table.lengths[row]:
            table.step_of_row[row] = NO_STEP  # the row's step may not write to cached blocks
        return new

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, for example after the model's weights have changed.

        Returns:
            Number of blocks that the prefix cache had.
        """
        return self.pool.reset_prefix_cache()

    def swap_out(self, sequences: Iterable[int] | Tensor) -> Copies:
        """Swap sequences out to the host's pool. Blocks that several of them share stay shared.

        Returns:
            (block, host block) pairs to copy before the next operation.

        Raises:
            OutOfBlocksError: the host's pool has too few available blocks.
            TypeError, ValueError: as :meth:`batch`.
        """
        return self._swap(*self.table.resolve(sequences), self.pool, self.host_pool, "swapping out")

    def swap_in(self, sequences: Iterable[int] | Tensor) -> Copies:
        """Swap sequences in from the host's pool. Blocks that several of them share stay shared.

        Returns:
            (host block, block) pairs to copy before the next operation.

        Raises:
            OutOfBlocksError: the pool has too few available blocks.
            TypeError: the sequences are not integers.
            ValueError: a sequence does not exist, is not swapped out, or is listed twice.
        """
        return self._swap(*self.table.resolve(sequences, True), self.host_pool, self.pool, "swapping in")

    def move(self, copies: Copies, source: BlockPool, target: BlockPool) -> None:
        """Copy blocks between two pools, or within one. Without tensors, this does nothing."""

    def _swap(
        self, sequences: Iterable[int], rows: list[int], source: BlockPool, target: BlockPool, what: str
    ) -> Copies:
        table = self.table
        blocks_of_row = [table.blocks(row) for row in rows]
        blocks = dict.fromkeys(block for blocks in blocks_of_row for block in blocks)
        if len(blocks) > target.available:
            total = target.num_blocks - target.null_blocks
            raise OutOfBlocksError(what, len(rows), len(blocks), target.available, total)
        moved: dict[int, int] = {}
        for sequence, row, old in zip(sequences, rows, blocks_of_row, strict=True):
            for column, block in enumerate(old, table.skipped[row]):
                if block in moved:
                    target.acquire(moved[block])
                else:
                    moved[block] = target.allocate()
                table.set_block(row, column, moved[block])
            source.release(reversed(old))
            table.set_swapped_out(sequence, row, target is self.host_pool)
        copies = list(moved.items())
        self.move(copies, source, target)
        return copies

    def usage(self) -> Usage:
        """Return how many blocks are used and available, and how many tokens the used blocks hold."""
        return usage(self.table, self.pool)

    def check_integrity(self) -> list[Invariant]:
        """Check all data structures for consistency. Takes O(blocks) time, so use it for tests and debugging.

        Returns:
            All invariants, each with the values of both sides.

        Raises:
            IntegrityError: invariants do not hold; the message lists them.
        """
        return check_integrity(self.table, self.pool, self.host_pool, self.window_left)
