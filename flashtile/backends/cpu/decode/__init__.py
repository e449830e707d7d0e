"""Decoding on the CPU in plain torch, with all features, without storing all scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashtile.backends.cpu.config import Fused, configure_decode
from flashtile.backends.cpu.decode import one_query
from flashtile.backends.cpu.decode.attend import attend, combine
from flashtile.backends.cpu.decode.cache import append, copy_blocks
from flashtile.backends.cpu.precision import with_exact_products
from flashtile.problems.decode import AppendProblem, CombineProblem, CopyProblem, DecodeProblem

__all__ = [
    "configure_decode",
    "prepare_append_kvcache",
    "prepare_combine",
    "prepare_copy_blocks",
    "prepare_decode",
    "reason_against",
]


def reason_against(problem: Any, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if problem.device.type != "cpu":
        return f"it computes on the CPU, the tensors are on {problem.device}"
    return None


def prepare_decode(problem: DecodeProblem, config: Fused | None) -> Callable[..., Any]:
    attend_any = partial(attend, problem) if config is None else partial(one_query.attend, problem, config)
    return with_exact_products(attend_any)


def prepare_append_kvcache(problem: AppendProblem, config: None) -> Callable[..., Any]:
    return partial(append, problem)


def prepare_combine(problem: CombineProblem, config: None) -> Callable[..., Any]:
    return partial(combine, problem)


def prepare_copy_blocks(problem: CopyProblem, config: None) -> Callable[..., Any]:
    return copy_blocks
