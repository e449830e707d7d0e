"""Products without rounded factors, norms of tensors, and the rounding error of a score in the error rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.torch_private import FakeTensor, rounds_products

SCORE_UNITS = 2.0
"""Allowed error of a score, in rounding units of the accumulator (float32 or float64)."""


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, without rounding factors of float32 first.

    ``torch.set_float32_matmul_precision`` allows TF32 or bfloat16, and autocast computes in 16 bits. A graph
    that is being traced cannot turn them off, nor can a derivative that autograd takes later. So the factors
    become float64 where they would be rounded.
    """
    if a.dtype == torch.float32 and rounds_products(a.device.type):
        return (a.double() @ b.double()).float()
    if leaks_between_rows(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of elements to x (rows, columns), on the CPU to each row by itself.

    torch's vectors have other exponentials than the elements after the last vector of a tensor.
    """
    if x.device.type != "cpu" or isinstance(x, FakeTensor):
        return function(x)
    return torch.cat([function(row) for row in x.split(1)])


def leaks_between_rows(x: Tensor) -> bool:
    """Whether a product of torch with x (M, K) may mix NaN or infinity of one row into others.

    oneDNN's product on AMX reads bfloat16 rows in tiles of 32 columns. Behind the last column it reads the
    next row, or the memory between two rows, and multiplies by zero, which keeps NaN and infinity
    (uxlfoundation/oneDNN#5717, mended after the version in torch 2.13).
    """
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[-1] % 32 != 0


def score_noise(q: Tensor, k: Tensor, softmax_scale: float | None, of: Callable[[Tensor], float]) -> float:
    """Return the rounding error that is allowed in the scores.

    ``of`` chooses the norm of the error: :func:`largest` or :func:`rms`.
    """
    eps_of_sums = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    return SCORE_UNITS * eps_of_sums * scale_of(q, softmax_scale) * product(q, k, of)


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    return abs(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


def product(left: Tensor, right: Tensor, of: Callable[[Tensor], float]) -> float:
    """Estimate how large the dot product is if one operand is a row of ``left``, the other of ``right``.

    The directions of the two rows are assumed to be unrelated. ``of``, :func:`largest` or :func:`rms`,
    reduces the norms of all rows of a tensor to one number.
    """
    sizes = [of(finite(torch.linalg.vector_norm(t.detach().double(), dim=-1))) for t in (left, right)]
    return sizes[0] * sizes[1] / left.shape[-1] ** 0.5


def finite(values: Tensor) -> Tensor:
    """Return the magnitudes of the finite values, (count,). NaN is left out: unused rows may hold it."""
    sizes = values.detach().double().abs()
    return sizes[sizes.isfinite()]


def largest(values: Tensor) -> float:
    """Return the largest value, 0 if there is none."""
    return values.max().item() if values.numel() else 0.0


def rms(values: Tensor) -> float:
    """Return the root mean square, 0 if there is no value."""
    return values.square().mean().sqrt().item() if values.numel() else 0.0
