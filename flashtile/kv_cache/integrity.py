"""The manager's books, compared with one another, and what they say about memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from flashtile.kv_cache.manager import BlockManager
    from flashtile.kv_cache.pool import BlockPool


class IntegrityError(AssertionError):
    """The books contradict each other: a block leaked, was freed twice or is written to by two."""


class Invariant(NamedTuple):
    """A statement and the two numbers that it says are equal."""

    statement: str
    left: int
    right: int

    def __str__(self) -> str:
        return f"{self.statement}: {self.left} {'=' if self.left == self.right else '!='} {self.right}"


@dataclass(frozen=True)
class Usage:
    """What the resident sequences use.

    Attributes:
        block_size: tokens a block.
        blocks: blocks that sequences hold.
        blocks_unshared: blocks that they would hold if none were shared.
        tokens: token positions in these blocks that are filled, each counted once.
        kept_blocks: blocks that only the prefix cache still knows; available whenever they are needed.
        available_blocks: blocks that can be taken, kept ones included.
    """

    block_size: int
    blocks: int
    blocks_unshared: int
    tokens: int
    kept_blocks: int
    available_blocks: int

    @property
    def waste(self) -> float:
        """Share of the held memory that holds no token."""
        return 1 - self.tokens / (self.blocks * self.block_size) if self.blocks else 0.0

    @property
    def saved(self) -> float:
        """Share of the memory that sharing saves."""
        return 1 - self.blocks / self.blocks_unshared if self.blocks_unshared else 0.0


def usage(manager: BlockManager) -> Usage:
    table, size = manager.table, manager.block_size
    filled: dict[int, int] = {}
    unshared = 0
    for row in table.rows.values():
        if row >= 0:
            blocks = table.held(row)
            unshared += len(blocks)
            last = len(blocks) - 1
            for i, block in enumerate(blocks):
                tokens = size if i < last else (table.lengths[row] - 1) % size + 1
                filled[block] = max(tokens, filled.get(block, 0))
    pool = manager.pool
    return Usage(size, len(filled), unshared, sum(filled.values()), pool.num_kept, pool.available)


def check_integrity(manager: BlockManager) -> list[Invariant]:
    table = manager.table
    rows = {sequence: row if row >= 0 else ~row for sequence, row in table.rows.items()}
    invariants = [
        Invariant(
            "rows in use + free rows = max_sequences", len(rows) + len(table.free_rows), table.max_sequences
        ),
        Invariant(
            "distinct rows = max_sequences", len({*rows.values(), *table.free_rows}), table.max_sequences
        ),
        Invariant(
            "rows owned by their resident sequence = resident sequences",
            sum(table.owners[row] == sequence for sequence, row in table.rows.items() if row >= 0),
            sum(row >= 0 for row in table.rows.values()),
        ),
        Invariant("tokens in free rows = 0", sum(table.lengths[row] for row in table.free_rows), 0),
        Invariant(
            "sequences longer than max_seqlen = 0",
            sum(table.lengths[row] > table.max_seqlen for row in rows.values()),
            0,
        ),
        Invariant(
            "sequences whose next query sees an evicted token = 0",
            sum(
                table.evicted[row] * table.block_size > max(0, table.lengths[row] - manager.window_left)
                for row in rows.values()
            ),
            0,
        ),
    ]
    for name, pool, swapped_out in (("pool", manager.pool, False), ("host", manager.host_pool, True)):
        tables = [
            table.held(rows[sequence]) for sequence, row in table.rows.items() if (row < 0) == swapped_out
        ]
        reserved = 0 if swapped_out else manager.reserved
        invariants += [
            Invariant(f"{name}: {statement}", left, right)
            for statement, left, right in _of_pool(pool, tables, reserved)
        ]
    broken = [str(invariant) for invariant in invariants if invariant.left != invariant.right]
    if broken:
        raise IntegrityError("; ".join(broken))
    return invariants


def _of_pool(pool: BlockPool, tables: list[list[int]], reserved: int) -> list[tuple[str, int, int]]:
    holders = Counter(block for blocks in tables for block in blocks)
    holders.update(range(reserved))
    remembered = set(pool.digest_of)
    free, kept, held = list(pool.free), set(pool.kept), set(holders)
    everything = range(pool.num_blocks)
    return [
        ("free + kept + held = blocks", len(free) + len(kept) + len(held), pool.num_blocks),
        ("distinct blocks among them = blocks", len({*free, *kept, *held}), pool.num_blocks),
        ("blocks outside of the pool = 0", len({*free, *kept, *held}.difference(everything)), 0),
        ("blocks twice in one table = 0", sum(len(blocks) - len(set(blocks)) for blocks in tables), 0),
        (
            "blocks whose refs = holders + remembered = blocks",
            sum(pool.refs[block] == holders[block] + (block in remembered) for block in everything),
            pool.num_blocks,
        ),
        ("kept = remembered and not held", len(kept), len(remembered - held)),
        ("digests = remembered blocks", len(pool.block_of), len(remembered)),
        (
            "remembered blocks found by their digest = remembered blocks",
            sum(pool.block_of.get(digest) == block for block, digest in pool.digest_of.items()),
            len(remembered),
        ),
    ]
