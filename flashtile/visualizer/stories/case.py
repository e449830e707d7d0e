"""One of the runs that a story puts side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashtile.algorithms import Trace
from flashtile.visualizer.packing import pack


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        name: of the case; its words in the story's texts are ``case_NAME`` and ``about_NAME``.
        trace: what happened.
        facts: what the picture needs beside it, as JSON has it: inputs, results, errors.
        variant: where a story has several inputs; all cases with the same one are shown side by side.
    """

    name: str
    trace: Trace
    facts: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    def as_record(self) -> dict[str, Any]:
        return {
            "name": self.name, "variant": self.variant, "packed": pack(self.trace), "facts": self.facts,
        }  # fmt: skip


def numbers(tensor: Tensor, digits: int = 6) -> list[Any]:
    """A tensor as lists that JSON holds; what is no finite number is its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)

    return plain(tensor.tolist())
