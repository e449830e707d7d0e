"""Attention weights from q, k and lse in Triton: every one, sums over rows, or the top of each row."""

from __future__ import annotations

from flashtile.backends import portable
from flashtile.backends.common.launch import padded
from flashtile.problems.attention import WeightsProblem

__all__ = ["configure_weights", "prepare_weights", "reason_against"]

LARGEST_TILE = 128 * 1024
"""Bytes of a tile of keys with which the kernel fits the GPUs that take such heads."""


def reason_against(problem: WeightsProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    reason = portable.reason_against(problem, explicit)
    if reason is None and problem.device.type == "cuda":
        reason = reason_of_top(problem)
    return reason


def reason_of_top(problem: WeightsProblem) -> str | None:
    """Why the keys of a tile, at least as many as are kept of a row, do not fit; None if they do."""
    if problem.form != "top" or problem.mods is not None:
        return None
    tile = padded(problem.head_dim) * padded(problem.top) * problem.dtype.itemsize
    if tile <= LARGEST_TILE:
        return None
    return (
        f"the largest {problem.top} weights of a row, of heads of {problem.head_dim} in {problem.dtype}, "
        "need more shared memory than a block has"
    )


def configure_weights(problem: WeightsProblem):
    from flashtile.backends.portable.weights.launch import choose

    return choose(problem)


def prepare_weights(problem: WeightsProblem, config):
    """A launch ``(q, k, lse, extras) -> (weights, indices)``, indices None but for the top of each row."""
    from flashtile.backends.portable.weights.launch import WeightsLaunch

    return WeightsLaunch(problem, config)
