"""Sequences of different lengths as a loop over dense calls.

Rows that are in no sequence, or in one without keys, keep out 0, lse -inf and gradients 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.problem import Extras, Problem


def forward(
    dense: Callable[..., tuple[Tensor, Tensor]],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as (total_q, heads_q, head_dim_v) and (heads_q, total_q).

    ``dense(q, k, v, alibi_slopes)`` computes one sequence.
    """
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    for rows, keys, slopes in _sequences(extras.cu_seqlens_q, extras.cu_seqlens_k, extras.alibi_slopes):
        out_one, lse_one = dense(q[None, rows], k[None, keys], v[None, keys], slopes)
        out[rows], lse[:, rows] = out_one[0], lse_one[0]
    return out, lse


def backward(
    dense: Callable[..., tuple[Tensor, Tensor, Tensor]],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """(dq, dk, dv, None); ``dense(dout, dlse, q, k, v, out, lse, alibi_slopes)`` computes one sequence."""
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, keys, slopes in _sequences(extras.cu_seqlens_q, extras.cu_seqlens_k, extras.alibi_slopes):
        dlse_one = None if dlse is None else dlse[None, :, rows]
        dq_one, dk_one, dv_one = dense(
            dout[None, rows], dlse_one, q[None, rows], k[None, keys], v[None, keys],
            out[None, rows], lse[None, :, rows], slopes,
        )  # fmt: skip
        dq[rows], dk[keys], dv[keys] = dq_one[0], dk_one[0], dv_one[0]
    return dq, dk, dv, None


def _sequences(
    cu_seqlens_q: Any, cu_seqlens_k: Any, alibi_slopes: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Rows, keys and ALiBi slopes of each sequence that has both."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]
        if rows.start < rows.stop and keys.start < keys.stop:
            yield rows, keys, slopes
