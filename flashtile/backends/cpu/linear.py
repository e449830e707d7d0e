"""Products with a weight on the CPU, in torch: sums in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.cpu import reason_against, with_exact_products
from flashtile.problems.linear import LinearProblem, QkvTensors
from flashtile.reference.linear import before_norm, epilogue, product, slots_of, turn
from flashtile.rounding import leaks_between_rows

__all__ = ["prepare_linear", "prepare_linear_qkv", "reason_against"]


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
    if problem.is_plain and not leaks_between_rows(x):
        return torch.nn.functional.linear(x.detach(), weight.detach(), given.bias)
    factors = given.bias, given.weight_scale, given.norm_weight, given.x_scale
    y = product(problem, x.detach(), weight.detach(), *factors, _sums_dtype(problem))
    y = epilogue(problem, y, given.residual).to(problem.dtype)
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
    angles = given.rotary_cos, given.rotary_sin, given.positions, heads.rotary_interleaved
    slots = slots_of(problem, given.positions, given.slot_mapping, given.block_table)
    token = (slots >= 0).nonzero().squeeze(1)  # tokens without a slot, such as padding, are not stored
    page, place = slots[token] // heads.page_size, slots[token] % heads.page_size
    with torch.inference_mode():  # so that caches made in inference mode can be written outside of it
        for cache, new in ((k_cache, turn(k, *angles)), (v_cache, v)):
            cache[page, place] = new[token].to(cache.dtype)
    return turn(q, *angles).to(problem.dtype).contiguous()
