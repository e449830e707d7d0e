"""Checks of an attention call: types and shapes. Values are checked by :mod:`flashtile.checks.values`."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    TRANSPOSED,
    check_broadcast,
    check_dense,
    check_device,
    check_dtype,
    check_equal,
    check_groups,
    check_heads_tensor,
    check_int32,
    check_last_stride,
    check_longest,
    check_offset_pair,
    check_same_dtype,
    check_score_options,
    check_share,
    check_sink,
    check_slopes,
    check_tensor,
    looks_transposed,
)
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.common import DTYPES, MAX_HEAD_DIM


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: OptionalTensors,
    options: Options,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    most: int = MAX_HEAD_DIM,
) -> None:
    """Check the arguments of an attention call.

    Args:
        dtypes: allowed dtypes of q, k and v.
        most: the largest head_dim.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, stride, device or number is not allowed, or arguments cannot be combined.
        NotImplementedError: flashtile does not support the device or head size.
    """
    check_types(q, k, v, extras, options)
    cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink, *_ = extras
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, tensor, dtypes)
        check_same_dtype(name, tensor, "q", q)
        check_heads_tensor(name, tensor, packed, "total", "seqlen", q, most)
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"v has {v.shape[-2]} heads, but k has {k.shape[-2]}: they must be equal")
    check_equal("leading shape", "v", v.shape[:-2], "k", k.shape[:-2])
    if not packed:
        check_equal("batch size", "k", k.shape[0], "q", q.shape[0])
    check_groups(q, k, "k")
    if not packed and looks_transposed(q, k):
        # Python shows the same warning only once for each calling line, so repeated calls are quiet.
        warnings.warn(f"q, k and v {TRANSPOSED}", stacklevel=2)
    if packed:
        check_offset_pair(cu_seqlens_q, cu_seqlens_k, q)
        check_longest("max_seqlen_q", options.max_seqlen_q)
        check_longest("max_seqlen_k", options.max_seqlen_k)
    elif options.max_seqlen_q is not None or options.max_seqlen_k is not None:
        name = "max_seqlen_q" if options.max_seqlen_q is not None else "max_seqlen_k"
        raise ValueError(f"{name} must be None without cu_seqlens_q and cu_seqlens_k, got an int")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check_int32("seqused_q", extras.seqused_q, (batch,), "(batch,)", q)
    check_int32("seqused_k", seqused_k, (batch,), "(batch,)", q)
    check_slopes(alibi_slopes, batch, q)
    check_sink(sink, q)
    _check_masks(q, k, batch, extras, options)
    _check_dropout(extras.rng_state, options.dropout_p, q)
    check_score_options(options)


def check_types(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options) -> None:
    """Check that tensors are dense (TypeError), and that slopes need no gradient (NotImplementedError)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
    for name, extra in zip(OptionalTensors._fields, extras, strict=True):
        if extra is not None:
            check_dense(name, extra)
    slopes = extras.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "alibi_slopes requires grad, but no gradient is computed for alibi_slopes in a call that cannot "
            "have a score_mod: alibi_slopes must be detached"
        )


def _check_masks(q: Tensor, k: Tensor, batch: int, extras: OptionalTensors, options: Options) -> None:
    packed = extras.cu_seqlens_q is not None
    seqlen_q, seqlen_k = (options.max_seqlen_q, options.max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    if extras.mask is not None:
        if extras.mask.is_floating_point():
            dtype = extras.mask.dtype
            raise TypeError(f"mask must be bool, got {dtype}: numbers that are added to scores are bias")
        check_dtype("mask", extras.mask, (torch.bool,))
        check_broadcast("mask", extras.mask, (batch, q.shape[-2], seqlen_q, seqlen_k), packed, q)
    if extras.bias is not None:
        check_dtype("bias", extras.bias, (torch.float32, q.dtype))
        check_broadcast("bias", extras.bias, (batch, q.shape[-2], seqlen_q, seqlen_k), packed, q)
    padding = extras.key_padding_mask
    if padding is not None and packed:
        raise NotImplementedError(
            "key_padding_mask must be None with cu_seqlens_k, because packed sequences have no padding "
            "(seqused_k gives the number of keys in use), got a tensor"
        )
    shapes, dtypes = ((batch, seqlen_k),), (torch.bool,)
    check_tensor("key_padding_mask", padding, shapes, "(batch, seqlen_k)", q, dtypes, any_strides=True)


def _check_dropout(rng_state: Tensor | None, dropout_p: float, q: Tensor) -> None:
    check_share("dropout_p", dropout_p)
    if rng_state is None:
        if dropout_p > 0:
            raise ValueError(f"rng_state must be given with dropout_p = {dropout_p}, got None")
        return
    check_dtype("rng_state", rng_state, (torch.int64,))
    if tuple(rng_state.shape) != (2,):
        raise ValueError(f"rng_state must have shape (2,), (seed, offset), got {tuple(rng_state.shape)}")
    check_device("rng_state", rng_state, q)
    check_last_stride("rng_state", rng_state)
