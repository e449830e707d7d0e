"""Configurations of kernels, and numbers that the launches of every backend's kernels are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.problems.attention import Problem


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch of one kernel.

    ``spill_budget`` is the number of bytes of register spills that is accepted for plain and causal problems,
    after measurement. ``features_spill_budget`` is that number with soft-cap, ALiBi, windows and unused keys
    at once.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    spill_budget: int = 0
    features_spill_budget: int = 0


RAGGED_ROWS = 2**30
"""Rows of a ragged descriptor (``tma.ragged_view``), and the most that a tensor may have."""


def padded(head_dim: int) -> int:
    """The power of two, at least 16, that a tile of ``head_dim`` columns takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def has_score_mod(problem: Problem) -> bool:
    """Whether the scores are more than raw products times a positive scale (which keeps their maximum)."""
    return problem.softcap > 0 or problem.alibi or problem.bias or problem.softmax_scale <= 0


def outer_stride(tensor: Tensor | None) -> int:
    """From row to row of a tensor of two dimensions or more; 0 for one of fewer, which all share, and for
    None."""
    return tensor.stride(0) if tensor is not None and tensor.dim() > 1 else 0


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def allocator(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, zeroed: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the fastest torch function that allocates contiguous memory of this shape and dtype, given a
    tensor with the signature of ``like``."""
    if (like.shape, like.stride(), like.dtype) == (shape, contiguous_strides(shape), dtype):
        return torch.zeros_like if zeroed else torch.empty_like
    # The shape is passed as separate arguments: parsing a tuple takes twice as long.
    if zeroed:
        return lambda tensor: tensor.new_zeros(*shape, dtype=dtype)
    return lambda tensor: tensor.new_empty(*shape, dtype=dtype)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` (at least 1) that is at most ``most``, or 1."""
    return next(size for size in range(max(min(most, number), 1), 0, -1) if number % size == 0)
