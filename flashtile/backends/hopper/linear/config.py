"""Configurations of the flat product with a ring: data, from the measured table where it has the shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.hardware.linear_table import FLAT
from flashtile.problems.linear import E4M3, LinearProblem

MAX_ROWS = 16


@dataclass(frozen=True)
class FlatConfig:
    """The configuration of a call."""

    kind: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    """Columns of a slot for each warp."""
    num_stages: int
    programs_per_sm: int
    num_warps: int


SHARED_BYTES = 228 * 2**10
"""Shared memory of a multiprocessor."""
PROGRAM_BYTES = 2**10
"""Shared memory of a program in addition to its ring and the sums of the warps: what CUDA takes."""
WARPS = 4
Tile = tuple[int, ...]
"""(BLOCK_N, BLOCK_K, num_stages, programs_per_sm), and num_warps where it is not WARPS."""
DEFAULT: dict[tuple[int, int], Tile] = {
    (8, 2): (16, 64, 8, 2),
    (16, 2): (16, 64, 6, 2),
    (8, 1): (16, 128, 4, 3),
    (16, 1): (32, 128, 3, 2),
}
"""(BLOCK_M, bytes of an element of W) -> tile."""
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
"""Tiles that ``flashtile profile`` measures."""


def padded_rows(rows: int) -> int:
    return 8 if rows <= 8 else MAX_ROWS


def key_of(problem: LinearProblem) -> tuple[int, int]:
    """By which tiles are chosen."""
    return padded_rows(problem.M), 1 if problem.weight_dtype == E4M3 else 2


def fits(problem: LinearProblem, tile: Tile) -> bool:
    """Whether as many programs as the tile means to run on a multiprocessor have the shared memory."""
    BLOCK_N, BLOCK_K, stages, programs_per_sm, *warps = tile
    num_warps, BLOCK_M = (*warps, WARPS)[0], padded_rows(problem.M)
    rows = BLOCK_M + problem.norm  # the norm's weights are one more
    bytes_of_column = BLOCK_N * problem.weight_dtype.itemsize + rows * problem.dtype.itemsize
    ring = stages * num_warps * BLOCK_K * bytes_of_column
    sums = num_warps * BLOCK_N * BLOCK_M * 4
    return programs_per_sm * (ring + sums + PROGRAM_BYTES) <= SHARED_BYTES


def make(problem: LinearProblem, tile: Tile) -> FlatConfig:
    tile = tile if fits(problem, tile) else DEFAULT[key_of(problem)]
    return FlatConfig(FLAT, padded_rows(problem.M), *(*tile, WARPS)[:5])


def choose(problem: LinearProblem, measured: Tile | None) -> FlatConfig:
    """By what was measured for this shape, else the tile that was good for most."""
    return make(problem, measured or DEFAULT[key_of(problem)])


def candidates(problem: LinearProblem) -> Iterator[FlatConfig]:
    if problem.M <= MAX_ROWS:
        for tile in TILES[key_of(problem)]:
            yield make(problem, tile)
