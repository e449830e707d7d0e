"""Calls of attention in the error rule: their text in a report, and the rounding errors of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.rounding import SCORE_UNITS, finite, largest, product, rms, scale_of, score_noise

CANCELLED_UNITS = 16.0
"""Rounding units allowed for a gradient of a score, which is a difference of sums that may cancel."""

LSE_UNITS = 1 / 8
"""Rounding units of q's dtype allowed for lse. This is far less than the error of rounding P to q's dtype."""

SHOWN_ELEMENTS = 64
"""Largest size of a tensor argument whose elements a report lists."""


def rounding_noise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None],
    dentropy: Tensor | None,
    tangents: dict[str, Tensor],
    exact: dict[str, Tensor],
    arguments: dict[str, Any],
) -> dict[str, tuple[float, float]]:
    """Return the rounding errors (largest, rms) allowed in each result even if plain PyTorch is exact.

    A score is a sum of products of q and k, and P is exp(score - lse). A small absolute error of the score is
    therefore an equal relative error of P, and of all that is computed from P. In the backward pass, the same
    holds for an error of lse.

    The gradient of a score is ``dS = P (dP - delta)``, where dP and delta are sums of products of dout and v.
    With one visible key, dP equals delta and dS is 0. With more keys there are two rounding errors: delta is
    computed from out in the dtype of q, and dS is rounded to this dtype for the products. The gradient of a
    key sums dS over all queries that see the key. The sink has no value vector, so the gradient of its score
    is ``P (dlse - delta)``, summed over all rows.

    The tangent of a score, S', is computed in the dtype of sums. That of out, ``sum(P (S' - mean) v)``, is a
    difference of sums that may cancel, and ``P (S' - mean)`` is rounded to the dtype of q for the product,
    with independent errors for the keys of a row.
    """
    dout, dlse = upstream
    eps = torch.finfo(q.dtype).eps
    eps_of_sums = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    scale = scale_of(q, arguments.get("softmax_scale"))
    p = 1 / _keys_seen(q, k, arguments)
    queries_per_key = max(q[..., 0].numel() / max(k[..., 0].numel(), 1), 1.0)

    def noise(of: Callable[[Tensor], float]) -> dict[str, float]:
        score = score_noise(q, k, scale, of)
        lse = SCORE_UNITS * eps_of_sums * of(finite(exact["lse"]))
        allowed = {name: (score + lse) * of(finite(result)) for name, result in exact.items()}
        allowed["lse"] = score + LSE_UNITS * eps
        for name in {"max_logits", "entropy"} & exact.keys():
            allowed[name] = score * (1 + of(exact["entropy"]) if name == "entropy" else 1) + LSE_UNITS * eps
        if dout is not None:
            score_gradient = product(dout, v, of)
            if dentropy is not None:  # dS = -dH P (log P + H)
                score_gradient += of(dentropy) * (1 + of(exact["entropy"]))
            score_gradient *= scale * p * (CANCELLED_UNITS * eps_of_sums + (eps if p < 1 else 0.0))
            allowed["dq"] += score_gradient * of(finite(k))
            allowed["dk"] += score_gradient * of(finite(q)) * queries_per_key**0.5
        if tangents:
            moved = sum(product(tangents[a], b, of) for a, b in (("q", k), ("k", q)) if a in tangents)
            moved, of_sums = moved * scale, CANCELLED_UNITS * eps_of_sums
            allowed["out_tangent"] += moved * of(finite(v)) * (of_sums + (eps * p**0.5 if p < 1 else 0.0))
            allowed["lse_tangent"] += moved * of_sums
        if dout is not None and "dbias" in exact:
            scores = exact["lse"].numel() * max(k.shape[-3], 1)
            gathered = max(scores / max(exact["dbias"].numel(), 1), 1.0)  # scores per element of dbias
            allowed["dbias"] += score_gradient / scale * gathered**0.5 if scale else 0.0
        if sink is not None:
            delta = 0.0 if dout is None else product(dout, exact["out"], of)
            score_gradient = delta + (0.0 if dlse is None else of(finite(dlse)))
            if dentropy is not None:
                score_gradient += of(dentropy) * (1 + of(exact["entropy"]))
            error = score_gradient * (score + lse + CANCELLED_UNITS * eps_of_sums) + eps * delta
            allowed["dsink"] = error * of(_gathered(sink, exact["lse"]))
        return allowed

    at_most, on_average = noise(largest), noise(rms)
    return {name: (at_most[name], on_average[name]) for name in at_most}


def _gathered(sink: Tensor, lse: Tensor) -> Tensor:
    """Return the Euclidean norm of the sink's probabilities over all rows, (heads,).

    The gradient of the sink is a sum over rows, in which each row's error is multiplied by the sink's
    probability in this row. The errors of the rows are assumed to be independent and to have equal variance.
    The variance of the sum is then this variance times the sum of the squared probabilities. Therefore the
    error of the sum is the error of a row times this norm.
    """
    p = torch.exp(sink.detach().double()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    squares = p.square().sum(-1)
    return (squares if squares.dim() == 1 else squares.sum(0)).sqrt()


def _keys_seen(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> float:
    """Estimate the number of keys that a query sees, at least 1."""
    cu_seqlens_k = arguments.get("cu_seqlens_k")
    sequences = 1 if cu_seqlens_k is None else max(cu_seqlens_k.numel() - 1, 1)
    seqlen_q, seqlen_k = q.shape[-3] / sequences, k.shape[-3] / sequences
    seqused_k = arguments.get("seqused_k")
    if seqused_k is not None and seqused_k.numel():
        seqlen_k = seqused_k.double().mean().item()
    for name in ("mask", "key_padding_mask"):
        if arguments.get(name) is not None and arguments[name].numel():
            seqlen_k *= arguments[name].double().mean().item()
    left, right = arguments.get("window_size", (-1, -1))
    right = 0 if arguments.get("causal", False) else right
    left = min(left, seqlen_k) if left >= 0 else seqlen_k
    right = min(right, seqlen_q) if right >= 0 else seqlen_q
    return max(1.0, min(seqlen_k, left + right + 1))


def described(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> str:
    tensors = [f"{name}: {tuple(t.shape)} strides {t.stride()}" for name, t in (("q", q), ("k", k), ("v", v))]
    options = [f"{name}={_shown(a) if isinstance(a, Tensor) else repr(a)}" for name, a in arguments.items()]
    return f"attention({', '.join(tensors + options)}) in {q.dtype} on {q.device}"


def _shown(tensor: Tensor) -> str:
    """Describe a tensor by its elements if there are few, otherwise by shape, strides and dtype."""
    if tensor.numel() <= SHOWN_ELEMENTS:
        return str(tensor.tolist())
    return f"{tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype}"
