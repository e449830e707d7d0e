"""Every check of the FP8 functions' arguments that looks at types and shapes, never at data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    check_backend,
    check_device,
    check_floats,
    check_int,
    check_int32,
    check_last_stride,
    check_offsets,
)
from flashtile.fp8 import layout
from flashtile.fp8.layout import E4M3, KEY_BLOCK, METHODS, QUERY_BLOCK, ROLES
from flashtile.fp8.problem import AttendOptions, QuantizeOptions, QuantizeTensors, Scales
from flashtile.fp8.quantized import Quantized
from flashtile.problem import (
    MAX_HEAD_DIM,
    MAX_LENGTH,
    Extras,
    Options,
    check_call,
    check_dense,
)

SOURCE_DTYPES = (torch.float16, torch.bfloat16)
TABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SEED = 2**31 - 1


def check_quantize(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> None:
    """Raise for a quantisation that no backend could compute.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, stride, device or number is not allowed, or arguments exclude each other.
        NotImplementedError: a device or head size that flashtile does not serve.
    """
    check_choice("role", options.role, ROLES)
    check_choice("method", options.method, METHODS)
    check_backend(options.backend)
    check_dense("x", x)
    varlen = tensors.cu_seqlens is not None
    rank, named = (3, "(total, heads, head_dim)") if varlen else (4, "(batch, seqlen, heads, head_dim)")
    if x.dim() != rank:
        raise ValueError(f"x must have {rank} dimensions {named}, got shape {tuple(x.shape)}")
    if x.dtype not in SOURCE_DTYPES:
        raise TypeError(f"x must be float16 or bfloat16, got {x.dtype}")
    check_device("x", x, x)
    head_dim = x.shape[-1]
    if head_dim == 0 or x.shape[-2] == 0:
        raise ValueError(f"x must have at least one head and one column, got shape {tuple(x.shape)}")
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"x has head_dim {head_dim}: it must be from 1 to {MAX_HEAD_DIM}")
    check_last_stride("x", x)
    batch = x.shape[0]
    if tensors.cu_seqlens is not None:
        check_offsets("cu_seqlens", tensors.cu_seqlens, x)
        batch = tensors.cu_seqlens.shape[0] - 1
        if options.max_seqlen is None:
            raise TypeError("max_seqlen must be an int beside cu_seqlens, got None")
        check_int("max_seqlen", options.max_seqlen, 0, MAX_LENGTH)
    elif options.max_seqlen is not None:
        raise ValueError(f"max_seqlen must be None without cu_seqlens, got {options.max_seqlen}")
    check_int32("seqused", tensors.seqused, (batch,), "(batch,)", x)
    if options.seed is not None:
        check_int("seed", options.seed, 0, MAX_SEED)
    _check_rotary(x, batch, tensors, options)


def _check_rotary(x: Tensor, batch: int, tensors: QuantizeTensors, options: QuantizeOptions) -> None:
    cos, sin, offsets = tensors.rotary_cos, tensors.rotary_sin, tensors.rotary_offsets
    if cos is None and sin is None:
        if offsets is not None or options.rotary_offset:
            raise ValueError("rotary_offset must be 0 without rotary_cos and rotary_sin")
        return
    if options.role == "v":
        raise ValueError("rotary_cos must be None for role 'v': values have no positions")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is None:
            raise TypeError(f"{name} must be a torch.Tensor beside its partner, got None")
        check_dense(name, table)
        if table.dim() != 2 or table.shape[0] == 0 or not 0 < 2 * table.shape[1] <= x.shape[-1]:
            raise ValueError(
                f"{name} must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to the "
                f"{x.shape[-1]} of head_dim, got {tuple(table.shape)}"
            )
        check_floats(name, table, (tuple(table.shape),), "(positions, rotary_dim / 2)", x, TABLE_DTYPES)
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"rotary_sin must have the shape and dtype of rotary_cos, {tuple(cos.shape)} {cos.dtype}, "
            f"got {tuple(sin.shape)} {sin.dtype}"
        )
    check_int32("rotary_offset", offsets, (batch,), "(batch,)", x)
    longest = options.max_seqlen if tensors.cu_seqlens is not None else x.shape[1]
    assert longest is not None
    if offsets is None and options.rotary_offset + longest > cos.shape[0]:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} rows, but positions are up to {options.rotary_offset + longest}"
        )


def check_inputs(q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k and v go together, tensors or quantised; a new call's other checks come with it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Quantized):
            if x.role != name:
                raise ValueError(f"{name} must be quantised with role {name!r}, got role {x.role!r}")
        else:
            check_dense(name, x)
            if x.dtype not in SOURCE_DTYPES:
                raise TypeError(
                    f"{name} must be float16 or bfloat16, or what flashtile.fp8.quantize made, got {x.dtype}"
                )
        if len(x.shape) != len(q.shape) or len(x.shape) not in (3, 4):
            raise ValueError(
                f"{name} must have shape (batch, seqlen, heads, head_dim) or (total, heads, head_dim), as q, "
                f"got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but q has {q.dtype}: they must be equal")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}: they must be on one device")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}, but q has {q.shape[-1]}: they must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, which must be that of k, {tuple(k.shape)}, but for head_dim"
        )


def check_attend(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, extras: Extras, options: Options, fp8: AttendOptions
) -> None:
    """Raise for an attention call in e4m3 that no backend could compute, as :func:`check_quantize`."""
    check_call(q, k, k if fp8.v_transposed else v, extras._replace(sink=None), options, (E4M3,))
    batch = q.shape[0] if extras.cu_seqlens_q is None else extras.cu_seqlens_q.shape[0] - 1
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if extras.sink is not None:
        check_floats("sink", extras.sink, ((heads_q,),), "(heads_q,)", q, TABLE_DTYPES)
    blocks_q, blocks_k = _blocks(q, QUERY_BLOCK, batch, extras), _blocks(k, KEY_BLOCK, batch, extras)
    first = () if extras.cu_seqlens_q is not None else (batch,)
    if fp8.v_transposed:
        columns = blocks_k * KEY_BLOCK
        check_dense("v", v)
        fits = v.dim() == len(first) + 3 and (*v.shape[:-2], v.shape[-1]) == (*first, heads_kv, columns)
        if not fits or v.dtype != E4M3:
            raise ValueError(
                f"v must hold {columns} columns of {heads_kv} heads for k {tuple(k.shape)}, "
                f"got {tuple(v.shape)} {v.dtype}"
            )
        check_device("v", v, q)
    for name, scale, heads, blocks in (
        ("q_descale", scales.q, heads_q, blocks_q),
        ("k_descale", scales.k, heads_kv, blocks_k),
        ("v_descale", scales.v, heads_kv, blocks_k),
    ):
        if fp8.block_scales:
            shapes: tuple[tuple[int, ...], ...] = ((*first, heads, blocks),)
            named = "(batch, heads, blocks)"
        else:
            shapes, named = ((batch, heads_kv), (batch, heads)), "(batch, heads_kv)"
        check_scale(name, scale, shapes, named, q)


def check_scale(name: str, scale: Any, shapes: tuple[tuple[int, ...], ...], named: str, q: Tensor) -> None:
    """A float32 tensor of one of these shapes and any strides, or None."""
    if scale is None:
        return
    check_dense(name, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    if tuple(scale.shape) not in shapes:
        raise ValueError(f"{name} must have shape {named} = {shapes[0]}, got {tuple(scale.shape)}")
    check_device(name, scale, q)


def _blocks(rows: Tensor, block: int, batch: int, extras: Extras) -> int:
    if extras.cu_seqlens_q is None:
        return layout.num_blocks(rows.shape[1], block)
    return layout.num_blocks_varlen(rows.shape[0], batch, block)


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
