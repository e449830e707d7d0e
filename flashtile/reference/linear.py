"""Steps of products with a weight in plain torch: the reference for all backends."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.linear import SCALE_BLOCK, SWIGLU, LinearProblem
from flashtile.reference.decode import rotate


def scaled_weight(weight: Tensor, weight_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight (N, K) in ``dtype``, multiplied by the scales of its rows or blocks."""
    wide = weight.to(dtype)
    if weight_scale is None:
        return wide
    if weight_scale.dim() == 1:
        return wide * weight_scale[:, None].to(dtype)
    scales = weight_scale.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return wide * scales[: weight.shape[0], : weight.shape[1]].to(dtype)


def rms_norm(x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    """Apply RMSNorm to the last dimension of x, in its dtype (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if norm_weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight.to(x.dtype)


def silu_and_mul(y: Tensor) -> Tensor:
    """Multiply silu of the first half of the columns by the second half (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def product(
    problem: LinearProblem,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None,
    norm_weight: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the product (M, N) in ``dtype``, without its epilogue."""
    y = rms_norm(x.to(dtype), norm_weight, problem.norm_eps) @ scaled_weight(weight, weight_scale, dtype).T
    if x_scale is not None:
        y = y * x_scale.to(dtype)[:, None]
    return y if bias is None else y + bias.to(dtype)


def epilogue(problem: LinearProblem, y: Tensor, residual: Tensor | None) -> Tensor:
    """Apply SwiGLU to y (M, N) if it is the problem's epilogue, and add the residual if there is one.

    The QKV epilogue, which appends keys and values to a cache, is not computed here.
    """
    if problem.epilogue == SWIGLU:
        y = silu_and_mul(y)
    return y if residual is None else y + residual.to(y.dtype)


def before_norm(problem: LinearProblem, y: Tensor, next_norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, y * next_norm_weight, factor) for the RMSNorm that follows this product.

    y and the product are (M, N). ``factor``, (M,) float32, is ``rsqrt(mean(y**2) + next_norm_eps)`` of each
    row.
    """
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    factor = torch.rsqrt(wide.square().mean(-1) + problem.next_norm_eps)
    return y, (wide * next_norm_weight.to(wide.dtype)).to(y.dtype), factor.float()


def turn(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, interleaved: bool
) -> Tensor:
    """Apply rotary embedding to x (tokens, heads, head_dim).

    A token whose position is outside the tables ``cos`` and ``sin`` is returned unrotated.
    """
    if cos is None or sin is None or positions is None:
        return x
    known = (positions >= 0) & (positions < cos.shape[0])
    turned = rotate(x, cos, sin, positions.long().clamp(0, cos.shape[0] - 1), interleaved)
    return torch.where(known[:, None, None], turned, x)


def slots_of(
    problem: LinearProblem, positions: Tensor | None, slot_mapping: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """Return the slot of each token in the cache, (tokens,) int64; -1 for tokens that are not written."""
    heads = problem.heads
    assert heads is not None
    if slot_mapping is not None:
        inside = (slot_mapping >= 0) & (slot_mapping < heads.num_blocks * heads.page_size)
        return torch.where(inside, slot_mapping, -1)
    assert positions is not None
    assert block_table is not None
    where = positions.long()
    column = where.div(heads.page_size, rounding_mode="floor")
    inside = (where >= 0) & (column < heads.table_width)
    at = column.clamp(0, max(heads.table_width - 1, 0))[:, None]
    page = block_table.long().gather(1, at)[:, 0] if heads.table_width else torch.full_like(where, -1)
    inside &= (page >= 0) & (page < heads.num_blocks)
    return torch.where(inside, page * heads.page_size + where % heads.page_size, -1)
