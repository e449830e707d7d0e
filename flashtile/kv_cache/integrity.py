"""Consistency checks of a block manager's data structures, and statistics of its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kv_cache.pool import BlockPool
from flashtile.kv_cache.table import BlockTable


class IntegrityError(AssertionError):
    """A manager's data are inconsistent: a block leaked, was freed twice, or has two writers."""


class Invariant(NamedTuple):
    """An equation that must hold: its text, and the values of both sides."""

    statement: str
    left: int
    right: int

    def __str__(self) -> str:
        return f"{self.statement}: {self.left} {'=' if self.left == self.right else '!='} {self.right}"


@dataclass(frozen=True)
class Usage:
    """Memory used by the resident sequences, which are not swapped out.

    Attributes:
        block_size: tokens per block.
        blocks: blocks used by sequences, shared ones counted once.
        blocks_unshared: blocks that the sequences would use without sharing.
        tokens: filled slots of ``blocks``, at most ``blocks * block_size``.
        cached_blocks: blocks used only by the prefix cache, which are evicted when needed.
        available_blocks: blocks that can be allocated, cached ones included.
    """

    block_size: int
    blocks: int
    blocks_unshared: int
    tokens: int
    cached_blocks: int
    available_blocks: int

    @property
    def waste(self) -> float:
        """Fraction of the slots of used blocks that hold no token, from 0 to 1."""
        return 1 - self.tokens / (self.blocks * self.block_size) if self.blocks else 0.0

    @property
    def saved(self) -> float:
        """Fraction of the memory that is saved because sequences share blocks, from 0 to 1."""
        return 1 - self.blocks / self.blocks_unshared if self.blocks_unshared else 0.0


def usage(table: BlockTable, pool: BlockPool) -> Usage:
    """Count the blocks of ``pool`` that the resident sequences of ``table`` use."""
    size = table.block_size
    filled: dict[int, int] = {}
    unshared = 0
    for row in table.rows.values():
        if row >= 0:
            blocks = table.blocks(row)
            unshared += len(blocks)
            last = len(blocks) - 1
            for i, block in enumerate(blocks):
                tokens = size if i < last else (table.lengths[row] - 1) % size + 1
                filled[block] = max(tokens, filled.get(block, 0))
    return Usage(size, len(filled), unshared, sum(filled.values()), len(pool.cached), pool.available)


def check_integrity(
    table: BlockTable, pool: BlockPool, host_pool: BlockPool, window_left: int
) -> list[Invariant]:
    """Check and return all invariants of a block manager. Raise IntegrityError if any does not hold."""
    rows = {sequence: row if row >= 0 else ~row for sequence, row in table.rows.items()}
    resident = [(sequence, row) for sequence, row in table.rows.items() if row >= 0]
    lengths, size, most = table.lengths, table.block_size, table.max_sequences
    statements = [
        ("rows in use + free rows = max_sequences", len(rows) + len(table.free_rows), most),
        ("distinct rows = max_sequences", len({*rows.values(), *table.free_rows}), most),
        (
            "rows owned by their resident sequence = resident sequences",
            sum(table.sequence_of_row[row] == sequence for sequence, row in resident),
            len(resident),
        ),
        ("tokens in free rows = 0", sum(lengths[row] for row in table.free_rows), 0),
        ("sequences longer than max_seqlen = 0", sum(length > table.max_seqlen for length in lengths), 0),
        (
            "sequences with more written tokens than tokens = 0",
            sum(written > length for written, length in zip(table.written, lengths, strict=True)),
            0,
        ),
        (
            "sequences whose next query sees a skipped token = 0",
            sum(table.skipped[row] * size > max(0, lengths[row] - window_left) for row in rows.values()),
            0,
        ),
    ]
    for name, blocks, swapped_out in (("pool", pool, False), ("host", host_pool, True)):
        tables = [table.blocks(rows[s]) for s, row in table.rows.items() if (row < 0) == swapped_out]
        statements += [(f"{name}: {text}", left, right) for text, left, right in _of_pool(blocks, tables)]
    invariants = [Invariant(*statement) for statement in statements]
    broken = [str(invariant) for invariant in invariants if invariant.left != invariant.right]
    if broken:
        raise IntegrityError("; ".join(broken))
    return invariants


def _of_pool(pool: BlockPool, tables: list[list[int]]) -> list[tuple[str, int, int]]:
    references = Counter(block for blocks in tables for block in blocks)
    references.update(range(pool.null_blocks))
    hashed = set(pool.hash_of)
    free, cached, used = list(pool.free), set(pool.cached), set(references)
    everything = range(pool.num_blocks)
    return [
        ("free + cached + used = blocks", len(free) + len(cached) + len(used), pool.num_blocks),
        ("distinct blocks among them = blocks", len({*free, *cached, *used}), pool.num_blocks),
        ("blocks outside of the pool = 0", len({*free, *cached, *used}.difference(everything)), 0),
        ("blocks twice in one table = 0", sum(len(blocks) - len(set(blocks)) for blocks in tables), 0),
        (
            "blocks whose refs = users + hashed = blocks",
            sum(pool.refs[block] == references[block] + (block in hashed) for block in everything),
            pool.num_blocks,
        ),
        ("cached = hashed and not used", len(cached), len(hashed - used)),
        ("hashes = hashed blocks", len(pool.block_of), len(hashed)),
        (
            "hashed blocks found by their hash = hashed blocks",
            sum(pool.block_of.get(block_hash) == block for block, block_hash in pool.hash_of.items()),
            len(hashed),
        ),
    ]
