"""Host side of all Hopper kernels: registers, widths of tiles, flags of modifiers, numbers.

The tables of configurations are in ``forward``, ``backward``, ``decode``, ``fp8`` and ``linear``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.backends.common.device import Target, multiprocessors
from flashtile.problems.attention import Problem
from flashtile.problems.common import LOG2_E, UNLIMITED
from flashtile.problems.decode import DecodeProblem

WARPGROUP_ROWS = 64
"""Rows of a product that one warpgroup computes."""
PRODUCER_REGISTERS = 24
"""Registers of a producer thread: the fewest that ``setmaxnreg`` allows. They suffice, because TMA needs
addresses in registers, but no data."""
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
"""Registers of a consumer thread, by number of consumer warpgroups: as many as the producer leaves.

An SM has 65536. ``setmaxnreg`` goes in steps of 8 and counts whole warpgroups, so the producer's 128 threads
take 24 * 128 = 3072. Two consumers then have 240 * 256 = 61440, three 160 * 384 = 61440; eight more a thread
would be too many in both cases."""
MAX_COLUMNS_OF_V = 256
"""Most columns of the output that one work tile of the forward computes. 64 x 256 floats take half of a
warpgroup's registers.

For head_dim_v over 256, two work tiles compute the same scores, so three products are computed where two
would do. A program with all columns would have 64 rows, and load twice as many keys and values from the L2
cache."""
SHARING_REGISTERS = {(2, 2): (104, 80), (1, 2): (232, 128), (1, 3): (136, 80)}
"""(consumer warpgroups of a program, programs that share an SM) -> registers (of a consumer thread, of any
thread at launch).

At launch the 384 threads of a program of two warpgroups have 80 * 384 = 30720, at most half of an SM's.
Consumers and producer divide these among themselves: 104 * 256 + 24 * 128 = 29696. Programs of one warpgroup
have 256 threads, and a half or a third of an SM's registers."""
LAUNCH_REGISTERS = {1: 168, 2: 168, 3: 128}
"""Registers of each thread at launch, by number of consumer warpgroups: at most 65536 over all threads, in
steps of 8. ``setmaxnreg`` then moves registers from the producer to the consumers."""


NARROW_COLUMNS = 32
"""Fewest columns of a tile. Tiles of 16 columns, with another layout in shared memory, were not timed."""


def padded_columns(head_dim: int) -> int:
    """Return the number of columns of a tile for a head size: 64, 128, 256 or 512. TMA adds zeros."""
    return next(size for size in (64, 128, 256, 512) if head_dim <= size)


def tile_widths(problem: Problem) -> tuple[int, int]:
    """Return the numbers of columns of tiles of (q and k, v) in the backward, each a power of two.

    Over 256 columns, both have 512. Both have NARROW_COLUMNS if these suffice and the call has no modifiers.
    """
    if max(problem.head_dim, problem.head_dim_v) <= NARROW_COLUMNS and not modifiers_of(problem):
        return NARROW_COLUMNS, NARROW_COLUMNS
    sizes = padded_columns(problem.head_dim), padded_columns(problem.head_dim_v)
    return (512, 512) if max(sizes) > MAX_COLUMNS_OF_V else sizes


def is_windowed(problem: Problem) -> bool:
    """Whether the mask by position has an edge: a window or a causal mask."""
    return problem.effective_window(problem.seqlen_q, problem.seqlen_k) != (UNLIMITED, UNLIMITED)


def column_splits(problem: Problem) -> int:
    """Return the number of work tiles that divide the columns of v: 2 for head_dim_v over 256, else 1."""
    return math.ceil(problem.head_dim_v / MAX_COLUMNS_OF_V)


def heads_together(group_size: int) -> int:
    """Return the number of query heads of a key head that can share a tile of query rows.

    It is the largest power of two that divides ``group_size``, but at most 64.
    """
    return min(group_size & -group_size, WARPGROUP_ROWS)


def rows_of_token(heads: int) -> int:
    """Return the number of rows that a token with ``heads`` heads takes in a tile: a power of two."""
    return 1 << (heads - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class ModifierFlags:
    """Flags of a kernel variant for modifiers of scores (``modifiers``); by default there are none."""

    HAS_BIAS: bool = False
    """Scores get an additive bias."""
    BIAS_STAGES: int = 1
    """Number of tiles of the bias in shared memory, in the forward."""
    SEQUENCES_FIRST: bool = False
    """Work tiles go through all sequences of a head before the next head. The bias of the head, which the
    sequences share, then stays in L2."""
    STORES_DS: bool = False
    """Each element of the bias belongs to one score, so the backward stores dS as the bias's gradient."""
    HAS_DROPOUT: bool = False
    LATE_BITS: bool = False
    """The assembler may delay the computation of the forward's random bits until the exponentials."""
    HAS_MODS: bool = False
    """The call has a score_mod, a mask_mod or a block mask."""
    HAS_CUTS: bool = False
    """A mask_mod or a block mask may hide any key."""
    SCORE_MOD: Any = None
    """The score_mod as a ``@triton.jit`` function, or None."""
    MASK_MOD: Any = None
    """The mask_mod as a ``@triton.jit`` function, or None."""
    MASK_COLUMNS: Any = None
    """In the forward, a ``@triton.jit`` function that loads what MASK_MOD needs for each key, or None."""
    GUARD_SCORES: bool = False
    """SCORE_MOD may return NaN or infinity."""
    GUARD_FACTORS: bool = False
    """The derivative of SCORE_MOD may be NaN or infinity."""
    LISTED: bool = False
    """A block mask lists the blocks to compute."""
    MASK_BLOCK: int = 0
    """Size of a block of the block mask: query rows in the forward, keys in the backward."""
    TILES_PER_MASK_BLOCK: int = 1
    """Number of kernel blocks per block of the block mask: blocks of keys in the forward, of query rows in
    the backward."""


def modifiers_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the problem's modifiers of scores."""
    given = {"functions": problem.mods is not None, "dropout": problem.dropout_p > 0, "bias": problem.bias}
    return tuple(name for name, is_given in given.items() if is_given)


def has_lists(problem: Problem) -> bool:
    """Whether a block mask lists the blocks that see one another."""
    return problem.mods is not None and problem.mods.block_size is not None


def persistent_programs(num_tiles: int, device: torch.device | Target, sharing: int = 1) -> int:
    """Return the number of programs of a persistent kernel: ``sharing`` per SM, at most one per work tile."""
    return min(sharing * multiprocessors(device), num_tiles)


def score_numbers(problem: Problem | DecodeProblem) -> dict[str, float]:
    """Return the factors that turn Q K^T into scores in log2 units, by their names in ``Numbers``."""
    softcap = problem.softcap
    return {
        "scale_log2": (softcap or problem.softmax_scale) * LOG2_E,
        "softcap_rate": problem.softmax_scale / softcap if softcap else 0.0,
        "softcap_log2": softcap * LOG2_E,
    }
