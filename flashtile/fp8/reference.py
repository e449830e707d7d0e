"""Standard attention over what FP8 tensors stand for: the oracle, and what FP8 attention is compared with.

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 4.3, compares with standard attention in FP8
whose tensors have one scale each: :func:`standard`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import reference
from flashtile.fp8.functional import QUANTIZING, quantize, sequences, shared_method
from flashtile.fp8.layout import E4M3
from flashtile.fp8.quantized import Quantized


def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    p_scale: float | None = None,
    upcast: torch.dtype = torch.float64,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of standard attention, which stores the scores, over the numbers that q, k and v stand for.

    Args:
        q, k, v: what :func:`flashtile.fp8.quantize` made, float8_e4m3fn with the descales of
            :func:`flashtile.flash_attn_func`, or of any other floating dtype.
        p_scale: probabilities are rounded to e4m3 times this before the second product, as FP8 has it; None
            leaves them as they are.
        upcast: the dtype of all arithmetic and of out.
        arguments: the others of :func:`flashtile.reference.attention`; quantised tensors bring their own
            ``cu_seqlens``, ``max_seqlen`` and ``seqused``.
    """
    scales = (q_descale, k_descale, v_descale)
    dequantized, arguments = dequantize(q, k, v, scales, upcast, arguments)
    round_p = None if p_scale is None else lambda p: (p * p_scale).to(E4M3).to(upcast) / p_scale
    return reference.attention(*dequantized, upcast=upcast, round_p=round_p, **arguments)


def standard(
    q: Tensor, k: Tensor, v: Tensor, *, p_scale: float | None = 1.0, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of standard attention in FP8: a scale for each tensor, products and softmax in float32.

    Args:
        q, k, v: float16 or bfloat16, as for :func:`flashtile.attention`.
        p_scale: as for :func:`attention`. 1 rounds the softmax's result as it is.
        arguments: the others of :func:`flashtile.reference.attention`.

    out is float32. With ``p_scale=1`` the error on the paper's data is the one that the paper prints for its
    baseline; with probabilities in 16 bits (None) it is two thirds of that.
    """
    parts = quantize_call(q, k, v, method="tensor", hadamard=False, **arguments)
    return attention(*parts, p_scale=p_scale, upcast=torch.float32, **arguments)


def quantize_call(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    method: str | None = None,
    hadamard: bool | None = None,
    seed: int | None = None,
    backend: str | None = None,
    **arguments: Any,
) -> tuple[Quantized, Quantized, Quantized]:
    """q, k and v as :func:`flashtile.fp8.attention` quantises those that are not yet."""
    method, seed = shared_method({"q": q, "k": k, "v": v}, method, hadamard, seed)
    quantized = (
        x
        if isinstance(x, Quantized)
        else quantize(
            x,
            role,
            method=method,
            hadamard=seed is not None,
            seed=seed or 0,
            cu_seqlens=arguments.get(f"cu_seqlens_{side}"),
            max_seqlen=arguments.get(f"max_seqlen_{side}"),
            seqused=arguments.get(f"seqused_{side}"),
            backend=backend if backend in QUANTIZING else None,
        )
        for x, role, side in zip((q, k, v), "qkv", "qkk", strict=True)
    )
    return next(quantized), next(quantized), next(quantized)


def dequantize(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtype: torch.dtype,
    arguments: dict[str, Any],
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The numbers that q, k and v stand for, and the call's arguments with those that they bring."""
    arguments = dict(arguments)
    for side, of in (("q", (q,)), ("k", (k, v))):
        names = f"cu_seqlens_{side}", f"max_seqlen_{side}", "seqused_k"
        given = (arguments.get(name) for name in names)
        found = sequences(of, *given)
        arguments.update(zip(names if side == "k" else names[:2], found, strict=False))
    if arguments.get("softmax_scale") is None:
        arguments["softmax_scale"] = q.shape[-1] ** -0.5
    if arguments.get("sink") is not None:
        arguments["sink"] = arguments["sink"].float()
    # In the columns of the transform, of which there may be more than of head_dim, all with an error.
    transformed = isinstance(q, Quantized) and isinstance(k, Quantized)
    rows = tuple(
        x.dequantize(dtype, transformed=transformed)
        if isinstance(x, Quantized)
        else _descaled(x.to(dtype), descale, arguments[f"cu_seqlens_{side}"])
        for x, descale, side in zip((q, k, v), scales, "qkk", strict=True)
    )
    return rows, arguments


def _descaled(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x times its scale by sequence and head, (batch, heads or heads_kv)."""
    if descale is None:
        return x
    scale = descale.to(x.dtype).repeat_interleave(x.shape[-2] // descale.shape[1], 1)
    if cu_seqlens is None:
        return x * scale[:, None, :, None]
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    b = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    inside = b < scale.shape[0]
    return torch.where(inside[:, None, None], x * scale[b * inside][..., None], 0.0)
