"""What a row of every table of configurations holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch of one kernel.

    ``spill_budget`` is the bytes of register spills that were measured and accepted, for plain and causal
    problems; ``features_spill_budget`` the same with soft-cap, ALiBi, windows and unused keys at once.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    spill_budget: int = 0
    features_spill_budget: int = 0
