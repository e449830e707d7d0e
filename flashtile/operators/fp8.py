"""FP8 as operations: quantisation, and attention over quantised tensors.

These operations have no derivative of their own. :mod:`flashtile.operators.fp8_gradients` adds one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.checks.fp8 import check_attend, check_attend_values, check_quantize, check_quantize_values
from flashtile.op.observers import count_scores, forward_flops
from flashtile.op.operation import Operation
from flashtile.problems.fp8 import (
    AttendOptions,
    AttendTensors,
    Fp8Problem,
    QuantizeOptions,
    QuantizeProblem,
    QuantizeTensors,
)
from flashtile.problems.fp8_layout import E4M3

NO_GRADIENT = (
    "FP8 has only gradients of q, k, v and sink, by .backward() of flashtile.fp8.attention (call it under "
    "torch.no_grad(), or use flashtile.attention)"
)


def _fake_quantize(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> tuple[Tensor, Tensor]:
    problem = QuantizeProblem.from_tensors(x, tensors, options)
    values = x.new_empty(problem.values_shape, dtype=E4M3)
    return values, x.new_empty(problem.scales_shape, dtype=torch.float32)


def _fake_attend(
    q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if tensors.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    out = q.new_empty((*rows, heads, v.shape[-2 if options.v_transposed else -1]), dtype=options.out_dtype)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _attend_flops(q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors, options: AttendOptions) -> int:
    of_k = k.shape[1], tensors.cu_seqlens_k, options.max_seqlen_k
    scores = count_scores(q, tensors.cu_seqlens_q, options.max_seqlen_q, *of_k)
    return forward_flops(scores, q.shape[-2], options.head_dim, v.shape[-2 if options.v_transposed else -1])


QUANTIZE = Operation(
    "fp8_quantize",
    part="fp8",
    tensors=("x",),
    optional=QuantizeTensors(),
    options=QuantizeOptions,
    results=2,
    check=check_quantize,
    check_values=check_quantize_values,
    describe=QuantizeProblem.from_tensors,
    fake=_fake_quantize,
    no_gradient=NO_GRADIENT,
)
ATTEND = Operation(
    "fp8_attend",
    part="fp8",
    tensors=("q", "k", "v"),
    optional=AttendTensors(),
    options=AttendOptions,
    results=2,
    check=check_attend,
    check_values=check_attend_values,
    describe=Fp8Problem.from_call,
    fake=_fake_attend,
    no_gradient=NO_GRADIENT,
    flops=_attend_flops,
)


def refuse_gradient(name: str, tensor: Tensor) -> None:
    """Raise NotImplementedError for a tensor that requires a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} must not require a gradient: {NO_GRADIENT}")
