"""Configurations of the Hopper kernels with an additive bias, and what they do not take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashtile.backends.hopper.backward.config import BackwardVariant
from flashtile.backends.hopper.config import padded
from flashtile.backends.hopper.forward.config import ForwardConfig, ForwardVariant
from flashtile.problems.attention import Problem

MOST_COLUMNS = 128
"""Of a head."""


@dataclass(frozen=True)
class BiasForwardConfig(ForwardConfig):
    """``BIAS_STAGES``: tiles of the bias in shared memory."""

    BIAS_STAGES: int = 1


F = BiasForwardConfig
_FORWARD: dict[tuple[int, int], BiasForwardConfig] = {
    (64, 64): F(2, 128, Q_STAGES=2, BIAS_STAGES=2, paired_below=4096, QUEUED=True),
    (128, 128): F(2, 128, paired_below=4096, QUEUED=True),
    (64, 128): F(2, 128, paired_below=4096, QUEUED=True),
    (128, 64): F(2, 128, paired_below=4096, QUEUED=True),
}
"""By padded head sizes: two consumers, whose registers have room for a tile of the bias in 16 bits."""


@dataclass(frozen=True)
class WithBias:
    """What both kernels with a bias are compiled for beside those without."""

    HAS_BIAS: ClassVar[bool] = True

    SEQUENCES_FIRST: bool
    """Sequences vary faster than heads, whose bias they share, so that it is in the L2 cache."""


@dataclass(frozen=True)
class BiasForwardVariant(WithBias, ForwardVariant):
    """Everything that the forward kernel with a bias is compiled for."""

    BIAS_STAGES: int


@dataclass(frozen=True)
class BiasBackwardVariant(WithBias, BackwardVariant):
    """Everything that the backward kernel with a bias is compiled for."""

    STORES_DS: bool  # type: ignore[misc]
    """It writes dS as the bias's gradient: each cell of the bias belongs to one score."""


@dataclass(frozen=True)
class GradientVariant:
    """Everything that the kernel of the bias's gradient is compiled for."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    SOFTCAP: bool
    HAS_SCORE_MOD: bool
    """Scores are more than raw products times a positive scale, as in the backward."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    """Columns of all operands in shared memory."""
    STAGES: int
    """Operands of a product, of both its sides, in shared memory."""
    PRODUCTS: int
    """Instructions' groups that dO V^T takes."""
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    BLOCK_M: int = 128
    BLOCK_N: int = 128


GRADIENT_STAGES = {64: 5, 128: 3}
"""By columns of the operands."""


def choose_forward(problem: Problem) -> BiasForwardConfig:
    return _FORWARD[padded(problem.head_dim), padded(problem.head_dim_v)]


def has_own_gradient(problem: Problem) -> bool:
    """Whether the kernel of the bias's gradient serves the call; the portable one serves all others."""
    dense = not (problem.varlen or problem.seqused_k)
    return dense and padded(problem.head_dim) == padded(problem.head_dim_v) and problem.seqlen_k % 8 == 0


def reason_against_bias(problem: Problem) -> str | None:
    """Why the kernels do not take a call's bias; None if they do."""
    if max(problem.head_dim, problem.head_dim_v) > MOST_COLUMNS:
        return f"it takes a bias for head sizes up to {MOST_COLUMNS}"
    for name, given in (
        ("alibi_slopes", problem.alibi), ("dropout_p", problem.dropout_p),
        ("float32 results", problem.partial), ("functions of scores and masks", problem.mods is not None),
    ):  # fmt: skip
        if given:
            return f"it takes no {name} beside bias"
    return problem.bias_obstacle
