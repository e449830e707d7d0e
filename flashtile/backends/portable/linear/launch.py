"""Launchers of the products, prepared once for each signature of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.counters import zeroed_counters
from flashtile.backends.common.device import capability
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
from flashtile.backends.common.tiles import CAPABILITY
from flashtile.backends.portable.fp8 import is_native
from flashtile.backends.portable.linear.config import LinearConfig, halves, needs_end, tiles_of
from flashtile.backends.portable.linear.kernel import (
    ProductVariant,
    Shares,
    epilogue_kernel,
    norm_kernel,
    product_kernel,
)
from flashtile.hardware.linear_table import GEMV, LIBRARY
from flashtile.problems.linear import E4M3, LinearProblem
from flashtile.reference.linear import before_norm, scaled_weight

MAX_NORM_COLUMNS = 2**15
"""Largest K of ``norm_kernel``, whose programs keep a row in registers: 64 numbers of a thread."""
EPILOGUE_PLACES, EPILOGUE_ROWS = 128, 8
"""Places and rows per program of the epilogue kernel after torch's product. Not measured against others."""
EPILOGUE_UNIT = 8
"""Places that an epilogue loads or stores at a time: 16 bytes of results (:func:`unit_of`)."""


def prepare(problem: LinearProblem, config: LinearConfig) -> Callable[..., Any]:
    """Return the launch ``(x, weight[, k_cache, v_cache], tensors) -> y`` for tensors of one signature."""
    return LibraryLaunch(problem) if config.kind == LIBRARY else ProductLaunch(problem, config)


def product_variant(problem: LinearProblem, config: LinearConfig) -> ProductVariant:
    dependent = capability(problem.device) >= CAPABILITY
    return ProductVariant(
        DOT=config.kind != GEMV,
        HALVES=halves(problem),
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_K=config.BLOCK_K,
        STAGES=config.num_stages,
        SPLIT=config.splits > 1,
        EVEN_K=problem.K % config.BLOCK_K == 0,
        BLOCK_SCALES=problem.scales == "block",
        E4M3_BITS=problem.weight_dtype == E4M3 and not is_native(problem.device),
        DEPENDENT=dependent,
        AHEAD=config.ahead if dependent and problem.prefetch else 0,
        UNIT=unit_of(problem, config),
    )


def unit_of(problem: LinearProblem, config: LinearConfig) -> int:
    """Return ``ProductVariant.UNIT``. The number of places of a tile is a multiple of this unit.

    If queries and keys are normalised, the unit is a head. Otherwise, it is 8 places (16 bytes of results) if
    the product is not a GEMV, and if both the tile and all places together are multiples of 8 places. Else it
    is 1.
    """
    if problem.heads is not None and problem.heads.norm:
        return problem.heads.head_dim // 2
    fits = config.BLOCK_N // halves(problem) % EPILOGUE_UNIT == 0 and problem.places % EPILOGUE_UNIT == 0
    return EPILOGUE_UNIT if fits and config.kind != GEMV else 1


class ProductLaunch:
    """Launch of one kernel that computes a GEMV or flat product and its epilogue."""

    def __init__(self, problem: LinearProblem, config: LinearConfig) -> None:
        self._problem, self._config = problem, config
        self._variant = product_variant(problem, config)
        self._tiles = tiles_of(problem, config)
        row_blocks = triton.cdiv(problem.M, config.BLOCK_M)
        self._blocks = self._tiles * row_blocks
        # A counter for each tile, then one for each block of rows of x (next_norm).
        self._counters = 0
        if config.splits > 1 or problem.next_norm:
            self._counters = self._blocks + row_blocks
        # Floats of a split's sums and squares, as ``split_at`` lays them out.
        self._part = (config.BLOCK_N + 1) * config.BLOCK_M if config.splits > 1 else 0
        self._kernel: CachedLaunch | None = None

    def __call__(self, x: Tensor, weight: Tensor, *others: Any) -> Any:
        *caches, given = others
        y = new_output(self._problem, x)
        following = new_next_norm(self._problem, y, self._blocks * self._config.BLOCK_M)
        results = (y, following.scaled, following.factor) if self._problem.next_norm else y
        if self._problem.M == 0:
            return results
        if self._kernel is None:
            self._kernel = self._prepare(x, weight, tuple(caches), given)
        if self._variant.E4M3_BITS:
            weight = weight.view(torch.uint8)
        partial = arrived = None
        if self._part:
            partial = x.new_empty(self._blocks * self._config.splits * self._part, dtype=torch.float32)
        if self._counters:
            arrived = zeroed_counters(x.device, self._counters)
        block_scale = given.weight_scale if self._variant.BLOCK_SCALES else None
        pointers = product_pointers(
            x, weight, y, given, tuple(caches), following, block_scale, partial, arrived
        )
        self._kernel(x.device, *pointers)
        return results

    def _prepare(self, x: Tensor, weight: Tensor, caches: tuple[Tensor, ...], given: Any) -> CachedLaunch:
        problem, config = self._problem, self._config
        shares = Shares(
            given.weight_scale.stride(0) if self._variant.BLOCK_SCALES else 0, config.splits, self._tiles
        )
        depth = ProductDepth(problem.K, x.stride(0), weight.stride(0))
        options: dict[str, Any] = {"launch_pdl": True} if self._variant.DEPENDENT else {}
        return CachedLaunch(
            product_kernel,
            self._blocks * config.splits,
            (depth, shares, problem.norm_eps, *epilogue_scalars(problem, given, caches)),
            (self._variant, epilogue_variant(problem)),
            None,
            pointers=ProductPointers,
            num_warps=config.num_warps,
            **options,
        )


class LibraryLaunch:
    """Launch of torch's product, followed by a kernel that applies the epilogue."""

    def __init__(self, problem: LinearProblem) -> None:
        self._problem, self._has_end = problem, needs_end(problem)
        self._kernel: CachedLaunch | None = None
        self._norm: CachedLaunch | None = None

    def __call__(self, x: Tensor, weight: Tensor, *others: Any) -> Any:
        y = self._product(x, weight, *others)
        return before_norm(self._problem, y, others[-1].next_norm_weight) if self._problem.next_norm else y

    def _product(self, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        *caches, given = others
        problem = self._problem
        with torch.no_grad():
            if problem.norm:
                x = self._normed(x, given.norm_weight)
            if problem.scales == "block":
                weight = scaled_weight(weight, given.weight_scale, x.dtype)
            weight = weight.to(x.dtype)
            if not self._has_end:
                if problem.residual:
                    return torch.addmm(given.residual, x, weight.t())
                return torch.nn.functional.linear(x, weight, given.bias)
            sums = torch.nn.functional.linear(x, weight)
        y = new_output(problem, x)
        if problem.M == 0:
            return y
        if self._kernel is None:
            self._kernel = self._prepare(sums, tuple(caches), given)
        self._kernel(x.device, *product_pointers(sums, None, y, given, tuple(caches)))
        return y

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._problem.K > MAX_NORM_COLUMNS:
            return torch.nn.functional.rms_norm(x, (self._problem.K,), weight, self._problem.norm_eps)
        y = x.new_empty(x.shape)
        if self._problem.M == 0:
            return y
        if self._norm is None:
            M, K, scalars = self._problem.M, self._problem.K, (x.stride(0), self._problem.norm_eps)
            block = triton.next_power_of_2(K)
            warps = min(max(block // 512, 1), 16)  # 16 numbers of each thread, so two loads of 16 bytes
            self._norm = CachedLaunch(norm_kernel, M, scalars, (K, block), None, num_warps=warps)
        self._norm(x.device, x, weight, y)
        return y

    def _prepare(self, sums: Tensor, caches: tuple[Tensor, ...], given: Any) -> CachedLaunch:
        problem = self._problem
        programs = triton.cdiv(problem.places, EPILOGUE_PLACES) * triton.cdiv(problem.M, EPILOGUE_ROWS)
        return CachedLaunch(
            epilogue_kernel,
            programs,
            (sums.stride(0), *epilogue_scalars(problem, given, caches)),
            (EPILOGUE_ROWS, EPILOGUE_PLACES, replace(epilogue_variant(problem, norm=False), NEXT_NORM=False)),
            None,
            pointers=ProductPointers,
        )
