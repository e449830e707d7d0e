"""Shared parts of the launches of all Hopper kernels."""

from __future__ import annotations

import torch

from flashtile.backends.common.device import Target, multiprocessors
from flashtile.problems.attention import Problem
from flashtile.problems.common import LOG2_E
from flashtile.problems.decode import DecodeProblem


def persistent_programs(num_tiles: int, device: torch.device | Target, sharing: int = 1) -> int:
    """Return the number of programs of a persistent kernel: ``sharing`` per SM, at most one per work tile."""
    return min(sharing * multiprocessors(device), num_tiles)


def score_numbers(problem: Problem | DecodeProblem) -> dict[str, float]:
    """Return the factors that turn Q K^T into scores in log2 units, by their names in ``Numbers``."""
    softcap = problem.softcap
    return {
        "scale_log2": (softcap or problem.softmax_scale) * LOG2_E,
        "softcap_rate": problem.softmax_scale / softcap if softcap else 0.0,
        "softcap_log2": softcap * LOG2_E,
    }
