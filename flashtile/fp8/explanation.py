"""What an FP8 call would get: backend, configuration, and why not the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flashtile.arguments import make_options
from flashtile.checks.fp8 import check_attend, check_inputs
from flashtile.dispatch import Explanation, explain_problem
from flashtile.fp8.dispatch import load_attending
from flashtile.fp8.functional import agreed, scales_of, sequences
from flashtile.fp8.layout import E4M3
from flashtile.fp8.problem import (
    AttendOptions,
    Fp8Problem,
    QuantizeOptions,
    QuantizeProblem,
    QuantizeTensors,
    Scales,
)
from flashtile.fp8.quantized import Quantized
from flashtile.problem import Extras


def explain(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    method: str | None = None,
    hadamard: bool | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
) -> Explanation:
    """Say which backend and configuration :func:`flashtile.fp8.attention` would use, and why.

    Nothing is launched and no data is read. The arguments are those of :func:`flashtile.fp8.attention`; q, k
    and v of float8_e4m3fn are taken as by :func:`flashtile.flash_attn_func`, with its descales.
    """
    cu_seqlens_q, max_seqlen_q, _ = sequences((q,), cu_seqlens_q, max_seqlen_q, None)
    cu_seqlens_k, max_seqlen_k, seqused_k = sequences((k, v), cu_seqlens_k, max_seqlen_k, seqused_k)
    options = make_options(
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap, False, backend
    )
    extras = Extras(cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink)
    if isinstance(q, Tensor) and q.dtype == E4M3:
        tensors: tuple[Any, Any, Any] = (q, k, v)
        scales = Scales(q_descale, k_descale, v_descale)
        fp8 = AttendOptions(torch.bfloat16, q.shape[-1])
        check_attend(q, k, v, scales, extras, options, fp8)  # type: ignore[arg-type]
    else:
        check_inputs(q, k, v)
        method, seed = agreed({"q": q, "k": k, "v": v}, method, hadamard, None)
        parts = (
            _stored(q, "q", method, seed, cu_seqlens_q, options.max_seqlen_q),
            _stored(k, "k", method, seed, cu_seqlens_k, options.max_seqlen_k),
            _stored(v, "v", method, None, cu_seqlens_k, options.max_seqlen_k),
        )
        tensors = parts[0].values, parts[1].values, parts[2].values
        scales = Scales(*map(scales_of, parts))
        fp8 = AttendOptions(q.dtype, q.shape[-1], True, method == "block")
    problem = Fp8Problem.from_call(*tensors, scales, extras, options, fp8)
    return explain_problem(dataclasses.replace(problem, device=q.device), backend, load_attending)


def _stored(
    x: Tensor | Quantized,
    role: str,
    method: str,
    seed: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Quantized:
    """x, or what :func:`flashtile.fp8.quantize` would make of it, without memory."""
    if isinstance(x, Quantized):
        return x
    options = QuantizeOptions(role, method, seed, max_seqlen, 0, False, None)
    problem = QuantizeProblem.from_tensors(x, QuantizeTensors(cu_seqlens), options)
    values = torch.empty(problem.values_shape, dtype=E4M3, device="meta")
    scales = torch.empty(problem.scales_shape, device="meta")
    return Quantized(values, scales, role, method, seed, tuple(x.shape), x.dtype, cu_seqlens, max_seqlen)
