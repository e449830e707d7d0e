"""Configurations of attention over a cache on Hopper: data, chosen by head sizes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from flashtile.backends.common.launch import KernelConfig
from flashtile.backends.hopper.config import WARPGROUP_ROWS, ModifierFlags, padded
from flashtile.backends.portable.config import precision_of
from flashtile.backends.portable.decode.config import DecodeConfig
from flashtile.backends.portable.decode.schedule import Layout
from flashtile.problems.decode import FP8, DecodeProblem

COPY_ROWS = 16
"""The fewest rows that are left to TMA. It could put 8 into a swizzled tile, but takes as long for a load of
so few as for one of 16."""

MIN_FILLED = 0.85
"""The least share of the programs, in rounds of whole work tiles of equal length. With less, programs take
equal runs of n_blocks, wherever these begin."""
MAX_SHARED = 4
"""Work tiles a program up to which that is so."""
DIVIDED_M_BLOCKS = 8
"""From so many m_blocks a sequence on, the work tiles of a long one are many already, and the queue has them
undivided: the code that leaves partial results costs 4 to 6 % there."""
DIVIDED_SLOTS = 2
"""Parts of divided work tiles for each program that there is room for: with a limit of a program's mean load,
or of more, there are no more of them."""


@dataclass(frozen=True)
class HopperDecodeConfig(DecodeConfig):
    """Tile and pipeline of the kernel; a tile has 64 rows for each consumer warpgroup.

    Args:
        STAGES, Q_STAGES: n_blocks of keys and values, and m_blocks, in shared memory.
        LAZY_RESCALE, PIN_WAIT: as in the forward's configuration.
    """

    STAGES: int
    Q_STAGES: int
    LAZY_RESCALE: bool
    PIN_WAIT: bool

    def balances(
        self, m_blocks: int, work_tiles: int, multiprocessors: int, tile_bytes: float, even: bool
    ) -> bool:
        programs = multiprocessors * self.programs_per_sm
        rounds = -(-work_tiles // programs)
        return work_tiles < MIN_FILLED * rounds * programs and work_tiles < MAX_SHARED * programs

    @property
    def warpgroups(self) -> int:
        return self.tile.BLOCK_M // WARPGROUP_ROWS

    @property
    def registers(self) -> tuple[int, int, int]:
        return REGISTERS[self.warpgroups, self.programs_per_sm]


@dataclass(frozen=True)
class HopperDecodeVariant(Layout, ModifierFlags):
    """Everything that the kernel is compiled for: one constant of the kernel."""

    TANH_APPROX: ClassVar[bool] = False
    EVEN_N: ClassVar[bool] = False

    PAGE_SIZE: int
    """0 is a dense cache."""
    COPY_ROWS: int
    """Keys that one TMA load brings: an n_block, or as many as lie side by side in a page."""
    LOADERS: int
    """Warps that load parts of each n_block of k, and as many of v."""
    COPIES: int
    """TMA loads of an n_block by a loader."""
    GATHER: bool
    """Keys come one by one, by asynchronous copies of each thread, not by TMA."""
    LOADER_WARPS: int
    HAS_BATCH_IDX: bool
    SOFTCAP: bool
    ALIBI: bool
    SINK: bool
    HAS_TREE: bool
    HAS_SCORE_MOD: bool
    E4M3: bool
    """The cache is in e4m3: the consumer converts its tiles."""
    DESCALE: str
    """Scales of an FP8 cache: "none", "head", "sequence" or "block"."""
    KEY_SCALES: bool
    """Those are of blocks, so that the keys of a tile have several."""
    BALANCED: bool
    """All programs take equal runs of n_blocks; else they take splits of work tiles from a queue."""
    DIVIDES: bool
    """The table of the queue divides the work tiles of long sequences."""
    SPLIT: bool
    """A work tile may have several splits: always, if balanced or if the table divides."""
    BY_WORK_TILE: bool
    """Combining what balanced programs leave has a program for each work tile, not for each of them."""
    PDL: bool
    """The kernel is placed while another fills the table of its queue, and waits for that one's end."""
    PACK: int
    """Query heads of a key head that share a tile, row by row."""
    KV_GROUP: int
    """Heads of the schedule to a key head: query heads to a key head, divided by PACK."""
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
    DV_PARTS: ClassVar[int] = 1

    @property
    def QK_COLUMNS(self) -> int:  # noqa: N802 - as in the kernel
        return self.BLOCK_D


MAX_LOADERS = 2
"""With those of v they fill a warpgroup. One warp alone issues loads of small pages too slowly."""
REGISTERS = {(1, 1): (240, 240, 240), (1, 2): (216, 40, 128), (2, 1): (232, 40, 168)}
"""By consumer warpgroups and programs that share a multiprocessor: of a consumer's thread, of a loader's, and
what each thread starts with."""


def row(
    warpgroups: int,
    BLOCK_N: int,
    STAGES: int,
    Q_STAGES: int = 1,
    programs_per_sm: int = 1,
    LAZY_RESCALE: bool = False,
    PIN_WAIT: bool = False,
    spill_budgets: tuple[int, int] = (0, 0),
) -> HopperDecodeConfig:
    """One configuration; ``spill_budgets`` as in ``KernelConfig``."""
    tile = KernelConfig(warpgroups * WARPGROUP_ROWS, BLOCK_N, 4, STAGES, *spill_budgets)
    precision = precision_of("hopper", 2)
    return HopperDecodeConfig(tile, programs_per_sm, precision, STAGES, Q_STAGES, LAZY_RESCALE, PIN_WAIT)


# (padded head_dim, padded head_dim_v) -> for at most 64 rows of a sequence, for more
_TABLE: dict[tuple[int, int], tuple[HopperDecodeConfig, HopperDecodeConfig]] = {
    (64, 64): (row(1, 128, 3, programs_per_sm=2), row(2, 128, 4, Q_STAGES=2)),
    (64, 128): (row(1, 128, 3), row(2, 128, 3, spill_budgets=(0, 104))),
    (128, 64): (row(1, 128, 3), row(2, 128, 3, spill_budgets=(0, 24))),
    (128, 128): (
        row(1, 64, 3, programs_per_sm=2),
        row(2, 128, 2, Q_STAGES=2, PIN_WAIT=True, spill_budgets=(36, 184)),
    ),
    (256, 128): (row(1, 64, 3), row(2, 64, 2)),
    (128, 256): (
        row(1, 64, 3),
        row(2, 64, 2, LAZY_RESCALE=True, PIN_WAIT=True, spill_budgets=(0, 100)),
    ),
    (256, 256): (
        row(1, 64, 2),
        row(2, 64, 2, LAZY_RESCALE=True, PIN_WAIT=True, spill_budgets=(112, 148)),
    ),
}

# For FP8 caches and any number of rows: one warpgroup, and where they fit, two programs on a multiprocessor,
# of which one converts a tile while the other multiplies. Timed at head_dim 128 alone.
_FP8_TABLE: dict[tuple[int, int], HopperDecodeConfig] = {
    (64, 64): row(1, 128, 4, programs_per_sm=2, spill_budgets=(80, 36)),
    (64, 128): row(1, 64, 4, programs_per_sm=2),
    (128, 64): row(1, 64, 4, programs_per_sm=2),
    (128, 128): row(1, 64, 3, programs_per_sm=2, spill_budgets=(76, 8)),
    (256, 128): row(1, 64, 4),
    (128, 256): row(1, 64, 4, spill_budgets=(0, 20)),
    (256, 256): row(1, 64, 3, spill_budgets=(476, 188)),
}


def gathers(problem: DecodeProblem) -> bool:
    """Whether keys come one by one: TMA takes pages of a multiple of COPY_ROWS, and no padding on the left,
    before which memory may hold anything."""
    return problem.leftpad or problem.page_size % COPY_ROWS != 0


def for_rows(head_dim: int, head_dim_v: int, rows: int, cache_element_bytes: int) -> HopperDecodeConfig:
    """For so many query rows of a key head."""
    sizes = padded(head_dim), padded(head_dim_v)
    if cache_element_bytes == 1:
        return _FP8_TABLE[sizes]
    few, many = _TABLE[sizes]
    return few if rows <= WARPGROUP_ROWS else many


def choose(problem: DecodeProblem) -> HopperDecodeConfig:
    rows = problem.seqlen_q * problem.group_size
    config = for_rows(problem.head_dim, problem.head_dim_v, rows, problem.cache_dtype.itemsize)
    if gathers(problem) and config.programs_per_sm > 1:  # each also needs room for addresses
        config = replace(config, STAGES=config.STAGES - 1)
    return config


def heads_together(group_size: int) -> int:
    """Query heads of a key head that share a tile: the largest power of two that divides them."""
    return min(group_size & -group_size, WARPGROUP_ROWS)


def serves_heads(head_dim: int, head_dim_v: int) -> bool:
    """Whether there is a configuration for these head sizes."""
    return max(head_dim, head_dim_v) <= 256 and (padded(head_dim), padded(head_dim_v)) in _TABLE


def every_row() -> Iterator[tuple[int, int, torch.dtype, HopperDecodeConfig]]:
    """(padded head_dim, padded head_dim_v, dtype of the cache, config) of both tables."""
    for (block_d, block_dv), row in _TABLE.items():
        for config in row:
            yield block_d, block_dv, torch.bfloat16, config
    for (block_d, block_dv), config in _FP8_TABLE.items():
        yield block_d, block_dv, FP8, config
