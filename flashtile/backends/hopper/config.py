"""Common parts of the configurations of all Hopper kernels. The tables are in ``forward``, ``backward``,
``fp8``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.problems.attention import Problem

WARPGROUP_ROWS = 64
"""Rows of a product that one warpgroup computes."""
PRODUCER_REGISTERS = 24
"""Registers of a thread of the producer."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Registers of a consumer thread, by number of consumer warpgroups; with the producer's they fill the 64 K
registers of an SM."""
SHARING_REGISTERS = 104, 80
"""(consumer's, what each thread starts with) of two warpgroups, where two programs share an SM."""
LAUNCH_REGISTERS = {2: 168, 3: 128}
"""Registers that each thread starts with, before partitions trade: 65536 over all threads, in steps of 8."""


def padded(head_dim: int) -> int:
    """The head size that the tiles have: TMA fills what is missing with zeros."""
    return next(size for size in (64, 128, 256) if head_dim <= size)


@dataclass(frozen=True, kw_only=True)
class ModifierFlags:
    """Flags of a variant for modifiers of scores (``modifiers``); by default there are none."""

    HAS_BIAS: bool = False
    """Scores get an additive bias."""
    BIAS_STAGES: int = 1
    """Tiles of the bias in shared memory, in the forward."""
    SEQUENCES_FIRST: bool = False
    """Sequences vary faster than heads, whose bias they share, so that it is in the L2 cache."""
    STORES_DS: bool = False
    """The backward writes dS as the bias's gradient: each element of the bias belongs to one score."""
    HAS_DROPOUT: bool = False
    FINE_DROPOUT: bool = False
    """Numbers of 15 bits decide, not of 7."""
    LATE_BITS: bool = False
    """The assembler may put the forward's random bits off until the exponentials."""
    HAS_MODS: bool = False
    """Functions of scores or masks, or a block mask."""
    HAS_CUTS: bool = False
    """A mask hides keys by other than their distance to the row."""
    SCORE_MOD: Any = None
    """``@triton.jit`` functions, or None; so is MASK_MOD."""
    MASK_MOD: Any = None
    GUARD_SCORES: bool = False
    """SCORE_MOD may give NaN where no score is seen; GUARD_FACTORS: so may its derivative."""
    GUARD_FACTORS: bool = False
    LISTED: bool = False
    """A block mask lists the blocks to compute."""
    MASK_BLOCK: int = 0
    """Size of a block of the block mask: query rows in the forward, keys in the backward."""
    TILES_PER_MASK_BLOCK: int = 1
    """Blocks of the kernel, of the other sequence, in one of the block mask."""


def modifiers_of(problem: Problem) -> tuple[str, ...]:
    """The modifiers of the problem's scores, by name."""
    given = {"functions": problem.mods is not None, "dropout": problem.dropout_p > 0, "bias": problem.bias}
    return tuple(name for name, is_given in given.items() if is_given)
