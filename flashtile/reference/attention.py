"""Standard attention, which stores the score matrix: the reference of tests, and a contestant of benchmarks.

Plain torch, differentiable by autograd any number of times, on any device and in any floating dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile import dropout
from flashtile.checks.attention import check_call
from flashtile.checks.conversions import as_masking
from flashtile.problems.attention import OptionalTensors, Options, Problem, clear_lse, new_lse
from flashtile.problems.masking import positions
from flashtile.rounding import exact_product
from flashtile.torch_private import is_mapped


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    upcast: torch.dtype | None = None,
    round_p: Callable[[Tensor], Tensor] | None = None,
    max_logits: bool = False,
    entropy: bool = False,
    **masking: int,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) by definition, with the arguments and conventions of :func:`flashtile.attention`.

    Args:
        upcast: dtype of all arithmetic and of out. float64 gives an exact reference for inputs of lower
            precision. None: the dtype of q, as in a plain PyTorch program. lse is at least float32.
        round_p: function applied to the probabilities before they multiply v; it does not affect lse.
        max_logits, entropy: whether the largest score and the entropy of each row follow lse in a last
            dimension.
        masking: the other options of :class:`flashtile.problems.masking.Masking`.
    """
    options = Options(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        masking=as_masking(causal, window_size, **masking),
        softcap=softcap,
        dropout_p=dropout_p,
        max_logits=max_logits,
        entropy=entropy,
    )
    extras = OptionalTensors(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sink=sink,
        mask=mask,
        key_padding_mask=key_padding_mask,
        bias=bias,
        rng_state=rng_state,
    )
    check_call(q, k, v, extras, options)
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
    return of_call(
        q, k, v, extras, options, score_mod=score_mod, mask_mod=mask_mod, upcast=upcast, round_p=round_p
    )


def of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: OptionalTensors,
    options: Options,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    upcast: torch.dtype | None = None,
    round_p: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) as :func:`attention`, for arguments that are normalised and checked."""
    cu_seqlens_q, cu_seqlens_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    seqused_q, seqused_k = extras.seqused_q, extras.seqused_k
    bias, rng_state = extras.bias, extras.rng_state
    problem = Problem.from_tensors(q, k, v, extras, options)
    if upcast is not None:
        q, k, v = q.to(upcast), k.to(upcast), v.to(upcast)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    masks = [] if extras.mask is None else [extras.mask]
    if extras.key_padding_mask is not None:
        masks.append(extras.key_padding_mask[:, None, None])

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, b: int | None = None) -> Any:
        """Compute (out, lse) of dense q, k, v, for sequence ``b``, or for all sequences if ``b`` is None."""
        seen = problem.visible(positions(q.shape[1], k.shape[1]), range(k.shape[1]), q.device)
        for one in masks:
            seen = seen & scores_of(one, b, q.shape[1], k.shape[1])
        grids = _grids(q, k)
        if mask_mod is not None:
            seen = seen & torch.as_tensor(mask_mod(*grids), device=q.device)
        modify = None if score_mod is None else lambda scores: _modified(score_mod, scores, seen, grids)
        added = None if bias is None else scores_of(bias, b, q.shape[1], k.shape[1]).to(q.dtype)
        factors = None
        if options.dropout_p > 0 and rng_state is not None:
            places = (range(len(q)) if b is None else range(b, b + 1), range(problem.num_heads_q))
            lengths = range(q.shape[1]), range(k.shape[1])
            kept = dropout.kept(rng_state, options.dropout_p, problem.num_heads_q, *places, *lengths)
            factors = kept.to(q.dtype) / (1 - options.dropout_p)
        return masked(
            q, k, v, problem.softmax_scale, seen, lse_dtype, slopes=slopes, bias=added,
            softcap=problem.softcap, modify=modify, sink=extras.sink, round_p=round_p, factors=factors,
            statistics=problem.statistics,
        )  # fmt: skip

    if cu_seqlens_q is None and (seqused_q is seqused_k is None or problem.batch == 0):
        return attend(q, k, v, extras.alibi_slopes)

    outs, lses = [], []

    def unseen(rows: int) -> Tensor:
        """Return lse and the statistics of rows that see no key."""
        lse = new_lse(q, (1, problem.num_heads_q, rows), lse_dtype, problem.statistics)
        return clear_lse(lse, problem.statistics)

    for b in range(problem.batch):
        slopes = extras.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        one_q, one_k, one_v = (
            t[b : b + 1] if offsets is None else t[None, offsets[b] : offsets[b + 1]]
            for t, offsets in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
        )
        if seqused_k is not None:
            one_k, one_v = one_k[:, : seqused_k[b]], one_v[:, : seqused_k[b]]
        unused_rows = 0
        if seqused_q is not None:
            unused_rows = one_q.shape[1] - int(seqused_q[b])
            one_q = one_q[:, : seqused_q[b]]
        out, lse = attend(one_q, one_k, one_v, slopes, b)
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, unused_rows))
        outs.append(out)
        lses.append(torch.cat([lse, unseen(unused_rows)], 2))
    if cu_seqlens_q is None:
        return torch.cat(outs), torch.cat(lses)
    unused = problem.total_q - int(cu_seqlens_q[-1])  # tokens after the last sequence
    outs.append(v.new_zeros((1, unused, problem.num_heads_q, problem.head_dim_v)))
    lses.append(unseen(unused))
    return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]


def standard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    *,
    hidden: Tensor | None = None,
    empty: Tensor | None = None,
    bias: Tensor | None = None,
    modify: Callable[[Tensor], Tensor] | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    round_p: Callable[[Tensor], Tensor] | None = None,
    factors: Tensor | None = None,
    lse_dtype: torch.dtype | None = None,
    statistics: Sequence[str] = (),
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(softmax_scale q k^T) v and its log-sum-exp with all scores in memory.

    Args:
        q: (..., heads_q, seqlen_q, head_dim), with heads before rows as in matrix products.
        k, v: (..., heads_kv, seqlen_k, head_dim), in the dtype of q. heads_q / heads_kv query heads share a
            head of k and v.
        softmax_scale: factor of q.
        hidden: bool, broadcast to the scores (..., heads_q, seqlen_q, seqlen_k): True for hidden keys.
        empty: bool, broadcast to (..., heads_q, seqlen_q, 1): True for rows that see no key. Their out is 0
            and their lse -inf. None: there are no such rows.
        bias: added to the scores after the soft cap.
        modify: function of all scores, applied after the bias.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 turns it off.
        sink: (heads_q,), or broadcast to (..., heads_q, seqlen_q, 1): an additional score of every row,
            without a value.
        round_p: function applied to the probabilities before they multiply v; it does not affect lse.
        factors: factors of the probabilities, for dropout. lse is not affected.
        lse_dtype: dtype of lse; None: lse is not computed.
        statistics: of ``problems.attention.STATISTICS``; they follow lse in a last dimension.

    Returns:
        (out (..., heads_q, seqlen_q, head_dim_v), lse (..., heads_q, seqlen_q) or None).
    """
    group_size = q.shape[-3] // max(1, k.shape[-3])
    if group_size > 1:
        k, v = (t.repeat_interleave(group_size, -3) for t in (k, v))
    scores = exact_product(q * softmax_scale, k.transpose(-2, -1))
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if modify is not None:
        scores = _expanded(modify(scores), scores).clone()
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    if modify is not None:  # it may have set all scores of a row to -inf
        empty = (scores == -torch.inf).all(-1, keepdim=True)
    keys = scores.detach()
    if sink is not None:  # one more column of scores
        column = (sink[:, None, None] if sink.dim() == 1 else sink).to(scores.dtype)
        column = column.expand(*scores.shape[:-1], 1)
        if empty is not None:
            empty = empty & (column == -torch.inf)
            column = column.masked_fill(empty, 0.0)
        scores = torch.cat([scores, column], -1)
    probabilities = torch.softmax(scores, -1)
    if empty is not None:  # a softmax over no key is NaN
        probabilities = probabilities.masked_fill(empty, 0.0)
    if round_p is not None:
        probabilities = round_p(probabilities)
    if sink is not None:
        probabilities = probabilities[..., :-1]
    if factors is not None:
        probabilities = probabilities * factors
    out = exact_product(probabilities, v)
    if lse_dtype is None:
        return out, None
    scores = scores.to(lse_dtype)
    lse = torch.logsumexp(scores, -1)
    if empty is not None:
        lse = lse.masked_fill(empty.squeeze(-1), -torch.inf)
    if not statistics:
        return out, lse
    found = {}
    if "max_logits" in statistics:
        unseen = keys.new_full((*keys.shape[:-1], 1), -torch.inf)  # there may be no key at all
        found["max_logits"] = torch.cat([keys, unseen], -1).amax(-1).to(lse_dtype)
    if "entropy" in statistics:
        # P of a hidden score is 0, and 0 times log P is NaN. A row that sees no key has the entropy 0.
        nothing = scores == -torch.inf if empty is None else (scores == -torch.inf) | empty
        log_p = (scores - lse[..., None]).masked_fill(nothing, 0.0)
        found["entropy"] = -(log_p.exp().masked_fill(nothing, 0.0) * log_p).sum(-1)
    return out, torch.stack([lse, *map(found.__getitem__, statistics)], -1)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    seen: Tensor,
    lse_dtype: torch.dtype,
    *,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention of q, k, v (..., seqlen, heads, head_dim) over visible keys, and its log-sum-exp.

    Args:
        seen: bool, broadcasts to (..., heads, seqlen_q, seqlen_k): True for visible keys.
        lse_dtype: dtype of lse.
        slopes: slopes of ALiBi, (..., heads).
        bias: broadcasts as ``seen``; -inf hides a key.
        options: the other options of :func:`standard`.

    Returns:
        (out (..., seqlen_q, heads, head_dim_v), lse (..., heads, seqlen_q)).
    """
    if bias is not None:
        hidden = bias == -torch.inf
        seen = seen & ~hidden
        bias = bias.masked_fill(hidden, 0.0)
    if slopes is not None:
        of_distance = alibi_bias(slopes, seen.shape[-2], seen.shape[-1], q.dtype)
        bias = of_distance if bias is None else bias + of_distance
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    empty = ~seen.any(-1, keepdim=True)
    out, lse = standard(
        q, k, v, softmax_scale, hidden=~seen, empty=empty, bias=bias, lse_dtype=lse_dtype, **options
    )
    assert lse is not None
    return out.transpose(-2, -3), lse


def sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return dsink (heads,): the sum over rows of ``exp(sink - lse) (dlse - rowsum(dout out))``."""
    ds = -(dout.to(lse.dtype) * out).sum(-1).mT  # (..., heads, rows)
    if dlse is not None:
        ds += dlse
    p = torch.exp(sink.to(lse.dtype)[:, None] - lse)
    # Rows without keys or sink, and rows outside all sequences, may hold NaN.
    terms = (p * ds).masked_fill_(lse == -torch.inf, 0.0).sum(-1)
    return (terms if terms.dim() == 1 else terms.sum(0)).to(sink.dtype)


def scores_of(scores: Tensor, b: int | None, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the part of a mask or bias ``scores`` for sequence ``b``, or for all sequences if ``b`` is None.

    ``scores`` broadcasts to the scores (batch, heads, seqlen_q, seqlen_k) of the whole batch. The part has at
    most ``seqlen_q`` rows and ``seqlen_k`` columns.
    """
    if b is not None and scores.shape[0] > 1:
        scores = scores[b : b + 1]
    return scores[:, :, :seqlen_q, :seqlen_k]


def _modified(
    score_mod: Callable[..., Any], scores: Tensor, seen: Tensor, grids: tuple[Tensor, ...]
) -> Tensor:
    """Apply ``score_mod`` to all ``scores``. Autograd differentiates only the visible ones.

    A score is hidden if it is not ``seen`` or if ``score_mod`` sets it to -inf. The derivative of
    ``score_mod`` at a hidden score may be infinite, and multiplying it by a gradient of 0 would give NaN.
    """
    values = _expanded(score_mod(scores, *grids), scores)
    seen = seen & (values.detach() != -torch.inf)

    def at(indices: tuple[Tensor, ...]) -> Tensor:  # batch, head, row and key of each score
        return _expanded(score_mod(scores[indices], *indices), scores[indices])

    if scores.numel() == 0:
        return values
    if not is_mapped(seen):
        if seen.all():
            return values
        visible = seen.nonzero(as_tuple=True)
        return values.detach().index_put(visible, at(visible))
    # vmap can neither branch on data nor select cells. A hidden score takes the place of a visible one, with
    # a gradient of 0. If a sample has none, it takes that of a finite one, which rarely has infinite slope.
    is_seen = seen.flatten()
    best = (2 * is_seen + values.isfinite().flatten()).argmax()
    places = torch.where(is_seen, torch.arange(len(is_seen), device=seen.device), best)
    of_seen = at(torch.unravel_index(places, scores.shape))
    return torch.where(seen, of_seen.view(scores.shape), values.detach())


def _expanded(result: Tensor | float, scores: Tensor) -> Tensor:
    """Return the result of a ``score_mod`` as a tensor with the device, dtype and shape of ``scores``."""
    return torch.as_tensor(result, dtype=scores.dtype, device=scores.device).expand(scores.shape)


def _grids(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return index tensors (batch, head, row, key) that broadcast to the scores of dense q and k."""
    batch, rows, heads, _ = q.shape
    b, h, i, j = (torch.arange(n, device=q.device) for n in (batch, heads, rows, k.shape[1]))
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def distance(seqlen_q: int, seqlen_k: int, device=None, position: int | None = None) -> Tensor:
    """Return (seqlen_q, seqlen_k): key position minus query position.

    The first query is at key ``position``; None aligns the last query with the last key.
    """
    first = seqlen_k - seqlen_q if position is None else position
    return (
        torch.arange(seqlen_k, device=device) - torch.arange(first, first + seqlen_q, device=device)[:, None]
    )


def alibi_bias(slopes: Tensor, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> Tensor:
    """Return ALiBi's bias (..., heads, seqlen_q, seqlen_k) for slopes (..., heads)."""
    wide = torch.promote_types(dtype, torch.float32)
    offsets = distance(seqlen_q, seqlen_k, slopes.device).abs()
    return -(slopes.to(wide)[..., None, None] * offsets).to(dtype)
