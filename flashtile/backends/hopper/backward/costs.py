"""How a launch of the Hopper backward is divided among programs, and the estimated time that this takes.

The mirror image of the forward's ``rounds``. A work tile is a block of keys with all query rows that see it,
of all query heads of the group. A launch takes as long as its busiest program, and then converts the dQ of
the last heads. :func:`fastest` chooses the query rows of a step, the room in ``dq_accum``, and how many
programs share a block of keys. The choice depends only on shapes.

Programs share blocks of keys where there are too few: eight query heads on one key head with 8192 keys give
64 long work tiles for 132 multiprocessors. The query heads of the group and the query rows are then divided
(:class:`Splits`). Each program writes a part of dK and dV in float32, and ``sum_parts`` adds the parts in a
fixed order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flashtile.backends.common.config import largest_divisor
from flashtile.backends.common.device import multiprocessors
from flashtile.backends.hopper.backward.preprocess import dense_batch
from flashtile.backends.hopper.config import WARPGROUP_ROWS, has_lists, is_windowed, tile_widths
from flashtile.backends.hopper.forward.rounds import WORTHWHILE
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED

if TYPE_CHECKING:
    from flashtile.backends.hopper.backward.config import BackwardConfig

ROW_SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts of the query rows: powers of two, because the kernels divide by shifting."""
SEEN_BY_ALL = 16
"""The host does not read the lists of a block mask. To choose splits, it assumes that all rows see one of
SEEN_BY_ALL blocks of keys, such as those of a prompt, and that one of SEEN_BY_ALL rows sees the others."""
MAX_PARTS = 32
"""Largest number of parts of a gradient, so that their sum stays a short kernel."""
MAX_BYTES = 128 * 2**20
"""Largest size of a ``dq_accum`` for all heads, and of all parts of dK and dV unless q and dO are larger."""


class Splits(NamedTuple):
    """Numbers of parts into which the query heads of a group and the query rows are divided."""

    heads: int = 1
    rows: int = 1

    @property
    def parts(self) -> int:
        """Number of programs that share a block of keys. Each writes a part, its partial sum of dK and dV."""
        return self.heads * self.rows


def candidates(problem: Problem) -> Iterator[Splits]:
    """Yield no splits, then all splits within MAX_PARTS and their memory. Heads are divided evenly.

    When deterministic, programs add to a row of dQ in the order of the blocks of keys. Under a mask, each
    block is seen by a different range of rows. If programs divided these rows, a program would wait until
    another program has done most of its work on the previous block. So in this case only heads are divided,
    and also if a block mask lists the rows.
    """
    group = problem.group_size
    heads = [count for count in range(1, group + 1) if group % count == 0]
    rows = (1,) if has_lists(problem) or (problem.deterministic and is_windowed(problem)) else ROW_SPLITS
    width = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    room = max(MAX_BYTES, problem.total_q * problem.num_heads_q * width)
    for splits in itertools.starmap(Splits, itertools.product(heads, rows)):
        fits = splits.parts <= MAX_PARTS and part_bytes(problem) * splits.parts <= room
        if splits.parts == 1 or fits:
            yield splits


def part_bytes(problem: Problem) -> int:
    """Return the bytes of one part of dK and dV."""
    return 4 * problem.total_k * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)


class SeenRows(NamedTuple):
    """The blocks of query rows that see a block of keys, in all sequences of average length."""

    begin: int
    end: int
    full_begin: int
    """All rows of blocks [full_begin, full_end) see all keys, and their steps need no mask. There are none if
    the sequence ends within the block of keys and the mask has edges. Without edges, the mask of the keys
    past the end costs little, so these steps count as unmasked."""
    full_end: int

    def share(self, index: int, count: int) -> SeenRows:
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
def rows_of_blocks(problem: Problem, block_m: int, block_n: int) -> tuple[SeenRows, ...]:
    """Return the :class:`SeenRows` of each block of keys of a head, for sequences of assumed lengths."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    has_edges, lengths = is_windowed(problem), assumed_lengths(problem)
    if has_lists(problem):
        steps, blocks = math.ceil(lengths[0][0] / block_m), math.ceil(lengths[0][1] / block_n)
        # The common blocks come first, as those of a prompt do: the queue starts with them.
        common, few = math.ceil(blocks / SEEN_BY_ALL), math.ceil(steps / SEEN_BY_ALL)
        seen = (steps,) * common + (few,) * (blocks - common)
        return tuple(SeenRows(0, count, 0, count) for count in seen)
    rows: list[SeenRows] = []
    for (seqlen_q, seqlen_k), equal in itertools.groupby(lengths):
        offset = seqlen_k - seqlen_q
        own = []
        for first in range(0, seqlen_k, block_n):
            last = min(first + block_n, seqlen_k) - 1
            begin = 0 if right == UNLIMITED else max(first - offset - right, 0)
            end = seqlen_q if left == UNLIMITED else min(last - offset + left + 1, seqlen_q)
            full_begin = 0 if right == UNLIMITED else max(last - offset - right, 0)
            full_end = seqlen_q if left == UNLIMITED else min(first - offset + left + 1, seqlen_q)
            if begin >= end:
                own.append(SeenRows(0, 0, 0, 0))
                continue
            first_full = math.ceil(full_begin / block_m)
            last_full = math.ceil(full_end / block_m) if full_end == seqlen_q else full_end // block_m
            # As in ``schedule.row_blocks``, except without edges (``full_begin``).
            if has_edges and first + block_n > seqlen_k:
                last_full = first_full
            own.append(SeenRows(begin // block_m, math.ceil(end / block_m), first_full, last_full))
        rows += own * len(list(equal))
    return tuple(rows)


def assumed_lengths(problem: Problem) -> list[tuple[int, int]]:
    """Return (query rows, keys) of each packed sequence, the longest first; of one sequence of a dense call.

    Lengths on the device are not read. The host knows the number of sequences, their sum and the longest. If
    a share u of the sequences is shorter than longest * u ** e, the mean is longest / (e + 1). Lengths that
    are drawn log-uniformly, as those of documents, are close to this.
    """
    totals = problem.total_q, problem.total_k
    if not problem.varlen:
        sequence_q, sequence_k = (math.ceil(total / max(problem.batch, 1)) for total in totals)
        return [(sequence_q, sequence_k)]
    ranks = [(rank + 0.5) / problem.batch for rank in reversed(range(problem.batch))]
    sides = []
    for bound, total in zip((problem.seqlen_q, problem.seqlen_k), totals, strict=True):
        longest = min(bound, total)
        exponent = max(longest * problem.batch / total - 1, 0.0)
        sides.append([math.ceil(longest * rank**exponent) for rank in ranks])
    return list(zip(*sides, strict=True))


def as_scheduled(problem: Problem, heads: int) -> Problem:
    """Return the problem for which work is scheduled: each key head is replaced by ``heads`` key heads.

    The query heads of the original key head are divided evenly among the new ones.
    """
    return problem if heads == 1 else replace(problem, num_heads_kv=problem.num_heads_kv * heads)


SWIZZLE_BYTES = {"even": 20 * 2**20, "uneven": 12 * 2**20}
"""Bytes of the L2 cache (50 MB) that the tensors of one group of interleaved heads may take. Programs work on
two groups at a time. A larger limit is faster if all blocks of keys cost the same. A smaller limit is faster
under a causal mask, where heads complete later."""
LISTED_ROUNDS = 8
"""With a block mask, each program takes about this many work tiles of the last, interleaved heads. The host
does not read the lists. A prompt that all rows see has work tiles several times as long as the mean, and
those of all heads must start early."""
BYTES_BY_COST, BYTES_BY_SEQUENCE = 60e6, 90e6
"""Up to so many :func:`bytes_at_work`, packed rows stay in the L2 cache, by the order of the tile table. By
cost, packed documents took longer on an H200 than estimated without misses: with 12 query heads on 2 1.32
times as long, 28 on 4 1.31, 40 on 8 1.15, 24 on 8 1.07 (head_dim 128, 32,768 tokens). A model with a cache of
40 MB and 3.3 TB/s behind it was within 7 % of ten such calls. Both numbers come from it. Plans that it
predicted then took 0.95 to 1.11 times the predicted time. With the choices that follow, 12 heads on 2 took
1163 us instead of 1397, and with longer documents 2048 instead of 2283; 28 on 4 2333 instead of 2719; 32 on 8
4686 instead of 4872; 40 on 8 as long as before, where 0.89 was predicted. The first is faster still with
heads divided in three (1104 us), or in two and sequence after sequence (1117). Neither number alone would
choose that without changing the plans of other calls."""
DENSE_MISSES = 1.1
"""Largest factor of :func:`cache_misses` of dense calls. Their programs work on few sequences, in the same
order of heads, so most misses are hidden. With the model above, steps take 1.00 to 1.06 times as long up to
8,192 keys, and 1.03 to 1.19 with 16,384 (head_dim 128, 7 query heads or more on one). Measured, 4 x 4096 with
64 query heads on 8 of 128 took 1.07 of the estimate without misses, and 1.02 with rows divided in two."""
SHORT = 1024
"""Keys up to which sequences have few programs that could read a row from the cache."""
ENOUGH_ROUNDS = 16
"""With this many work tiles per program, all programs end at about the same time. It is twice the number of
the forward, since a work tile has all query heads of a group. 4 x 4096 with 64 heads on 8 of 128 makes 7.8
rounds: with rows divided in two it took 4900 us instead of 5395, and 5276 instead of 5751 on another card
(estimated 4795 and 4987)."""
EQUAL = 1.02
"""Times that differ by at most this factor are considered equal."""


class Costs(NamedTuple):
    """Times of a program, in microseconds."""

    tile: float
    """A work tile apart from its steps: loading K and V, filling the pipeline, storing dK and dV."""
    step: float
    """A block of query rows of one head."""
    cut: float
    """Additional time of a step that an edge of a window or a causal mask cuts."""


COSTS: dict[tuple[int, int, int], Costs] = {
    (32, 32, 128): Costs(2.5, 1.75, 0.6),
    (32, 32, 64): Costs(2.0, 1.05, 0.3),
    (64, 64, 128): Costs(2.7, 2.35, 2.2),
    (64, 64, 64): Costs(2.1, 1.35, 0.5),
    (128, 128, 64): Costs(2.8, 2.05, 0.25),
    (64, 128, 64): Costs(2.4, 1.7, 0.4),
    (128, 64, 64): Costs(2.4, 1.7, 0.4),
}
"""(columns of q and k, of v, query rows of a step) -> costs. They, and the constants below, were fitted to
130 times on an H200: the plain calls of ``benchmarks/results/2026-11-23-h200-*-backward*.json`` and the
configurations of ``2026-11-27-h200-rounds.json``. The root of the mean squared error is 5 %. Unequal head
sizes have few measurements: their costs lie between those of equal ones."""
WIDE_COSTS = Costs(6.6, 2.2, 0.0)
"""Costs of the kernel of dK and dV for head sizes over 128. Those over 256 have half as many rows in a
step and were not measured."""
LAUNCH = {32: 7.5, 64: 7.5, 128: 10.5}
"""Query rows of a step -> time of the launches of the preprocess kernel and of the main kernel, without work.
Steps of 128 rows have about twice as many instructions, which the first work tiles load."""
BYTES = 6.0e6
"""Bytes of the call's tensors per microsecond. Much of this is hidden, so they exceed the memory's rate."""
ACCUM_BYTES = 1.9e6
"""Bytes of ``dq_accum`` per microsecond: it is zeroed, and what leaves the L2 cache comes back."""
CHUNK = 0.27
"""Conversion of POSTPROCESS_CHUNK floats of ``dq_accum``."""
SIGNAL = 2.0
"""From a program's last addition to dQ to the start of its conversion."""
SUM = 4.0
"""The launch of the kernel that adds up parts."""
L2_PARTS = 40e6
"""Bytes of parts that stay in the L2 cache."""
PART_BYTES = 5.0e6
"""Bytes per microsecond of parts that do not stay there. With 107 MB of parts, cross-attention to 234 keys
took 291 us, and the estimate without this time is 237; with 101 MB, to 512 keys, 670 and 613. Without parts,
the first takes 258 us instead of 296. This time is not all of it: with 54 MB of parts the first takes 291 us,
estimated 251. Under a causal mask it is not added: there, splits also keep rows in the cache."""


class LaunchWork(NamedTuple):
    """The work of a launch, in whole blocks, so that calls of similar lengths share an estimate."""

    rows: tuple[SeenRows, ...]
    """The query rows of each block of keys of a head, in the order of the queue."""
    heads: int
    """Number of key heads (:func:`key_heads`), each counted HEAD_SPLITS * COLUMN_SPLITS times."""
    group: int
    """Query heads of each of them."""
    row_splits: int
    last: int
    """Number of heads at the end of the queue that are interleaved (:func:`last_heads`)."""
    resident: int
    """Number of heads that ``dq_accum`` has room for."""
    chunks: int
    """Chunks of ``dq_accum`` that a program converts at a time."""
    programs: int
    costs: Costs

    @property
    def tiles(self) -> int:
        return len(self.rows) * self.heads * self.row_splits


def fastest(problem: Problem, configs: tuple[BackwardConfig, ...]) -> BackwardConfig:
    """Return the first of ``configs``, or one that is estimated to take less than WORTHWHILE of its time.

    Others are variants of each of ``configs``: its splits, and room in ``dq_accum`` for all heads. Of those
    that take nearly the least time, it is the one with the fewest parts, and with equal numbers of parts the
    one that divides heads rather than rows. Where rows of dense sequences leave the L2 cache, two parts
    divide rows: 0.89 of the whole instead of 0.93 (8 x 2048, 64 heads on 8 of 128), 0.92 instead of 0.94
    (4 x 4096), 0.97 instead of 0.98 (1 x 16384, 16 on 2). Work tiles that make ENOUGH_ROUNDS are not divided
    further.
    """
    first = configs[0]  # the table's, which stays unless another should clearly be faster
    if not (problem.batch and problem.total_q and problem.total_k):
        return first
    whole = microseconds(problem, first)
    choices = tuple(variants(problem, configs))
    bounds = {config: microseconds(problem, config, least_busiest) for config in choices}
    times = {first: whole}
    for config in sorted(choices, key=bounds.__getitem__):
        if bounds[config] > EQUAL * min(times.values()):
            break  # this one and the rest cannot be near the least time, and simulating them takes long
        times[config] = microseconds(problem, config)
    least = min(times.values())
    if least >= WORTHWHILE * whole:
        return first
    near = [config for config in choices if times.get(config, math.inf) <= EQUAL * least]
    by_rows = not problem.varlen and cache_misses(problem, first) > 1

    def preference(config: BackwardConfig) -> tuple[int, int]:
        return config.parts, config.HEAD_SPLITS if by_rows and config.parts == 2 else config.ROW_SPLITS

    return min(near, key=preference)


def variants(problem: Problem, configs: tuple[BackwardConfig, ...]) -> Iterator[BackwardConfig]:
    """Yield the configurations among which :func:`fastest` chooses."""
    enough = ENOUGH_ROUNDS * multiprocessors(problem.device)
    for config, splits in itertools.product(configs, candidates(problem)):
        divided = replace(config, HEAD_SPLITS=splits.heads, ROW_SPLITS=splits.rows)
        work = work_of_launch(problem, divided)
        # Rows that leave the L2 cache may be worth dividing in any number of rounds.
        if splits.parts > 1 and work.tiles >= enough and cache_misses(problem, config) == 1:
            continue
        yield divided
        # Room for all heads only where heads would wait for it: if all fit, ``dq_accum`` leaves the L2 cache
        # sooner.
        if work.resident < work.heads and work.tiles < enough:
            everywhere = replace(divided, ALL_RESIDENT=True)
            if accum_bytes(problem, work_of_launch(problem, everywhere)) <= MAX_BYTES:
                yield everywhere


def microseconds(
    problem: Problem, config: BackwardConfig, of_programs: Callable[[LaunchWork], float] | None = None
) -> float:
    """Return the estimated time of a call with ``config``.

    ``of_programs`` returns the time of the programs; None means :func:`busiest`.
    """
    work = work_of_launch(problem, config)
    width = problem.head_dim + problem.head_dim_v
    rows, keys = problem.total_q * problem.num_heads_q, problem.total_k * problem.num_heads_kv
    # out and dO are read, then q, k, v and dO; dq, dk and dv are written.
    moved = problem.dtype.itemsize * (rows * (2 * width + problem.head_dim_v) + 2 * keys * width)
    time = LAUNCH[config.BLOCK_M] + moved / BYTES + (of_programs or busiest)(work)
    time += accum_bytes(problem, work) / ACCUM_BYTES
    if config.parts > 1:
        parts = config.parts * part_bytes(problem)
        time += SUM + 2 * parts / BYTES
        if not is_causal(problem):
            time += 2 * max(parts - L2_PARTS, 0) / PART_BYTES
    return time


@lru_cache(maxsize=64)
def work_of_launch(problem: Problem, config: BackwardConfig) -> LaunchWork:
    """Return the work of a call with ``config``."""
    scheduled = as_scheduled(problem, config.HEAD_SPLITS)
    heads, group = key_heads(scheduled) * config.COLUMN_SPLITS, scheduled.group_size
    block_d, block_dv = tile_widths(problem)
    rows = rows_of_blocks(problem, config.BLOCK_M, config.BLOCK_N)
    if sorted_by_cost(problem, config):
        rows = tuple(sorted(rows, key=lambda seen: seen.begin - seen.end))
    tiles = math.ceil(group * row_tiles(problem) / (len(rows) * config.ROW_SPLITS))
    programs = min(multiprocessors(problem.device), len(rows) * heads * config.ROW_SPLITS)
    # Without dq_accum nothing waits for it. The waits of deterministic sums are not modelled.
    no_accum = config.wide or config.ONE_BLOCK
    simple = problem.deterministic or no_accum
    last = 0
    if not problem.deterministic and (is_causal(problem) or has_lists(problem)):
        last = last_heads(scheduled, config.BLOCK_N, programs, config.ROW_SPLITS)
    resident = heads if simple else resident_heads(scheduled, config, 1, programs)
    costs = WIDE_COSTS if config.wide else COSTS[block_d, block_dv, config.BLOCK_M]
    return LaunchWork(
        rows=rows[::-1] if problem.deterministic else rows,
        heads=heads,
        group=group,
        row_splits=config.ROW_SPLITS,
        last=last,
        resident=resident,
        # Chunks have POSTPROCESS_CHUNK floats, and a tile has 64 x block_d.
        chunks=0 if no_accum else tiles * block_d // 16,
        programs=programs,
        costs=costs._replace(step=costs.step * cache_misses(problem, config)),
    )


def accum_bytes(problem: Problem, work: LaunchWork) -> int:
    """Return the bytes of ``dq_accum``."""
    if not work.chunks:
        return 0
    rows = row_tiles(problem) * WARPGROUP_ROWS
    return 4 * work.resident * work.group * rows * tile_widths(problem)[0]


def row_tiles(problem: Problem) -> int:
    """Return the number of 64-row tiles of a query head, in all packed sequences or in one dense sequence."""
    return sum(math.ceil(length / WARPGROUP_ROWS) for length, _ in assumed_lengths(problem))


def bytes_at_work(problem: Problem, config: BackwardConfig) -> int:
    """Return the bytes of q, dO and dq_accum that programs work on at a time, sequence after sequence.

    Under a causal mask, programs of a sequence have different numbers of steps for each query head of the
    group. They are soon at different heads, so all rows of the group should stay in the L2 cache. Each block
    of keys has as many rows, on average, as keys.
    """
    rows = multiprocessors(problem.device) * config.BLOCK_N * problem.group_size // config.HEAD_SPLITS
    return rows * row_bytes(problem)


def sorted_by_cost(problem: Problem, config: BackwardConfig) -> bool:
    """Whether the tile table lists work tiles by cost, not sequence after sequence.

    A work tile has all query heads of a group: that of the first keys of a long document takes 830 us of a
    call of 2,500. Sequence after sequence, those of the last heads begin late: packed documents of 40 to
    4,000 tokens take up to 1.04 times the time by cost (simulated). By cost, programs work on more sequences
    at a time, whose rows must be in the L2 cache. On an H200 sequence after sequence took 0.83 of the time by
    cost with 12 query heads on 2 of 128, 0.91 with 28 on 4, 0.96 with 32 on 8, and 0.98 to 1.02 in six other
    calls, where the difference is noise. Deterministic sums have an order of their own.
    """
    _, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    if not problem.varlen or problem.deterministic or right == UNLIMITED:
        return False
    return not is_causal(problem) or bytes_at_work(problem, config) <= BYTES_BY_COST


def cache_misses(problem: Problem, config: BackwardConfig) -> float:
    """Return the factor of the time of steps whose rows leave the L2 cache, 1 if they do not.

    It was found for causal sequences with as many queries as keys. Programs that divide the rows of a block
    of keys work on fewer sequences at a time.
    """
    square = problem.varlen or problem.seqlen_q == problem.seqlen_k
    many = square and is_causal(problem) and problem.seqlen_k > SHORT
    if not many or problem.deterministic or config.wide:
        return 1.0
    factor = max(bytes_at_work(problem, config) / config.ROW_SPLITS / BYTES_BY_SEQUENCE, 1.0)
    return factor if problem.varlen else min(factor, DENSE_MISSES)


def row_bytes(problem: Problem) -> int:
    """Return the bytes of a row of q, dO and ``dq_accum``."""
    return problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v) + 4 * problem.head_dim


def tile_costs(work: LaunchWork) -> list[list[float]]:
    """Return the costs of the work tiles of each block of keys of a head."""
    tile, step, cut = work.costs
    shares = [[rows.share(index, work.row_splits) for index in range(work.row_splits)] for rows in work.rows]
    return [
        [tile + work.group * (step * (rows.end - rows.begin) + cut * rows.cut) for rows in block]
        for block in shares
    ]


def queue(work: LaunchWork) -> Iterator[tuple[int, int]]:
    """Yield (key head, block of keys) in the order of the queue (``schedule.head_and_block``)."""
    blocks, first = range(len(work.rows)), work.heads - work.last
    yield from itertools.product(range(first), blocks)
    for block, head in itertools.product(blocks, range(first, work.heads)):
        yield head, block


def least_busiest(work: LaunchWork) -> float:
    """Return a lower bound of :func:`busiest`, from the mean load of programs and the longest work tile."""
    tile, step, cut = work.costs
    steps, longest, cuts = totals(work.rows)
    mean = tile * len(work.rows) * work.row_splits + work.group * (step * steps + cut * cuts)
    longest_tile = tile + work.group * step * (longest // work.row_splits)
    return max(mean * work.heads / work.programs, longest_tile) + conversion(work)


@lru_cache(maxsize=8)
def totals(rows: tuple[SeenRows, ...]) -> tuple[int, int, int]:
    """Return the number of steps of all blocks of keys, the most of one block, and how many are cut."""
    steps = [block.end - block.begin for block in rows]
    return sum(steps), max(steps), sum(block.cut for block in rows)


def conversion(work: LaunchWork) -> float:
    """Return the time from the last addition to a head's dQ to the end of its conversion."""
    return SIGNAL + CHUNK * work.chunks if work.chunks else 0.0


@lru_cache(maxsize=64)
def busiest(work: LaunchWork) -> float:
    """Return the estimated time of the programs, with the conversion of the dQ of the last heads.

    The first addition to a head's dQ waits until its place in ``dq_accum`` is converted and zero. With
    ENOUGH_ROUNDS all programs end at about the same time, and the mean is returned.
    """
    costs = tile_costs(work)
    convert = conversion(work)
    if work.tiles >= ENOUGH_ROUNDS * work.programs:
        return work.heads * sum(map(sum, costs)) / work.programs + convert
    # The queue is played through: the program that is free first takes the next work tile.
    busy = [0.0] * work.programs
    ends = [0.0] * work.heads
    for head, block in queue(work):
        before = head - work.resident
        zeroed = ends[before] + convert if before >= 0 else 0.0
        for cost in costs[block]:
            end = max(busy[0], zeroed - work.costs.step) + cost  # dQ of a step is passed on one step later
            heapq.heapreplace(busy, end)
            ends[head] = max(ends[head], end)
    return max(busy) + convert


def key_heads(problem: Problem) -> int:
    """Return the number of key heads, over all sequences of a dense batch."""
    return problem.num_heads_kv * dense_batch(problem)


def is_causal(problem: Problem) -> bool:
    """Whether the mask has only a right edge."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    return left == UNLIMITED != right


def has_uneven_blocks(problem: Problem) -> bool:
    """Whether some blocks of keys are seen by more rows than others, as under a causal mask."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    return (left == UNLIMITED) != (right == UNLIMITED)


def l2_swizzle(problem: Problem) -> int:
    """Return the number of key heads whose work tiles are interleaved when deterministic.

    It is the largest divisor of :func:`key_heads` for which q, dO and ``dq_accum`` fit in SWIZZLE_BYTES.
    """
    room = SWIZZLE_BYTES["uneven" if has_uneven_blocks(problem) else "even"]
    most = room // (row_bytes(problem) * problem.group_size * max(problem.seqlen_q, 1))
    return largest_divisor(key_heads(problem), most)


def last_heads(problem: Problem, block_n: int, programs: int, row_splits: int = 1) -> int:
    """Return how many key heads at the end of the queue have interleaved work tiles.

    Under a causal mask, it is the number of heads that the programs work on at a time. With a block mask, it
    is LISTED_ROUNDS times this number. Packed sequences get one head more: the first blocks of keys of a long
    document take longer than all other blocks of a head, divided among the programs. ``problem`` is from
    :func:`as_scheduled`.
    """
    tiles = math.ceil(problem.total_k / dense_batch(problem) / block_n) * row_splits
    rounds = LISTED_ROUNDS if has_lists(problem) else 1
    return min(math.ceil(rounds * programs / max(tiles, 1)) + problem.varlen, key_heads(problem))


def resident_heads(problem: Problem, config: BackwardConfig, swizzle: int, programs: int) -> int:
    """Return the number of key heads that ``dq_accum`` has room for.

    ``problem`` is from :func:`as_scheduled`. There is room for about twice the heads that programs work on at
    a time, because programs begin the next heads while the sums of the previous ones are converted, and for
    three times as many if causal steps are short. When deterministic or with a block mask, interleaved heads
    complete at the same time and need more room. All interleaved heads must fit, since they must not wait for
    one another. A larger ``dq_accum`` would not stay in the L2 cache. If the last heads would wait for the
    first ones, there may be room for all (``config.ALL_RESIDENT``).
    """
    if config.ALL_RESIDENT:
        return key_heads(problem)
    # Twice the heads at work and one. Causal at a length of 512 and head_dim 64, 1.2, 1.5, 2, 3 and 6 times
    # took 533, 493, 481, 483 and 491 us: with less room heads wait, with more dq_accum leaves the L2 cache.
    # Steps of 64 rows at head_dim 64 are short, so more heads complete during a conversion. With room for
    # three times the heads at work, causal sequences of 231, 413 and 589 tokens took 154, 218 and 241 us
    # instead of 159, 226 and 251; those of 512 448 instead of 450, which is noise. With head sizes up to 32
    # it brought nothing: causal at a length of 1,024, heads of 16 took 1048, 1047 and 1049 us with two, three
    # and eight times. They take 1.4 times the estimate, as long as without a mask; the cause is not found.
    # Grouped heads, and those of packed sequences, take longer and were not tried.
    tiles = math.ceil(problem.total_k / dense_batch(problem) / config.BLOCK_N) * config.ROW_SPLITS
    rounds = LISTED_ROUNDS if has_lists(problem) else 2
    short = config.BLOCK_M == tile_widths(problem)[0] == 64 and problem.group_size == 1
    if short and is_causal(problem) and not (problem.varlen or problem.deterministic or has_lists(problem)):
        rounds = 3
    heads = math.ceil(rounds * programs / max(tiles, 1)) + 1
    # A group of interleaved heads completes at once, so another group needs room meanwhile. Without it,
    # causal calls took up to 20 % longer. Without a mask, all rooms that were tried were within 5 % of each
    # other.
    if problem.deterministic:
        heads = heads + swizzle if has_uneven_blocks(problem) else max(heads, 5 * swizzle // 2)
    return min(heads, key_heads(problem))
