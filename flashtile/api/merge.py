"""Combines attention over disjoint sets of keys into attention over their union, by their log-sum-exp."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashtile.checks.attention import check_states


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *more: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two or more disjoint sets of keys into attention over their union.

    ``out = sum_i e^lse_i out_i / sum_i e^lse_i`` and ``lse = log(sum_i e^lse_i)`` (Flash-Decoding, 2023). The
    largest lse is subtracted from every lse_i first, so that no exponential overflows. Sums have the dtype of
    lse, and out is rounded once. The operation is associative, and differentiable in all arguments.

    Args:
        out_a, out_b: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), both of one dtype:
            float16, bfloat16, float32 or float64.
        lse_a, lse_b: natural log, (batch, heads, seqlen) or (heads, total), both float32 or both float64.
            -inf marks a row without keys, whose out is ignored. So does +inf, which FlashAttention-2 uses.
        more: further pairs of out and lse.

    Returns:
        (out, lse) in the shapes and dtypes of the arguments. If no argument has keys for a row, the row's out
        is 0 and its lse is -inf.

    Raises:
        TypeError: an argument is not a tensor, or of a dtype that is not allowed.
        ValueError: shapes or devices do not match, or an out comes without its lse.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 128, 4, 64).unbind()
        >>> first = flashtile.attention(q, k[:, :100], v[:, :100], return_lse=True)
        >>> rest = flashtile.attention(q, k[:, 100:], v[:, 100:], return_lse=True)
        >>> out, lse = flashtile.merge_states(*first, *rest)
        >>> torch.testing.assert_close(out, flashtile.attention(q, k, v))
    """
    outs, lses = (out_a, out_b, *more[::2]), (lse_a, lse_b, *more[1::2])
    check_states(outs, lses)
    lses = tuple(lse.masked_fill(lse == torch.inf, -torch.inf) for lse in lses)
    largest = functools.reduce(torch.maximum, lses).detach()
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0.0)
    weights = [torch.exp(lse - largest) for lse in lses]
    # All weights of an empty row are 0. Setting their sum to 1 keeps the row's values and gradients finite.
    total = sum(weights[1:], weights[0]).masked_fill(empty, 1.0)
    lse = (largest + torch.log(total)).masked_fill(empty, -torch.inf)
    # A product takes the memory layout of its first factor, so ``out`` comes first.
    parts = [
        out.masked_fill(_over_heads(part == -torch.inf), 0.0) * _over_heads(weight / total)
        for out, part, weight in zip(outs, lses, weights, strict=True)
    ]
    return sum(parts[1:], parts[0]).to(out_a.dtype), lse


def _over_heads(weight: Tensor) -> Tensor:
    """Reshape (batch, heads, seqlen) or (heads, total) to the layout of out, with a last dimension of 1."""
    return weight.transpose(-1, -2).unsqueeze(-1)


def merge_into(
    out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor, start: int, dtype: torch.dtype
) -> Tensor:
    """Merge two results of attention as :func:`merge_states` does, and return the merged out in ``dtype``.

    lse is updated in place. out may be overwritten: use the returned tensor. All tensors are contiguous, and
    float32 or float64. out is (batch, seqlen, heads, head_dim), and lse is (batch, heads, seqlen). lse is
    -inf for rows without keys. ``more_out`` and ``more_lse`` may have fewer rows: their first row belongs to
    row ``start`` of out. On a GPU one kernel merges and rounds.
    """
    if out.is_cuda and out.dtype == torch.float32:
        from flashtile.backends.portable.merging import merge

        return merge(out, lse, more_out, more_lse, start, dtype)
    rows = slice(start, start + more_out.shape[1])
    share = torch.sigmoid(more_lse - lse[:, :, rows]).nan_to_num_(0.0)  # NaN if neither has keys
    out[:, rows].lerp_(more_out, _over_heads(share))
    lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], more_lse)
    return out.to(dtype)
