"""How a launch of the Hopper forward is divided among programs, and the estimated time that this takes.

A launch takes as long as its busiest program. If there are few more work tiles than programs, most programs
are idle in the second round. :func:`fastest` then chooses tiles of another size, or single tiles instead of
pairs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from flashtile.backends.common.config import largest_divisor
from flashtile.backends.common.device import multiprocessors
from flashtile.backends.hopper.config import (
    WARPGROUP_ROWS,
    column_splits,
    has_lists,
    heads_together,
    modifiers_of,
    rows_of_token,
)
from flashtile.backends.hopper.forward.schedule import lacking_tokens
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import KernelMask

if TYPE_CHECKING:
    from flashtile.backends.hopper.forward.config import ForwardConfig

SWIZZLE_HEADS = 8
"""Number of heads to interleave if work tiles are pairs or come from the work queue."""
SWIZZLE_TILES = 2816
"""Number of work tiles to interleave if they are sorted by falling cost. With about 20 per multiprocessor,
programs end together, and the keys of the interleaved heads stay in the L2 cache."""
ENOUGH_ROUNDS = 8
"""With this many work tiles per program, partly empty rounds cost little, and no time is estimated."""
WORTHWHILE = 0.97
"""Another configuration is used if its estimated time is below this share of the time of the table's."""
MAX_SINGLE_BYTES, SINGLE_MISSES = 96 * 2**20, 1.05
"""If the keys and values of all heads exceed this size, the estimated time of single tiles in place of pairs
is multiplied by this factor, because programs then read many heads at a time. Single tiles took 0.80 of the
time of pairs with 72 MiB (estimate: 0.76), and 1.05 with 128 MiB (0.98); at head_dim 256 0.77 with 100 MiB
(0.78), 0.85 with 110 (0.85) and 0.93 with 120 (0.92). In the kernel of dQ for head sizes over 128, they took
0.965 of the whole backward pass with 103 MiB, 0.964 with 140 and 1.010 with 160. If dQ is three sevenths of
the pass, these are 0.92, 0.92 and 1.02 (estimates: 0.85, 0.95, 0.97)."""

FIRST_PARTIAL_SAVES = 0.01
"""In dense calls the first block of query rows is the partial one if this saves more of their keys. 4 x 4096
saves 5.9 % and takes 0.946 of the time; calls that save 1 to 3 % were not measured."""


class Costs(NamedTuple):
    """Measured times of a program, in microseconds."""

    tile: float
    """A block of query rows apart from its blocks of keys: loading q, filling the pipeline, storing out."""
    block: float
    """A block of keys."""


LAUNCH = 7.0
"""Estimated time of a launch without work tiles, in microseconds."""
COSTS: dict[tuple[int, int, int, int, int], Costs] = {
    (64, 64, 1, 128, 1): Costs(1.0, 0.79),
    (64, 64, 1, 128, 2): Costs(0.4, 1.26),
    (128, 128, 1, 128, 1): Costs(1.7, 1.09),
    (256, 256, 1, 64, 1): Costs(2.3, 1.05),
    (32, 32, 1, 128, 1): Costs(1.0, 0.70),
    (32, 32, 2, 64, 2): Costs(1.6, 0.93),
    (32, 32, 2, 128, 1): Costs(1.6, 0.88),
    (32, 32, 3, 128, 1): Costs(2.5, 1.10),
    (64, 64, 2, 64, 2): Costs(2.0, 1.20),
    (64, 64, 2, 128, 1): Costs(1.8, 1.08),
    (64, 64, 3, 128, 1): Costs(3.2, 1.39),
    (96, 96, 1, 128, 1): Costs(1.5, 1.07),
    (96, 96, 2, 128, 1): Costs(1.6, 1.47),
    (128, 128, 2, 64, 1): Costs(0.9, 0.98),
    (128, 128, 2, 128, 1): Costs(2.4, 1.49),
    (160, 160, 2, 128, 1): Costs(3.6, 1.80),
    (192, 128, 2, 128, 1): Costs(1.6, 2.01),
    (192, 192, 2, 64, 1): Costs(1.6, 1.18),
    (256, 256, 2, 64, 1): Costs(3.7, 1.38),
}
"""(columns of q and k, of v, warpgroups, BLOCK_N, PROGRAMS) -> costs. At head sizes 64, 128 and 256, they and
``LAUNCH`` were fitted to ``benchmarks/results/2026-11-27-h200-rounds.json`` and, of
``2026-11-23-h200-*-forward*.json``, to the calls with few work tiles. Few of them have two warpgroups and 64
keys at head sizes 64 and 128: these costs lie between that fit and one of longer calls. Other head sizes were
fitted to the older files, except those of 32 columns and 128 keys and of 96 columns and one warpgroup, which
are estimated. Two programs of one warpgroup were timed in one call, 6 x 1480 with 4 heads: 0.92 of the time
of 192 rows. Of the costs that explain this, these have the longest blocks, as each program reads all keys."""
TILES_TO_SHARE = 2, 3
"""Least and most work tiles of a program of one warpgroup that shares its multiprocessor."""


def measured_costs(columns: tuple[int, int], config: ForwardConfig) -> Costs | None:
    """Return the costs of a configuration for tiles of ``columns`` of (q and k, v); None if not measured."""
    return COSTS.get((*columns, config.warpgroups, config.BLOCK_N, config.PROGRAMS))


class ForwardPlan(NamedTuple):
    """How a call is divided into work tiles, and how programs get them. The launch follows the plan by which
    its configuration was chosen: both are from :func:`plan_of`."""

    kernel: str
    """A kernel with the forward's schedule: "forward", "fp8", or "dq" (of head sizes over 128)."""
    config: ForwardConfig
    pack: int
    """Query heads of a key head that share a tile."""
    column_splits: int
    """Work tiles that divide the columns of v."""
    heads: int
    """Heads of all sequences with work tiles of their own. ``pack`` heads that share tiles count once. A head
    with divided columns of v counts once for each part."""
    blocks: int
    """Blocks of query rows of the longest sequence."""
    paired: bool
    """Work tiles are pairs: the first block of query rows with the last, and so on."""
    queued: bool
    """Programs take work tiles from the work queue, not in serpentine order."""
    first_partial: bool
    """The first block of query rows lacks warpgroups, not the last."""
    interleaved: int
    """Number of heads whose work tiles are interleaved."""
    mask: KernelMask
    """The mask by position, as kernels take it."""

    @property
    def tiles(self) -> int:
        """Number of work tiles of a dense call."""
        return self.heads * (math.ceil(self.blocks / 2) if self.paired else self.blocks)


def plan_of(problem: Problem, config: ForwardConfig, kernel: str = "forward") -> ForwardPlan:
    """Return how the work of a call is divided under ``config``."""
    pack, splits = 1, 1
    if kernel != "dq":
        pack, splits = pack_of(problem, config.BLOCK_M, kernel), column_splits(problem)
    heads = problem.batch * problem.num_heads_q // pack * splits
    blocks = math.ceil(problem.seqlen_q * rows_of_token(pack) / config.BLOCK_M)
    mask = problem.for_kernels(problem.seqlen_q, problem.seqlen_k)
    right = mask.window_right
    one_edge = right != UNLIMITED and mask.window_left == UNLIMITED
    short = problem.seqlen_k < config.paired_below
    # Lengths of packed sequences, and of lists, are known on the device only: no fixed order balances them.
    queued = kernel != "dq" and (problem.varlen or (config.QUEUED and one_edge and not short))
    paired = right != UNLIMITED and not queued and (problem.varlen or short)
    if kernel == "forward" and heads * blocks <= multiprocessors(problem.device):
        paired = False  # every block has a multiprocessor of its own
    if has_lists(problem):
        queued, paired = True, False
    few = paired or queued
    interleaved = interleaved_heads(problem, heads, problem.group_size // pack * splits, blocks, few)
    return ForwardPlan(
        kernel=kernel, config=config, pack=pack, column_splits=splits, heads=heads, blocks=blocks,
        paired=paired, queued=queued, interleaved=interleaved, mask=mask,
        first_partial=kernel == "forward" and one_edge and first_is_partial(problem, config, pack),
    )  # fmt: skip


class LaunchWork(NamedTuple):
    """The work of a launch, in whole blocks, so that calls of similar lengths share an estimate."""

    blocks: tuple[int, ...]
    """Number of blocks of keys for each block of query rows of a head, the last query rows first."""
    heads: int
    interleaved: int
    paired: bool
    queued: bool
    """heads, interleaved, paired and queued are those of the :class:`ForwardPlan`."""
    programs: int
    """Programs that the GPU runs at a time; some have no work tile if there are fewer tiles."""
    costs: Costs


def fastest(
    problem: Problem,
    configs: tuple[ForwardConfig, ...],
    costs_of: Callable[[ForwardConfig], Costs | None],
    kernel: str = "forward",
) -> ForwardConfig:
    """Return the first of ``configs``, or another that is estimated to take less than WORTHWHILE of its time.

    It is the first for packed sequences and used keys, whose lengths the host does not know. Others are
    passed over if ``costs_of`` returns None for them, if another number of heads would share their tiles, or
    if more programs would share a multiprocessor without need (:func:`programs_overlap`).
    """
    first, *others = configs
    plan, costs = plan_of(problem, first, kernel), costs_of(first)
    enough = tiles_of_program(problem, plan) >= ENOUGH_ROUNDS
    if problem.varlen or problem.seqused_k or enough or costs is None:
        return first
    misses = 1.0 if keys_are_few(problem) else SINGLE_MISSES
    best, least = first, WORTHWHILE * microseconds(work_of_launch(problem, plan, costs))
    for config in others:
        other, costs = plan_of(problem, config, kernel), costs_of(config)
        if costs is None or other.pack != plan.pack:
            continue
        if config.PROGRAMS != first.PROGRAMS and not programs_overlap(problem, other):
            continue
        time = microseconds(work_of_launch(problem, other, costs))
        if plan.paired and not other.paired:
            time *= misses
        if time < least:
            best, least = config, time
    return best


def tiles_of_program(problem: Problem, plan: ForwardPlan) -> float:
    """Return how many work tiles of a dense call a program has, on average."""
    return plan.tiles / (plan.config.PROGRAMS * multiprocessors(problem.device))


def programs_overlap(problem: Problem, plan: ForwardPlan) -> bool:
    """Whether programs of one warpgroup that share multiprocessors may replace longer tiles.

    While one begins or ends a tile the other multiplies, so programs need more than one tile. Where they have
    many, longer tiles fill the card as well, and read keys less often.
    """
    least, most = TILES_TO_SHARE
    return least <= tiles_of_program(problem, plan) <= most


def keys_are_few(problem: Problem) -> bool:
    """Whether the keys and values of a dense call, of 16 bits, have at most MAX_SINGLE_BYTES."""
    width = 2 * (problem.head_dim + problem.head_dim_v)
    return problem.batch * problem.num_heads_kv * problem.seqlen_k * width <= MAX_SINGLE_BYTES


def work_of_launch(problem: Problem, plan: ForwardPlan, costs: Costs) -> LaunchWork:
    """Return the work of a dense call that is divided by ``plan``."""
    config = plan.config
    rows, lacking = config.BLOCK_M // plan.pack, 0
    if plan.first_partial:
        lacking = lacking_tokens.fn(problem.seqlen_q, WARPGROUP_ROWS // plan.pack, rows)
    blocks = tuple(blocks_of_rows(problem, rows, config.BLOCK_N, lacking))
    programs = config.PROGRAMS * multiprocessors(problem.device)
    return LaunchWork(
        blocks=blocks, heads=plan.heads, interleaved=plan.interleaved, paired=plan.paired, queued=plan.queued,
        programs=programs, costs=costs,
    )  # fmt: skip


def blocks_of_rows(problem: Problem, rows: int, block_n: int, lacking: int = 0) -> Iterator[int]:
    """Yield how many blocks of keys each block of ``rows`` query rows visits, the last rows first.

    ``lacking``: rows that the first block lacks in place of the last one.
    """
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    offset = problem.seqlen_k - problem.seqlen_q
    for first in range((problem.seqlen_q - 1) // rows * rows - lacking, -rows, -rows):
        last = min(first + rows, problem.seqlen_q) - 1
        begin = 0 if left == UNLIMITED else max(first + offset - left, 0)
        end = problem.seqlen_k if right == UNLIMITED else min(last + offset + right + 1, problem.seqlen_k)
        yield math.ceil(end / block_n) - begin // block_n if begin < end else 1


def first_is_partial(problem: Problem, config: ForwardConfig, pack: int) -> bool:
    """Whether the first block of query rows is the partial one, under a mask with only a right edge.

    No block then visits more keys, and bits are equal. Blocks of three warpgroups take 0.955 to 0.995 of the
    time. Blocks of two, whose rows are at most half a block of keys apart, took 0.98 to 1.08 at head sizes
    (192, 128). A dense call must save FIRST_PARTIAL_SAVES of its keys: it may need one more kernel. The host
    does not know the lengths of packed sequences, and few of them fill whole blocks.
    """
    if config.warpgroups < 3 or modifiers_of(problem):
        return False
    if problem.varlen:
        return True
    rows = config.BLOCK_M // pack
    blocks = math.ceil(problem.seqlen_q / rows)
    # The last block sees all keys, and each one before it ``rows`` fewer: the mean is that of the middle.
    saved = (blocks - 1) * lacking_tokens.fn(problem.seqlen_q, WARPGROUP_ROWS // pack, rows)
    return saved > FIRST_PARTIAL_SAVES * blocks * max(problem.seqlen_k - (blocks - 1) * rows / 2, 0)


def tile_costs(work: LaunchWork) -> Iterator[float]:
    """Yield the cost of each work tile, in the order in which programs take them."""
    rows = [work.costs.tile + work.costs.block * count for count in work.blocks]
    if work.paired:
        half = len(rows) // 2
        rows = [*map(add, rows[:half], reversed(rows)), *rows[half : len(rows) - half]]
    for _ in range(work.heads // work.interleaved):
        for cost in rows:
            yield from [cost] * work.interleaved


@lru_cache(maxsize=1024)
def microseconds(work: LaunchWork) -> float:
    """Return the estimated time of a launch: that of its busiest program."""
    busy = [0.0] * work.programs
    tiles = list(tile_costs(work))
    if work.queued:
        for cost in tiles:
            heapq.heapreplace(busy, busy[0] + cost)
    else:
        for first in range(0, len(tiles), work.programs):
            turn = tiles[first : first + work.programs]
            turn += [0.0] * (work.programs - len(turn))
            busy = list(map(add, reversed(busy), turn))  # serpentine order: every other turn runs backwards
    return LAUNCH + max(busy)


def pack_of(problem: Problem, block_m: int, kernel: str = "forward") -> int:
    """Return the number of query heads of a key head that share a tile: :func:`heads_together`, or 1.

    The heads share tiles if this saves a quarter of the tiles. In the kernel "forward", if the mask has a
    left and a right edge, the heads share tiles if this saves a quarter of the keys that warpgroups visit.
    Rows of a shared tile have fewer distinct positions, so together they see fewer keys. Packed sequences are
    divided by :func:`packed_heads`.
    """
    pack = heads_together(problem.group_size)
    if modifiers_of(problem):
        return 1
    if problem.varlen:
        return packed_heads(problem, block_m) if kernel == "forward" else 1
    apart = pack * math.ceil(problem.seqlen_q / block_m)
    together = math.ceil(problem.seqlen_q * pack / block_m)
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    if kernel == "forward" and left != UNLIMITED and right != UNLIMITED:
        window = max(left + 1 + right, 1)
        apart = max(apart, 1) * (WARPGROUP_ROWS + window)
        together = max(together, 1) * (WARPGROUP_ROWS // pack + window)
    return pack if together <= 0.75 * apart else 1


LIKELY_LENGTH = 1 / 4
"""Length of most packed sequences as a share of the longest: the host knows only the longest, and documents
differ much."""


def packed_heads(problem: Problem, block_m: int) -> int:
    """Return the number of query heads of a key head that share a tile if sequences are packed.

    Sharing tiles leaves fewer rows without a query at the ends of sequences: a document of 10 tokens fills 10
    of 64 rows with one head, and 40 with four. So :func:`heads_together` always share tiles. All heads of
    another group share them, with unused rows, if this is estimated to save a quarter of the tiles.
    """
    group, pack = problem.group_size, heads_together(problem.group_size)
    length = math.ceil(problem.seqlen_q * LIKELY_LENGTH)
    apart = group // pack * math.ceil(length * pack / block_m)
    together = math.ceil(length * rows_of_token(group) / block_m)
    return group if group <= WARPGROUP_ROWS and together <= 0.75 * apart else pack


def interleaved_heads(problem: Problem, heads: int, group: int, blocks: int, few: bool) -> int:
    """Return the number of heads whose work tiles are interleaved.

    It divides ``heads``, the number of heads with work tiles of their own. ``group`` of them have the same
    keys, and each has ``blocks`` blocks of query rows. Programs that run at the same time should read the
    same keys, so the number depends on the mask:

    * Without a right edge, the query heads of one key head are interleaved.
    * With pairs or a work queue (``few``), a few heads are interleaved. Concurrent programs compute the same
      query rows of these heads.
    * Otherwise, many heads are interleaved. Their work tiles are sorted by falling cost, so that programs end
      at about the same time.
    """
    _, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    most = group
    if few:
        most = max(SWIZZLE_HEADS, most)
    elif right != UNLIMITED:
        most = max(SWIZZLE_TILES // blocks, most)
    return largest_divisor(heads, most)


def blocks_stand_alone(problem: Problem, block_m: int) -> bool:
    """Whether a dense call, without shared tiles, has at most one block of query rows per multiprocessor."""
    heads = problem.batch * problem.num_heads_q * column_splits(problem)
    blocks = heads * math.ceil(problem.seqlen_q / block_m)
    return not problem.varlen and blocks <= multiprocessors(problem.device)
