"""The forward of few queries on many keys: programs divide the keys of a query tile, as in Flash-Decoding.

512 new tokens of 8 heads on 16,384 cached keys have 32 query tiles of 128 rows. Each would take one
multiprocessor of an H200's 132, for as long as it takes to read all keys. The kernel of attention over a
cache (``hopper.decode``) divides them: each program attends to an equal range of keys, and a second kernel
merges the parts by their log-sum-exp. Dense keys are a cache without pages. Six drawn calls take 0.39 to
0.73 of the time of whole keys on an H200 (estimated: 0.37 to 0.76).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from flashtile.backends.common.device import multiprocessors
from flashtile.backends.hopper.config import heads_together, modifiers_of, padded_columns
from flashtile.backends.hopper.decode.config import HopperDecodeConfig, serves_heads
from flashtile.backends.hopper.decode.config import choose as choose_decode
from flashtile.backends.hopper.decode.launch import HopperDecodeLaunch
from flashtile.backends.hopper.forward.config import ForwardConfig
from flashtile.backends.hopper.forward.launch import HopperForwardLaunch
from flashtile.backends.hopper.forward.rounds import (
    COSTS,
    ENOUGH_ROUNDS,
    LAUNCH,
    blocks_of_rows,
    measured_costs,
    microseconds,
    plan_of,
    tiles_of_program,
    work_of_launch,
)
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.decode import CacheTensors, DecodeProblem

SLOWER = 1.2
"""Time of a block of keys in the kernel that divides them, relative to the forward's: 1,024 tokens of 32
heads on 8,192 keys take 201 us on an H200, and the forward's cost of their blocks is 173 us."""
COMBINE = 8.0
"""Estimated microseconds that merging the parts adds to a launch."""
WORTHWHILE = 0.8
"""Keys are divided if the estimated time is below this share: the estimates err by a tenth."""


@dataclass(frozen=True)
class DividedConfig:
    """Configuration of a forward whose keys are divided.

    ``whole`` serves tensors that TMA cannot address as a cache.
    """

    KERNEL: ClassVar[str] = "keys divided among programs"

    decode: HopperDecodeConfig
    whole: ForwardConfig


def over_cache(problem: Problem) -> DecodeProblem:
    """Return the description of an equal call over a cache."""
    return DecodeProblem(
        **{name: getattr(problem, name) for name in SHARED},
        capacity=problem.seqlen_k, page_size=0, num_blocks=problem.batch, seqlen_new=0,
        cache_dtype=problem.dtype, out_dtype=problem.out_dtype,
    )  # fmt: skip


SHARED = tuple(DecodeProblem.__dataclass_fields__.keys() & Problem.__dataclass_fields__.keys())


def divided(problem: Problem, config: ForwardConfig) -> DividedConfig | None:
    """Return the configuration with divided keys if it is estimated to be faster than ``config``, or None.

    Lengths of packed sequences and of ``seqused_k`` are known on the device only, and no time is estimated.
    """
    if problem.varlen or problem.seqused_k or problem.partial or problem.statistics or modifiers_of(problem):
        return None
    if problem.needs_general_mask is not None or not serves_heads(problem.head_dim, problem.head_dim_v):
        return None
    plan = plan_of(problem, config)
    if tiles_of_program(problem, plan) >= ENOUGH_ROUNDS:
        return None
    decode = choose_decode(over_cache(problem))
    widths = padded_columns(problem.head_dim), padded_columns(problem.head_dim_v)
    tile = decode.tile
    own = measured_costs(widths, config)
    costs = COSTS.get((*widths, decode.warpgroups, tile.BLOCK_N, 1))
    if own is None or costs is None:
        return None
    together = heads_together(problem.group_size)
    blocks = sum(blocks_of_rows(problem, tile.BLOCK_M // together, tile.BLOCK_N))
    heads = problem.batch * problem.num_heads_q // together
    of_program = math.ceil(heads * blocks / multiprocessors(problem.device))
    time = LAUNCH + COMBINE + costs.tile + SLOWER * costs.block * of_program
    if time >= WORTHWHILE * microseconds(work_of_launch(problem, plan, own)):
        return None
    return DividedConfig(decode, config)


class DividedForwardLaunch:
    """Launch for tensors of one signature: ``(q, k, v, extras[, out, lse]) -> (out, lse)``."""

    writes_into = True

    def __init__(self, problem: Problem, config: DividedConfig) -> None:
        self._over_keys = HopperDecodeLaunch(over_cache(problem), config.decode)
        self._whole = HopperForwardLaunch(problem, config.whole)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, *into: Any
    ) -> tuple[Tensor, Tensor]:
        # TMA addresses a cache as rows of one tensor, so sequences must be whole rows apart.
        if any(t.shape[0] > 1 and t.stride(0) % t.stride(1) for t in (k, v)):
            return self._whole(q, k, v, extras, *into)
        tensors = CacheTensors(alibi_slopes=extras.alibi_slopes, sink=extras.sink)
        return self._over_keys(q, k, v, tensors, *into)  # type: ignore[return-value]  # lse is returned
