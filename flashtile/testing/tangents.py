"""Checks of attention in forward mode on this machine, by the error rule of :mod:`flashtile.testing`.

from flashtile.testing import tangents
print(tangents.check((q, k, v), (q_tangent, k_tangent, None), causal=True))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile import testing
from flashtile.api import attention as functional
from flashtile.reference import attention as reference
from flashtile.rounding import finite, largest, product, rms, scale_of
from flashtile.testing.calls import CANCELLED_UNITS, described, keys_seen, rounding_noise

FACTORS = {"out": 2.0, "lse": 2.0, "out_tangent": 3.0, "lse_tangent": 3.0}
"""Allowed error of each result, in multiples of plain PyTorch's error."""


def check(
    tensors: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    *,
    poison: bool = True,
    function: Callable[..., Any] = functional.attention,
    **arguments: Any,
) -> testing.Report:
    """Raise AssertionError unless out, lse and their tangents are within the error rule.

    The check takes the memory of standard attention in float64: several times 8 bytes per score.

    Args:
        tensors: q, k and v, as for :func:`flashtile.attention`.
        tangents: their tangents, None for a tensor without a tangent. At least one must be given.
        poison: run the call under :func:`flashtile.testing.poisoned_memory`.
        function: the function to check, with the arguments and results of :func:`flashtile.attention`.
        arguments: the other arguments of :func:`flashtile.attention`.

    Examples:
        >>> from flashtile import testing
        >>> from flashtile.testing import tangents
        >>> q, k, v = (testing.random_tensor((1, 50, 4, 32), torch.float32, "cpu", seed=i) for i in range(3))
        >>> tangents.check((q, k, v), (q.sin(), None, v.cos()), causal=True).holds
        True
    """
    if all(tangent is None for tangent in tangents):
        raise ValueError("tangents must have a tensor for at least one of q, k and v, got None for each")
    defining = {n: argument for n, argument in arguments.items() if n not in ("deterministic", "backend")}
    with testing.poisoned_memory() if poison else nullcontext():
        ours = _along(partial(function, return_lse=True, **arguments), tensors, tangents)
    standard = partial(reference.attention, **defining)
    wide = dict(zip(testing.LEARNED, _wide(map(defining.get, testing.LEARNED)), strict=True))
    exact = _along(partial(standard, **wide), _wide(tensors), _wide(tangents))
    plain = _along(standard, tensors, tangents)
    plain[1::2] = _along(partial(standard, upcast=ours[1].dtype), tensors, tangents)[1::2]
    noise = _rounding_noise(tensors, tangents, dict(zip(FACTORS, exact, strict=True)), arguments)
    comparisons = [
        testing.compare(name, *results, factor=FACTORS[name], noise=noise[name])
        for name, *results in zip(FACTORS, ours, exact, plain, strict=True)
    ]
    given = ", ".join(name for name, tangent in zip("qkv", tangents, strict=True) if tangent is not None)
    q, k, v = tensors
    call = f"along {given}: {described(q, k, v, arguments)}"
    return testing.Report(call, tuple(comparisons)).require()


def _wide(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [
        None if t is None else t.to(torch.float64, memory_format=torch.contiguous_format) for t in tensors
    ]


def _along(
    attend: Callable[..., Any], tensors: Sequence[Any], tangents: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return out, lse and their tangents."""
    given = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def of_given(*moving: Tensor) -> Any:
        every = list(tensors)
        for i, tensor in zip(given, moving, strict=True):
            every[i] = tensor
        return attend(*every)

    results, found, *_ = torch.func.jvp(
        of_given, tuple(tensors[i] for i in given), tuple(tangents[i] for i in given)
    )
    return [*results, *found]


def _rounding_noise(
    tensors: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    exact: dict[str, Tensor],
    arguments: dict[str, Any],
) -> dict[str, tuple[float, float]]:
    """Return the rounding errors (largest, rms) allowed in each result even if plain PyTorch is exact.

    Those of out and lse are as without tangents. The tangent of a score, dS, is computed in the dtype of
    sums. That of out, sum(P (dS - mean) v), is a difference of sums that may cancel, and P (dS - mean) is
    rounded to the dtype of q for the product, with independent errors for the keys of a row.
    """
    q, k, v = tensors
    (dq, dk, _), sink = tangents, arguments.get("sink")
    of_call = rounding_noise(q, k, v, sink, (None, None), None, exact, arguments)
    eps = torch.finfo(q.dtype).eps
    eps_of_sums = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    p = 1 / keys_seen(q, k, arguments)

    def more(of: Callable[[Tensor], float]) -> tuple[float, float]:
        moved = sum(product(a, b, of) for a, b in ((dq, k), (q, dk)) if a is not None and b is not None)
        moved *= scale_of(q, arguments.get("softmax_scale"))
        of_sums = CANCELLED_UNITS * eps_of_sums
        return moved * of(finite(v)) * (of_sums + (eps * p**0.5 if p < 1 else 0.0)), moved * of_sums

    of_norms = zip(*map(more, (largest, rms)), strict=True)
    for name, terms in zip(("out_tangent", "lse_tangent"), of_norms, strict=True):
        of_call[name] = tuple(a + b for a, b in zip(of_call[name], terms, strict=True))
    return of_call
