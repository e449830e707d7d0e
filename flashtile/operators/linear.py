"""Products with a weight as operations. None of them has a backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.decode import check_own_memory
from flashtile.checks.linear import check_before_norm, check_linear, check_qkv
from flashtile.op.operation import Operation, Writing
from flashtile.problems.linear import (
    BeforeNormOptions,
    BeforeNormTensors,
    LinearOptions,
    LinearProblem,
    LinearTensors,
    QkvOptions,
    QkvTensors,
)

NO_GRADIENT = (
    "products of flashtile.linear have no backward pass (call them under torch.no_grad(), or train with "
    "torch.nn.functional.linear)"
)


def _fake_linear(x: Tensor, weight: Tensor, tensors: LinearTensors, options: LinearOptions) -> Tensor:
    columns = weight.shape[0] if options.activation is None else weight.shape[0] // 2
    return x.new_empty((x.shape[0], columns))


def _fake_before_norm(
    x: Tensor, weight: Tensor, tensors: BeforeNormTensors, options: BeforeNormOptions
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((x.shape[0], weight.shape[0]))
    return y, torch.empty_like(y), x.new_empty(x.shape[0], dtype=torch.float32)


def _fake_qkv(
    x: Tensor, weight: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: QkvTensors, options: QkvOptions
) -> Tensor:
    heads_kv, head_dim = k_cache.shape[2:]
    return x.new_empty((x.shape[0], weight.shape[0] // head_dim - 2 * heads_kv, head_dim))


def _flops(x: Tensor, weight: Tensor, *others: Any) -> int:
    return 2 * x.shape[0] * weight.shape[0] * weight.shape[1]


class _Appending(Writing):
    """An operation that writes into two caches."""

    def check_values(self, tensors: tuple, optional: Any, options: Any) -> None:
        check_own_memory(tensors[2], tensors[3])


LINEAR = Operation(
    "linear",
    part="linear",
    tensors=("x", "weight"),
    optional=LinearTensors(),
    options=LinearOptions,
    results=1,
    check=check_linear,
    describe=LinearProblem.from_linear,
    fake=_fake_linear,
    no_gradient=NO_GRADIENT,
    flops=_flops,
)
LINEAR_BEFORE_NORM = Operation(
    "linear",
    suffix="_before_norm",
    part="linear",
    tensors=("x", "weight"),
    optional=BeforeNormTensors(),
    options=BeforeNormOptions,
    results=3,
    check=check_before_norm,
    describe=LinearProblem.from_before_norm,
    fake=_fake_before_norm,
    no_gradient=NO_GRADIENT,
    flops=_flops,
)
LINEAR_QKV = _Appending(
    "linear_qkv",
    part="linear",
    tensors=("x", "weight", "k_cache", "v_cache"),
    optional=QkvTensors(),
    options=QkvOptions,
    results=1,
    mutates=("k_cache", "v_cache"),
    check=check_qkv,
    describe=LinearProblem.from_qkv,
    fake=_fake_qkv,
    no_gradient=NO_GRADIENT,
    flops=_flops,
)
