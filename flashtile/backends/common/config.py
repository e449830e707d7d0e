"""Tile and launch parameters, as every table of configurations holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch of one kernel.

    ``spill_budget`` is the number of bytes of register spills that is accepted for plain and causal problems,
    after measurement. ``features_spill_budget`` is that number with soft-cap, ALiBi, windows and unused keys
    at once.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    spill_budget: int = 0
    features_spill_budget: int = 0
