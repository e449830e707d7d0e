"""Configurations of attention over a cache on Hopper: data, chosen by head sizes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.hopper.config import WARPGROUP_ROWS, padded
from flashtile.backends.portable.decode.schedule import Layout
from flashtile.decode.problem import DecodeProblem

COPY_ROWS = 8
"""The fewest rows that TMA can put into a swizzled tile: 8 rows are what the swizzle repeats after."""


@dataclass(frozen=True)
class HopperDecodeConfig:
    """Tile and pipeline of the kernel.

    Args:
        warpgroups: consumers of 64 rows each.
        BLOCK_N: keys of an n_block.
        STAGES, Q_STAGES: n_blocks of keys and values, and m_blocks, in shared memory.
        programs_per_sm: programs that share a multiprocessor.
        LAZY_RESCALE, PIN_WAIT: as in the forward's configuration.
        spill_budget: bytes of register spills that were measured and accepted; features_spill_budget: the
            same with every feature at once.
    """

    warpgroups: int
    BLOCK_N: int
    STAGES: int
    Q_STAGES: int = 1
    programs_per_sm: int = 1
    LAZY_RESCALE: bool = False
    PIN_WAIT: bool = False
    spill_budget: int = 0
    features_spill_budget: int = 0

    @property
    def registers(self) -> tuple[int, int, int]:
        return REGISTERS[self.warpgroups, self.programs_per_sm]

    @property
    def tile(self) -> KernelConfig:
        """What the schedule and the combining kernel, which every backend shares, want to know."""
        return KernelConfig(self.warpgroups * WARPGROUP_ROWS, self.BLOCK_N, 4, 1)


@dataclass(frozen=True)
class Variant(Layout):
    """Everything that the kernel is compiled for: one constant of the kernel."""

    PAGE_SIZE: int
    """0 is a dense cache."""
    COPY_ROWS: int
    """Keys that one TMA load brings: an n_block, or as many as lie side by side in a page."""
    LOADERS: int
    """Warps that load parts of each n_block of k, and as many of v."""
    COPIES: int
    """TMA loads of an n_block by a loader."""
    HAS_BATCH_IDX: bool
    SOFTCAP: bool
    ALIBI: bool
    SINK: bool
    HAS_SCORE_MOD: bool
    BALANCED: bool
    """All programs take equal runs of n_blocks; else they take splits of work tiles from a queue."""
    SPLIT: bool
    """A work tile may have several splits: always, if balanced."""
    PACK: int
    """Query heads of a key head that share a tile, row by row."""
    KV_GROUP: int
    """Heads of the schedule to a key head: query heads to a key head, divided by PACK."""
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


MOST_LOADERS = 2
"""With those of v they fill a warpgroup. One warp alone issues loads of small pages too slowly."""
REGISTERS = {(1, 1): (240, 240, 240), (1, 2): (216, 40, 128), (2, 1): (232, 40, 168)}
"""By consumer warpgroups and programs that share a multiprocessor: of a consumer's thread, of a loader's, and
what each thread starts with."""

C = HopperDecodeConfig
# (padded head_dim, padded head_dim_v) -> for at most 64 rows of a sequence, for more
_TABLE: dict[tuple[int, int], tuple[HopperDecodeConfig, HopperDecodeConfig]] = {
    (64, 64): (C(1, 128, STAGES=4), C(2, 128, STAGES=4, Q_STAGES=2)),
    (64, 128): (C(1, 128, STAGES=3), C(2, 128, STAGES=3)),
    (128, 64): (C(1, 128, STAGES=3), C(2, 128, STAGES=3)),
    (128, 128): (C(1, 128, STAGES=3), C(2, 128, STAGES=2, Q_STAGES=2)),
    (256, 128): (C(1, 64, STAGES=3), C(2, 64, STAGES=2)),
    (128, 256): (C(1, 64, STAGES=3), C(2, 64, STAGES=2, LAZY_RESCALE=True, PIN_WAIT=True)),
    (256, 256): (C(1, 64, STAGES=2), C(2, 64, STAGES=2, LAZY_RESCALE=True, PIN_WAIT=True)),
}


def choose(problem: DecodeProblem) -> HopperDecodeConfig:
    few, many = _TABLE[padded(problem.head_dim), padded(problem.head_dim_v)]
    return few if problem.seqlen_q * problem.group_size <= WARPGROUP_ROWS else many


def serves_heads(head_dim: int, head_dim_v: int) -> bool:
    """Whether there is a configuration for these head sizes."""
    return max(head_dim, head_dim_v) <= 256 and (padded(head_dim), padded(head_dim_v)) in _TABLE


def every_row() -> Iterator[tuple[int, int, HopperDecodeConfig]]:
    """(padded head_dim, padded head_dim_v, config) of the whole table."""
    for (block_d, block_dv), row in _TABLE.items():
        for config in row:
            yield block_d, block_dv, config
