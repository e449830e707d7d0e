"""Configurations of the Hopper backward: data, chosen by head sizes. Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashtile.backends.hopper.backward.costs import fastest, is_causal
from flashtile.backends.hopper.config import (
    MAX_COLUMNS_OF_V,
    WARPGROUP_ROWS,
    ModifierFlags,
    is_windowed,
    modifiers_of,
    tile_widths,
)
from flashtile.backends.hopper.forward import rounds as forward_rounds
from flashtile.backends.hopper.forward.config import ForwardConfig
from flashtile.problems.attention import Problem
from flashtile.problems.masking import MaskConstants

POSTPROCESS_WARPS = 2
"""Number of postprocess warps, which convert ``dq_accum`` to dQ. With the producer and ``accumulate_dq`` they
fill a warpgroup. As two partitions of one warp each, a call at head_dim 128 and a length of 512 took 497
instead of 466 us."""
POSTPROCESS_CHUNK = 1024
"""Floats of ``dq_accum`` that the postprocess warps convert at a time; at most a quarter of a tile."""
POSTPROCESS_STAGES = 3
"""Number of chunks of ``dq_accum`` in shared memory, which are loaded ahead: as many as fit at head_dim 64
and 128, where less than one chunk of shared memory is left."""
GRADIENT_PART = 64
"""Columns of dK and dV that one TMA store writes in 16 bits; half as many in float32."""


@dataclass(frozen=True)
class BackwardConfig:
    """Tile and pipeline of the backward kernel: two consumers of 64 keys each.

    Args:
        BLOCK_M: query rows of a step, 64 or 128.
        STAGES: blocks of queries and output gradients in shared memory.
        HEAD_SPLITS, ROW_SPLITS: numbers of parts into which the query heads of a group, and the query rows of
            each head, are divided among programs that share a block of keys (``splits``).
        COLUMN_SPLITS: number of work tiles that divide the columns of dK and dV, and of tiles that hold the
            columns of a block (``wide_dkv``).
        EXTRA_Q: tiles of queries that ``wide_dkv`` has in shared memory besides STAGES of them (of halves,
            STAGES * COLUMN_SPLITS).
        ALL_RESIDENT: whether ``dq_accum`` has room for all heads, so that none waits for another.
        ONE_BLOCK: whether each sequence has one block of keys at most, so that dQ needs no ``dq_accum``.
    """

    BLOCK_M: int
    STAGES: int = 2
    HEAD_SPLITS: int = 1
    ROW_SPLITS: int = 1
    COLUMN_SPLITS: int = 1
    EXTRA_Q: int = 0
    ALL_RESIDENT: bool = False
    ONE_BLOCK: bool = False

    @property
    def BLOCK_N(self) -> int:  # noqa: N802 - as in the kernel
        return 2 * WARPGROUP_ROWS

    @property
    def parts(self) -> int:
        """Number of partial sums (parts) of dK and dV, one for each program that shares a block of keys."""
        return self.HEAD_SPLITS * self.ROW_SPLITS

    @property
    def wide(self) -> bool:
        """Whether this is the configuration of two kernels, for head sizes over 128."""
        return False


@dataclass(frozen=True)
class WideBackwardConfig(BackwardConfig):
    """Tile and pipeline of the two kernels for head sizes over 128.

    The kernel of dK and dV has tiles of 64 keys and one consumer for each gradient. The kernel of dQ has two
    consumers of 64 query rows each, or one block of 64 rows with COLUMN_SPLITS 2.

    Args:
        paired_below: for the kernel of dQ, as in
            :class:`~flashtile.backends.hopper.forward.config.ForwardConfig`.
    """

    BLOCK_M: int = WARPGROUP_ROWS
    paired_below: int = 8192

    @property
    def BLOCK_N(self) -> int:  # noqa: N802 - as in the kernels
        return WARPGROUP_ROWS

    @property
    def wide(self) -> bool:
        return True

    @property
    def rows(self) -> ForwardConfig:
        """Tile of the kernel of dQ, whose scheduler is that of the forward."""
        if self.COLUMN_SPLITS == 1:
            return ForwardConfig(2, self.BLOCK_N, paired_below=self.paired_below)
        return ForwardConfig(1, self.BLOCK_M, STAGES=self.STAGES, paired_below=self.paired_below)


@dataclass(frozen=True)
class BackwardVariant(MaskConstants, ModifierFlags):
    """Compile-time parameters of the backward kernel, which takes them as one constexpr."""

    HAS_TREE: ClassVar[bool] = False
    """Only decoding has tree masks."""

    VARLEN: bool
    SEQUSED: bool
    SOFTCAP: bool
    ALIBI: bool
    SCALED_SCORES: bool
    """Scores are more than raw products times a positive scale: with a soft-cap, ALiBi, a bias or SCORE_MOD,
    or with a scale below ``launch.SMALLEST_SCALE``."""
    EVEN_N: bool
    """No row sees keys past the end of its sequence: sequences end with a whole block of keys, or the mask is
    causal."""
    MASKED: bool
    """Some block has a row that does not see all keys of the block."""
    DETERMINISTIC: bool
    """Blocks of keys add to ``dq_accum`` in a fixed order."""
    ONE_BLOCK: bool
    """Sequences have one block of keys at most. A step's dQ is then complete, and stored in 16 bits without
    ``dq_accum``. Every row is visited, because the rows that see no keys need zeros."""
    GROUPED: bool
    """Several query heads share a key head of the schedule."""
    SHARED: bool
    """Several programs share a block of keys, and each writes its part of dK and dV in float32."""
    COLUMN_SPLITS: int
    EXTRA_Q: int
    HEAD_DIM: int
    """Columns of q and k."""
    HEAD_DIM_V: int
    """Columns of v."""
    BLOCK_D: int
    """Columns of tiles of q and k; those past HEAD_DIM are zeros."""
    BLOCK_DV: int
    """Columns of tiles of v and dO; those past HEAD_DIM_V are zeros."""
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


# (columns of q and k, of v) -> config
_BACKWARD: dict[tuple[int, int], BackwardConfig] = {
    (32, 32): BackwardConfig(128),
    (64, 64): BackwardConfig(128),  # full 1 x 2048, 16 heads: 102.9 us, with steps of 64 rows 115.7
    (128, 128): BackwardConfig(64),  # not measured against others, as those below
    (64, 128): BackwardConfig(64),
    (128, 64): BackwardConfig(64),
}
_HALVES = WideBackwardConfig(WARPGROUP_ROWS // 2, STAGES=1, COLUMN_SPLITS=2, EXTRA_Q=1)
"""Configuration for head sizes over 256: a step has 32 query rows, or 32 keys in the kernel of dQ."""
_FEW_ROWS = BackwardConfig(64)
"""Configuration for calls with a score_mod or dropout, since tiles of 64 rows leave registers for them. At
head_dim 64 it is also an alternative for short sequences and windows, which have fewer hidden scores in such
tiles: a causal window of 64 keys takes 0.66 of the time of steps of 128 rows, causal 4 x 512 30.9 instead of
36.0 us."""
SHORT = 512
"""Packed sequences up to this length may have steps of 64 rows at head_dim 64, as dense calls. For documents
of 16 to 128 tokens the estimate is 0.54 to 0.63 of the time of steps of 128 rows (not measured); it is 0.92
for causal sequences of 512."""
_DQ_COSTS = forward_rounds.Costs(4.0, 2.4)
"""Costs of the kernel of dQ for head sizes over 128: for three of seven products, three sevenths of the times
at head_dim 256 in ``benchmarks/results/2026-11-23-h200-paper-grid-backward.json``."""


def choose(problem: Problem) -> BackwardConfig:
    """Return the configuration of a problem: a :class:`WideBackwardConfig` if a head size is over 128.

    Of the :func:`alternatives`, it is the one that ``rounds`` estimates to be fastest.
    """
    return fastest(problem, alternatives(problem))


def alternatives(problem: Problem) -> tuple[BackwardConfig, ...]:
    """Return the configuration of the tables, then others, all without splits.

    Only plain calls have others, because the costs of their steps were measured. Their lengths are known, or
    sequences are packed and short: estimates assume that they are equally long, and of sequences that differ
    much, the longest have most of the work.
    """
    columns = tile_widths(problem)
    config = _BACKWARD.get(columns)
    if config is None:
        return (_wide(problem),)
    if problem.dropout_p or (problem.mods is not None and problem.mods.score_mod):
        return (_FEW_ROWS,)
    one_block = has_one_block(problem)
    known = not (problem.varlen and max(problem.seqlen_q, problem.seqlen_k) > SHORT)
    known = known and not (problem.seqused_k or problem.deterministic or modifiers_of(problem))
    tables = (config, _FEW_ROWS) if known and config.BLOCK_M != _FEW_ROWS.BLOCK_M else (config,)
    small = columns in ((32, 32), (64, 64)) and problem.group_size == 1
    if small and is_causal(problem) and problem.seqlen_k <= 2 * SHORT:
        # 16 x 1024: 584 us instead of 625 (32 heads of 64), 494 instead of 563 (32 of 32), and 911 instead of
        # 1054 (64 of 16). With 8 x 2048 and 64 heads of 16 both take as long. With 32 columns, 128 rows are
        # estimated to take 0.71 of their time, so they are not offered.
        tables = tables[::-1] if columns == (64, 64) else tables[-1:]
    return tuple(replace(table, ONE_BLOCK=one_block) for table in tables)


def has_one_block(problem: Problem) -> bool:
    """Whether a plain call with 16-bit results has one block of keys per sequence.

    Rows that see no keys are then visited, so there must be few: masks with edges have few rows in all.
    """
    plain = not (problem.seqused_k or problem.partial or modifiers_of(problem))
    keys = BackwardConfig(WARPGROUP_ROWS).BLOCK_N
    return plain and problem.seqlen_k <= keys and not (is_windowed(problem) and problem.seqlen_q > keys)


def _wide(problem: Problem) -> WideBackwardConfig:
    """Return the configuration for head sizes over 128, without pairs for dQ if these would take longer."""
    if max(problem.head_dim, problem.head_dim_v) > MAX_COLUMNS_OF_V:
        return _HALVES
    # dK of 129 to 192 columns leaves through 64 of them (``launch.gradient_columns``). With narrower values,
    # memory suffices for a third tile of q, which is read from the first product of a step, S, to the last,
    # dK. The backward pass of heads of (192, 128) then takes 0.935 of the time (three drawn causal calls).
    has_room = 128 < problem.head_dim <= 192 and problem.head_dim_v <= 128
    config = WideBackwardConfig(EXTRA_Q=int(has_room))
    single = replace(config, paired_below=0)
    rows = forward_rounds.fastest(problem, (config.rows, single.rows), lambda _: _DQ_COSTS, "dq")
    return config if rows == config.rows else single
