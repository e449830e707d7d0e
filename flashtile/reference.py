"""Standard attention, which stores the score matrix: every test's oracle, the "standard" row of benchmarks.

Plain torch, differentiable by autograd (twice, too), any device, any floating dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.attn.problem import Extras, Options, Problem
from flashtile.checks.attention import check_call


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    upcast: torch.dtype | None = None,
    round_p: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, with the arguments and conventions of :func:`flashtile.attention`.

    Args:
        upcast: compute in this dtype and return out in it, for a reference more exact than the inputs. None
            computes in the dtype of q, as plain PyTorch does: the yardstick of the error rule. lse is then
            float32 (float64 for float64 inputs).
        round_p: what becomes of the probabilities before they meet v; lse does not see it.
    """
    options = Options(max_seqlen_q, max_seqlen_k, softmax_scale, causal, *window_size, softcap)
    extras = Extras(cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink)
    check_call(q, k, v, extras, options)
    problem = Problem.from_tensors(q, k, v, extras, options)
    if upcast is not None:
        q, k, v = q.to(upcast), k.to(upcast), v.to(upcast)
    if cu_seqlens_q is None and (seqused_k is None or problem.batch == 0):
        return _dense(q, k, v, alibi_slopes, sink, problem, round_p)

    outs, lses = [], []
    for b in range(problem.batch):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        one_q, one_k, one_v = (
            t[b : b + 1] if offsets is None else t[None, offsets[b] : offsets[b + 1]]
            for t, offsets in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
        )
        if seqused_k is not None:
            one_k, one_v = one_k[:, : seqused_k[b]], one_v[:, : seqused_k[b]]
        out, lse = _dense(one_q, one_k, one_v, slopes, sink, problem, round_p)
        outs.append(out)
        lses.append(lse)
    if cu_seqlens_q is None:
        return torch.cat(outs), torch.cat(lses)
    unused = problem.total_q - int(cu_seqlens_q[-1])  # tokens after the last sequence
    outs.append(v.new_zeros((1, unused, problem.num_heads_q, problem.head_dim_v)))
    lses.append(q.new_full((1, problem.num_heads_q, unused), -torch.inf, dtype=_lse_dtype(q)))
    return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    problem: Problem,
    round_p: Callable[[Tensor], Tensor] | None,
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
    # A row that sees nothing would be a softmax over nothing: give it finite scores, then zero its output.
    empty = ~seen.any(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(scores.dtype)[None, :, None, None]  # a key that every row sees
        empty = empty & (sink == -torch.inf)
    scores = scores.masked_fill(~(seen | empty), -torch.inf)
    if sink is not None:
        column = sink.expand(*scores.shape[:-1], 1).masked_fill(empty, 0.0)
        scores = torch.cat([scores, column], dim=-1)
    if scores.shape[-1] == 0:
        probabilities = scores
    else:
        probabilities = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
    if round_p is not None:
        probabilities = round_p(probabilities)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities[..., :seqlen_k], v)
    lse = torch.logsumexp(scores.to(_lse_dtype(q)), dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return out, lse
