"""Tangents and second derivatives of calls with functions: see :mod:`flashtile.operators.derivatives`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flashtile.masks.block_mask import listed
from flashtile.masks.evaluate import evaluate
from flashtile.operators import derivatives
from flashtile.problems.mask_program import parse


def plain(
    q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any, captured: Sequence[Tensor], call: tuple
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a call with functions; ``call`` is its extras and options without them."""
    functions: dict[str, Any] = {}
    if options.score_mod:
        functions["score_mod"] = partial(_evaluated, options.score_mod, captured, "score_mod")
    if options.mask_mod or options.block_q:
        functions["mask_mod"] = partial(_seen, extras, options, captured)
    return derivatives.plain(q, k, v, *call, **functions)


def _evaluated(
    text: str, captured: Sequence[Tensor], kind: str, score: Tensor, b: Any, h: Any, i: Any, j: Any
) -> Any:
    inputs = {"score": score, "b": b, "h": h, "q": i, "kv": j}
    return evaluate(parse(text), inputs, captured, score.dtype, kind, differentiable=True)[0]


def _seen(extras: Any, options: Any, captured: Sequence[Tensor], b: Any, h: Any, i: Any, j: Any) -> Any:
    """Apply the mask in a block mask's partial blocks; full blocks are all visible, empty ones all hidden."""
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
