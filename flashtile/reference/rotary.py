"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4), whole or partial."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.addresses import new_tokens
from flashtile.problems.decode import AppendTensors


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head by the angles of its token's position.

    Computed in float32 (float64 for float64) and rounded once to the dtype of x.

    Args:
        x: (tokens, heads, head_dim).
        cos, sin: (rows, rotary_dim / 2); row p holds the angles of position p.
        positions: (tokens,) int64.
        interleaved: pairs are elements (0, 1), (2, 3), ... (GPT-J); otherwise elements i and
            ``i + rotary_dim / 2`` (GPT-NeoX, Llama).
    """
    return turn(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (..., heads, head_dim) as :func:`rotate`, by cos and sin (..., 1, rotary_dim / 2)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotary_dim = 2 * cos.shape[-1]
    c, s = cos.to(wide), sin.to(wide)
    part = x[..., :rotary_dim].to(wide)
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        rotated = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        rotated = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], -1)


def rotate_appended(
    x: Tensor, cu_seqlens: Tensor | None, tensors: AppendTensors, interleaved: bool, by_token: bool = True
) -> Tensor:
    """Rotate new keys or queries, and return (rows, heads, head_dim) of all rows that belong to a sequence.

    With ``by_token``, positions of a sequence's rows count up from its first new position. Otherwise all rows
    of a sequence have that position.
    """
    first = tensors.cache_seqlens if tensors.rotary_seqlens is None else tensors.rotary_seqlens
    assert first is not None
    assert tensors.rotary_cos is not None
    assert tensors.rotary_sin is not None
    sequence, number = new_tokens(x, cu_seqlens)
    positions = first.long()[sequence] + (number if by_token else 0)
    rows = x.flatten(0, -3)[: sequence.shape[0]]
    return rotate(rows, tensors.rotary_cos, tensors.rotary_sin, positions, interleaved)
