"""Checks of attention over a cache on this machine, by the error rule of :mod:`flashtile.testing`.

    from flashtile.decode import testing
    print(testing.check(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True))

The caches are compared bit by bit, except for new tokens that the call rotates or scales.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flashtile.api.decode import flash_attn_with_kvcache
from flashtile.problems.decode import FP8
from flashtile.reference import decode as reference
from flashtile.rounding import finite, largest, score_noise
from flashtile.testing import LSE_UNITS, Report, compare, poisoned_memory

IMPLEMENTATION_ARGUMENTS = ("num_splits", "split_size", "softmax_max", "backend", "debug_checks")
"""Arguments that decide how a result is computed, but do not change the exact result."""


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    poison: bool = True,
    **arguments: Any,
) -> Report:
    """Raise AssertionError unless the call is within the error rule and writes exactly the new tokens.

    The rule is that of :mod:`flashtile.testing`. The caches are not changed, because the checked call gets
    copies. The check needs as much memory as standard attention in float64.

    Args:
        q, k_cache, v_cache, k, v: as for :func:`flashtile.flash_attn_with_kvcache`.
        poison: run the call under :func:`flashtile.testing.poisoned_memory`.
        arguments: the other arguments of :func:`flashtile.flash_attn_with_kvcache`; ``mass`` is not changed.

    Returns:
        The report of out and lse, and of mass if it is given.
    """
    ours_k, ours_v = _copy(k_cache), _copy(v_cache)
    mass = arguments.pop("mass", None)
    ours_mass = None if mass is None else _copy(mass)
    with poisoned_memory() if poison else nullcontext():
        out, lse = flash_attn_with_kvcache(
            q, ours_k, ours_v, k, v, return_softmax_lse=True, mass=ours_mass, **arguments
        )
    exact_mass: Any = None if mass is None else mass.to(torch.float64, copy=True)
    plain_mass: Any = None if mass is None else mass.to(lse.dtype, copy=True)
    defining = {name: value for name, value in arguments.items() if name not in IMPLEMENTATION_ARGUMENTS}
    call = (q, k_cache, v_cache, k, v)
    exact = reference.attention_with_kvcache(*call, upcast=torch.float64, mass=exact_mass, **defining)
    plain = reference.attention_with_kvcache(*call, mass=plain_mass, **defining)
    plain_lse = reference.attention_with_kvcache(*call, upcast=lse.dtype, **defining)[1]
    noise = score_noise(q, exact[2], arguments.get("softmax_scale"), largest)
    noise += LSE_UNITS * torch.finfo(q.dtype).eps
    # Where the terms of out cancel to almost 0, its error is as large as the rounding of the largest term,
    # while plain PyTorch may be exact by chance.
    sums = torch.finfo(lse.dtype).eps * largest(finite(exact[3]))
    if arguments.get("v_descale") is not None:
        sums *= largest(finite(arguments["v_descale"]))
    compared = [
        compare("out", out, exact[0], plain[0], noise=(sums, sums)),
        compare("lse", lse, exact[1], plain_lse, noise=(noise, noise)),
    ]
    if ours_mass is not None:
        # A probability is off by as much, relatively, as its score and lse are.
        most = float(exact_mass.max()) if exact_mass.numel() else 0.0
        compared.append(
            compare("mass", ours_mass, exact_mass, plain_mass, noise=(noise * most, noise * most))
        )
    report = Report(
        f"flash_attn_with_kvcache({tuple(q.shape)} over {tuple(k_cache.shape)} in {q.dtype}, "
        f"{k_cache.dtype}, {', '.join(sorted(arguments))})",
        tuple(compared),
    ).require()
    computed = arguments.get("rotary_cos") is not None or arguments.get("k_descale") is not None
    check_cache("k_cache", ours_k, exact[2], k_cache, computed)
    check_cache("v_cache", ours_v, exact[3], v_cache, arguments.get("v_descale") is not None)
    return report


def check_cache(name: str, actual: Tensor, expected: Tensor, before: Tensor, computed: bool) -> None:
    """Raise AssertionError unless a cache holds the new tokens and all other bits are unchanged.

    Args:
        name: name of the cache in errors.
        actual: the cache after the call.
        expected: the cache that the reference returns.
        before: the cache before the call.
        computed: whether the new tokens were rotated or scaled, so that their last bit may differ.
    """
    written = _bits(expected) != _bits(before)
    if not torch.equal(_bits(actual)[~written], _bits(before)[~written]):
        where = ((_bits(actual) != _bits(before)) & ~written).nonzero()[0].tolist()
        raise AssertionError(f"{name} must be unchanged at {where}, but the call has written there")
    got, target = actual[written].double(), expected[written].double()
    allowed = torch.zeros_like(target)
    if computed:
        allowed = torch.finfo(actual.dtype).eps * target.abs()
        allowed += 4 * torch.finfo(torch.float32).eps * (target.abs().max() if target.numel() else 0.0)
    right = ((got - target).abs() <= allowed) | (got.isnan() & target.isnan())
    if not right.all():
        i = int((~right).nonzero()[0])
        where = written.nonzero()[i].tolist()
        raise AssertionError(f"{name} at {where} is {got[i].item()}, expected {target[i].item()}")


def _copy(cache: Tensor) -> Tensor:
    """Copy a cache, and keep its strides."""
    copy = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    return copy.copy_(cache)


def _bits(cache: Tensor) -> Tensor:
    if cache.dtype == FP8:
        return cache.view(torch.uint8)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return cache.view(integers[cache.itemsize])
