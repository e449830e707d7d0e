"""Norms of tensors, and what rounding may leave in a score: the measures of the error rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SCORE_UNITS = 2.0
"""Rounding units of the accumulator (float32, or float64) that a score may be off."""


def score_noise(q: Tensor, k: Tensor, softmax_scale: float | None, of: Callable[[Tensor], float]) -> float:
    """What rounding may leave in a score, by the norm ``of`` (:func:`largest`, :func:`rms`)."""
    eps_of_sums = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    return SCORE_UNITS * eps_of_sums * scale_of(q, softmax_scale) * product(q, k, of)


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    return abs(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


def product(left: Tensor, right: Tensor, of: Callable[[Tensor], float]) -> float:
    """The size of a product of a row of each, if they point in unrelated directions."""
    sizes = [of(finite(torch.linalg.vector_norm(t.detach().double(), dim=-1))) for t in (left, right)]
    return sizes[0] * sizes[1] / left.shape[-1] ** 0.5


def finite(values: Tensor) -> Tensor:
    """Sizes of the values that are finite: rows that are no part of the call may hold NaN."""
    sizes = values.detach().double().abs()
    return sizes[sizes.isfinite()]


def largest(values: Tensor) -> float:
    """0 where there is no value."""
    return values.max().item() if values.numel() else 0.0


def rms(values: Tensor) -> float:
    """Root mean square, 0 where there is no value."""
    return values.square().mean().sqrt().item() if values.numel() else 0.0
