"""Configurations of the Hopper FP8 kernel: data, chosen by head sizes, mask and the layout of v."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from flashtile.backends.hopper.config import is_windowed, padded_columns
from flashtile.backends.hopper.forward.config import ForwardConfig, ForwardVariant
from flashtile.problems.fp8 import Fp8Problem


@dataclass(frozen=True)
class Fp8Config(ForwardConfig):
    """Tile and pipeline of the FP8 forward kernel; the fields are those of the 16-bit kernel.

    BLOCK_N divides 128, the number of keys that share a scale. ``Q_IN_REGISTERS`` is 0 or the padded head
    size.
    """


@dataclass(frozen=True)
class Fp8Variant(ForwardVariant):
    """Compile-time parameters of the FP8 kernel, which takes them as one constant."""

    V_TRANSPOSED: bool
    """Whether memory holds V^T, with keys in the order of P's registers; else the producer transposes V."""
    BLOCK_SCALES: bool
    """Whether each block of a head has a scale; otherwise each head of a sequence has one. Blocks of packed
    sequences are numbered consecutively."""
    HAS_Q_SCALE: bool
    HAS_K_SCALE: bool
    HAS_V_SCALE: bool
    Q_SCALE_GROUP: int
    """Query heads that share a scale of q."""


PRODUCER_WARPS = {True: 1, False: 4}
"""Warps of the producer, by whether memory holds V^T."""
REGISTERS = {(2, True): (240, 24), (2, False): (232, 40), (3, True): (160, 32), (3, False): (160, 32)}
"""Registers per thread of (consumers, producer), by (consumer warpgroups, whether memory holds V^T).

A producer that transposes V needs more than 24, and two consumers give them: 232 * 256 + 40 * 128 = 64512,
the registers at launch. Three consumers leave 65536 - 160 * 384 = 32 * 128."""

F = Fp8Config

# (padded head_dim of q, k and v, windowed, v transposed in memory) -> config; a causal mask is a window.
# A comment has TFLOP/s on an H100 at a sequence length of 16384 (benchmarks/results/experiments/fp8.json).
# Rows without one were not measured; they have the tiles that fit.
_TABLE: dict[tuple[int, bool, bool], Fp8Config] = {
    (64, False, True): F(
        3, 128, PING_PONG=True
    ),  # 632; without ping-pong 636; two warpgroups, four stages 549
    (64, True, True): F(3, 128, PING_PONG=True),  # causal 620; 615; 544
    (64, False, False): F(2, 128, STAGES=4),
    (64, True, False): F(2, 128, STAGES=4),
    (128, False, True): F(2, 128, Q_IN_REGISTERS=128),  # 889; q in shared memory 883; with ping-pong 876
    (128, True, True): F(2, 128, Q_IN_REGISTERS=128),  # causal 862; 860; 845
    # Four stages 868, causal 829; blocks of 64 keys 713, 638; three warpgroups 748, 815.
    (128, False, False): F(2, 128),  # 716
    (128, True, False): F(2, 128),  # causal 731
    (256, False, True): F(2, 64),
    (256, True, True): F(2, 64),
    (256, False, False): F(2, 64),
    (256, True, False): F(2, 64),
}
_UNEQUAL = {(d, dv): F(2, 128 if max(d, dv) <= 128 else 64) for d, dv in permutations((64, 128, 256), 2)}
"""(padded head_dim of q and k, padded head_dim of v) -> config. They fit, and were not timed."""


def choose(problem: Fp8Problem) -> Fp8Config:
    block_d, block_dv = padded_columns(problem.head_dim), padded_columns(problem.head_dim_v)
    if block_d != block_dv:
        return _UNEQUAL[block_d, block_dv]
    return _TABLE[block_d, is_windowed(problem), problem.v_transposed]


def every_row() -> Iterator[tuple[int, int, bool, bool, Fp8Config]]:
    """Yield (padded head_dim, padded head_dim_v, windowed, v transposed, config) of each table entry."""
    for (size, windowed, v_transposed), config in _TABLE.items():
        yield size, size, windowed, v_transposed, config
    for (block_d, block_dv), config in _UNEQUAL.items():
        yield block_d, block_dv, False, True, config
