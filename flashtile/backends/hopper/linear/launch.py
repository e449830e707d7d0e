"""The launch of the flat product (few rows of x). Its arguments are prepared once for each signature."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.common.counters import zeroed_counters
from flashtile.backends.common.device import multiprocessors
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.linear import (
    ProductDepth,
    ProductPointers,
    epilogue_scalars,
    epilogue_variant,
    new_next_norm,
    new_output,
    product_pointers,
)
from flashtile.backends.hopper.linear.config import FlatConfig
from flashtile.backends.hopper.linear.kernel import FlatVariant, flat_kernel
from flashtile.problems.linear import E4M3, LinearProblem


def flat_variant(problem: LinearProblem, config: FlatConfig) -> FlatVariant:
    return FlatVariant(
        HALVES=1 if problem.places == problem.N else 2,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_K=config.BLOCK_K,
        EVEN_K=problem.K % (config.num_warps * config.BLOCK_K) == 0,
        STAGES=config.num_stages,
        WARPS=config.num_warps,
        AHEAD=problem.prefetch,
        K_WIDTH=4 if problem.weight_dtype == E4M3 else 2,
    )


class FlatLaunch:
    """A launch ``(x, weight[, k_cache, v_cache], tensors) -> y`` for tensors of one signature.

    If a norm follows, it returns (y, scaled, factor): y, y times the norm's weight, and the norm's factors.
    """

    def __init__(self, problem: LinearProblem, config: FlatConfig) -> None:
        self._problem, self._config = problem, config
        self._programs = min(config.programs_per_sm * multiprocessors(problem.device), problem.places)
        self._kernel: CachedLaunch | None = None

    def __call__(self, x: Tensor, weight: Tensor, *others: Any) -> Any:
        *caches, given = others
        y = new_output(self._problem, x)
        following = new_next_norm(self._problem, y, self._programs * self._config.BLOCK_M)
        if self._kernel is None:
            self._kernel = self._prepare(x, weight, tuple(caches), given)
        arrived = zeroed_counters(x.device, 1) if self._problem.next_norm else None
        pointers = product_pointers(x, weight, y, given, tuple(caches), following, arrived=arrived)
        self._kernel(x.device, *pointers)
        return (y, following.scaled, following.factor) if self._problem.next_norm else y

    def _prepare(self, x: Tensor, weight: Tensor, caches: tuple[Tensor, ...], given: Any) -> CachedLaunch:
        problem, config = self._problem, self._config
        return CachedLaunch(
            flat_kernel,
            self._programs,
            (
                ProductDepth(problem.K, x.stride(0), weight.stride(0)),
                problem.norm_eps,
                *epilogue_scalars(problem, given, caches),
            ),
            (flat_variant(problem, config), epilogue_variant(problem)),
            None,
            pointers=ProductPointers,
            num_warps=config.num_warps,
            launch_pdl=True,
        )
