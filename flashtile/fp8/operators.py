"""``torch.library`` operators ``flashtile::fp8_quantize`` and ``flashtile::fp8_attend``, with fakes.

Neither has a backward pass. A plain eager call skips the dispatcher, whose host time exceeds the launch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.attn.operators import _ARGUMENTS, _library, _split
from flashtile.checks.fp8 import check_attend, check_quantize
from flashtile.decode.operators import is_plain
from flashtile.fp8 import launches
from flashtile.fp8.layout import E4M3
from flashtile.fp8.problem import (
    AttendOptions,
    QuantizeOptions,
    QuantizeProblem,
    QuantizeTensors,
    Scales,
)
from flashtile.problem import Extras, Options

_library.define(
    "fp8_quantize(Tensor x, Tensor? cu_seqlens, Tensor? seqused, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? rotary_offsets, str role, str method, int? seed, SymInt? max_seqlen, SymInt rotary_offset, "
    "bool rotary_interleaved, str? backend) -> (Tensor, Tensor)"
)
_library.define(
    "fp8_attend(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    f"{_ARGUMENTS}, ScalarType out_dtype, SymInt head_dim, bool v_transposed, bool block_scales) "
    "-> (Tensor, Tensor)"
)


def quantize(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> tuple[Tensor, Tensor]:
    """(values, scales), by the shortest path that is right."""
    if is_plain(x, *tensors):
        return launches.quantize(x, tensors, options)
    check_quantize(x, tensors, options)
    return torch.ops.flashtile.fp8_quantize(x, *tensors, *options)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, extras: Extras, options: Options, fp8: AttendOptions
) -> tuple[Tensor, Tensor]:
    """(out, lse), by the shortest path that is right."""
    if is_plain(q, k, v, *scales, *extras):
        return launches.attend(q, k, v, scales, extras, options, fp8)
    check_attend(q, k, v, scales, extras, options, fp8)
    return torch.ops.flashtile.fp8_attend(q, k, v, *scales, *extras, *options, *fp8)


def refuse_gradient(*named: tuple[str, Tensor | None]) -> None:
    """Raise NotImplementedError if one of these requires a gradient."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in named:
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(f"{name} {_NO_GRADIENT}")


_NO_GRADIENT = (
    "must not require a gradient: attention in FP8 has no backward pass (call it under torch.no_grad(), or "
    "train with flashtile.attention)"
)


def _quantize_kernel(x, *arguments):
    tensors, options = QuantizeTensors(*arguments[:_QUANTIZE]), QuantizeOptions(*arguments[_QUANTIZE:])
    return launches.quantize(x, tensors, options)


def _quantize_fake(x, *arguments):
    tensors, options = QuantizeTensors(*arguments[:_QUANTIZE]), QuantizeOptions(*arguments[_QUANTIZE:])
    check_quantize(x, tensors, options)
    problem = QuantizeProblem.from_tensors(x, tensors, options)
    values = x.new_empty(problem.values_shape, dtype=E4M3)
    return values, x.new_empty(problem.scales_shape, dtype=torch.float32)


def _attend_arguments(rest: tuple) -> tuple[Scales, Extras, Options, AttendOptions]:
    scales, shared, fp8 = rest[:_SCALES], rest[_SCALES:-_ATTEND], rest[-_ATTEND:]
    return Scales(*scales), *_split(shared), AttendOptions(*fp8)


def _attend_kernel(q, k, v, *rest):
    return launches.attend(q, k, v, *_attend_arguments(rest))


def _attend_fake(q, k, v, *rest):
    arguments = _attend_arguments(rest)
    check_attend(q, k, v, *arguments)
    _, extras, _, fp8 = arguments
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if extras.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    out = q.new_empty((*rows, heads, v.shape[-2 if fp8.v_transposed else -1]), dtype=fp8.out_dtype)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _no_gradient(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(f"q, k and v {_NO_GRADIENT}")


_QUANTIZE = len(QuantizeTensors._fields)
_SCALES = len(Scales._fields)
_ATTEND = len(AttendOptions._fields)
for _device in ("CUDA", "CPU"):
    _library.impl("fp8_quantize", _quantize_kernel, _device)
    _library.impl("fp8_attend", _attend_kernel, _device)
torch.library.register_fake("flashtile::fp8_quantize", _quantize_fake, lib=_library)
torch.library.register_fake("flashtile::fp8_attend", _attend_fake, lib=_library)
torch.library.register_autograd("flashtile::fp8_quantize", _no_gradient, lib=_library)
torch.library.register_autograd("flashtile::fp8_attend", _no_gradient, lib=_library)
