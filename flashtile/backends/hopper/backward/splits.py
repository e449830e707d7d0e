"""Choice of the number of programs that share a block of keys in the Hopper backward.

A work tile is a block of keys with all query rows that see it, of all query heads of the group. For example,
eight query heads on one key head with 8192 keys give 64 long work tiles, too few for 132 multiprocessors. In
such cases the query heads of the group and the query rows are divided among several programs. Each program
writes a part of dK and dV in float32, and ``sum_parts`` adds the parts in a fixed order.

The choice depends only on shapes: the work queue is simulated for each possible choice. Lengths on the device
are not read; packed sequences are assumed to be equally long.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from flashtile.backends.common.device import multiprocessors
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED

ROW_SPLITS = (1, 2, 4, 8, 16)
MAX_PARTS = 32
"""Largest number of parts of a gradient, so that their sum stays a short kernel."""
MAX_BYTES = 128 * 2**20
"""Largest size of the memory for all parts of dK and dV."""
ENOUGH_WAVES = 8
"""With this many work tiles per program, programs end at about the same time, and splits are not needed."""
START_AND_END = 3.0
"""Approximate cost, in steps, of the start and the end of a work tile: loading K and V, storing dK and dV."""
STEP_SECONDS = 2.2e-6
"""Approximate time of a step at full load: 10.5 MFLOP at 4.8 TFLOP/s per multiprocessor of an H100."""
SUM_SECONDS = 12e-6
"""Minimum time of summing the parts: one more kernel and two more tensors, most of it on the host."""
BYTES_PER_SECOND = 4.4e12
"""Memory bandwidth for writing and for reading parts."""
ALTERNATING = 1.15
"""Factor on the estimated time without splits if the last heads' blocks are interleaved. Measurements were 11
and 12 % above the estimate (H200, 12 query heads on 2 key heads and 28 on 4, S = 4096); the rest is a
margin."""
WORTHWHILE = 0.9
"""Splits are used if they take less than this share of the time without them, since estimates are rough and
parts take memory."""
EQUAL = 1.03
"""Times that differ by at most this factor are considered equal."""


class Splits(NamedTuple):
    """Numbers of parts into which the query heads of a group and the query rows are divided."""

    heads: int = 1
    rows: int = 1

    @property
    def parts(self) -> int:
        """Number of programs that share a block of keys. Each writes a part, its partial sum of dK and dV."""
        return self.heads * self.rows


class Work(NamedTuple):
    """Inputs of the choice of splits, in whole blocks, so that calls of similar lengths share a choice."""

    steps: tuple[int, ...]
    """Number of blocks of query rows that see each block of keys of a sequence, in the order of the queue."""
    heads: int
    """Key heads of all sequences."""
    group: int
    part_bytes: int
    """Bytes of one part of dK and dV."""
    divides_rows: bool
    """Whether query rows may be divided; heads always may."""
    last_alternate: bool
    """Whether the queue interleaves the work tiles of the last heads, as under a causal mask."""
    programs: int
    """Programs that the card runs at a time."""


def choose_splits(problem: Problem, block_m: int, block_n: int, columns: int = 1) -> Splits:
    """Return the splits of a call with work tiles of ``block_n`` keys and steps of ``block_m`` rows.

    ``columns`` work tiles divide the columns of dK and dV in any case. They count as heads.
    """
    sequences = max(problem.batch, 1)
    blocks = -(-problem.total_k // (sequences * block_n))
    programs = multiprocessors(problem.device)
    heads = problem.num_heads_kv * sequences * columns
    if blocks * heads == 0 or blocks * heads >= ENOUGH_WAVES * programs:
        return Splits()
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    width = problem.head_dim + problem.head_dim_v
    steps = steps_of_blocks(problem, block_m, block_n)
    listed = problem.mods is not None and problem.mods.block_size is not None  # rows come from a list
    work = Work(
        steps=steps[::-1] if problem.deterministic else steps,
        heads=heads,
        group=problem.group_size,
        part_bytes=4 * blocks * block_n * heads * width // columns,
        divides_rows=not listed and (not problem.deterministic or left == right == UNLIMITED),
        last_alternate=not problem.deterministic and left == UNLIMITED != right,
        programs=programs,
    )
    return best_splits(work)


def steps_of_blocks(problem: Problem, block_m: int, block_n: int) -> tuple[int, ...]:
    """Return how many blocks of rows see each block of keys, if the sequences have the average length."""
    sequences = max(problem.batch, 1)
    seqlen_q, seqlen_k = -(-problem.total_q // sequences), -(-problem.total_k // sequences)
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    offset = seqlen_k - seqlen_q
    steps = []
    for first in range(0, seqlen_k, block_n):
        last = min(first + block_n, seqlen_k) - 1
        begin = 0 if right == UNLIMITED else max(first - offset - right, 0)
        end = seqlen_q if left == UNLIMITED else min(last - offset + left + 1, seqlen_q)
        steps.append(max(-(-end // block_m) - begin // block_m, 0) if begin < end else 0)
    return tuple(steps)


@lru_cache(maxsize=1024)
def best_splits(work: Work) -> Splits:
    """Return the splits with the least estimated time.

    If several splits take nearly equal times, return the one with the fewest parts. With equal numbers of
    parts, prefer to split heads rather than rows.
    """
    whole = seconds(work, Splits()) * (ALTERNATING if work.last_alternate else 1)
    times: dict[Splits, float] = {}
    for splits in sorted(candidates(work), key=lambda splits: least_seconds(work, splits)):
        if least_seconds(work, splits) >= min([WORTHWHILE * whole, *times.values()]):
            break
        times[splits] = seconds(work, splits)
    least = min(times.values(), default=whole)
    if least >= WORTHWHILE * whole:
        return Splits()
    near = [splits for splits, time in times.items() if time <= EQUAL * least]
    return min(near, key=lambda splits: (splits.parts, splits.rows))


def candidates(work: Work) -> Iterator[Splits]:
    """Yield all splits of two or more parts within MAX_PARTS and MAX_BYTES. Heads are divided evenly.

    When deterministic, programs add to a row of dQ in the order of the blocks of keys. Under a mask, each
    block is seen by a different range of rows. If programs divided these rows, a program would wait until
    another program has done most of its work on the previous block. So in this case only heads are divided.
    """
    heads = [count for count in range(1, work.group + 1) if work.group % count == 0]
    for splits in itertools.starmap(Splits, itertools.product(heads, ROW_SPLITS)):
        fits = splits.parts <= MAX_PARTS and splits.parts * work.part_bytes <= MAX_BYTES
        if splits.parts > 1 and fits and (splits.rows == 1 or work.divides_rows):
            yield splits


def tiles_of(work: Work, splits: Splits) -> Iterator[int]:
    """Yield the number of steps of each work tile, in the order of the queue.

    All work tiles of a head come before those of the next head. If ``last_alternate``, the last heads are
    interleaved instead: the first block of keys of each, then the second block of each, and so on.
    """
    group, rows = work.group // splits.heads, splits.rows
    blocks = [
        [group * (count * (share + 1) // rows - count * share // rows) for share in range(rows)]
        for count in work.steps
    ]
    heads = work.heads * splits.heads
    last = min(-(-work.programs // (len(blocks) * rows)), heads) if work.last_alternate else 0
    for _ in range(heads - last):
        yield from itertools.chain(*blocks)
    for shares in blocks:
        yield from shares * last


def seconds(work: Work, splits: Splits) -> float:
    """Return the estimated time in seconds of the backward kernel and the kernel that sums dK and dV."""
    busy_until = [0.0] * work.programs
    for steps in tiles_of(work, splits):
        heapq.heapreplace(busy_until, busy_until[0] + START_AND_END + steps)
    return STEP_SECONDS * max(busy_until) + sum_seconds(work, splits)


def least_seconds(work: Work, splits: Splits) -> float:
    """Return a lower bound of :func:`seconds`, from the mean load of programs and the longest work tile."""
    longest = START_AND_END + work.group // splits.heads * (-(-max(work.steps) // splits.rows))
    tiles = len(work.steps) * work.heads * splits.parts
    steps = START_AND_END * tiles + sum(work.steps) * work.heads * work.group
    return STEP_SECONDS * max(longest, steps / work.programs) + sum_seconds(work, splits)


def sum_seconds(work: Work, splits: Splits) -> float:
    """Return the estimated time in seconds of writing, reading and summing the parts of dK and dV."""
    if splits.parts == 1:
        return 0.0
    return SUM_SECONDS + 2 * splits.parts * work.part_bytes / BYTES_PER_SECOND


def as_scheduled(problem: Problem, heads: int) -> Problem:
    """Return the problem for which work is scheduled: each key head is replaced by ``heads`` key heads.

    The query heads of the original key head are divided evenly among the new ones.
    """
    return problem if heads == 1 else replace(problem, num_heads_kv=problem.num_heads_kv * heads)
