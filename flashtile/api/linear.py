"""Public functions for products with a weight matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.arguments import check_dense
from flashtile.checks.conversions import as_float, check_flag, under_autocast
from flashtile.operators.linear import LINEAR, LINEAR_BEFORE_NORM, LINEAR_QKV, NO_GRADIENT
from flashtile.problems.linear import (
    BeforeNormOptions,
    BeforeNormTensors,
    LinearOptions,
    LinearTensors,
    QkvOptions,
    QkvTensors,
)


class BeforeNorm(NamedTuple):
    """Result of :func:`linear_before_norm`.

    Attributes:
        y: (..., N), the result of :func:`linear`.
        scaled: (..., N), ``y * next_norm_weight``.
        factor: (rows,) float32, ``rsqrt(mean(y**2) + next_norm_eps)`` of each row.
    """

    y: Tensor
    scaled: Tensor
    factor: Tensor


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    x_scale: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    prefetch: bool = False,
    invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.linear`` for few rows of x, fused with the operations around it in a transformer.

    With few rows and a large weight, reading the weight dominates the time. As in FlashDecoding++ (Hong et
    al. 2023, arXiv:2311.01282), the number of rows decides between a GEMV on the CUDA cores, a flat GEMM on
    the tensor cores and the library's GEMM; :func:`explain` says which of them a call gets.

    The result is that of these operations, in this order: ``x * rsqrt(mean(x**2) + norm_eps) * norm_weight``,
    the product, ``weight_scale``, ``x_scale``, ``bias``, ``activation``, ``residual``. Sums are in float32,
    in the same order in every run, and rounded once at the end. There is no backward pass.

    Args:
        x: (..., K): float16, bfloat16, float32 or float64. The last stride must be 1. Products in float32 and
            float64 are computed by torch.
        weight: (N, K) as ``torch.nn.Linear`` holds it, in the dtype of x, or float8_e4m3fn.
        bias: (N,) in the dtype of x.
        weight_scale: float32 scales of a weight in float8_e4m3fn: (N,) for its rows, or (N / 128, K / 128),
            rounded up, for its blocks of 128 x 128.
        norm_weight: (K,) in the dtype of x: apply RMSNorm to x. The kernels multiply by the factor
            ``rsqrt(...)`` of each row after the product, which is equivalent.
        norm_eps: epsilon of the RMSNorm.
        x_scale: (rows of x,) float32, a factor for each row. Cannot be combined with ``norm_weight``.
        activation: "silu_and_mul" is SwiGLU: silu of the first half of the columns times the second half; the
            result has N / 2 columns.
        residual: tensor that is added to the result. It has the result's shape and dtype.
        prefetch: load the weight while the previous kernel still runs (programmatic dependent launch). Valid
            only if that kernel does not write the weight, its scales or ``norm_weight``, as in inference.
        invariant: give each row of the result the same bits for any other rows of x and any number of them.
            One kernel then serves every number of rows; on a GPU only in float16 and bfloat16.
        backend: "hopper", "portable" or "cpu" to require this backend.

    Returns:
        (..., N) in the dtype of x. With "silu_and_mul", (..., N / 2).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> x, weight = torch.randn(2, 1, 64), torch.randn(96, 64)
        >>> flashtile.linear.linear(x, weight).shape
        torch.Size([2, 1, 96])
        >>> gated = flashtile.linear.linear(x, weight, norm_weight=torch.ones(64), activation="silu_and_mul")
        >>> gated.shape
        torch.Size([2, 1, 48])
    """
    x, weight, bias = under_autocast(x, weight, bias)
    check_flag("prefetch", prefetch)
    check_flag("invariant", invariant)
    rows = _rows(x)
    residual = _residual_rows(residual, x)
    tensors = LINEAR.nothing
    if not (bias is weight_scale is norm_weight is x_scale is residual is None):
        tensors = LinearTensors(
            bias=bias,
            weight_scale=weight_scale,
            norm_weight=norm_weight,
            x_scale=x_scale,
            residual=residual,
        )
    options = LinearOptions(
        activation=activation, norm_eps=_as_eps("norm_eps", norm_eps), prefetch=prefetch, invariant=invariant,
        backend=backend,
    )  # fmt: skip
    out = LINEAR((rows, weight), tensors, options)
    return out if rows is x else out.view(*x.shape[:-1], out.shape[-1])


def linear_before_norm(
    x: Tensor,
    weight: Tensor,
    next_norm_weight: Tensor,
    bias: Tensor | None = None,
    *,
    next_norm_eps: float = 1e-6,
    weight_scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    x_scale: Tensor | None = None,
    residual: Tensor | None = None,
    prefetch: bool = False,
    invariant: bool = False,
    backend: str | None = None,
) -> BeforeNorm:
    """Compute :func:`linear` and, in the same kernel, the inputs of an RMSNorm of the result.

    For the result ``found``, ``linear(found.scaled, w, x_scale=found.factor)`` equals
    ``linear(found.y, w, norm_weight=next_norm_weight)``. The first call does less work, because ``scaled``
    already contains y times the norm's weight. In the second call, every program multiplies the elements of
    y that it reads.

    Args:
        next_norm_weight: (N,) in the dtype of x.
        next_norm_eps: epsilon of the next norm.
        x, weight, bias, weight_scale, norm_weight, norm_eps, x_scale, residual, prefetch, invariant, backend:
            as for :func:`linear`. With ``prefetch`` the previous kernel must not write ``next_norm_weight``
            either.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> x, out, up, norm = torch.randn(3, 64), torch.randn(32, 64), torch.randn(48, 32), torch.rand(32)
        >>> found = flashtile.linear.linear_before_norm(x, out, norm, residual=torch.randn(3, 32))
        >>> y = flashtile.linear.linear(found.scaled, up, x_scale=found.factor)
        >>> torch.allclose(y, flashtile.linear.linear(found.y, up, norm_weight=norm), atol=1e-3)
        True
    """
    x, weight, bias = under_autocast(x, weight, bias)
    check_flag("prefetch", prefetch)
    check_flag("invariant", invariant)
    rows = _rows(x)
    tensors = BeforeNormTensors(
        bias=bias,
        weight_scale=weight_scale,
        norm_weight=norm_weight,
        x_scale=x_scale,
        residual=_residual_rows(residual, x),
        next_norm_weight=next_norm_weight,
    )
    options = BeforeNormOptions(
        norm_eps=_as_eps("norm_eps", norm_eps),
        next_norm_eps=_as_eps("next_norm_eps", next_norm_eps),
        prefetch=prefetch,
        invariant=invariant,
        backend=backend,
    )
    y, scaled, factor = LINEAR_BEFORE_NORM((rows, weight), tensors, options)
    if rows is not x:
        shape = (*x.shape[:-1], y.shape[-1])
        y, scaled = y.view(shape), scaled.view(shape)
    return BeforeNorm(y, scaled, factor)


def linear_qkv(
    x: Tensor,
    weight: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bias: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    weight_scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    x_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    prefetch: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute queries, keys and values in one product, with rotary embedding, and append k and v to a cache.

    Equivalent to :func:`linear` followed by :func:`flashtile.append_kvcache`. With few rows of x, all of this
    is one kernel. The weight has first the rows of all query heads, then those of the key heads, then those
    of the value heads.

    Args:
        x: (tokens, K), or (batch, 1, K).
        weight: ((heads_q + 2 * heads_kv) * head_dim, K).
        k_cache, v_cache: (num_blocks, page_size, heads_kv, head_dim), written in place, in the dtype of x.
        positions: (tokens,) int32: position of each token in its sequence, used for the rotary angles and the
            block table.
        block_table: (tokens, max_blocks) int32: pages of each token's sequence.
        slot_mapping: (tokens,) int64 instead of a block table: page * page_size + offset in the page. A token
            with a negative slot, or one outside all pages, is not written.
        rotary_cos, rotary_sin: (rows, rotary_dim / 2), float32 or the dtype of x. A token whose position has
            no row in these tables is not rotated.
        rotary_interleaved: True if the two numbers of a rotary pair are adjacent (GPT-J), False if they are
            rotary_dim / 2 apart (Llama).
        q_norm_weight, k_norm_weight: (head_dim,) in the dtype of x: apply RMSNorm to each query and each key
            before rotary embedding, with ``norm_eps``. head_dim must then be a power of two from 16 to 256.
        bias, weight_scale, norm_weight, norm_eps, x_scale, prefetch, backend: as for :func:`linear`.

    Returns:
        The queries, (tokens, heads_q, head_dim), or (batch, 1, heads_q, head_dim).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> cache = torch.zeros(2, 8, 4, 2, 16)  # keys and values, 8 pages of 4 tokens
        >>> x, weight = torch.randn(3, 64), torch.randn((4 + 2 * 2) * 16, 64)
        >>> slots = torch.tensor([0, 5, -1])  # the last token is not written
        >>> flashtile.linear.linear_qkv(x, weight, *cache, slot_mapping=slots).shape
        torch.Size([3, 4, 16])
        >>> int(cache[0].abs().sum((-1, -2)).count_nonzero())
        2
    """
    x, weight, bias = under_autocast(x, weight, bias)
    check_flag("prefetch", prefetch)
    check_flag("rotary_interleaved", rotary_interleaved)
    rows = _rows(x)
    tensors = QkvTensors(
        bias=bias,
        weight_scale=weight_scale,
        norm_weight=norm_weight,
        x_scale=x_scale,
        positions=positions,
        slot_mapping=slot_mapping,
        block_table=block_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
    )
    given = (rows, weight, k_cache, v_cache)
    options = QkvOptions(
        rotary_interleaved=rotary_interleaved,
        norm_eps=_as_eps("norm_eps", norm_eps),
        prefetch=prefetch,
        backend=backend,
    )
    if torch.is_grad_enabled():
        for name, tensor in zip(LINEAR_QKV.names, (*given, *tensors), strict=True):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise NotImplementedError(f"{name} must not require a gradient: {NO_GRADIENT}")
    q = LINEAR_QKV(given, tensors, options)
    return q if rows is x else q.view(*x.shape[:-1], *q.shape[-2:])


def _rows(x: Tensor) -> Tensor:
    """Reshape (..., K) to (M, K)."""
    check_dense("x", x)
    if x.dim() == 2:
        return x
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have shape (..., K) with K at least 1, got {tuple(x.shape)}")
    return x.reshape(-1, x.shape[-1])


def _as_eps(name: str, eps: Any) -> float:
    return eps if type(eps) is float else as_float(name, eps, "a number")


def _residual_rows(residual: Tensor | None, x: Tensor) -> Tensor | None:
    """Reshape a residual with the leading dimensions of x to (M, N)."""
    if not isinstance(residual, Tensor) or residual.dim() == 2:
        return residual
    check_dense("residual", residual)
    if residual.dim() != x.dim() or residual.shape[-1:] == (0,):  # the number of rows cannot be inferred
        return residual
    return residual.reshape(-1, residual.shape[-1])
