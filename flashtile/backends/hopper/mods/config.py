"""Configurations of the Hopper kernels with functions, and what they do not take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashtile.backends.common.preprocess import ROW_PAD
from flashtile.backends.hopper.backward.config import BackwardConfig, BackwardVariant, with_splits
from flashtile.backends.hopper.backward.config import choose as choose_plain_backward
from flashtile.backends.hopper.config import padded
from flashtile.backends.hopper.forward.config import ForwardConfig, ForwardVariant
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED

MOST_COLUMNS = 128
"""Of a head."""

_FORWARD: dict[tuple[int, int], ForwardConfig] = {
    (64, 64): ForwardConfig(2, 128, Q_STAGES=2, QUEUED=True),
    (128, 128): ForwardConfig(2, 128, QUEUED=True),
    (64, 128): ForwardConfig(2, 128, QUEUED=True),
    (128, 64): ForwardConfig(2, 128, QUEUED=True),
}
"""By padded head sizes: two consumers, as blocks of block masks consist of tiles of 128 rows."""

_SCORE_MOD_BACKWARD = BackwardConfig(64)
"""Of every head size: a score_mod needs the registers that tiles of 128 rows have."""


@dataclass(frozen=True)
class WithFunctions:
    """What kernels with functions are compiled for beside those without."""

    HAS_MODS: ClassVar[bool] = True

    HAS_CUTS: bool
    SCORE_MOD: Any
    """``@triton.jit`` functions, or None; so is MASK_MOD."""
    MASK_MOD: Any
    GUARD_SCORES: bool
    GUARD_FACTORS: bool
    LISTED: bool
    OWN: int
    """Of a block of the block mask: query rows in the forward, keys in the backward."""
    PARTS: int
    """Blocks of the kernel, of the other sequence, in one of the block mask."""


@dataclass(frozen=True)
class ModifiedForwardVariant(WithFunctions, ForwardVariant):
    """Everything that the forward kernel with functions is compiled for."""


@dataclass(frozen=True)
class ModifiedBackwardVariant(WithFunctions, BackwardVariant):
    """Everything that the backward kernel with functions is compiled for."""


def choose_forward(problem: Problem) -> ForwardConfig:
    return _FORWARD[padded(problem.head_dim), padded(problem.head_dim_v)]


def choose_backward(problem: Problem) -> BackwardConfig:
    assert problem.mods is not None
    if problem.mods.score_mod:
        return with_splits(_SCORE_MOD_BACKWARD, problem)
    return choose_plain_backward(problem)


def reason_against_mods(problem: Problem) -> str | None:
    """Why the kernels do not take a call's functions; None if they do."""
    mods = problem.mods
    assert mods is not None
    if max(problem.head_dim, problem.head_dim_v) > MOST_COLUMNS:
        return f"it takes {mods.given} for head sizes up to {MOST_COLUMNS}"
    if mods.score_mod and (problem.softcap > 0 or problem.alibi):
        return f"it takes no {'softcap' if problem.softcap > 0 else 'alibi_slopes'} beside score_mod"
    if mods.block_size is None:
        return None
    size_q, size_kv = mods.block_size
    config = choose_forward(problem)
    if size_q % config.BLOCK_M or size_kv % config.BLOCK_N:
        return (
            f"blocks of block_mask must be multiples of {config.BLOCK_M} queries and {config.BLOCK_N} keys, "
            f"they are {size_q} by {size_kv}"
        )
    if problem.effective_window(problem.seqlen_q, problem.seqlen_k) != (UNLIMITED, UNLIMITED):
        return "it takes no causal or window_size beside block_mask: write it in the block mask's mask_mod"
    return None


def reason_against_backward(problem: Problem) -> str | None:
    """The same of the backward pass, of what the forward takes."""
    mods = problem.mods
    assert mods is not None
    if mods.learned:
        return "it computes no gradients of captured tensors"
    if mods.block_size is None:
        return None
    if problem.deterministic:
        return "it takes no block_mask when deterministic"
    if mods.list_heads > 1 and problem.group_size > 1:
        return "it takes no block_mask that tells query heads apart which share a key head"
    size_q, _ = mods.block_size
    if size_q > ROW_PAD and problem.seqlen_q % size_q:
        return f"blocks of block_mask of more than {ROW_PAD} queries must fill seqlen_q, they have {size_q}"
    return None
