"""The largest score of each sequence and head from those of rows, in Triton."""

from __future__ import annotations

from flashtile.backends.portable import reason_of_device
from flashtile.problems.statistics import MaxLogitsProblem

__all__ = ["prepare_max_logits", "reason_against"]


def reason_against(problem: MaxLogitsProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    return reason_of_device(problem.device, {problem.dtype}, explicit)


def prepare_max_logits(problem: MaxLogitsProblem, config: None):
    """Return a launch ``(rows, tensors) -> largest``, which is (sequences, heads)."""
    from flashtile.backends.portable.statistics.kernel import MaxLogitsLaunch

    return MaxLogitsLaunch(problem)
