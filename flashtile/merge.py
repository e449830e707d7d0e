"""Attention over a union of key sets from attention over each (online softmax across partial results)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    ``out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)``, ``lse = log(e^lse_a + e^lse_b)``, computed in
    the dtype of lse with the larger exponent taken out (Flash-Decoding, 2023). Differentiable in all four.

    Args:
        out_a, out_b: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse_a, lse_b: natural log, float32 or float64, (batch, heads, seqlen) or (heads, total). -inf is a row
            without keys; so is +inf, FlashAttention-2's mark for it.

    Returns:
        (out, lse) in the shapes and dtypes of the first; a row without keys in either is 0 and -inf.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit.
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
    out = _over_heads(weight_a / total) * out_a + _over_heads(weight_b / total) * out_b
    return out.to(out_a.dtype), lse


def _over_heads(weight: Tensor) -> Tensor:
    """(batch, heads, seqlen) or (heads, total) -> the same beside out, with a last dimension of 1."""
    return weight.transpose(-1, -2).unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != out_a.device:
            raise ValueError(f"{name} is on {tensor.device}, but out_a is on {out_a.device}")
    if out_a.dim() not in (3, 4):
        raise ValueError(
            "out_a must have shape (batch, seqlen, heads, head_dim) or (total, heads, head_dim), "
            f"got {tuple(out_a.shape)}"
        )
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b has shape {tuple(out_b.shape)}, but out_a has {tuple(out_a.shape)}")
    if out_b.dtype != out_a.dtype or not out_a.is_floating_point():
        raise TypeError(f"out_a and out_b must have one floating dtype, got {out_a.dtype} and {out_b.dtype}")
    *rows, heads, _ = out_a.shape
    expected = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != expected:
            raise ValueError(f"{name} must have shape {expected} beside out_a, got {tuple(lse.shape)}")
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {lse.dtype}")
