"""Configurations of the flat product with a ring: data, from the measured table where it has the shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.linear.problem import LinearProblem
from flashtile.linear.table import FLAT

MOST_ROWS = 16


@dataclass(frozen=True)
class FlatConfig:
    """What one call gets."""

    kind: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    """Columns of a slot for each warp."""
    num_stages: int
    programs_per_sm: int


WARPS = 4
SHARED_BYTES = 228 * 2**10
"""Of a multiprocessor."""
PROGRAM_BYTES = 3 * 2**10
"""Of a program, beside its ring: what CUDA takes, and the sums of the warps."""
DEFAULT = {8: (16, 64, 8, 2), 16: (16, 64, 6, 2)}
"""BLOCK_M -> (BLOCK_N, BLOCK_K, num_stages, programs_per_sm)."""
TILES = {
    8: ((16, 64, 8, 2), (16, 128, 4, 2), (32, 128, 5, 1), (32, 64, 9, 1), (16, 64, 5, 3), (16, 128, 3, 3)),
    16: ((16, 64, 6, 2), (16, 128, 3, 2), (32, 64, 9, 1), (32, 64, 4, 2), (32, 128, 4, 1)),
}
"""What ``flashtile profile`` measures."""


def padded_rows(rows: int) -> int:
    return 8 if rows <= 8 else MOST_ROWS


def fits(problem: LinearProblem, tile: tuple[int, int, int, int]) -> bool:
    """Whether as many programs as the tile means to run on a multiprocessor have the shared memory."""
    BLOCK_N, BLOCK_K, stages, programs_per_sm = tile
    columns = stages * WARPS * BLOCK_K
    rows = padded_rows(problem.M) + problem.norm  # the norm's weights are one more
    ring = columns * (BLOCK_N * problem.weight_dtype.itemsize + rows * problem.dtype.itemsize)
    return programs_per_sm * (ring + PROGRAM_BYTES) <= SHARED_BYTES


def make(problem: LinearProblem, tile: tuple[int, int, int, int]) -> FlatConfig:
    rows = padded_rows(problem.M)
    return FlatConfig(FLAT, rows, *(tile if fits(problem, tile) else DEFAULT[rows]))


def choose(problem: LinearProblem, measured: tuple[int, int, int, int] | None) -> FlatConfig:
    """By what was measured for this shape, else the tile that was good for most."""
    return make(problem, measured or DEFAULT[padded_rows(problem.M)])


def candidates(problem: LinearProblem) -> Iterator[FlatConfig]:
    if problem.M <= MOST_ROWS:
        for tile in TILES[padded_rows(problem.M)]:
            yield make(problem, tile)
