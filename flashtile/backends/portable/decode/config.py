"""Configurations of the decoding kernels: data, chosen by architecture, element size of the cache and head
size.

Decoding is bound by the bytes of the cache. What counts is how many of them are on their way at a time:
tiles times stages times programs of a multiprocessor, within its shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashtile.backends.common.launch import KernelConfig, padded
from flashtile.backends.portable.config import family, precision_of
from flashtile.problems.decode import DecodeProblem

NARROW, WIDE, TALL = 16, 64, 128
"""Row blocks: the least that tensor cores take, one for groups of more rows than that, and one for so many
that the products cost more than the bytes: 64 tokens, or sequences that share a prefix."""

BALANCED_M_BLOCKS = 16
"""Up to so many m_blocks a sequence, the grid may be balanced. More are a prefill: work enough for any
grid."""

WHOLE_BYTES = 192 * 1024
"""Bytes of keys and values: about what a program reads in the time that partial results take to be left and
combined. Work tiles of no more are left whole."""
MAX_WHOLE_BYTES = 512 * 1024
"""The most of a work tile that is left whole. Programs that share all n_blocks prefetch the next one's keys
and read the heads of a token next to each other, which is worth more with more bytes."""
MAX_UNEVEN_BYTES = 256 * 1024
"""The most where lengths may differ, or keys lie in pages."""

HEAD_DIMS = (64, 128, 256, 512)
"""Padded head sizes of the table; smaller heads take the first."""


@dataclass(frozen=True)
class DecodeConfig:
    """The configuration of a call."""

    tile: KernelConfig
    programs_per_sm: int
    """Programs of a balanced grid, which has as many programs as run at a time."""
    precision: str

    def balances(
        self, m_blocks: int, work_tiles: int, multiprocessors: int, tile_bytes: float, even: bool
    ) -> bool:
        """Whether programs share all n_blocks equally.

        Args:
            m_blocks: of a sequence at most.
            tile_bytes: of a work tile at most, by :func:`bytes_to_read`.
            even: all work tiles have as many, and they do not lie in pages.
        """
        if m_blocks > BALANCED_M_BLOCKS:
            return False
        most = MAX_WHOLE_BYTES if even else MAX_UNEVEN_BYTES
        if self.tile.BLOCK_M > NARROW or tile_bytes > most:
            return True
        # A program on each multiprocessor keeps the memory busy; in a last round of fewer, some wait.
        last_round = work_tiles % (multiprocessors * self.programs_per_sm) or multiprocessors
        idle = max(0, multiprocessors - last_round)
        return tile_bytes * idle > WHOLE_BYTES * multiprocessors


def operand_bytes(problem: DecodeProblem) -> int:
    """Bytes of an element of the cache, as the products take it."""
    return 4 if problem.dtype.itemsize == 4 else problem.cache_dtype.itemsize


def bytes_to_read(keys: int, columns: int, element_bytes: int) -> float:
    """Bytes of so many keys and values, as far as they take time to read: FP8 is converted, which takes as
    long as 16 bits, and in float32 the products take longer."""
    return math.inf if element_bytes == 4 else keys * columns * max(element_bytes, 2)


def _row(BLOCK_N: int, num_warps: int, num_stages: int, programs_per_sm: int, *spill_budgets: int):
    return BLOCK_N, num_warps, num_stages, programs_per_sm, spill_budgets


# (family, bytes of a cache element, BLOCK_M, padded head_dim) ->
# (BLOCK_N, num_warps, num_stages, programs_per_sm[, spill budget, the same with every feature])
_TABLE: dict[tuple[str, int, int, int], tuple] = {
    ("hopper", 2, NARROW, 64): _row(128, 4, 3, 2),
    ("hopper", 2, NARROW, 128): _row(64, 4, 3, 2),
    ("hopper", 2, NARROW, 256): _row(32, 4, 3, 2),
    ("hopper", 2, NARROW, 512): _row(16, 4, 3, 2, 56),
    ("hopper", 2, WIDE, 64): _row(64, 4, 3, 2),
    ("hopper", 2, WIDE, 128): _row(64, 8, 3, 1, 0, 16),
    ("hopper", 2, WIDE, 256): _row(32, 8, 3, 1, 4),
    ("hopper", 2, WIDE, 512): _row(32, 8, 2, 1, 576),
    ("hopper", 2, TALL, 64): _row(64, 8, 3, 1),
    ("hopper", 2, TALL, 128): _row(64, 8, 3, 1, 0, 112),
    ("hopper", 1, NARROW, 64): _row(64, 4, 4, 2, 8),
    ("hopper", 1, NARROW, 128): _row(64, 4, 4, 2),
    ("hopper", 1, NARROW, 256): _row(32, 4, 4, 2),
    ("hopper", 1, NARROW, 512): _row(32, 8, 3, 1),
    ("hopper", 1, WIDE, 64): _row(64, 4, 3, 2),
    ("hopper", 1, WIDE, 128): _row(64, 4, 3, 1),
    ("hopper", 1, WIDE, 256): _row(32, 8, 3, 1, 28),
    ("hopper", 1, WIDE, 512): _row(32, 8, 2, 1, 632),
    ("hopper", 1, TALL, 64): _row(64, 8, 3, 1),
    ("hopper", 1, TALL, 128): _row(64, 8, 3, 1),
    ("hopper", 4, NARROW, 64): _row(32, 4, 3, 2),
    ("hopper", 4, NARROW, 128): _row(32, 4, 3, 2),
    ("hopper", 4, NARROW, 256): _row(32, 8, 3, 1, 180),
    ("hopper", 4, NARROW, 512): _row(16, 4, 2, 1, 3132),
    ("ampere", 2, NARROW, 64): _row(128, 4, 3, 2),
    ("ampere", 2, NARROW, 128): _row(64, 4, 3, 2, 0, 4),
    ("ampere", 2, NARROW, 256): _row(32, 4, 3, 2),
    ("ampere", 2, NARROW, 512): _row(16, 4, 3, 1),
    ("ampere", 2, WIDE, 64): _row(64, 4, 3, 2),
    ("ampere", 2, WIDE, 128): _row(32, 4, 3, 2, 0, 280),
    ("ampere", 2, WIDE, 256): _row(32, 8, 3, 1),
    ("ampere", 2, WIDE, 512): _row(16, 8, 2, 1, 228),
    ("ampere", 1, NARROW, 64): _row(64, 4, 3, 2),
    ("ampere", 1, NARROW, 128): _row(32, 4, 3, 2),
    ("ampere", 1, NARROW, 256): _row(32, 8, 3, 1),
    ("ampere", 1, NARROW, 512): _row(32, 8, 3, 1),
    ("ampere", 1, WIDE, 64): _row(64, 4, 3, 2),
    ("ampere", 1, WIDE, 128): _row(32, 4, 3, 2, 8),
    ("ampere", 1, WIDE, 256): _row(32, 8, 3, 1, 44),
    ("ampere", 1, WIDE, 512): _row(32, 8, 2, 1, 692),
    ("ampere", 4, NARROW, 64): _row(32, 4, 3, 2),
    ("ampere", 4, NARROW, 128): _row(32, 4, 3, 2),
    ("ampere", 4, NARROW, 256): _row(16, 4, 3, 1, 280),
    ("ampere", 4, NARROW, 512): _row(16, 4, 2, 1, 2976),
    # Any other GPU: tiles that fit 64 KiB of shared memory.
    ("other", 2, NARROW, 64): _row(64, 4, 2, 2),
    ("other", 2, NARROW, 128): _row(32, 4, 2, 2),
    ("other", 2, NARROW, 256): _row(32, 4, 2, 1),
    ("other", 2, NARROW, 512): _row(16, 4, 2, 1),
    ("other", 2, WIDE, 64): _row(32, 4, 2, 2),
    ("other", 2, WIDE, 128): _row(32, 4, 2, 1),
    ("other", 2, WIDE, 256): _row(16, 8, 2, 1),
    ("other", 2, WIDE, 512): _row(16, 8, 1, 1),
    ("other", 1, NARROW, 64): _row(64, 4, 2, 2),
    ("other", 1, NARROW, 128): _row(32, 4, 2, 2),
    ("other", 1, NARROW, 256): _row(32, 8, 2, 1),
    ("other", 1, NARROW, 512): _row(32, 8, 2, 1),
    ("other", 1, WIDE, 64): _row(32, 4, 2, 2),
    ("other", 1, WIDE, 128): _row(32, 4, 2, 1),
    ("other", 1, WIDE, 256): _row(32, 8, 2, 1),
    ("other", 1, WIDE, 512): _row(32, 8, 1, 1),
    ("other", 4, NARROW, 64): _row(16, 4, 2, 2),
    ("other", 4, NARROW, 128): _row(16, 4, 2, 2),
    ("other", 4, NARROW, 256): _row(16, 4, 1, 1),
    ("other", 4, NARROW, 512): _row(16, 4, 1, 1),
}


def row_blocks(table_family: str, element_bytes: int, width: int) -> tuple[int, ...]:
    """The row blocks that there are for a cache of elements of this size and heads of a padded width."""
    width = max(width, HEAD_DIMS[0])
    blocks = (NARROW, WIDE, TALL)
    return tuple(block for block in blocks if (table_family, element_bytes, block, width) in _TABLE)


def row(table_family: str, element_bytes: int, BLOCK_M: int, width: int) -> DecodeConfig:
    """The configuration of one row of the table; ``width`` is a padded head_dim."""
    key = (table_family, element_bytes, BLOCK_M, max(width, HEAD_DIMS[0]))
    BLOCK_N, num_warps, num_stages, programs_per_sm, spill_budgets = _TABLE[key]
    tile = KernelConfig(BLOCK_M, BLOCK_N, num_warps, num_stages, *spill_budgets)
    return DecodeConfig(tile, programs_per_sm, precision_of(table_family, element_bytes))


def choose(problem: DecodeProblem) -> DecodeConfig:
    """The configuration for a problem."""
    element_bytes = operand_bytes(problem)
    rows = problem.seqlen_q * problem.group_size
    width = padded(max(problem.head_dim, problem.head_dim_v))
    table_family = family(problem.device)
    blocks = row_blocks(table_family, element_bytes, width)
    BLOCK_M = next((block for block in blocks if rows <= block), blocks[-1])
    return row(table_family, element_bytes, BLOCK_M, width)
