"""Attention weights from q, k and lse in Triton: all weights, sums over rows, or the largest of each row."""

from __future__ import annotations

from flashtile.backends import portable
from flashtile.backends.common.config import padded
from flashtile.problems.attention import WeightsProblem

__all__ = ["configure_weights", "prepare_weights", "reason_against"]

LARGEST_TILE = 128 * 1024
"""Maximum bytes of a tile of k. With this limit the kernel fits into a GPU's shared memory."""


def reason_against(problem: WeightsProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    reason = portable.reason_against(problem, explicit)
    if reason is None and problem.device.type == "cuda":
        reason = reason_of_top(problem)
    return reason


def reason_of_top(problem: WeightsProblem) -> str | None:
    """Return why a tile of k does not fit into shared memory, or None if it fits.

    With the form "top", the kernel keeps the largest ``problem.top`` weights of a row, and a tile of k has at
    least ``problem.top`` keys.
    """
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
    from flashtile.backends.portable.weights.kernel import choose

    return choose(problem)


def prepare_weights(problem: WeightsProblem, config):
    """Return a launch ``(q, k, lse, extras) -> (weights, indices)``.

    ``indices`` is None unless the problem's form is "top".
    """
    from flashtile.backends.portable.weights.kernel import WeightsLaunch

    return WeightsLaunch(problem, config)
