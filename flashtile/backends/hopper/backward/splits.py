"""Among how many programs the Hopper backward shares a block of keys, so that few key heads fill the card.

A work tile is a block of keys with all query rows that see it, of all query heads of the group. Eight query
heads on one key head leave a card of 132 multiprocessors 64 long work tiles of 8192 keys. Then the heads of a
group are divided, and the rows. Each program writes a part of dK and dV in float32, and ``sum_parts`` adds
the parts up in one order.

How many is a matter of the shapes alone: a work queue is played through for each choice. Lengths on the
device are not read; packed sequences count as equally long.
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
"""Largest size of the memory for parts."""
ENOUGH_WAVES = 8
"""Waves of work tiles. With more per program, programs end together for any costs of tiles."""
START_AND_END = 3.0
"""Steps that the start and the end of a work tile cost, about: K and V come, dK and dV leave."""
STEP_SECONDS = 2.2e-6
"""Time of a step at full load, about: 10.5 MFLOP at 4.8 TFLOP/s per multiprocessor of an H100."""
SUM_SECONDS = 12e-6
"""Least cost of one more kernel and two more tensors, most of it on the host."""
BYTES_PER_SECOND = 4.4e12
"""To write parts, or to read them."""
ALTERNATING = 1.15
"""Factor by which the estimate without splits is too low where the blocks of the last heads alternate, with a
margin: measured are 11 and 12 % (H200, 12 heads on 2 and 28 on 4, S 4096)."""
WORTHWHILE = 0.9
"""Share of the time without splits below which they are used: estimates are rough, and parts take memory."""
EQUAL = 1.03
"""Times so close are not told apart."""


class Splits(NamedTuple):
    """Programs that share a block of keys: query heads of the group, and query rows, in so many parts."""

    heads: int = 1
    rows: int = 1

    @property
    def parts(self) -> int:
        """Number of parts of each row of dK and dV."""
        return self.heads * self.rows


class Work(NamedTuple):
    """Inputs of the choice of splits, in whole blocks, so that calls of similar lengths share a choice."""

    steps: tuple[int, ...]
    """The blocks of query rows that see each block of keys of a sequence, in the order of the queue."""
    heads: int
    """Key heads of all sequences."""
    group: int
    part_bytes: int
    """Bytes of one part of dK and dV."""
    divides_rows: bool
    """Whether rows may be divided, and not only heads."""
    last_alternate: bool
    """Whether blocks of the last heads alternate, as under a causal mask."""
    programs: int
    """Programs that the card runs at a time."""


def choose_splits(problem: Problem, block_m: int, block_n: int) -> Splits:
    """The splits of a call whose work tiles are ``block_n`` keys and whose steps are ``block_m`` rows."""
    sequences = max(problem.batch, 1)
    blocks = -(-problem.total_k // (sequences * block_n))
    programs = multiprocessors(problem.device)
    heads = problem.num_heads_kv * sequences
    if blocks * heads == 0 or blocks * heads >= ENOUGH_WAVES * programs:
        return Splits()
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    width = problem.head_dim + problem.head_dim_v
    steps = steps_of_blocks(problem, block_m, block_n)
    listed = problem.mods is not None and problem.mods.block_size is not None  # rows are not a range then
    work = Work(
        steps=steps[::-1] if problem.deterministic else steps,
        heads=heads,
        group=problem.group_size,
        part_bytes=4 * blocks * block_n * heads * width,
        divides_rows=not listed and (not problem.deterministic or left == right == UNLIMITED),
        last_alternate=not problem.deterministic and left == UNLIMITED != right,
        programs=programs,
    )
    return best_splits(work)


def steps_of_blocks(problem: Problem, block_m: int, block_n: int) -> tuple[int, ...]:
    """Blocks of rows that see each block of keys, in sequences of the average length."""
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
    """The fewest parts of those whose estimated time is the least, of heads before rows."""
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
    """All that there are, but for one part. Heads are divided evenly.

    When deterministic, programs add to rows of dQ in turn. Under a mask the shares of neighbouring blocks of
    keys do not have the same rows, so that a program would wait for most of another's work: only heads are
    divided.
    """
    heads = [count for count in range(1, work.group + 1) if work.group % count == 0]
    for splits in itertools.starmap(Splits, itertools.product(heads, ROW_SPLITS)):
        fits = splits.parts <= MAX_PARTS and splits.parts * work.part_bytes <= MAX_BYTES
        if splits.parts > 1 and fits and (splits.rows == 1 or work.divides_rows):
            yield splits


def tiles_of(work: Work, splits: Splits) -> Iterator[int]:
    """Steps of each work tile, in the order of the queue: a head after the other, but for the last."""
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
    """Estimate of the time until the last program ends and the parts are added up."""
    busy_until = [0.0] * work.programs
    for steps in tiles_of(work, splits):
        heapq.heapreplace(busy_until, busy_until[0] + START_AND_END + steps)
    return STEP_SECONDS * max(busy_until) + sum_seconds(work, splits)


def least_seconds(work: Work, splits: Splits) -> float:
    """Return a lower bound of the time: the mean load of the programs, or the longest work tile."""
    longest = START_AND_END + work.group // splits.heads * (-(-max(work.steps) // splits.rows))
    tiles = len(work.steps) * work.heads * splits.parts
    steps = START_AND_END * tiles + sum(work.steps) * work.heads * work.group
    return STEP_SECONDS * max(longest, steps / work.programs) + sum_seconds(work, splits)


def sum_seconds(work: Work, splits: Splits) -> float:
    """Return the time that parts cost: each is written once and read once."""
    if splits.parts == 1:
        return 0.0
    return SUM_SECONDS + 2 * splits.parts * work.part_bytes / BYTES_PER_SECOND


def as_scheduled(problem: Problem, heads: int) -> Problem:
    """The problem as the schedule has it: key heads counted once for each share of their query heads."""
    return problem if heads == 1 else replace(problem, num_heads_kv=problem.num_heads_kv * heads)
