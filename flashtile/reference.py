"""Standard attention, which stores the score matrix: every test's oracle, the "standard" row of benchmarks.

Plain torch, differentiable by autograd (twice, too), any device, any floating dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problem import Extras, Options, Problem


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    upcast: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, with the arguments and conventions of :func:`flashtile.attention`.

    Args:
        upcast: compute in this dtype and return out in it, for a reference more exact than the inputs. None
            computes in the dtype of q, as plain PyTorch does: the yardstick of the error rule. lse is then
            float32 (float64 for float64 inputs).
    """
    options = Options(max_seqlen_q, max_seqlen_k, softmax_scale, causal, *window_size, softcap)
    extras = Extras(cu_seqlens_q, cu_seqlens_k, None, alibi_slopes, None)
    problem = Problem.from_tensors(q, k, v, extras, options)
    if upcast is not None:
        q, k, v = q.to(upcast), k.to(upcast), v.to(upcast)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _dense(q, k, v, alibi_slopes, problem)

    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(problem.batch):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        out, lse = _dense(q[None, rows], k[None, keys], v[None, keys], slopes, problem)
        outs.append(out[0])
        lses.append(lse[0])
    unused = problem.total_q - starts_q[-1]  # tokens after the last sequence
    outs.append(v.new_zeros((unused, problem.num_heads_q, problem.head_dim_v)))
    lses.append(q.new_full((problem.num_heads_q, unused), -torch.inf, dtype=_lse_dtype(q)))
    return torch.cat(outs, 0), torch.cat(lses, 1)


def visible(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int, device=None) -> Tensor:
    """(seqlen_q, seqlen_k) bool: which key each query sees, aligned to the bottom right; -1 is unlimited."""
    distance = _distance(seqlen_q, seqlen_k, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window_left >= 0:
        seen &= distance >= -window_left
    if window_right >= 0:
        seen &= distance <= window_right
    return seen


def _distance(seqlen_q: int, seqlen_k: int, device) -> Tensor:
    """Key position minus the query's own position, (seqlen_q, seqlen_k)."""
    rows = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return torch.arange(seqlen_k, device=device)[None, :] - rows


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _dense(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(problem.group_size, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * problem.softmax_scale, k)
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    seqlen_q, seqlen_k = scores.shape[-2:]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(_lse_dtype(q)).reshape(-1, problem.num_heads_q, 1, 1)
        scores = scores - (slopes * _distance(seqlen_q, seqlen_k, q.device).abs()).to(scores.dtype)
    seen = visible(seqlen_q, seqlen_k, problem.window_left, problem.window_right, q.device)
    # A row that sees no key would be a softmax over nothing: give it finite scores, then zero its output.
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | empty), -torch.inf)
    if seqlen_k == 0:
        probabilities = scores
    else:
        probabilities = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, v)
    lse = torch.logsumexp(scores.to(_lse_dtype(q)), dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return out, lse
