"""Products with a weight on the CPU, in torch: sums in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.cpu import reason_against, with_exact_products
from flashtile.problems.linear import SWIGLU, LinearProblem, QkvTensors
from flashtile.reference.linear import (
    before_norm,
    epilogue,
    product,
    rms_norm,
    scaled_weight,
    slots_of,
    turn,
)
from flashtile.rounding import by_row, leaks_between_rows

__all__ = ["prepare_linear", "prepare_linear_qkv", "reason_against"]

TILE_ROWS = 16
"""Rows of an invariant product. With torch's MKL, a row of 16 has the same bits wherever it stands, for all
352 shapes that were tried; a row of 2, 4 or 8 has not if the weight has at most 3 rows. 16 rows of x and a
weight of 3072 x 1024 take 1.4 ms, one row takes 0.5 ms, 64 rows in one product 3.0 ms (a core of a Xeon)."""


def prepare_linear(problem: LinearProblem, config: None) -> Callable[..., Any]:
    return with_exact_products(partial(_linear, problem))


def prepare_linear_qkv(problem: LinearProblem, config: None) -> Callable[..., Any]:
    return with_exact_products(partial(_linear_qkv, problem))


def _sums_dtype(problem: LinearProblem) -> torch.dtype:
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


def _linear(problem: LinearProblem, x: Tensor, weight: Tensor, given: Any) -> Any:
    """Return y. If ``problem.next_norm`` is set, return (y, scaled, factor) for the RMSNorm that follows.

    ``given`` is a LinearTensors or a BeforeNormTensors.
    """
    if problem.is_plain and not problem.invariant and not leaks_between_rows(x):
        return torch.nn.functional.linear(x.detach(), weight.detach(), given.bias)
    if problem.invariant:
        return _invariant(problem, x.detach(), weight.detach(), given)
    factors = given.bias, given.weight_scale, given.norm_weight, given.x_scale
    y = product(problem, x.detach(), weight.detach(), *factors, _sums_dtype(problem))
    y = epilogue(problem, y, given.residual).to(problem.dtype)
    return before_norm(problem, y, given.next_norm_weight) if problem.next_norm else y


def _invariant(problem: LinearProblem, x: Tensor, weight: Tensor, given: Any) -> Any:
    """Compute the product ``TILE_ROWS`` rows at a time: the order of torch's sums depends on their number."""
    dtype, more = _sums_dtype(problem), -len(x) % TILE_ROWS
    wide = scaled_weight(weight, given.weight_scale, dtype)
    tiles = torch.nn.functional.pad(x, (0, 0, 0, more)).split(TILE_ROWS)
    found = [product(problem, tile, wide, None, None, given.norm_weight, None, dtype) for tile in tiles]
    y = torch.cat(found)[: len(x)]
    y = y if given.x_scale is None else y * given.x_scale.to(dtype)[:, None]
    y = y if given.bias is None else y + given.bias.to(dtype)
    if problem.epilogue == SWIGLU:
        y = by_row(lambda row: epilogue(problem, row, None), y)
    y = (y if given.residual is None else y + given.residual.to(dtype)).to(problem.dtype)
    return before_norm(problem, y, given.next_norm_weight) if problem.next_norm else y


def _linear_qkv(
    problem: LinearProblem, x: Tensor, weight: Tensor, k_cache: Tensor, v_cache: Tensor, given: QkvTensors
) -> Tensor:
    heads = problem.heads
    assert heads is not None
    factors = given.bias, given.weight_scale, given.norm_weight, given.x_scale
    y = product(problem, x, weight, *factors, _sums_dtype(problem))
    q, k, v = y.unflatten(1, (-1, heads.head_dim)).split(
        [heads.num_heads_q, heads.num_heads_kv, heads.num_heads_kv], 1
    )
    q = rms_norm(q, given.q_norm_weight, problem.norm_eps)
    k = rms_norm(k, given.k_norm_weight, problem.norm_eps)
    angles = given.rotary_cos, given.rotary_sin, given.positions, heads.rotary_interleaved
    slots = slots_of(problem, given.positions, given.slot_mapping, given.block_table)
    token = (slots >= 0).nonzero().squeeze(1)  # tokens without a slot, such as padding, are not stored
    page, place = slots[token] // heads.page_size, slots[token] % heads.page_size
    with torch.inference_mode():  # so that caches made in inference mode can be written outside of it
        for cache, new in ((k_cache, turn(k, *angles)), (v_cache, v)):
            cache[page, place] = new[token].to(cache.dtype)
    return turn(q, *angles).to(problem.dtype).contiguous()
