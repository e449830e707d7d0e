"""Configurations of attention over a cache on Hopper: data, chosen by head sizes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.device import multiprocessors
from flashtile.backends.hopper.config import WARPGROUP_ROWS, ModifierFlags, heads_together, padded_columns
from flashtile.backends.portable.config import precision_of
from flashtile.backends.portable.decode.config import NARROW, DecodeConfig, bytes_to_read
from flashtile.backends.portable.decode.launch import keys_seen, most_work_tiles
from flashtile.backends.portable.decode.schedule import Layout
from flashtile.problems.decode import FP8, DecodeProblem

COPY_ROWS = 16
"""Minimum keys of a TMA load. A swizzled tile would allow 8, but a load of 8 takes as long as one of 16."""

MIN_FILLED = 0.85
"""Programs take whole work tiles if these would keep at least this share of the programs busy in all rounds.
The estimate assumes work tiles of equal lengths. Otherwise each program takes an equal range of consecutive
n_blocks, which may begin within a work tile."""
MAX_SHARED = 4
"""With this many work tiles per program or more, programs take whole work tiles in any case."""
DIVIDED_M_BLOCKS = 8
"""The queue divides no work tiles of sequences with equal numbers of queries if a sequence has this many
m_blocks or more. It then has many work tiles without division, and the code for partial results would cost
4 to 6 %. Of packed queries the host knows only the longest sequence, which may be the only one with many
m_blocks: they are divided unless this sequence alone has a work tile for each program. Steps of chunks and
single tokens are divided if there are less than MAX_SHARED work tiles for each program (``launch.divides``),
because keys of a single token may then take longer than a program's mean load."""
DIVIDED_SLOTS = 2
"""Slots for parts of divided work tiles, per program. Two suffice, because a part may be at least as long as
a program's mean load."""


SHORT_BYTES = 2**19
"""Work tiles of at most this many bytes of keys and values are short, and the portable kernel is faster. With
4 tokens and 8 key heads on an H200, Hopper's takes 7 % more time for 128 sequences of 512 keys (0.25 MiB) and
11 % less for 16 sequences of 2048 keys (1 MiB)."""


def fill(work_tiles: int, programs: int) -> bool:
    """Whether most programs are busy if each work tile gets the same number of programs, at least one."""
    return programs // max(work_tiles, 1) * work_tiles >= MIN_FILLED * programs


@dataclass(frozen=True)
class HopperDecodeConfig(DecodeConfig):
    """Tile and pipeline of the kernel; a tile has 64 rows for each consumer warpgroup.

    Args:
        STAGES: n_blocks of keys, and of values, in shared memory.
        Q_STAGES: m_blocks of queries in shared memory.
        LAZY_RESCALE, PIN_WAIT: as in ``hopper.forward.config.ForwardConfig``.
    """

    DIVIDES_ALIKE: ClassVar[bool] = True

    STAGES: int
    Q_STAGES: int
    LAZY_RESCALE: bool
    PIN_WAIT: bool

    def takes_stream_k(
        self, m_blocks: int, work_tiles: int, multiprocessors: int, tile_bytes: float, even: bool,
        mixed: bool = False,
    ) -> bool:  # fmt: skip
        # The first m_blocks of a chunk have few keys. Equal shares of keys give many of them to one program,
        # although each costs as much as several n_blocks. Programs also step, one by one, over m_blocks that
        # single tokens do not have. In a step of 23 sequences with 605 tokens at most, 24 heads on 8, one
        # program had 38 work tiles, and the mean was 3: 404 us on an H200. The queue takes 165 us,
        # FlashAttention-3 220.
        if mixed and m_blocks > 1:
            return False
        programs = multiprocessors * self.programs_per_sm
        rounds = -(-work_tiles // programs)
        return work_tiles < MIN_FILLED * rounds * programs and work_tiles < MAX_SHARED * programs

    def stream_k_programs(self, work_tiles: int, multiprocessors: int) -> int:
        """Return the number of programs of a stream-K grid.

        It is the number of programs that run at a time. This number is rounded down to a multiple of the
        number of work tiles, unless fewer than MIN_FILLED of the programs would remain. With a multiple,
        work tiles of similar lengths can be divided alike (``work.even_start``).
        """
        programs = multiprocessors * self.programs_per_sm
        return programs // work_tiles * work_tiles if fill(work_tiles, programs) else programs

    def takes_few_rows(
        self, tokens: int, rows: int, work_tiles: int, multiprocessors: int, tile_bytes: float
    ) -> bool:
        """Whether to prefer this kernel for at most 16 rows per key head, over pages of 16-bit numbers.

        It is faster than the portable kernel if there are several tokens, more than half of the 16 rows, and
        work tiles that stay whole in this kernel and are not short.
        """
        several = tokens > 1 and rows > NARROW // 2
        queued = not self.takes_stream_k(1, work_tiles, multiprocessors, tile_bytes, False)
        return several and queued and tile_bytes > SHORT_BYTES

    @property
    def warpgroups(self) -> int:
        return self.tile.BLOCK_M // WARPGROUP_ROWS

    @property
    def registers(self) -> tuple[int, int, int]:
        return REGISTERS[self.warpgroups, self.programs_per_sm]


@dataclass(frozen=True)
class HopperDecodeVariant(Layout, ModifierFlags):
    """Compile-time parameters of the kernel, which takes them as one constexpr."""

    TANH_APPROX: ClassVar[bool] = False
    EVEN_N: ClassVar[bool] = False

    PAGE_SIZE: int
    """Keys per page; 0 for a dense cache."""
    COPY_ROWS: int
    """Keys per TMA load, contiguous in memory: an n_block, or the part of it that lies within one page."""
    LOADERS: int
    """Number of loader partitions of k; v has as many. Each loads its part of every n_block."""
    COPIES: int
    """TMA loads per loader and n_block."""
    GATHER: bool
    """Whether threads copy keys one by one (cp.async) instead of by TMA."""
    LOADER_WARPS: int
    """Warps per loader."""
    HAS_BATCH_IDX: bool
    SOFTCAP: bool
    ALIBI: bool
    SINK: bool
    HAS_TREE: bool
    SCALED_SCORES: bool
    INVARIANT: bool
    """Whether a row has the same bits in all calls."""
    E4M3: bool
    """Whether the cache is e4m3, whose tiles the consumer converts."""
    DESCALE: str
    """Scales of an FP8 cache: "none", "head", "sequence" or "block"."""
    KEY_SCALES: bool
    """Whether DESCALE is "block", so the keys of one tile may have different scales."""
    STREAM_K: bool
    """Whether programs take equal ranges of n_blocks; otherwise they take splits from a queue."""
    DIVIDES: bool
    """Whether the queue's table divides the work tiles of long sequences."""
    SPLIT: bool
    """Whether a work tile may have several splits; True if STREAM_K or DIVIDES."""
    BY_WORK_TILE: bool
    """Whether stream-K programs write a partial record for each work tile, otherwise one for each program."""
    PDL: bool
    """Programmatic dependent launch: programs start while another kernel fills the queue's table, and wait
    for its end."""
    PACK: int
    """Number of query heads of a key head that share a tile; their rows alternate."""
    COPIES_Q: bool
    """Whether threads copy queries row by row, because PACK does not divide the rows of a TMA load."""
    KV_GROUP: int
    """Query heads per key head, divided by PACK, because the schedule counts PACK query heads as one head."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    WARPGROUPS: int
    STAGES: int
    Q_STAGES: int
    LAZY_RESCALE: bool
    PIN_WAIT: bool
    CONSUMER_REGISTERS: int
    LOADER_REGISTERS: int
    Q_IN_REGISTERS: ClassVar[int] = 0
    D_PARTS: ClassVar[int] = 1
    O_RIGHT: ClassVar[int] = 0
    PING_PONG: ClassVar[bool] = False
    MAX_LOGITS: ClassVar[bool] = False
    ENTROPY: ClassVar[bool] = False
    K_BY_PARTS: ClassVar[bool] = False

    @property
    def QK_COLUMNS(self) -> int:  # noqa: N802 - as in the kernel
        return self.BLOCK_D

    @property
    def O_LEFT(self) -> int:  # noqa: N802 - as in the kernel
        return self.BLOCK_DV


MAX_LOADERS = 2
"""Maximum loaders of k, and of v. One warp would issue loads of small pages too slowly."""
REGISTERS = {(1, 1): (240, 240, 240), (1, 2): (216, 40, 128), (2, 1): (232, 40, 168)}
"""(consumer warpgroups, programs per multiprocessor) -> registers per thread: of consumers, of loaders, and
at launch.

All loaders together count as one warpgroup. The registers at launch are divided without a rest: with two
programs (216 + 40) * 128 = 128 * 256, half of a multiprocessor's; with two consumers 232 * 256 + 40 * 128 =
168 * 384. Loaders need more than the forward's producer, since they compute addresses of pages."""


def row(
    warpgroups: int,
    BLOCK_N: int,
    STAGES: int,
    Q_STAGES: int = 1,
    programs_per_sm: int = 1,
    LAZY_RESCALE: bool = False,
    PIN_WAIT: bool = False,
) -> HopperDecodeConfig:
    tile = KernelConfig(warpgroups * WARPGROUP_ROWS, BLOCK_N, 4, STAGES)
    precision = precision_of("hopper", 2)
    return HopperDecodeConfig(tile, programs_per_sm, precision, STAGES, Q_STAGES, LAZY_RESCALE, PIN_WAIT)


# (padded head_dim, padded head_dim_v) -> config for at most 64 query rows per key head, and for more.
# Measured on an H200 at head_dim 128 (benchmarks/results/experiments/decoding.json); other rows were not
# measured against others:
# - Few rows: two programs of 64 keys on a multiprocessor, instead of one of 128: 8 sequences of 8192 with 8
#   tokens take 82 instead of 87 us, 32 of 4096 140 instead of 166.
# - Many rows: 1024 tokens over 8192 keys take 201 us, with 128 x 64 229. PIN_WAIT, the wait for P V after the
#   exponentials: 0.937 to 0.970 of the time.
# - Mixed steps of mostly single tokens have the row for few rows (``of_tokens``): in two steps of 12 heads on
#   2 it took 0.80 and 0.84 of the time of the row for many; one program of 64 rows and 128 keys took 0.84 and
#   0.91.
_TABLE: dict[tuple[int, int], tuple[HopperDecodeConfig, HopperDecodeConfig]] = {
    (64, 64): (row(1, 128, 3, programs_per_sm=2), row(2, 128, 4, Q_STAGES=2)),
    (64, 128): (row(1, 128, 3), row(2, 128, 3)),
    (128, 64): (row(1, 128, 3), row(2, 128, 3)),
    (128, 128): (row(1, 64, 3, programs_per_sm=2), row(2, 128, 2, Q_STAGES=2, PIN_WAIT=True)),
    (256, 128): (row(1, 64, 3), row(2, 64, 2)),
    (128, 256): (row(1, 64, 3), row(2, 64, 2, LAZY_RESCALE=True, PIN_WAIT=True)),
    (256, 256): (row(1, 64, 2), row(2, 64, 2, LAZY_RESCALE=True, PIN_WAIT=True)),
}

# The same for at most 64 rows, if the work tiles stay whole and fill the GPU with one program per
# multiprocessor. One warpgroup multiplies 128 keys in 1.2 us, and memory delivers them in 2 us. For smaller
# heads it would take longer than memory. Where several programs share a work tile, two programs per
# multiprocessor are faster: 8 sequences of 8192 keys take 6 % less time with 8 tokens.
_ALONE: dict[tuple[int, int], HopperDecodeConfig] = {(128, 128): row(1, 128, 3)}

# For FP8 caches and any number of rows: one warpgroup. Where two programs fit a multiprocessor, one converts
# a tile while the other multiplies. Only head_dim 128 was timed.
_FP8_TABLE: dict[tuple[int, int], HopperDecodeConfig] = {
    (64, 64): row(1, 128, 4, programs_per_sm=2),
    (64, 128): row(1, 64, 4, programs_per_sm=2),
    (128, 64): row(1, 64, 4, programs_per_sm=2),
    (128, 128): row(1, 64, 3, programs_per_sm=2),  # four stages: 99.5 instead of 98.2 us
    (256, 128): row(1, 64, 4),
    (128, 256): row(1, 64, 4),
    (256, 256): row(1, 64, 3),
}


def gathers(problem: DecodeProblem) -> bool:
    """Whether keys are copied one by one.

    TMA serves page sizes that are multiples of COPY_ROWS. It cannot leave out the padding on the left, whose
    memory may hold anything.
    """
    return problem.leftpad or problem.page_size % COPY_ROWS != 0


def for_rows(
    head_dim: int, head_dim_v: int, rows: int, cache_element_bytes: int, alone: bool
) -> HopperDecodeConfig:
    """Return the configuration for ``rows`` query rows per key head.

    ``alone``: whether work tiles of few rows fill the GPU with one program per multiprocessor.
    """
    sizes = padded_columns(head_dim), padded_columns(head_dim_v)
    if cache_element_bytes == 1:
        return _FP8_TABLE[sizes]
    few, many = _TABLE[sizes]
    if rows > WARPGROUP_ROWS:
        return many
    return _ALONE.get(sizes, few) if alone else few


MAX_TILES_PER_SM = 7
"""A mixed step of mostly single tokens has the row for few rows if a multiprocessor then gets at most this
many work tiles. Of twelve steps on an H200, those with up to 6.9 took 0.78 to 0.93 of the time of the row for
many rows, those with 7.6 to 7.9 0.98 to 1.00, and one with 8.8 1.11."""


def of_tokens(problem: DecodeProblem) -> HopperDecodeConfig | None:
    """Return the row for few rows for a step in which chunks are among many single tokens, otherwise None.

    Most work tiles then hold a single token, whose rows wait for memory. So what counts is how much is in
    flight: on a multiprocessor 192 KB with two programs, and 128 KB with one of 128 rows. Rows for few rows
    with one program were not tried.
    """
    if not (problem.mixed and takes_any_splits(problem)) or gathers(problem) or problem.cache_dtype == FP8:
        return None
    few, many = _TABLE[padded_columns(problem.head_dim), padded_columns(problem.head_dim_v)]
    mean_rows = problem.total_q * problem.group_size / problem.batch
    if few.programs_per_sm == 1 or mean_rows >= many.tile.BLOCK_M:
        return None
    most = MAX_TILES_PER_SM * multiprocessors(problem.device)
    return few if most_work_tiles(packed(problem), few) <= most else None


def choose(problem: DecodeProblem) -> HopperDecodeConfig:
    rows = problem.seqlen_q * problem.group_size
    # A result with fixed splits must not depend on the batch.
    programs, work_tiles = multiprocessors(problem.device), few_row_tiles(problem)
    alone = takes_any_splits(problem) and MIN_FILLED * programs <= work_tiles <= programs
    sizes = problem.head_dim, problem.head_dim_v
    # ``_ALONE`` has tiles of as many keys as those of many rows, and other sizes' tiles have equally many.
    config = for_rows(*sizes, rows, problem.cache_dtype.itemsize, alone or problem.invariant)
    if rows > WARPGROUP_ROWS:
        config = of_tokens(problem) or config
    if problem.invariant:  # whether O is rescaled lazily depends on all rows of a tile
        config = replace(config, LAZY_RESCALE=False)
    if gathers(problem) and config.programs_per_sm > 1:  # offsets of keys also need shared memory
        config = replace(config, STAGES=config.STAGES - 1)
    return config


def packed(problem: DecodeProblem) -> DecodeProblem:
    """Return the problem for which work is scheduled.

    In this problem, each group of query heads that share a tile (:func:`pack_of`) has its own key head.
    """
    return replace(problem, num_heads_kv=problem.num_heads_q // pack_of(problem.group_size))


def serves_few_rows(problem: DecodeProblem) -> bool:
    """Whether to prefer this kernel for a call whose rows fit the portable kernel's narrow tile."""
    if problem.cache_dtype == FP8 or problem.page_size == 0 or gathers(problem):
        return False
    tile_bytes = bytes_to_read(keys_seen(problem), problem.head_dim + problem.head_dim_v, 2)
    return takes_any_splits(problem) and choose(problem).takes_few_rows(
        problem.seqlen_q, problem.seqlen_q * problem.group_size, few_row_tiles(problem),
        multiprocessors(problem.device), tile_bytes,
    )  # fmt: skip


def few_row_tiles(problem: DecodeProblem) -> int:
    """Return the number of work tiles if each sequence has one m_block."""
    return problem.batch * problem.num_heads_q // pack_of(problem.group_size)


def pack_of(group_size: int) -> int:
    """Return the number of query heads of a key head that share a tile: all, if a warpgroup has room."""
    return group_size if group_size <= WARPGROUP_ROWS else heads_together(group_size)


def takes_any_splits(problem: DecodeProblem) -> bool:
    """Whether the call leaves it to the backend how work tiles are divided."""
    return problem.num_splits == 0 and problem.split_size == 0


def serves_heads(head_dim: int, head_dim_v: int) -> bool:
    """Whether there is a configuration for these head sizes."""
    return (
        max(head_dim, head_dim_v) <= 256 and (padded_columns(head_dim), padded_columns(head_dim_v)) in _TABLE
    )


def every_row() -> Iterator[tuple[int, int, torch.dtype, HopperDecodeConfig]]:
    """Yield (padded head_dim, padded head_dim_v, dtype of the cache, config) for each configuration.

    Configurations for 16-bit caches come first, then those for FP8 caches.
    """
    for (block_d, block_dv), row in _TABLE.items():
        for config in row:
            yield block_d, block_dv, torch.bfloat16, config
    for (block_d, block_dv), config in _ALONE.items():
        yield block_d, block_dv, torch.bfloat16, config
    for (block_d, block_dv), config in _FP8_TABLE.items():
        yield block_d, block_dv, FP8, config
