"""Checks of the FP8 functions: types and shapes, then values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    check_backend,
    check_choice,
    check_dense,
    check_device,
    check_dtype,
    check_equal,
    check_heads_tensor,
    check_int,
    check_int32,
    check_longest,
    check_offset_pair,
    check_offsets,
    check_pair,
    check_rotary,
    check_same_dtype,
    check_same_rows,
    check_sink,
    check_tensor,
)
from flashtile.checks.attention import check_call
from flashtile.checks.values import check_lengths, check_offset_values, check_used
from flashtile.problems import fp8_layout as layout
from flashtile.problems.common import MAX_LENGTH
from flashtile.problems.fp8 import AttendOptions, AttendTensors, QuantizeOptions, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3, KEY_BLOCK, MAX_HEAD_DIM, METHODS, QUERY_BLOCK, ROLES
from flashtile.problems.quantized import Quantized

SOURCE_DTYPES = (torch.float16, torch.bfloat16)
TABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SEED = 2**31 - 1


def check_quantize(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> None:
    """Check the arguments of a quantisation of x, which is a dense tensor.

    Errors are as for :func:`flashtile.checks.attention.check_call`.
    """
    check_choice("role", options.role, ROLES)
    check_choice("method", options.method, METHODS)
    check_backend(options.backend)
    check_dtype("x", x, SOURCE_DTYPES)
    if tensors.cu_seqlens is not None:
        check_dense("cu_seqlens", tensors.cu_seqlens)
    check_heads_tensor("x", x, tensors.cu_seqlens is not None, "total", "seqlen", x, MAX_HEAD_DIM)
    if x.shape[-2] == 0:
        raise ValueError(f"x must have at least one head, got shape {tuple(x.shape)}")
    batch = x.shape[0]
    if tensors.cu_seqlens is not None:
        check_offsets("cu_seqlens", tensors.cu_seqlens, x)
        batch = tensors.cu_seqlens.shape[0] - 1
        check_longest("max_seqlen", options.max_seqlen)
    elif options.max_seqlen is not None:
        raise ValueError(f"max_seqlen must be None without cu_seqlens, got {options.max_seqlen}")
    check_int32("seqused", tensors.seqused, (batch,), "(batch,)", x)
    if options.seed is not None:
        check_int("seed", options.seed, 0, MAX_SEED)
    _check_rotary(x, batch, tensors, options)
    if tensors.scale is not None:
        heads = x.shape[-2]
        if options.method == "block":
            raise ValueError("scale must be None with method 'block', got a tensor: use 'head' or 'tensor'")
        of_heads = ((batch, heads), (1, heads)) if options.method == "head" else ()
        named = "(batch, heads), (1, heads) or (1, 1)" if of_heads else "(1, 1)"
        check_tensor("scale", tensors.scale, (*of_heads, (1, 1)), named, x, any_strides=True)


def _check_rotary(x: Tensor, batch: int, tensors: QuantizeTensors, options: QuantizeOptions) -> None:
    cos, sin, offsets = tensors.rotary_cos, tensors.rotary_sin, tensors.rotary_offsets
    check_int("rotary_offset", options.rotary_offset, 0, MAX_LENGTH)
    if cos is None and sin is None:
        if offsets is not None or options.rotary_offset:
            got = "a tensor" if offsets is not None else options.rotary_offset
            raise ValueError(f"rotary_offset must be 0 without rotary_cos and rotary_sin, got {got}")
        return
    if options.role == "v":
        raise ValueError("rotary_cos must be None for role 'v', got a tensor: values are not rotated")
    check_rotary(cos, sin, x, x.shape[-1], TABLE_DTYPES)
    assert cos is not None
    check_int32("rotary_offset", offsets, (batch,), "(batch,)", x)
    longest = options.max_seqlen if tensors.cu_seqlens is not None else x.shape[1]
    assert longest is not None
    if offsets is None and options.rotary_offset + longest > cos.shape[0]:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} rows, but positions are up to {options.rotary_offset + longest}"
        )


def check_inputs(q: Any, k: Any, v: Any) -> None:
    """Check that q, k and v, quantised or not, have matching shapes, dtypes, devices and roles."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Quantized):
            if x.role != name:
                raise ValueError(f"{name} must be quantised with role {name!r}, got role {x.role!r}")
        else:
            check_dense(name, x)
            if x.dtype not in SOURCE_DTYPES:
                raise TypeError(
                    f"{name} must be float16 or bfloat16, or come from flashtile.fp8.quantize, got {x.dtype}"
                )
        if len(x.shape) != len(q.shape) or len(x.shape) not in (3, 4):
            raise ValueError(
                f"{name} must have shape (batch, seqlen, heads, head_dim) or (total, heads, head_dim) and "
                f"as many dimensions as q, got {tuple(x.shape)}"
            )
        check_same_dtype(name, x, "q", q)
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device, {q.device}, got {x.device}")
    check_equal("head_dim", "k", k.shape[-1], "q", q.shape[-1])
    check_same_rows("v", v, "k", k)


def check_sequences(
    q: Any, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None
) -> None:
    """Check the shapes, dtypes and devices of ``cu_seqlens_q``, ``cu_seqlens_k`` and ``seqused_k``.

    :func:`flashtile.fp8.attention` then computes rotary positions from these tensors.
    """
    batch = q.shape[0]
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_pair("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k", cu_seqlens_k)
        check_offset_pair(cu_seqlens_q, cu_seqlens_k, q)
        batch = cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
    check_int32("seqused_k", seqused_k, (batch,), "(batch,)", q)


def check_attend(q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors, options: AttendOptions) -> None:
    """Check the arguments of an attention call in e4m3. Errors are as for :func:`check_quantize`."""
    extras = tensors.extras
    rows = k if options.v_transposed else v  # check_call needs one row per key, which a transposed v lacks
    check_call(q, k, rows, extras._replace(sink=None), options.shared, (E4M3,), MAX_HEAD_DIM)
    batch = q.shape[0] if extras.cu_seqlens_q is None else extras.cu_seqlens_q.shape[0] - 1
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    check_sink(extras.sink, q, TABLE_DTYPES)
    packed = extras.cu_seqlens_q is not None
    blocks_q, blocks_k = _blocks(q, QUERY_BLOCK, batch, packed), _blocks(k, KEY_BLOCK, batch, packed)
    first = () if packed else (batch,)
    if options.v_transposed:
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
        ("q_descale", tensors.q_descale, heads_q, blocks_q),
        ("k_descale", tensors.k_descale, heads_kv, blocks_k),
        ("v_descale", tensors.v_descale, heads_kv, blocks_k),
    ):
        if options.block_scales:
            shapes: tuple[tuple[int, ...], ...] = ((*first, heads, blocks),)
            named = "(batch, heads, blocks)"
        else:
            shapes, named = ((batch, heads_kv), (batch, heads)), "(batch, heads_kv)"
        check_tensor(name, scale, shapes, named, q, any_strides=True)


def _blocks(rows: Tensor, block: int, batch: int, packed: bool) -> int:
    """Return the number of blocks of ``block`` rows in one sequence, or in all sequences if ``packed``."""
    if packed:
        return layout.num_blocks_varlen(rows.shape[0], batch, block)
    return layout.num_blocks(rows.shape[1], block)


def check_quantize_values(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> None:
    """Raise ValueError for values of ``cu_seqlens`` or ``seqused`` that do not fit x.

    Also raise ValueError for a scale that is not finite or not above 0.
    """
    if tensors.scale is not None and not bool(((tensors.scale > 0) & tensors.scale.isfinite()).all()):
        raise ValueError(f"scale must be finite and above 0, got {tensors.scale.flatten().tolist()[:8]}")
    lengths = [x.shape[1]] * x.shape[0] if tensors.cu_seqlens is None else []
    if tensors.cu_seqlens is not None:
        assert options.max_seqlen is not None
        check_offset_values("cu_seqlens", tensors.cu_seqlens, x.shape[0], options.max_seqlen)
        lengths = tensors.cu_seqlens.diff().tolist()
    if tensors.seqused is not None:
        check_used("seqused", tensors.seqused, lengths, "rows")


def check_attend_values(
    q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors, options: AttendOptions
) -> None:
    """Raise ValueError for negative scales, and for offsets or lengths that do not fit the tensors."""
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), tensors.scales, strict=True):
        if descale is not None and bool((descale < 0).any()):
            raise ValueError(f"{name} must be at least 0, got {float(descale.min())}")
    check_lengths(q, k, v, tensors.extras, options.shared)
