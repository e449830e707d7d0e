"""Standard attention over dequantised FP8 tensors: the reference of FP8 attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.problems.fp8_layout import E4M3
from flashtile.problems.quantized import Quantized, sequences
from flashtile.reference import attention as reference


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
    """Compute (out, lse) of standard attention over dequantised q, k and v.

    Args:
        q, k, v: results of :func:`flashtile.fp8.quantize`, float8_e4m3fn with the descales of
            :func:`flashtile.flash_attn_func`, or any other floating dtype.
        p_scale: probabilities are multiplied by this and rounded to e4m3 before the second product, as in FP8
            attention; None does not round them.
        upcast: dtype of all arithmetic and of out.
        arguments: the other arguments of :func:`flashtile.reference.attention.attention`. ``cu_seqlens``,
            ``max_seqlen`` and ``seqused`` default to those that quantised tensors hold.
    """
    scales = (q_descale, k_descale, v_descale)
    dequantized, arguments = dequantize(q, k, v, scales, upcast, arguments)
    round_p = None if p_scale is None else lambda p: (p * p_scale).to(E4M3).to(upcast) / p_scale
    return reference.attention(*dequantized, upcast=upcast, round_p=round_p, **arguments)


def dequantize(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtype: torch.dtype,
    arguments: dict[str, Any],
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return ((q, k, v) dequantised in ``dtype``, arguments with the lengths of quantised tensors)."""
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
    # Products are over the transformed columns, which may outnumber head_dim and all have rounding errors.
    transformed = isinstance(q, Quantized) and isinstance(k, Quantized)
    rows = tuple(
        x.dequantize(dtype, transformed=transformed)
        if isinstance(x, Quantized)
        else _descaled(x.to(dtype), descale, arguments[f"cu_seqlens_{side}"])
        for x, descale, side in zip((q, k, v), scales, "qkk", strict=True)
    )
    return rows, arguments


def _descaled(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Multiply x (batch, seqlen, heads, head_dim), or packed, by its scales (batch, heads or heads_kv)."""
    if descale is None:
        return x
    scale = descale.to(x.dtype).repeat_interleave(x.shape[-2] // descale.shape[1], 1)
    if cu_seqlens is None:
        return x * scale[:, None, :, None]
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    b = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    inside = b < scale.shape[0]
    return torch.where(inside[:, None, None], x * scale[b * inside][..., None], 0.0)
