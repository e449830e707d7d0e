"""The length of a training run and its learning rate: warm-up, plateau, decay (Hu 2024, arXiv:2404.06395).

Warm-up and plateau do not depend on the length of the run. So runs of different length make the same first
steps, and a run that has seconds rather than steps can find its length while it is on the plateau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PLATEAU_ENDS = 0.7
"""Share of the run after which the learning rate falls, linearly towards 0."""

FEWEST_STEPS = 60
"""Of a run that has seconds, however slow the machine is."""


@dataclass
class Schedule:
    """The length of one run: ``steps``, or as many as fit in ``seconds``."""

    peak: float
    warm_up: int
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            given = f"steps={self.steps} and seconds={self.seconds}"
            raise ValueError(f"a run needs steps or seconds, got {given}")

    def finished(self, step: int, elapsed: float) -> bool:
        """Whether ``step`` steps in ``elapsed`` seconds are all; call it before each step.

        A machine that slows down after the plateau may take twice the ``seconds``, no more.
        """
        if self.seconds is not None and step >= FEWEST_STEPS:
            if self.steps is None and elapsed >= PLATEAU_ENDS * self.seconds:
                self.steps = math.ceil(step / PLATEAU_ENDS)
            if elapsed > 2 * self.seconds:
                return True
        return self.steps is not None and step >= self.steps

    def rate(self, step: int) -> float:
        """Learning rate of step ``step``, from 0."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        if self.steps is None or step < PLATEAU_ENDS * self.steps:
            return self.peak
        return self.peak * (self.steps - step) / ((1 - PLATEAU_ENDS) * self.steps + 1)

    def share(self, step: int, elapsed: float) -> float:
        """How much of the run is done, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.seconds is not None
        return min(PLATEAU_ENDS, elapsed / self.seconds if self.seconds else 1.0)
