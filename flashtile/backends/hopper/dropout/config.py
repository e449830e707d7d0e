"""Configurations of the Hopper kernels with dropout, and what they do not take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashtile.backends.hopper.backward.config import BackwardConfig, BackwardVariant, with_splits
from flashtile.backends.hopper.config import padded
from flashtile.backends.hopper.forward.config import ForwardConfig, ForwardVariant
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED

MOST_COLUMNS = 128
"""Of a head."""
MOST_DROPPED = 31 / 32
"""Numbers from there on are no numbers in fp16."""


@dataclass(frozen=True)
class DropoutForwardConfig(ForwardConfig):
    """``LATE_WORDS``: the assembler may put the random words off until the exponentials; else they are made
    under the products."""

    LATE_WORDS: bool = False


F = DropoutForwardConfig
_FORWARD: dict[tuple[int, int], DropoutForwardConfig] = {
    (64, 64): F(2, 128, Q_STAGES=2, PIN_WAIT=True, QUEUED=True, paired_below=4096),
    (128, 128): F(2, 128, QUEUED=True, paired_below=4096),
    (64, 128): F(2, 128, QUEUED=True, paired_below=4096),
    (128, 64): F(2, 128, QUEUED=True, paired_below=4096),
}
"""By padded head sizes."""
_BACKWARD = BackwardConfig(64)
"""Of every head size: what is kept needs registers that tiles of 128 rows have not."""


@dataclass(frozen=True)
class DropoutForwardVariant(ForwardVariant):
    """Everything that the forward kernel with dropout is compiled for."""

    HAS_DROPOUT: ClassVar[bool] = True
    FINE_DROPOUT: bool
    """Numbers of 15 bits decide, not of 7."""
    LATE_WORDS: bool


@dataclass(frozen=True)
class DropoutBackwardVariant(BackwardVariant):
    """Everything that the backward kernel with dropout is compiled for."""

    HAS_DROPOUT: ClassVar[bool] = True
    FINE_DROPOUT: bool = False
    """Numbers of 15 bits decide, not of 7."""


def choose_forward(problem: Problem) -> DropoutForwardConfig:
    config = _FORWARD[padded(problem.head_dim), padded(problem.head_dim_v)]
    # Under a mask a warpgroup waits more, and the words fit in between.
    masked = problem.effective_window(problem.seqlen_q, problem.seqlen_k) != (UNLIMITED, UNLIMITED)
    return replace(config, LATE_WORDS=masked)


def choose_backward(problem: Problem) -> BackwardConfig:
    return with_splits(_BACKWARD, problem)


def reason_against_dropout(problem: Problem) -> str | None:
    """Why the kernels do not take a call's dropout; None if they do."""
    if max(problem.head_dim, problem.head_dim_v) > MOST_COLUMNS:
        return f"it takes dropout_p for head sizes up to {MOST_COLUMNS}"
    if problem.dropout_p > MOST_DROPPED:
        return f"it takes dropout_p up to {MOST_DROPPED}"
    if problem.partial:
        return "it takes no dropout_p where results are partial"
    if problem.mods is not None:
        return f"it takes no dropout_p beside {problem.mods.given}"
    return None
