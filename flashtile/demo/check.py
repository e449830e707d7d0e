"""One thing that the demo promises, and whether it held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    name: str
    holds: bool
    detail: str
