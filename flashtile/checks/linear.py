"""Checks of products with a weight: types and shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    check_backend,
    check_choice,
    check_contiguous,
    check_dense,
    check_device,
    check_dtype,
    check_equal,
    check_int32,
    check_last_stride,
    check_rotary,
    check_same_dtype,
    check_tensor,
)
from flashtile.checks.decode import PAGED_CACHE, check_memory
from flashtile.problems.linear import (
    ACTIVATIONS,
    DTYPES,
    E4M3,
    SCALE_BLOCK,
    SWIGLU,
    BeforeNormOptions,
    BeforeNormTensors,
    LinearOptions,
    LinearTensors,
    QkvOptions,
    QkvTensors,
)

HALVES = (torch.float16, torch.bfloat16)
NORMED_HEAD_DIMS = (16, 32, 64, 128, 256)


def check_linear(x: Tensor, weight: Tensor, tensors: LinearTensors, options: LinearOptions) -> None:
    """Check the arguments of a product with a weight.

    Errors are as for :func:`flashtile.checks.attention.check_call`.
    """
    check_choice("activation", options.activation, ACTIVATIONS)
    _check_product(x, weight, tensors, options)
    columns = weight.shape[0]
    if options.activation == SWIGLU:
        if columns % 2:
            raise ValueError(
                f"weight has {columns} rows, but must have an even number with activation={SWIGLU!r}, "
                "half of them for the gate"
            )
        columns //= 2
    shape = (x.shape[0], columns)
    check_tensor("residual", tensors.residual, (shape,), "that of the result,", x, (x.dtype,))


def check_before_norm(
    x: Tensor, weight: Tensor, tensors: BeforeNormTensors, options: BeforeNormOptions
) -> None:
    """Check the arguments of a product that also prepares its result for the following norm.

    Errors are as for :func:`check_linear`.
    """
    _check_product(x, weight, tensors, options)
    N = weight.shape[0]
    check_tensor("residual", tensors.residual, ((x.shape[0], N),), "that of the result,", x, (x.dtype,))
    check_dense("next_norm_weight", tensors.next_norm_weight)
    check_tensor("next_norm_weight", tensors.next_norm_weight, ((N,),), "(N,)", x, (x.dtype,))
    _check_eps("next_norm_eps", options.next_norm_eps)


def check_qkv(
    x: Tensor, weight: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: QkvTensors, options: QkvOptions
) -> None:
    """Check the arguments of a QKV product. Errors are as for :func:`check_linear`."""
    _check_product(x, weight, tensors, options)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache)
        if cache.dim() != 4 or 0 in cache.shape[1:]:
            raise ValueError(f"{name} must have 4 dimensions {PAGED_CACHE}, got shape {tuple(cache.shape)}")
        check_device(name, cache, x)
        check_last_stride(name, cache)
        if cache.dtype == E4M3:
            raise NotImplementedError(
                f"{name} must be {x.dtype} like x, got {E4M3}: append to such a cache by append_kvcache"
            )
        check_same_dtype(name, cache, "x", x)
    check_equal("shape", "v_cache", v_cache.shape, "k_cache", k_cache.shape)
    check_memory(k_cache, v_cache)
    heads_kv, head_dim = k_cache.shape[2:]
    if head_dim % 2:
        raise ValueError(f"k_cache must have an even head_dim, got {head_dim}")
    if weight.shape[0] % head_dim or weight.shape[0] // head_dim <= 2 * heads_kv:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, but must have head_dim = {head_dim} for each query head and "
            f"for each of the {heads_kv} heads of keys and of values"
        )
    rows, q_norm, k_norm = x.shape[0], tensors.q_norm_weight, tensors.k_norm_weight
    check_tensor("q_norm_weight", q_norm, ((head_dim,),), "(head_dim,)", x, (x.dtype,))
    check_tensor("k_norm_weight", k_norm, ((head_dim,),), "(head_dim,)", x, (x.dtype,))
    if (q_norm is None) != (k_norm is None):
        given, missing = ("k", "q") if q_norm is None else ("q", "k")
        raise ValueError(f"{missing}_norm_weight must be given with {given}_norm_weight, got None")
    if q_norm is not None and head_dim not in NORMED_HEAD_DIMS:
        raise NotImplementedError(
            f"k_cache must have a head_dim of {NORMED_HEAD_DIMS} with q_norm_weight, got {head_dim}"
        )
    check_rotary(tensors.rotary_cos, tensors.rotary_sin, x, head_dim, (x.dtype, torch.float32))
    check_int32("positions", tensors.positions, (rows,), "(rows of x,)", x)
    _check_places(rows, tensors, x)
    if tensors.rotary_cos is not None and tensors.positions is None:
        raise ValueError("positions must be given with rotary_cos and rotary_sin, got None")


def _check_places(rows: int, tensors: QkvTensors, x: Tensor) -> None:
    """Check the tensors that address the new keys and values: slots, or positions and a block table."""
    slots, table = tensors.slot_mapping, tensors.block_table
    if (slots is None) == (table is None):
        given = "neither" if slots is None else "both"
        raise ValueError(f"slot_mapping or block_table must give positions of keys and values, got {given}")
    check_tensor("slot_mapping", slots, ((rows,),), "(rows of x,)", x, (torch.int64,))
    if table is not None:
        check_dense("block_table", table)
        check_dtype("block_table", table, (torch.int32,))
        if table.dim() != 2 or table.shape[0] != rows or table.shape[1] == 0:
            raise ValueError(
                f"block_table must have shape (rows of x, max_blocks) with {rows} rows and at least 1 block, "
                f"got {tuple(table.shape)}"
            )
        check_device("block_table", table, x)
        check_contiguous("block_table", table)
        if tensors.positions is None:
            raise ValueError("positions must be given with block_table, got None")


def _check_product(x: Any, weight: Any, tensors: Any, options: Any) -> None:
    check_dense("x", x)
    check_dtype("x", x, DTYPES)
    check_device("x", x, x)
    check_dense("weight", weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must have shape (N, K) with N and K at least 1, got {tuple(weight.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x must have shape (..., K) with K = {weight.shape[1]}, that of weight {tuple(weight.shape)}, "
            f"got {tuple(x.shape)}"
        )
    check_device("weight", weight, x)
    for name, matrix in (("x", x), ("weight", weight)):
        check_last_stride(name, matrix)
    N, K = weight.shape
    scale = tensors.weight_scale
    if weight.dtype == E4M3:
        if x.dtype not in HALVES:
            raise TypeError(f"x must be float16 or bfloat16 with a weight in {E4M3}, got {x.dtype}")
        if scale is None:
            raise ValueError(f"weight_scale must be given with a weight in {E4M3}, got None")
        blocks = (math.ceil(N / SCALE_BLOCK), math.ceil(K / SCALE_BLOCK))
        layout = f"(N,), or (N / {SCALE_BLOCK}, K / {SCALE_BLOCK}) rounded up"
        check_tensor("weight_scale", scale, ((N,), blocks), layout, x)
        check_contiguous("weight_scale", scale)
    else:
        check_same_dtype("weight", weight, "x", x)
        if scale is not None:
            raise ValueError(
                f"weight_scale must be None for a weight of {weight.dtype}, because only {E4M3} is scaled"
            )
    check_tensor("bias", tensors.bias, ((N,),), "(N,)", x, (x.dtype,))
    check_tensor("norm_weight", tensors.norm_weight, ((K,),), "(K,)", x, (x.dtype,))
    check_tensor("x_scale", tensors.x_scale, ((x.shape[0],),), "(rows of x,)", x)
    if tensors.x_scale is not None and tensors.norm_weight is not None:
        raise ValueError(
            "x_scale must be None with norm_weight, because the norm computes its own factors, got a tensor"
        )
    _check_eps("norm_eps", options.norm_eps)
    check_backend(options.backend)


def _check_eps(name: str, eps: float) -> None:
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {eps}")
