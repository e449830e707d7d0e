"""Attention weights for inspection, ``exp(score - lse)``, from q, k and the log-sum-exp.

A separate pass computes them tile by tile and stores only the requested form. Attention itself never has the
final weights: it accumulates tiles relative to a running maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashtile.checks.attention import check_forward, check_lse, check_traced
from flashtile.checks.conversions import (
    as_int,
    as_masking,
    as_operands,
    make_options,
    optional_tensors,
    refuse_unknown,
)
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

MAX_TOP = 128
"""Largest number of weights per row that the kernels keep in registers."""

Form = bool | str | int
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


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    form: Literal["full", "columns"] | int = "full",
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
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """Return the weights of :func:`flashtile.attention`, their column sums, or the largest of each row.

    Weights are the probabilities that multiply v, before dropout. They have no gradient: a backward pass
    through them raises NotImplementedError. With a sink, which ``lse`` includes, a row sums to less than 1.

    Args:
        q, k: as for :func:`flashtile.attention`.
        lse: the log-sum-exp that a call of :func:`flashtile.attention` returned (``return_lse=True``).
        form: "full" for every weight; "columns" for the sum of each key's weights over all rows of a head,
            which cache eviction policies use (H2O, Zhang et al. 2023, arXiv:2306.14048); an int from 1 to 128
            for that many of the largest in each row. The memory for "columns" or an int grows only linearly
            with the sequence lengths.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: those of the call that
            gave lse.
        softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes: those of that call.
        mask, key_padding_mask, bias, score_mod, mask_mod, block_mask, backend: those of that call.

    Returns:
        "full": (batch, heads_q, seqlen_q, seqlen_k) in q's dtype; packed sequences are padded with zeros to
        the longest. "columns": (batch, heads_q, seqlen_k), or (heads_q, total_k) with cu_seqlens, float32
        (float64 for float64 inputs). An int: :class:`flashtile.api.weights.TopWeights`. A key that a row
        does not see has weight 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.attention`; for an unknown ``form``;
            for an ``lse`` of another shape or dtype.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 128, 4, 64).unbind()  # each (batch, seqlen, heads, head_dim)
        >>> out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
        >>> weights = flashtile.attention_weights(q, k, lse, causal=True)
        >>> weights.shape
        torch.Size([1, 4, 128, 128])
        >>> torch.testing.assert_close((weights @ v.transpose(1, 2)).transpose(1, 2), out)
        >>> flashtile.attention_weights(q, k, lse, 8, causal=True).indices.shape
        torch.Size([1, 4, 128, 8])
    """
    if unknown:
        refuse_unknown("attention_weights", unknown)
    checked = check_form("form", form)
    options = make_options(
        as_masking(causal, window_size, attention_chunk=attention_chunk),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        backend=backend,
    )
    extras = optional_tensors(
        q, k, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        seqused_k=seqused_k, alibi_slopes=alibi_slopes, mask=mask, key_padding_mask=key_padding_mask,
        bias=bias,
    )  # fmt: skip
    q, k = as_operands(q, k)
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        from flashtile.api import masks

        extras, options = masks.with_functions(q, k, extras, options, score_mod, mask_mod, block_mask)
    return weights_of(q, k, lse, extras, options, checked)


def check_form(name: str, form: Form) -> tuple[str, int]:
    """Parse ``form`` into (form, number of weights per row). True means "full".

    ``name`` is the argument's name in errors.
    """
    if form is True or (isinstance(form, str) and form == "full"):
        return "full", 0
    if isinstance(form, str) and form == "columns":
        return "columns", 0
    allowed = f'{name} must be "full", "columns" or an int from 1 to {MAX_TOP}'
    if isinstance(form, str):
        raise ValueError(f"{allowed}, got {form!r}")
    try:
        top = as_int(name, form)
    except TypeError:
        raise TypeError(f"{allowed}, got {type(form).__name__} {form!r}") from None
    if not 1 <= top <= MAX_TOP:
        raise ValueError(f"{allowed}, got {top}")
    return "top", top


def weights_of(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    extras: OptionalTensors,
    options: Options,
    form: tuple[str, int],
) -> Tensor | TopWeights:
    """Compute :func:`attention_weights` for normalised arguments of a call, ignoring its dropout."""
    slopes = extras.alibi_slopes
    extras = extras._replace(
        sink=None, rng_state=None, alibi_slopes=slopes.detach() if isinstance(slopes, Tensor) else slopes
    )
    own = options._asdict() | {"dropout_p": 0.0, "deterministic": False, "form": form[0], "top": form[1]}
    if isinstance(extras, ModifiedExtras):
        of_weights = ModifiedWeightsOptions(**own | {"learned": 0})  # captured tensors get no gradient here
    else:
        of_weights = WeightsOptions(**own)
        if all(tensor is None for tensor in extras):
            extras = NO_EXTRAS
    found = WEIGHTS((q, k, lse), extras, of_weights)
    weights, indices = found
    return TopWeights(weights, indices) if form[0] == "top" else weights


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
