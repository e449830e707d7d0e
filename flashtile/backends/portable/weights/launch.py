"""Launcher of the kernel of attention weights: conversion of tensors to its arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.launch import CachedLaunch, KernelConfig, padded
from flashtile.backends.portable import configure_forward
from flashtile.backends.portable.attention.functions import FunctionPointers, captured_of
from flashtile.backends.portable.attention.launch import attention_kernel, optional_pointers
from flashtile.backends.portable.config import Config
from flashtile.backends.portable.weights.kernel import WeightsPointers, weights_kernel
from flashtile.problems.attention import WeightsProblem

KEYS_A_THREAD = 16
"""Maximum number of 64-bit entries per thread in a tile whose rows are sorted to find the largest weights."""


@dataclass(frozen=True)
class WeightsConfig:
    tile: KernelConfig
    precision: str


def choose(problem: WeightsProblem) -> WeightsConfig:
    return of_forward(problem, configure_forward(problem))


def of_forward(problem: WeightsProblem, config: Config) -> WeightsConfig:
    """Return the weights kernel's configuration, derived from the forward kernel's ``config``."""
    tile = replace(config.forward, spill_budget=0, features_spill_budget=0)
    if problem.form == "top":
        keys = max(tile.BLOCK_N, padded(problem.top)) if problem.mods is None else tile.BLOCK_N
        most = max(16, KEYS_A_THREAD * 32 * tile.num_warps // max(keys, padded(problem.top)))
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, most), BLOCK_N=keys)
    return WeightsConfig(tile, config.precision)


def constants_of(problem: WeightsProblem) -> dict[str, Any]:
    """Return the constants of the weights kernel that the forward kernel lacks or sets differently.

    The weights kernel applies the mask to every block, even to blocks that lie within the window.
    """
    block_top = padded(problem.top) if problem.top else 0
    return {"FORM": problem.form, "TOP": problem.top, "BLOCK_TOP": block_top, "MASKS_EVERY_BLOCK": True}


class WeightsLaunch:
    """The launch ``(q, k, lse, extras) -> (weights, indices)`` for tensors of one signature."""

    def __init__(self, problem: WeightsProblem, config: WeightsConfig) -> None:
        self._problem, self._config = problem, config
        self._kernel: CachedLaunch | None = None
        self._functions: FunctionPointers | None = None

    def __call__(self, q: Tensor, k: Tensor, lse: Tensor, extras: Any) -> tuple[Tensor, Tensor | None]:
        problem, tile = self._problem, self._config.tile
        weights = q.new_zeros(problem.weights_shape, dtype=problem.weights_dtype)
        indices = None
        if problem.form == "top":
            indices = q.new_full(problem.weights_shape, -1, dtype=torch.int64)
        by_keys = problem.form == "columns"
        blocks = (
            triton.cdiv(problem.seqlen_k, tile.BLOCK_N)
            if by_keys
            else triton.cdiv(problem.seqlen_q, tile.BLOCK_M)
        )
        programs = blocks * problem.num_heads_q * problem.batch
        if programs == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
            return weights, indices
        lse = lse.contiguous()
        kernel = self._kernel
        if kernel is None:
            kernel = self._kernel = self._prepare(q, k, extras, programs, by_keys)
        if self._functions is None:
            optional = optional_pointers(extras)
        else:
            captured = captured_of(extras)  # kept alive until the launch
            optional = self._functions(kernel, extras, captured, owns_keys=by_keys)
        kernel(q.device, q, k, lse, weights, indices, *optional)
        return weights, indices

    def _prepare(self, q: Tensor, k: Tensor, extras: Any, programs: int, by_keys: bool) -> CachedLaunch:
        problem, config = self._problem, self._config
        if problem.mods is not None:
            self._functions = FunctionPointers(problem, extras)
        return attention_kernel(
            weights_kernel, WeightsPointers, programs, config.tile, problem, config.precision, (q, k, k),
            extras, owns_keys=by_keys, **constants_of(problem),
        )  # fmt: skip
