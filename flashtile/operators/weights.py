"""Attention weights as an operation: ``exp(score - lse)`` from q, k and the log-sum-exp.

A separate pass computes them tile by tile and stores only the requested form. Attention itself never has the
final weights: it accumulates tiles relative to a running maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.attention import check_forward, check_lse, check_traced
from flashtile.op.operation import Operation
from flashtile.operators.functions import check_values
from flashtile.problems.attention import (
    FURTHER_DEFAULTS,
    FURTHER_OPTIONS,
    NO_EXTRAS,
    ModifiedExtras,
    OptionalTensors,
    Options,
    WeightsProblem,
)
from flashtile.problems.common import extended

_NO_GRADIENT = "weights have none (those of out and lse are complete): call .detach() on them"


class TopWeights(NamedTuple):
    """The largest weights of each row, in descending order.

    Attributes:
        weights: (batch, heads_q, seqlen_q, k), or (heads_q, total_q, k) with cu_seqlens; float32 (float64 for
            float64 inputs).
        indices: int64, of the same shape: the key of each weight, counted from 0 in its sequence. Where a row
            sees fewer than k keys, the remaining weights are 0 and their indices -1.
    """

    weights: Tensor
    indices: Tensor


WeightsOptions: Any = extended("WeightsOptions", Options, {"form": "str", "top": "int"})
ModifiedWeightsOptions: Any = extended(
    "ModifiedWeightsOptions", WeightsOptions, FURTHER_OPTIONS, FURTHER_DEFAULTS
)


def _check(q: Tensor, k: Tensor, lse: Tensor, extras: Any, options: Any) -> None:
    check_forward(q, k, k, extras, options)
    check_lse(lse, q, extras.cu_seqlens_q is not None)


def _fake(q: Tensor, k: Tensor, lse: Tensor, extras: Any, options: Any) -> tuple[Tensor, Tensor | None]:
    problem = WEIGHTS.describe(q, k, lse, extras, options)
    weights = q.new_empty(problem.weights_shape, dtype=problem.weights_dtype)
    indices = q.new_empty(problem.weights_shape, dtype=torch.int64) if options.form == "top" else None
    return weights, indices


def _with_keys_as_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a function of the tensors q, k and v to q, k and lse, by passing k as v."""
    return lambda q, k, lse, extras, options: function(q, k, k, extras, options)


WEIGHTS = Operation(
    "weights",
    tensors=("q", "k", "lse"),
    optional=NO_EXTRAS,
    options=WeightsOptions,
    extended_to=(ModifiedExtras, ModifiedWeightsOptions),
    results=2,
    check=_check,
    describe=_with_keys_as_values(WeightsProblem.from_tensors),
    fake=_fake,
    check_values=_with_keys_as_values(check_values),
    check_traced=_with_keys_as_values(check_traced),
    part="weights",
    no_gradient=_NO_GRADIENT,
)


def weights_of(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    extras: OptionalTensors,
    options: Options,
    form: tuple[str, int],
) -> Tensor | TopWeights:
    """Return the weights of a call, before dropout. ``form`` is (form, number of weights per row)."""
    slopes = extras.alibi_slopes
    extras = extras._replace(
        sink=None, rng_state=None, alibi_slopes=slopes.detach() if isinstance(slopes, Tensor) else slopes
    )
    own = options._replace(dropout_p=0.0, deterministic=False, max_logits=False, entropy=False)._asdict()
    own |= {"form": form[0], "top": form[1]}
    if isinstance(extras, ModifiedExtras):
        of_weights = ModifiedWeightsOptions(**own | {"learned": 0})  # captured tensors get no gradient here
    else:
        of_weights = WeightsOptions(**own)
        if all(tensor is None for tensor in extras):
            extras = NO_EXTRAS
    weights, indices = WEIGHTS((q, k, lse), extras, of_weights)
    return TopWeights(weights, indices) if form[0] == "top" else weights
