"""Decoding on the CPU in plain torch: every feature, and no memory that grows with the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashtile.backends.cpu.decode.attend import attend
from flashtile.backends.cpu.decode.cache import append, copy_blocks
from flashtile.backends.cpu.decode.combine import combine
from flashtile.decode.problem import AppendProblem, CombineProblem, CopyProblem, DecodeProblem


def reason_against(problem: Any, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if problem.device.type != "cpu":
        return f"it computes on the CPU, the tensors are on {problem.device}"
    return None


def prepare_decode(problem: DecodeProblem, config: None) -> Callable[..., Any]:
    return lambda q, k, v, t: attend(problem, q, k, v, *t, return_lse=problem.return_lse)


def prepare_append_kvcache(problem: AppendProblem, config: None) -> Callable[..., Any]:
    return lambda kc, vc, k, v, t: append(problem, kc, vc, k, v, *t)


def prepare_combine(problem: CombineProblem, config: None) -> Callable[..., Any]:
    return lambda out, lse, t: combine(problem, out, lse)


def prepare_copy_blocks(problem: CopyProblem, config: None) -> Callable[..., Any]:
    return lambda k, v, b, t: copy_blocks(k, v, b, *t)
