"""Configurations of the flat product: from the measured table if it has the shape, otherwise defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.hardware.linear_table import FLAT
from flashtile.problems.linear import E4M3, LinearProblem

MAX_ROWS = 16
"""Maximum rows of x."""


@dataclass(frozen=True)
class FlatConfig:
    """The configuration of a call."""

    kind: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    """Columns of K per warp in each slot of the ring."""
    num_stages: int
    programs_per_sm: int
    num_warps: int


SHARED_BYTES = 228 * 2**10
"""Shared memory of a multiprocessor."""
PROGRAM_BYTES = 2**10
"""Shared memory that CUDA reserves per program, in addition to the ring and the sums of the warps."""
WARPS = 4
Tile = tuple[int, ...]
"""(BLOCK_N, BLOCK_K, num_stages, programs_per_sm) and, if it is not WARPS, num_warps."""
DEFAULT: dict[tuple[int, int], Tile] = {
    (8, 2): (16, 64, 8, 2),
    (16, 2): (16, 64, 6, 2),
    (8, 1): (16, 128, 4, 3),
    (16, 1): (32, 128, 3, 2),
}
"""(BLOCK_M, bytes of an element of W) -> tile, the first of TILES: for shapes that no table has measured, and
for measured tiles that do not fit. Why these are first is not recorded."""
TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (8, 2): (
        (16, 64, 8, 2), (16, 128, 4, 2), (32, 128, 5, 1), (32, 64, 9, 1), (16, 64, 5, 3), (16, 128, 3, 3),
    ),
    (16, 2): (
        (16, 64, 6, 2), (16, 128, 3, 2), (32, 64, 9, 1), (32, 64, 4, 2), (32, 128, 4, 1),
        (32, 64, 4, 1, 8), (64, 32, 4, 1, 8), (64, 64, 4, 1),
    ),
    (8, 1): (
        (16, 128, 4, 3), (16, 128, 6, 2), (16, 128, 3, 4), (32, 128, 4, 2), (32, 128, 4, 1, 8),
        (16, 128, 6, 1, 8), (16, 256, 3, 2), (32, 64, 5, 3),
    ),
    (16, 1): (
        (32, 128, 3, 2), (16, 128, 4, 2), (32, 64, 6, 2), (32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 3, 1, 8),
        (64, 64, 4, 1, 8),
    ),
}  # fmt: skip
"""(BLOCK_M, bytes of an element of W) -> tiles that ``flashtile profile`` measures."""


def padded_rows(rows: int) -> int:
    return 8 if rows <= 8 else MAX_ROWS


def key_of(problem: LinearProblem) -> tuple[int, int]:
    """Return the problem's key in TILES and DEFAULT: (BLOCK_M, bytes of an element of W)."""
    return padded_rows(problem.M), 1 if problem.weight_dtype == E4M3 else 2


def fits(problem: LinearProblem, tile: Tile) -> bool:
    """Whether the tile's ``programs_per_sm`` programs fit the shared memory of a multiprocessor."""
    BLOCK_N, BLOCK_K, stages, programs_per_sm, *warps = tile
    num_warps, BLOCK_M = (*warps, WARPS)[0], padded_rows(problem.M)
    rows = BLOCK_M + problem.norm  # the norm's weights take one more row
    bytes_of_column = BLOCK_N * problem.weight_dtype.itemsize + rows * problem.dtype.itemsize
    ring = stages * num_warps * BLOCK_K * bytes_of_column
    sums = num_warps * BLOCK_N * BLOCK_M * 4
    return programs_per_sm * (ring + sums + PROGRAM_BYTES) <= SHARED_BYTES


def make(problem: LinearProblem, tile: Tile) -> FlatConfig:
    """Return the configuration with ``tile``, or with the default tile if ``tile`` does not fit."""
    tile = tile if fits(problem, tile) else DEFAULT[key_of(problem)]
    return FlatConfig(FLAT, padded_rows(problem.M), *(*tile, WARPS)[:5])


def choose(problem: LinearProblem, measured: Tile | None) -> FlatConfig:
    """Return the configuration with the tile ``measured``, or with the default tile if it is None."""
    return make(problem, measured or DEFAULT[key_of(problem)])


def candidates(problem: LinearProblem) -> Iterator[FlatConfig]:
    if problem.M <= MAX_ROWS:
        for tile in TILES[key_of(problem)]:
            yield make(problem, tile)
