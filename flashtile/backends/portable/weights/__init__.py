"""Attention weights from q, k and lse in Triton: every one, sums over rows, or the top of each row."""

from __future__ import annotations

from flashtile.attn.problem import WeightsProblem
from flashtile.backends import portable

__all__ = ["configure_weights", "prepare_weights", "reason_against"]


def reason_against(problem: WeightsProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    return portable.reason_against(problem, explicit)


def configure_weights(problem: WeightsProblem):
    from flashtile.backends.portable.weights.config import choose

    return choose(problem)


def prepare_weights(problem: WeightsProblem, config):
    """A launch ``(q, k, lse, extras) -> (weights, indices)``, indices None but for the top of each row."""
    from flashtile.backends.portable.weights.launch import Launch

    return Launch(problem, config)
