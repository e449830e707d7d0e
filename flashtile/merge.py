"""Attention over a union of key sets from attention over each (online softmax across partial results)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problem import DTYPES, check_dense

LSE_DTYPES = (torch.float32, torch.float64)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    ``out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)``, ``lse = log(e^lse_a + e^lse_b)``,
    computed in the dtype of lse with the larger exponent taken out (Flash-Decoding, 2023). Associative, so
    that any number of partial results can be merged, and differentiable in all four.

    Args:
        out_a, out_b: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), both of one dtype:
            float16, bfloat16, float32 or float64.
        lse_a, lse_b: natural log, (batch, heads, seqlen) or (heads, total), both float32 or both float64.
            -inf is a row without keys; so is +inf, FlashAttention-2's mark for it.

    Returns:
        (out, lse) in the shapes and dtypes of the arguments; a row without keys in either is 0 and -inf.

    Raises:
        TypeError: an argument is not a tensor, or of a dtype that is not allowed.
        ValueError: shapes or devices do not fit.
    """
    _check(out_a, lse_a, out_b, lse_b)
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    largest = torch.maximum(lse_a, lse_b).detach()
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0.0)
    weight_a, weight_b = torch.exp(lse_a - largest), torch.exp(lse_b - largest)
    # Both weights of an empty row are 0; a sum of 1 keeps its values and gradients finite.
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    lse = (largest + torch.log(total)).masked_fill(empty, -torch.inf)
    # out first in each product, so that the result has its memory layout.
    out = out_a * _over_heads(weight_a / total) + out_b * _over_heads(weight_b / total)
    return out.to(out_a.dtype), lse


def _over_heads(weight: Tensor) -> Tensor:
    """(batch, heads, seqlen) or (heads, total) -> the same beside out, with a last dimension of 1."""
    return weight.transpose(-1, -2).unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_dense(name, tensor)
        if tensor.device != out_a.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but out_a is on {out_a.device}: they must be on one device"
            )
    if out_a.dim() not in (3, 4):
        raise ValueError(
            "out_a must have shape (batch, seqlen, heads, head_dim) or (total, heads, head_dim), "
            f"got {tuple(out_a.shape)}"
        )
    if out_a.dtype not in DTYPES:
        raise TypeError(f"out_a must be float16, bfloat16, float32 or float64, got {out_a.dtype}")
    if lse_a.dtype not in LSE_DTYPES:
        raise TypeError(f"lse_a must be float32 or float64, got {lse_a.dtype}")
    *rows, heads, _ = out_a.shape
    expected = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
    if tuple(lse_a.shape) != expected:
        raise ValueError(f"lse_a must have shape {expected} beside out_a, got {tuple(lse_a.shape)}")
    for a, b, name in ((out_a, out_b, "out"), (lse_a, lse_b, "lse")):
        if b.shape != a.shape:
            raise ValueError(
                f"{name}_b has shape {tuple(b.shape)}, but {name}_a has {tuple(a.shape)}: they must be equal"
            )
        if b.dtype != a.dtype:
            raise TypeError(f"{name}_b has dtype {b.dtype}, but {name}_a has {a.dtype}: they must be equal")
