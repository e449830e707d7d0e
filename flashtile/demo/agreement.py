"""Whether two exact attentions train alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CurveTolerance:
    """How far apart two losses of one step may be, in nats a byte.

    Two exact attentions differ by rounding only, which training amplifies from step to step. So the first
    steps are held to rounding, where a gradient that is wrong by a few percent shows, and the whole curve is
    held more loosely.
    """

    early: float
    whole: float


CURVE_TOLERANCES = {"float32": CurveTolerance(1e-5, 0.05), "bfloat16": CurveTolerance(0.01, 0.2)}
EARLY_STEPS = 20


@dataclass(frozen=True)
class Agreement:
    """Two loss curves, in nats a byte, from the same start and batches, over the steps that both made."""

    steps: int
    early_steps: int
    early_difference: float
    largest_difference: float
    tolerance: CurveTolerance

    @property
    def holds(self) -> bool:  # False for NaN
        allowed = self.tolerance
        return self.early_difference <= allowed.early and self.largest_difference <= allowed.whole


def agreement(losses: Sequence[float], twin: Sequence[float], dtype: str) -> Agreement:
    """Compare two curves over their common steps; there must be at least one."""
    differences = [abs(a - b) for a, b in zip(losses, twin, strict=False)]
    early = differences[:EARLY_STEPS]
    tolerance = CURVE_TOLERANCES[dtype]
    return Agreement(len(differences), len(early), _largest(early), _largest(differences), tolerance)


def _largest(differences: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, differences)) else max(differences)
