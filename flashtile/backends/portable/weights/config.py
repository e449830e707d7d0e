"""Tiles of the attention weights kernel: those of the forward pass. None was timed for this kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.launch import padded
from flashtile.backends.portable import configure_forward
from flashtile.backends.portable.config import Config
from flashtile.problems.attention import WeightsProblem

KEYS_A_THREAD = 16
"""Keys per thread in a tile whose rows are sorted for their top weights. Each is a 64-bit number."""


@dataclass(frozen=True)
class WeightsConfig:
    tile: KernelConfig
    precision: str


def choose(problem: WeightsProblem) -> WeightsConfig:
    return of_forward(problem, configure_forward(problem))


def of_forward(problem: WeightsProblem, config: Config) -> WeightsConfig:
    """The tile for a problem whose forward pass has ``config``."""
    tile = replace(config.forward, spill_budget=0, features_spill_budget=0)
    if problem.form == "top":
        keys = max(tile.BLOCK_N, padded(problem.top)) if problem.mods is None else tile.BLOCK_N
        most = max(16, KEYS_A_THREAD * 32 * tile.num_warps // max(keys, padded(problem.top)))
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, most), BLOCK_N=keys)
    return WeightsConfig(tile, config.precision)
