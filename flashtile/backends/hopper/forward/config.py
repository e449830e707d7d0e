"""Configurations of the Hopper forward: data, chosen by head sizes and mask. Nothing is tuned at run time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from flashtile.attn.problem import Problem
from flashtile.backends.hopper.config import WARPGROUP_ROWS, WithoutFunctions, padded
from flashtile.problem import UNLIMITED

O_PART = 64
"""Columns of an output in 16 bits that leave together with ``O_IN_PARTS``; of one in float32 half as many."""


@dataclass(frozen=True)
class ForwardConfig:
    """Tile and pipeline of the forward kernel.

    Args:
        warpgroups: consumers of 64 rows each.
        BLOCK_N: keys of a block.
        STAGES, Q_STAGES: blocks of keys and values, and blocks of queries, in shared memory.
        PING_PONG: consumers multiply in a fixed order, one while the others exponentiate (FlashAttention-3).
        Q_HOLDS_O: the output leaves through the queries' shared memory, where there is no room for its own.
        O_IN_PARTS: the output leaves ``O_PART`` columns at a time, through two small tiles of each consumer,
            so that the queries' shared memory is free for the next ones at once.
        Q_IN_REGISTERS: columns of q that stay in registers, which spares shared memory a part of its reads.
        LAZY_RESCALE: the running maximum of a row may lag behind by a factor of 2 ** 8, so that most blocks
            of keys leave O as it is; a warp multiplies it only where one of its rows has a new maximum.
        PIN_WAIT: the wait for P V stays behind the exponentials, where the assembler would move it in front.
        paired_below: in keys. Under a mask with a right edge, shorter sequences take their blocks of queries
            in pairs (``schedule.num_parts``); in longer ones the longest blocks of all heads come first.
        QUEUED: programs take the blocks of these longer sequences from the work queue. With a left edge, too,
            most blocks cost the same, and they do not. Those of packed sequences always come from the queue.
        spill_budget: bytes of register spills that were measured and accepted, none of them in the loop over
            uncut blocks; features_spill_budget: the same with every feature at once.
    """

    warpgroups: int
    BLOCK_N: int
    STAGES: int = 2
    Q_STAGES: int = 1
    PING_PONG: bool = False
    Q_HOLDS_O: bool = False
    O_IN_PARTS: bool = False
    Q_IN_REGISTERS: int = 0
    LAZY_RESCALE: bool = False
    PIN_WAIT: bool = False
    paired_below: int = 8192
    QUEUED: bool = False
    spill_budget: int = 0
    features_spill_budget: int = 0

    @property
    def BLOCK_M(self) -> int:  # noqa: N802 - as in the kernel
        return self.warpgroups * WARPGROUP_ROWS


@dataclass(frozen=True)
class ForwardVariant(WithoutFunctions):
    """Everything that the forward kernel is compiled for: one constant of the kernel."""

    HAS_TREE: ClassVar[bool] = False
    """Tree masks are decoding's."""

    VARLEN: bool
    SEQUSED: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    SOFTCAP: bool
    TANH_APPROX: bool
    """Soft-caps by the hardware's tanh (``soft_cap``)."""
    ALIBI: bool
    SINK: bool
    EVEN_N: bool
    """All sequences end with a whole block of keys."""
    QUEUED: bool
    """Programs take work tiles from the work queue as they come free, not in a fixed order."""
    PAIRED: bool
    """A work tile is a pair of blocks of query rows; all pairs cost the same (``schedule.num_parts``)."""
    PACK: int
    """Query heads of a key head that share a tile, row by row (FlashAttention-3's PackGQA); else 1."""
    KV_GROUP: int
    """Heads of the schedule to a key head: query heads to a key head, divided by PACK."""
    HAS_SCORE_MOD: bool
    """Scores are more than raw products, or the tanh of a soft-cap, times a positive scale: ALiBi, a scale
    that is not positive."""
    BLOCK_D: int
    """Columns of q and k in shared memory."""
    BLOCK_DV: int
    D_PARTS: int
    """Tiles of q and k side by side, where BLOCK_D is no power of two; else 1."""
    QK_COLUMNS: int
    """Columns of q and k that are multiplied: those behind head_dim are zeros."""
    BLOCK_M: int
    BLOCK_N: int
    WARPGROUPS: int
    STAGES: int
    Q_STAGES: int
    PING_PONG: bool
    Q_HOLDS_O: bool
    Q_IN_REGISTERS: int
    """Columns of q that stay in registers, 0 or half of BLOCK_D."""
    O_IN_PARTS: bool
    LAZY_RESCALE: bool
    PIN_WAIT: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    KEY_SCALES: ClassVar[bool] = False


F = ForwardConfig
_TWO = F(2, 128, paired_below=4096, QUEUED=True, features_spill_budget=108)
_NARROW = F(2, 64, spill_budget=28, features_spill_budget=96)
_THREE = F(3, 128, Q_STAGES=2, PING_PONG=True, spill_budget=268, features_spill_budget=812)
_TWO_Q = F(2, 128, Q_IN_REGISTERS=128, QUEUED=True, spill_budget=64, features_spill_budget=468)
_SHORT = F(2, 128, Q_STAGES=2, LAZY_RESCALE=True)
_SHORT_PING_PONG = replace(_SHORT, PING_PONG=True, spill_budget=36, features_spill_budget=140)
_SHORT_BLOCKS = F(2, 64, STAGES=4, Q_STAGES=2, LAZY_RESCALE=True, spill_budget=36, features_spill_budget=36)
_WIDE_SHORT = F(
    2, 64, O_IN_PARTS=True, LAZY_RESCALE=True, paired_below=4096, spill_budget=44, features_spill_budget=84
)
_WIDE = F(2, 64, Q_HOLDS_O=True, LAZY_RESCALE=True, PIN_WAIT=True)
_WIDE_Q = replace(_WIDE, Q_IN_REGISTERS=128, PING_PONG=True, spill_budget=24)
_WIDE_CAUSAL = F(
    2,
    64,
    Q_HOLDS_O=True,
    Q_IN_REGISTERS=128,
    LAZY_RESCALE=True,
    paired_below=4096,
    spill_budget=116,
    features_spill_budget=328,
)
_PARTS = F(
    2, 128, Q_HOLDS_O=True, paired_below=4096, QUEUED=True, spill_budget=48, features_spill_budget=184
)
PARTIAL = F(
    2, 128, O_IN_PARTS=True, QUEUED=True, paired_below=4096, spill_budget=64, features_spill_budget=128
)
"""Of results in float32, head sizes up to 128: they leave in parts, for which there is room. Not timed."""
PARTIAL_Q = replace(PARTIAL, Q_IN_REGISTERS=128, spill_budget=0)
"""The same without a mask, for q of 128 columns: in registers there is room for them."""
ANY_LENGTH = 2**31

# (columns of q and k, of v, windowed) -> (keys, config) where no row sees as many keys; causal is a
# window.
# H100, S = 512 to 16384: docs/measured.md. Rows of unequal head sizes have the tiles that fit; not timed.
_TABLE: dict[tuple[int, int, bool], tuple[tuple[int, ForwardConfig], ...]] = {
    (64, 64, False): ((ANY_LENGTH, _THREE),),
    (64, 64, True): ((4096, F(2, 128, Q_STAGES=2, features_spill_budget=8)), (ANY_LENGTH, _THREE)),
    (128, 128, False): ((2048, _SHORT), (4096, _TWO), (ANY_LENGTH, _TWO_Q)),
    (128, 128, True): ((1024, _SHORT_BLOCKS), (2048, _SHORT_PING_PONG), (8192, _TWO), (ANY_LENGTH, _TWO_Q)),
    (256, 256, False): ((1024, _WIDE_SHORT), (8192, _WIDE), (ANY_LENGTH, _WIDE_Q)),
    (256, 256, True): ((1024, _WIDE_SHORT), (ANY_LENGTH, _WIDE_CAUSAL)),
    (64, 128, False): ((ANY_LENGTH, _TWO),),
    (64, 128, True): ((ANY_LENGTH, _TWO),),
    (128, 64, False): ((ANY_LENGTH, _TWO),),
    (128, 64, True): ((ANY_LENGTH, _TWO),),
    (64, 256, False): ((ANY_LENGTH, _NARROW),),
    (64, 256, True): ((ANY_LENGTH, _NARROW),),
    (128, 256, False): ((ANY_LENGTH, _NARROW),),
    (128, 256, True): ((ANY_LENGTH, _NARROW),),
    (256, 64, False): ((ANY_LENGTH, _NARROW),),
    (256, 64, True): ((ANY_LENGTH, _NARROW),),
    (256, 128, False): ((ANY_LENGTH, _NARROW),),
    (256, 128, True): ((ANY_LENGTH, _NARROW),),
    (192, 128, False): ((ANY_LENGTH, _PARTS),),
    (192, 128, True): ((ANY_LENGTH, _PARTS),),
}
_PARTS_OF = {192: 3}
"""Columns of q and k that are no power of two: how many tiles side by side."""


# (padded head_dim, padded head_dim_v) -> the first rows of a mask with both edges, which both cut blocks.
_BOTH_EDGES: dict[tuple[int, int], tuple[tuple[int, ForwardConfig], ...]] = {
    (64, 64): ((512, F(2, 64, STAGES=4, Q_STAGES=2)),),
    (128, 128): ((2048, _SHORT_BLOCKS),),
}


def tile_columns(problem: Problem) -> tuple[int, int, int]:
    """(columns of q and k in shared memory, of v, tiles that those of q and k make side by side)."""
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    for columns, parts in _PARTS_OF.items():
        if problem.head_dim <= columns < block_d and (columns, block_dv, False) in _TABLE:
            return columns, block_dv, parts
    return block_d, block_dv, 1


def choose(problem: Problem) -> ForwardConfig:
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    windowed = left != UNLIMITED or right != UNLIMITED
    block_d, block_dv, _ = tile_columns(problem)
    seen = problem.seqlen_k
    rows = _TABLE[block_d, block_dv, windowed]
    if left != UNLIMITED and right != UNLIMITED:
        seen = min(seen, left + 1 + right)
        rows = _BOTH_EDGES.get((block_d, block_dv), ()) + rows
    if problem.partial:
        return PARTIAL_Q if block_d == 128 and not windowed else PARTIAL
    return next(config for keys, config in rows if seen < keys)


def every_row() -> Iterator[tuple[int, int, bool, int, ForwardConfig]]:
    """(columns of q and k, of v, windowed, keys, config) of the whole table."""
    for (block_d, block_dv, windowed), rows in _TABLE.items():
        for keys, config in rows:
            yield block_d, block_dv, windowed, keys, config


def smem_bytes(config: ForwardConfig, block_d: int, block_dv: int) -> int:
    """Shared memory of the tiles, in bytes, as the kernel allocates them (barriers take a few dozen more)."""
    q = config.Q_STAGES * config.BLOCK_M * block_d
    kv = config.STAGES * config.BLOCK_N * (block_d + block_dv)
    o = 0 if config.Q_HOLDS_O else config.BLOCK_M * (2 * O_PART if config.O_IN_PARTS else block_dv)
    return 2 * (q + kv + o)
