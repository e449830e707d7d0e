"""Second derivatives, and tangents that no kernel computes, with standard attention in plain PyTorch.

Kernels compute out, lse, first gradients and most tangents. Further derivatives are rare and are computed
with :mod:`flashtile.reference.attention` in float32 (float64 for float64 inputs). Several tensors of
(batch, heads_q, seqlen_q, seqlen_k) are then in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.masks.block_mask import listed
from flashtile.masks.evaluate import evaluate
from flashtile.masks.program import parse
from flashtile.problems.attention import ModifiedExtras, captured_tensors, learned_of
from flashtile.problems.masks import CAPTURED
from flashtile.reference import attention as reference

Attend = Callable[..., tuple[Tensor, Tensor]]
"""Function from (q, k, v, *learned) to (out, lse). ``learned`` are a call's other differentiable tensors."""

LEARNED = ("sink", "bias")
"""Fields of OptionalTensors that can have derivatives."""


def plain(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) in plain PyTorch, in float32 (float64 for float64 inputs).

    The results have the dtypes of the kernels' results.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = reference.of_call(q, k, v, extras, options, upcast=wide, **_functions(extras, options))
    return out if options.partial else out.to(q.dtype), lse


def of_call(extras: Any, options: Any) -> tuple[Attend, dict[str, Tensor]]:
    """Return (attend, learned) of a call.

    ``learned`` maps names to the call's sink, bias and captured tensors, except those that are absent or
    cannot need a gradient. ``attend`` is :func:`plain` as a function of q, k, v and these tensors.
    """
    names = (*LEARNED, *(CAPTURED[i] for i in learned_of(options)))
    learned = {name: getattr(extras, name) for name in names if getattr(extras, name) is not None}

    def attend(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return plain(q, k, v, extras._replace(**dict(zip(learned, given, strict=True))), options)

    return attend, learned


def _functions(extras: Any, options: Any) -> dict[str, Any]:
    """Return ``score_mod`` and ``mask_mod`` of a call as arguments of the reference."""
    functions: dict[str, Any] = {}
    if isinstance(extras, ModifiedExtras):
        captured = captured_tensors(extras)
        if options.score_mod:
            functions["score_mod"] = partial(_score, options.score_mod, captured)
        if options.mask_mod or options.block_q:
            functions["mask_mod"] = partial(_seen, extras, options, captured)
    return functions


def _score(text: str, captured: Sequence[Tensor], score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Any:
    inputs = {"score": score, "b": b, "h": h, "q": i, "kv": j}
    return evaluate(parse(text), inputs, captured, score.dtype, "score_mod", differentiable=True)[0]


def _seen(extras: Any, options: Any, captured: Sequence[Tensor], b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return which scores are visible under ``mask_mod`` and the block mask.

    In full blocks of the block mask all scores are visible, and in empty blocks none. Everywhere else
    ``mask_mod`` decides.
    """
    seen: Any = True
    if options.mask_mod:
        inputs = {"b": b, "h": h, "q": i, "kv": j}
        (seen,) = evaluate(parse(options.mask_mod), inputs, captured)
    if options.block_q:
        lists = (extras.kv_num_blocks, extras.kv_indices), (extras.full_kv_num_blocks, extras.full_kv_indices)
        part, full = (listed(*of_rows) for of_rows in lists)
        sequences, heads = part.shape[:2]
        place = b % sequences, h % heads, i // options.block_q, j // options.block_kv
        seen = (part[place] & seen) | full[place]
    return seen


def gradients(
    attend: Attend, dout: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``tensors`` (q, k, v, *learned) from dout and dlse, where None means zero."""
    results, pull, *_ = torch.func.vjp(attend, *tensors)
    return pull(_filled((dout, dlse), results))


def of_pass(
    run: Callable[[Sequence[Tensor | None], Sequence[Tensor]], tuple[Tensor, ...]],
    cotangents: Sequence[Tensor | None],
    optional: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Differentiate ``run(optional, tensors)``, such as :func:`gradients` or :func:`along`.

    ``cotangents`` are the gradients of its results. Returns the gradients of ``optional``, None for each that
    is None, and those of ``tensors``.
    """
    places = range(len(optional))

    def of_given(given: dict[int, Tensor], *others: Tensor) -> tuple[Tensor, ...]:
        return run(list(map(given.get, places)), others)

    results, pull, *_ = torch.func.vjp(of_given, _given(optional), *tensors)
    of_optional, *others = pull(_filled(cotangents, results))
    return list(map(of_optional.get, places)), others


def along(
    attend: Attend, tensors: Sequence[Tensor], directions: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Compute the results of ``attend`` and their tangents. Directions are those of the first tensors.

    Gradients are linear in the cotangents, and their derivative by these is the tangent. So reverse mode is
    enough, which nests in every transform. Two levels of forward mode do not nest outside of ``torch.func``.
    """
    given = _given(directions)
    if not given:
        results = attend(*tensors)
        return *results, *map(torch.zeros_like, results)

    def of_moving(moving: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        return attend(*(moving.get(i, tensor) for i, tensor in enumerate(tensors)))

    results, pull, *_ = torch.func.vjp(of_moving, {i: tensors[i] for i in given})
    _, push, *_ = torch.func.vjp(pull, tuple(map(torch.zeros_like, results)))
    (found,) = push((given,))
    return *results, *found


def _given(tensors: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Return the tensors that are not None, by their index."""
    return {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}


def _filled(cotangents: Sequence[Tensor | None], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pairs = zip(cotangents, results, strict=True)
    return tuple(torch.zeros_like(r) if c is None else c.to(r.dtype) for c, r in pairs)
