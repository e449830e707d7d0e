"""Configurations of the portable FP8 attention kernel: data, by head size and kind of product."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.backends.common.config import KernelConfig
from flashtile.problems.fp8 import Fp8Problem

K = KernelConfig


@dataclass(frozen=True)
class AttendConfig:
    """Tile of the kernel, and whether products are of FP8 or, emulated, of float16, which holds e4m3."""

    tile: KernelConfig
    native: bool


# (native, padded head_dim) -> tile. Tiles that fit with few spills; not timed.
_TABLE: dict[tuple[bool, int], KernelConfig] = {
    (True, 32): K(64, 64, 4, 3),
    (True, 64): K(64, 64, 4, 3),
    (True, 128): K(64, 64, 4, 2),
    (True, 256): K(64, 64, 8, 1),
    (False, 32): K(64, 64, 4, 2),
    (False, 64): K(64, 32, 4, 2),
    (False, 128): K(64, 32, 4, 2),
    (False, 256): K(32, 32, 4, 1),
}
HEAD_DIMS = (32, 64, 128, 256)


def padded(head_dim: int) -> int:
    """The power of two, at least the 32 that an FP8 product sums over, that a tile takes."""
    return max(32, 1 << (head_dim - 1).bit_length())


def row(native: bool, width: int) -> AttendConfig:
    """The configuration of one row of the table; ``width`` is a padded head_dim."""
    return AttendConfig(_TABLE[native, width], native)


def choose(problem: Fp8Problem, native: bool) -> AttendConfig:
    return row(native, padded(max(problem.head_dim, problem.head_dim_v)))
