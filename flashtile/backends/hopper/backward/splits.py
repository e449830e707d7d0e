"""How several programs can share a block of keys in the Hopper backward.

A work tile is a block of keys with all query rows that see it, of all query heads of the group. For example,
eight query heads on one key head with 8192 keys give 64 long work tiles, too few for 132 multiprocessors. In
such cases the query heads of the group and the query rows are divided among several programs. Each program
writes a part of dK and dV in float32, and ``sum_parts`` adds the parts in a fixed order. ``rounds`` chooses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED

ROW_SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts of the query rows: powers of two, because the kernels divide by shifting."""
SEEN_BY_ALL = 16
"""The host does not read the lists of a block mask. To choose splits, it assumes that all rows see one of
SEEN_BY_ALL blocks of keys, such as those of a prompt, and that one of SEEN_BY_ALL rows sees the others."""
MAX_PARTS = 32
"""Largest number of parts of a gradient, so that their sum stays a short kernel."""
MAX_BYTES = 128 * 2**20
"""Largest size of the memory for all parts of dK and dV."""


class Splits(NamedTuple):
    """Numbers of parts into which the query heads of a group and the query rows are divided."""

    heads: int = 1
    rows: int = 1

    @property
    def parts(self) -> int:
        """Number of programs that share a block of keys. Each writes a part, its partial sum of dK and dV."""
        return self.heads * self.rows


def candidates(problem: Problem) -> Iterator[Splits]:
    """Yield no splits, then all splits within MAX_PARTS and MAX_BYTES. Heads are divided evenly.

    When deterministic, programs add to a row of dQ in the order of the blocks of keys. Under a mask, each
    block is seen by a different range of rows. If programs divided these rows, a program would wait until
    another program has done most of its work on the previous block. So in this case only heads are divided,
    and also if a block mask lists the rows.
    """
    group = problem.group_size
    heads = [count for count in range(1, group + 1) if group % count == 0]
    windowed = problem.effective_window(problem.seqlen_q, problem.seqlen_k) != (UNLIMITED, UNLIMITED)
    rows = (1,) if has_lists(problem) or (problem.deterministic and windowed) else ROW_SPLITS
    for splits in itertools.starmap(Splits, itertools.product(heads, rows)):
        fits = splits.parts <= MAX_PARTS and part_bytes(problem) * splits.parts <= MAX_BYTES
        if splits.parts == 1 or fits:
            yield splits


def has_lists(problem: Problem) -> bool:
    """Whether a block mask lists the rows that see a block of keys."""
    return problem.mods is not None and problem.mods.block_size is not None


def part_bytes(problem: Problem) -> int:
    """Return the bytes of one part of dK and dV."""
    return 4 * problem.total_k * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)


class RowBlocks(NamedTuple):
    """The blocks of query rows that see a block of keys, in all sequences of average length."""

    begin: int
    end: int
    full_begin: int
    """All rows of blocks [full_begin, full_end) see all keys. There are none if the sequence ends within a
    block of keys under a mask with edges. Without edges, the keys past the end cost little."""
    full_end: int

    def share(self, index: int, count: int) -> RowBlocks:
        """Return the share of one of ``count`` programs, as ``schedule.own_row_blocks`` does."""
        steps = self.end - self.begin
        first = self.begin + steps * index // count
        return self._replace(begin=first, end=self.begin + steps * (index + 1) // count)

    @property
    def cut(self) -> int:
        """Number of blocks that the mask cuts."""
        full = min(self.end, self.full_end) - max(self.begin, self.full_begin)
        return self.end - self.begin - max(full, 0)


@lru_cache(maxsize=8)
def rows_of_blocks(problem: Problem, block_m: int, block_n: int) -> tuple[RowBlocks, ...]:
    """Return the :class:`RowBlocks` of each block of keys, if the sequences have the average length."""
    seqlen_q, seqlen_k = average_lengths(problem)
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    has_edges = left != UNLIMITED or right != UNLIMITED
    offset = seqlen_k - seqlen_q
    if has_lists(problem):
        steps, blocks = math.ceil(seqlen_q / block_m), math.ceil(seqlen_k / block_n)
        common, few = math.ceil(blocks / SEEN_BY_ALL), math.ceil(steps / SEEN_BY_ALL)
        seen = (steps,) * common + (few,) * (blocks - common)
        return tuple(RowBlocks(0, count, 0, count) for count in seen)
    rows = []
    for first in range(0, seqlen_k, block_n):
        last = min(first + block_n, seqlen_k) - 1
        begin = 0 if right == UNLIMITED else max(first - offset - right, 0)
        end = seqlen_q if left == UNLIMITED else min(last - offset + left + 1, seqlen_q)
        full_begin = 0 if right == UNLIMITED else max(last - offset - right, 0)
        full_end = seqlen_q if left == UNLIMITED else min(first - offset + left + 1, seqlen_q)
        if begin >= end:
            rows.append(RowBlocks(0, 0, 0, 0))
            continue
        first_full = math.ceil(full_begin / block_m)
        last_full = math.ceil(full_end / block_m) if full_end == seqlen_q else full_end // block_m
        if has_edges and first + block_n > seqlen_k:
            last_full = first_full
        rows.append(RowBlocks(begin // block_m, math.ceil(end / block_m), first_full, last_full))
    return tuple(rows)


def average_lengths(problem: Problem) -> tuple[int, int]:
    """Return (query rows, keys) of a sequence, rounded up. Lengths on the device are not read."""
    sequences = max(problem.batch, 1)
    return math.ceil(problem.total_q / sequences), math.ceil(problem.total_k / sequences)


def as_scheduled(problem: Problem, heads: int) -> Problem:
    """Return the problem for which work is scheduled: each key head is replaced by ``heads`` key heads.

    The query heads of the original key head are divided evenly among the new ones.
    """
    return problem if heads == 1 else replace(problem, num_heads_kv=problem.num_heads_kv * heads)
