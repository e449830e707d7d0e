"""Checks of an attention call: types and shapes. Values are checked by :mod:`flashtile.checks.values`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

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
    check_only_window,
    check_same_dtype,
    check_score_options,
    check_share,
    check_sink,
    check_slopes,
    check_tensor,
    looks_transposed,
)
from flashtile.problems.attention import (
    NO_EXTRAS,
    OPTIONS_OF_PLAIN_CALLS,
    ModifiedExtras,
    OptionalTensors,
    Options,
    captured_of,
    captured_tensors,
)
from flashtile.problems.common import DTYPES, MAX_HEAD_DIM
from flashtile.problems.masks import BACKWARD_LISTS, LISTS, MAX_CAPTURED, MAX_SIZES

ALLOWED_EXTRAS = ("alibi_slopes", "sink")
"""The optional tensors that a call with score or mask functions may have, in addition to q, k and v."""


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Any,
    options: Any,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    most: int = MAX_HEAD_DIM,
) -> None:
    """Check the arguments of an attention call.

    Args:
        extras, options: OptionalTensors and Options; with score or mask functions, ModifiedExtras and
            ModifiedOptions.
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
    check_operands(q, k, v, packed, dtypes, most)
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
    mask, bias, padding, rng_state = extras.mask, extras.bias, extras.key_padding_mask, extras.rng_state
    seqlen_q, seqlen_k = (options.max_seqlen_q, options.max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    scores = (batch, q.shape[-2], seqlen_q, seqlen_k)
    if mask is not None:
        if mask.is_floating_point():
            raise TypeError(f"mask must be bool, got {mask.dtype}: numbers that are added to scores are bias")
        check_dtype("mask", mask, (torch.bool,))
        check_broadcast("mask", mask, scores, packed, q)
    if bias is not None:
        check_dtype("bias", bias, (torch.float32, q.dtype))
        check_broadcast("bias", bias, scores, packed, q)
    if padding is not None and packed:
        raise NotImplementedError(
            "key_padding_mask must be None with cu_seqlens_k, because packed sequences have no padding "
            "(seqused_k gives the number of keys in use), got a tensor"
        )
    shapes, dtypes = ((batch, seqlen_k),), (torch.bool,)
    check_tensor("key_padding_mask", padding, shapes, "(batch, seqlen_k)", q, dtypes, any_strides=True)
    check_share("dropout_p", options.dropout_p)
    if rng_state is not None:
        check_dtype("rng_state", rng_state, (torch.int64,))
        if tuple(rng_state.shape) != (2,):
            raise ValueError(f"rng_state must have shape (2,), (seed, offset), got {tuple(rng_state.shape)}")
        check_device("rng_state", rng_state, q)
        check_last_stride("rng_state", rng_state)
    elif options.dropout_p > 0:
        raise ValueError(f"rng_state must be given with dropout_p = {options.dropout_p}, got None")
    check_score_options(options)
    if options.invariant and options.dropout_p:
        raise NotImplementedError(f"dropout_p must be 0 with invariant, got {options.dropout_p}")
    if isinstance(extras, ModifiedExtras):
        check_captured(q, captured_of(extras))
        if options.block_q:
            check_lists(q, k, extras, options)


def check_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: bool,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    most: int = MAX_HEAD_DIM,
) -> None:
    """Check dtypes, shapes, strides and devices of q, k and v, which are dense."""
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


def check_forward(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    """Raise for a call that no backend could compute, or whose slopes would get no gradient."""
    _check_slopes(extras, options)
    check_call(q, k, v, extras, options)


def check_tangents(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
    """Raise for a call in forward mode that no backend could compute.

    ``others`` are the tangents of q, k and v, or None for each that has none, the extras and the options.
    """
    *tangents, extras, options = others
    check_forward(q, k, v, extras, options)
    for name, tensor, tangent in zip("qkv", (q, k, v), tangents, strict=True):
        if tangent is not None:
            check_equal("shape", f"{name}_tangent", tangent.shape, name, tensor.shape)
            check_same_dtype(f"{name}_tangent", tangent, name, tensor)
            check_device(f"{name}_tangent", tangent, tensor)


def check_traced(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    """Do that part of :func:`check_forward` that ``torch.compile`` traces."""
    _check_slopes(extras, options)
    check_types(q, k, v, extras, options)


def _check_slopes(extras: Any, options: Any) -> None:
    slopes = extras.alibi_slopes
    if isinstance(slopes, Tensor) and slopes.requires_grad and torch.is_grad_enabled():
        check_learned_slopes(extras, options)


def check_learned_slopes(extras: Any, options: Any) -> None:
    """Raise for a call in which slopes get no gradient: only kernels with a ``score_mod`` compute it."""
    try:
        check_with_functions(extras, options)
    except NotImplementedError:
        raise NotImplementedError(
            "alibi_slopes requires grad, but no gradient is computed for alibi_slopes in a call that cannot "
            "have a score_mod: alibi_slopes must be detached"
        ) from None
    captured = [*captured_tensors(extras), extras.alibi_slopes]
    if len(captured) > MAX_CAPTURED or sum(t.dim() for t in captured) > MAX_SIZES:
        raise ValueError(
            f"alibi_slopes, which requires grad, must be one of at most {MAX_CAPTURED} tensors of "
            f"{MAX_SIZES} dimensions that functions read, got {len(captured)} of "
            f"{sum(t.dim() for t in captured)}"
        )


def check_types(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    """Check that tensors are dense (TypeError)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
    for name, extra in zip(OptionalTensors._fields, extras, strict=False):
        if extra is not None:
            check_dense(name, extra)


def check_with_functions(extras: Any, options: Any) -> None:
    """Raise NotImplementedError for an argument that cannot be combined with score or mask functions."""
    where = "with score_mod, mask_mod or block_mask"
    check_only_window(options.masking, where)
    for name in OPTIONS_OF_PLAIN_CALLS:
        value = getattr(options, name)
        if value:
            raise NotImplementedError(f"{name} must be left out {where}, got {value}")
    if extras is NO_EXTRAS:
        return
    for name, tensor in zip(OptionalTensors._fields, extras, strict=False):
        if tensor is not None and name not in ALLOWED_EXTRAS:
            hint = "score_mod" if name == "bias" else "mask_mod (flashtile.masks.document, padding)"
            raise NotImplementedError(f"{name} must be None {where}, got a tensor: write it in {hint}")


def check_kind(
    q: Any,
    k: Any,
    v: Any,
    extras: Any,
    options: Any,
    descales: tuple[Tensor | None, ...],
    buffers: tuple[Tensor | None, ...],
    has_functions: bool = False,
    form: tuple[str, int] | None = None,
) -> bool:
    """Raise for an argument that calls in FP8, or with score or mask functions, do not have.

    Args:
        descales: (q_descale, k_descale, v_descale), or () if none is given.
        buffers: (out, lse), or () if neither is given.
        form: the form of the weights that the call also returns, or None.

    Returns:
        Whether the call is in FP8.
    """
    in_e4m3 = isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn
    name = "lse" if buffers and buffers[0] is None else "out"
    if has_functions:
        functions = "score_mod, mask_mod or block_mask"
        if in_e4m3:
            raise NotImplementedError(f"q must be float16 or wider with {functions}, got {q.dtype}")
        if descales:
            refuse_descales(descales, f"without {functions}")
        if buffers:
            raise NotImplementedError(f"{name} must be None with {functions}, got a tensor")
        check_with_functions(extras, options)
    elif in_e4m3:
        from flashtile.problems.fp8 import AttendOptions, AttendTensors  # few programs use them

        operands = "q, k and v of float8_e4m3fn"
        if form is not None:
            got = repr(form[0])
            raise NotImplementedError(f"return_attn_weights must be False for {operands}, got {got}")
        if buffers:
            raise NotImplementedError(f"{name} must be None for {operands}, got a tensor")
        check_types(q, k, v, extras, options)
        allowed = (*AttendTensors._fields, *AttendOptions._fields, "seqused_q")
        refuse_beyond(extras, options, allowed, f"for {operands}")
    elif descales:
        refuse_descales(descales, "for q, k and v of float8_e4m3fn")
    return in_e4m3


def refuse_descales(descales: tuple[Tensor | None, ...], allowed: str) -> None:
    """Raise ValueError if one of ``descales`` (q_descale, k_descale, v_descale) is given.

    The message ends with ``allowed``, which says which calls accept scales.
    """
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=False):
        if descale is not None:
            raise ValueError(f"{name} must be None, got a tensor: {name} is only accepted {allowed}")


def refuse_beyond(extras: Any, options: Any, taken: Collection[str], where: str) -> None:
    """Raise NotImplementedError for an option or tensor that is given and not among the ``taken``.

    In the message, ``where`` names the kind of call.
    """
    for name, value in options._asdict().items():
        if name not in taken and value != Options._field_defaults[name]:
            raise NotImplementedError(f"{name} must be left out {where}, got {value}")
    for name, tensor in extras._asdict().items():
        if name not in taken and tensor is not None:
            raise NotImplementedError(f"{name} must be left out {where}, got a tensor")


def check_results(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, v: Tensor, packed: bool) -> None:
    """Check the results of a forward pass, and the gradient of out."""
    *rows, heads, _ = q.shape
    shape = *rows, heads, v.shape[-1]
    check_result("dout", dout, shape, q.dtype, q)
    check_result("out", out, shape, q.dtype, q)
    check_lse(lse, q, packed)


def check_lse(lse: Tensor, q: Tensor, packed: bool) -> None:
    """Check the log-sum-exp that a forward pass returned."""
    *rows, heads, _ = q.shape
    shape = (heads, *rows) if packed else (rows[0], heads, rows[1])
    check_result("lse", lse, shape, torch.float64 if q.dtype == torch.float64 else torch.float32, q)


def check_result(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> None:
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, not on {q.device}: all must be on one device")


def check_captured(q: Tensor, captured: Iterable[Tensor | None]) -> None:
    """Check the tensors that score and mask functions read.

    A table with an entry per sequence has no elements in a call of no sequences, which runs no kernel.
    """
    for tensor in captured:
        if tensor is not None and tensor.device != q.device:
            raise ValueError(
                f"score_mod or mask_mod reads a tensor on {tensor.device}, but q is on {q.device}"
            )
        if tensor is not None and tensor.numel() == 0 and q.shape[0]:
            raise ValueError(
                f"score_mod or mask_mod reads a tensor without elements, of shape {tuple(tensor.shape)}"
            )


def check_lists(q: Tensor, k: Tensor, extras: Any, options: Any) -> None:
    """Check the lists of a block mask, which are fields of ``extras``."""
    lengths = q.shape[1], k.shape[1]
    made_for = options.mask_seqlen_q, options.mask_seqlen_k
    if made_for != lengths:
        raise ValueError(
            f"block_mask was made for {made_for[0]} queries and {made_for[1]} keys, but q has {lengths[0]} "
            f"and k {lengths[1]}: make one for these lengths"
        )
    if extras.kv_num_blocks.dim() != 3:
        shape = tuple(extras.kv_num_blocks.shape)
        raise ValueError(
            f"block_mask.kv_num_blocks must have 3 dimensions (batch, heads, blocks), got {shape}"
        )
    batch, heads = extras.kv_num_blocks.shape[:2]
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[2]):
        raise ValueError(
            f"block_mask must be of batch 1 or {q.shape[0]} and of 1 or {q.shape[2]} heads, got "
            f"{batch} and {heads}"
        )
    blocks_q, blocks_kv = -(-q.shape[1] // options.block_q), -(-k.shape[1] // options.block_kv)
    for name in LISTS:
        tensor = getattr(extras, name)
        if tensor is None and name in LISTS[-BACKWARD_LISTS:]:
            continue
        own, others = (blocks_q, blocks_kv) if "kv" in name else (blocks_kv, blocks_q)
        shape = (batch, heads, own) if "num" in name else (batch, heads, own, others)
        if tensor.dtype != torch.int32:
            raise TypeError(f"block_mask.{name} must be int32, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"block_mask.{name} must have shape {shape} for {q.shape[1]} queries and {k.shape[1]} keys, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.device != q.device:
            raise ValueError(f"block_mask is on {tensor.device}, but q is on {q.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"block_mask.{name} must be contiguous, got strides {tuple(tensor.stride())}")


def check_states(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> None:
    """Check that results of attention, which are to be merged, match each other."""
    if len(outs) != len(lses):
        raise ValueError(f"more must hold pairs of out and lse, got {len(outs) + len(lses) - 4} tensors")
    (out_a, *_), (lse_a, *_) = outs, lses
    suffixes = ["a", "b", *(str(i) for i in range(2, len(outs)))]  # pairs in `more` are out_2, lse_2, ...
    named = [(f"out_{i}", out) for i, out in zip(suffixes, outs, strict=True)]
    named += [(f"lse_{i}", lse) for i, lse in zip(suffixes, lses, strict=True)]
    for name, tensor in named:
        check_dense(name, tensor)
        if tensor.device != out_a.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but out_a is on {out_a.device}: they must be on one device"
            )
    if out_a.dim() not in (3, 4):
        allowed = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise ValueError(f"out_a must have shape {allowed}, got {tuple(out_a.shape)}")
    check_dtype("out_a", out_a)
    check_dtype("lse_a", lse_a, (torch.float32, torch.float64))
    *rows, heads, _ = out_a.shape
    expected = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
    if tuple(lse_a.shape) != expected:
        raise ValueError(f"lse_a must have shape {expected} to match out_a, got {tuple(lse_a.shape)}")
    for name, tensor in named:
        first_name, first = ("out_a", out_a) if name.startswith("out") else ("lse_a", lse_a)
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {first_name} has {tuple(first.shape)}: "
                "they must be equal"
            )
        check_same_dtype(name, tensor, first_name, first)


def check_segments(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k and v hold the tokens of the same packed segments."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
        if tensor.dim() != 3 or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have shape (total, heads, head_dim), with the total of q, got shape "
                f"{tuple(tensor.shape)}"
            )
