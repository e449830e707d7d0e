"""Tangents, and derivatives of gradients: standard attention in plain PyTorch, which can differentiate it.

Kernels compute out, lse and first gradients. Further derivatives are rare and are computed with
:func:`flashtile.reference.attention.attention` in float32 (float64 for float64 inputs). Several tensors of
(batch, heads_q, seqlen_q, seqlen_k) are then in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.problems.attention import Extras, Options
from flashtile.reference import attention as reference

Attend = Callable[..., tuple[Tensor, Tensor]]
"""Function from (q, k, v, *learned) to (out, lse)."""

LEARNED = ("sink", "bias")
"""Extras that can have derivatives."""


def plain(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, **functions: Any
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) as the kernels would; ``functions`` are those of the reference."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = reference.attention(
        q, k, v, **extras._asdict(), max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k,
        softmax_scale=options.softmax_scale, causal=options.causal,
        window_size=(options.window_left, options.window_right), attention_chunk=options.attention_chunk,
        softcap=options.softcap, dropout_p=options.dropout_p, upcast=wide, **functions,
    )  # fmt: skip
    return out if options.partial else out.to(q.dtype), lse


def of_call(extras: Extras, options: Options) -> tuple[Attend, list[Tensor]]:
    """Return :func:`plain` as a function of the differentiable tensors, and those besides q, k and v."""
    names = [name for name in LEARNED if getattr(extras, name) is not None]

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        return plain(q, k, v, extras._replace(**dict(zip(names, learned, strict=True))), options)

    return attend, [getattr(extras, name) for name in names]


def gradients(
    attend: Attend, dout: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``tensors`` (q, k, v, *learned) from those of out and lse; None means zero."""
    results, pull, *_ = torch.func.vjp(attend, *tensors)
    return pull(_filled((dout, dlse), results))


def of_gradients(
    attend: Attend,
    cotangents: Sequence[Tensor | None],
    dout: Tensor | None,
    dlse: Tensor | None,
    tensors: Sequence[Tensor],
) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
    """Differentiate :func:`gradients`: return the contributions to dout, dlse and ``tensors``."""
    given = [t for t in (dout, dlse) if t is not None]

    def first(*arguments: Tensor) -> tuple[Tensor, ...]:
        of_results = iter(arguments[: len(given)])
        own_dout, own_dlse = (None if t is None else next(of_results) for t in (dout, dlse))
        return gradients(attend, own_dout, own_dlse, arguments[len(given) :])

    results, pull, *_ = torch.func.vjp(first, *given, *tensors)
    found = list(pull(_filled(cotangents, results)))
    ddout = None if dout is None else found.pop(0)
    ddlse = None if dlse is None else found.pop(0)
    return ddout, ddlse, found


def _filled(cotangents: Sequence[Tensor | None], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pairs = zip(cotangents, results, strict=True)
    return tuple(torch.zeros_like(r) if c is None else c.to(r.dtype) for c, r in pairs)
