"""Configurations of the decoding kernels, by architecture, element size of the cache and head size.

Decoding is bound by reading the cache. Its speed depends on the bytes in flight per multiprocessor: tile
times stages times programs, which must fit into shared memory. :mod:`schedule` defines *m_block*, *n_block*
and *work tile*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flashtile.backends.common.config import KernelConfig, padded
from flashtile.backends.portable.config import family, precision_of
from flashtile.problems.decode import DecodeProblem

NARROW, WIDE, TALL = 16, 64, 128
"""Values of BLOCK_M. NARROW is the minimum of the tensor cores, and WIDE serves groups with more rows.

TALL serves so many rows that products take longer than reading: 64 tokens, or sequences that share a prefix.
"""

BALANCED_M_BLOCKS = 16
"""Maximum m_blocks per sequence of a stream-K grid. More are a prefill, with enough work for any grid."""

WHOLE_BYTES = 192 * 1024
"""Bytes of keys and values that a program reads in about the time of writing and combining partial results.
Narrow work tiles of up to this size gain nothing from a stream-K grid."""
MAX_WHOLE_BYTES = 512 * 1024
"""Work tiles with more bytes get a stream-K grid even if all multiprocessors are busy without it.

Programs of a stream-K grid prefetch the next work tile's keys and read adjacent heads at about the same time,
which saves more if there are more bytes.
"""
MAX_UNEVEN_BYTES = 256 * 1024
"""Used instead of MAX_WHOLE_BYTES if lengths may differ or keys lie in pages."""

HEAD_DIMS = (64, 128, 256, 512)
"""Padded head sizes of the table; smaller heads take the first."""


@dataclass(frozen=True)
class DecodeConfig:
    """The configuration of a call."""

    DIVIDES_ALIKE: ClassVar[bool] = False
    """Whether a stream-K grid divides work tiles of similar lengths alike (Hopper's ``work.even_start``)."""

    tile: KernelConfig
    programs_per_sm: int
    """Programs per multiprocessor of a stream-K grid, which run concurrently."""
    precision: str

    def takes_stream_k(
        self, m_blocks: int, work_tiles: int, multiprocessors: int, tile_bytes: float, even: bool,
        mixed: bool = False,
    ) -> bool:  # fmt: skip
        """Whether programs should share all n_blocks equally, as in stream-K.

        Args:
            m_blocks: maximum number of m_blocks per sequence.
            work_tiles: maximum number of work tiles in the batch.
            tile_bytes: maximum bytes of a work tile, by :func:`bytes_to_read`.
            even: whether all work tiles have equally many bytes, and the cache has no pages.
            mixed: ``DecodeProblem.mixed``, which only the kernel for Hopper considers.
        """
        if m_blocks > BALANCED_M_BLOCKS:
            return False
        most = MAX_WHOLE_BYTES if even else MAX_UNEVEN_BYTES
        if self.tile.BLOCK_M > NARROW or tile_bytes > most:
            return True
        # One program per multiprocessor keeps memory busy. Without stream-K, some multiprocessors are idle in
        # the last round of programs.
        last_round = work_tiles % (multiprocessors * self.programs_per_sm) or multiprocessors
        idle = max(0, multiprocessors - last_round)
        return tile_bytes * idle > WHOLE_BYTES * multiprocessors

    def stream_k_programs(self, work_tiles: int, multiprocessors: int) -> int:
        """Return the number of programs of a stream-K grid that is not for few n_blocks."""
        return multiprocessors * self.programs_per_sm


def operand_bytes(problem: DecodeProblem) -> int:
    """Return the element size in bytes by which the problem's configuration is looked up.

    It is 4 if products are in float32, else the element size of the cache.
    """
    return 4 if problem.dtype.itemsize == 4 else problem.cache_dtype.itemsize


def bytes_to_read(keys: int, columns: int, element_bytes: int) -> float:
    """Return the size in bytes of ``keys`` tokens' keys and values, as a measure of the time to read them.

    FP8 counts as 16 bits, because reading and converting it takes as long. float32 counts as infinitely many
    bytes, because products take longer than reading.
    """
    return math.inf if element_bytes == 4 else keys * columns * max(element_bytes, 2)


# (family, bytes of a cache element, BLOCK_M, padded head_dim) ->
# (BLOCK_N, num_warps, num_stages, programs_per_sm). Only Hopper's rows were timed.
_TABLE: dict[tuple[str, int, int, int], tuple[int, int, int, int]] = {
    # Which other tiles were tried for a row is not recorded.
    ("hopper", 2, NARROW, 64): (128, 4, 3, 2),
    ("hopper", 2, NARROW, 128): (64, 4, 3, 2),
    ("hopper", 2, NARROW, 256): (32, 4, 3, 2),
    ("hopper", 2, NARROW, 512): (16, 4, 3, 2),
    ("hopper", 2, WIDE, 64): (64, 4, 3, 2),
    ("hopper", 2, WIDE, 128): (64, 8, 3, 1),
    ("hopper", 2, WIDE, 256): (32, 8, 3, 1),
    ("hopper", 2, WIDE, 512): (32, 8, 2, 1),
    ("hopper", 2, TALL, 64): (64, 8, 3, 1),
    ("hopper", 2, TALL, 128): (64, 8, 3, 1),
    ("hopper", 1, NARROW, 64): (64, 4, 4, 2),
    ("hopper", 1, NARROW, 128): (64, 4, 4, 2),
    ("hopper", 1, NARROW, 256): (32, 4, 4, 2),
    ("hopper", 1, NARROW, 512): (32, 8, 3, 1),
    ("hopper", 1, WIDE, 64): (64, 4, 3, 2),
    ("hopper", 1, WIDE, 128): (64, 4, 3, 1),
    ("hopper", 1, WIDE, 256): (32, 8, 3, 1),
    ("hopper", 1, WIDE, 512): (32, 8, 2, 1),
    ("hopper", 1, TALL, 64): (64, 8, 3, 1),
    ("hopper", 1, TALL, 128): (64, 8, 3, 1),
    ("hopper", 4, NARROW, 64): (32, 4, 3, 2),
    ("hopper", 4, NARROW, 128): (32, 4, 3, 2),
    ("hopper", 4, NARROW, 256): (32, 8, 3, 1),
    ("hopper", 4, NARROW, 512): (16, 4, 2, 1),
    ("ampere", 2, NARROW, 64): (128, 4, 3, 2),
    ("ampere", 2, NARROW, 128): (64, 4, 3, 2),
    ("ampere", 2, NARROW, 256): (32, 4, 3, 2),
    ("ampere", 2, NARROW, 512): (16, 4, 3, 1),
    ("ampere", 2, WIDE, 64): (64, 4, 3, 2),
    ("ampere", 2, WIDE, 128): (32, 4, 3, 2),
    ("ampere", 2, WIDE, 256): (32, 8, 3, 1),
    ("ampere", 2, WIDE, 512): (16, 8, 2, 1),
    ("ampere", 1, NARROW, 64): (64, 4, 3, 2),
    ("ampere", 1, NARROW, 128): (32, 4, 3, 2),
    ("ampere", 1, NARROW, 256): (32, 8, 3, 1),
    ("ampere", 1, NARROW, 512): (32, 8, 3, 1),
    ("ampere", 1, WIDE, 64): (64, 4, 3, 2),
    ("ampere", 1, WIDE, 128): (32, 4, 3, 2),
    ("ampere", 1, WIDE, 256): (32, 8, 3, 1),
    ("ampere", 1, WIDE, 512): (32, 8, 2, 1),
    ("ampere", 4, NARROW, 64): (32, 4, 3, 2),
    ("ampere", 4, NARROW, 128): (32, 4, 3, 2),
    ("ampere", 4, NARROW, 256): (16, 4, 3, 1),
    ("ampere", 4, NARROW, 512): (16, 4, 2, 1),
    # Any other GPU: tiles that fit 64 KiB of shared memory.
    ("other", 2, NARROW, 64): (64, 4, 2, 2),
    ("other", 2, NARROW, 128): (32, 4, 2, 2),
    ("other", 2, NARROW, 256): (32, 4, 2, 1),
    ("other", 2, NARROW, 512): (16, 4, 2, 1),
    ("other", 2, WIDE, 64): (32, 4, 2, 2),
    ("other", 2, WIDE, 128): (32, 4, 2, 1),
    ("other", 2, WIDE, 256): (16, 8, 2, 1),
    ("other", 2, WIDE, 512): (16, 8, 1, 1),
    ("other", 1, NARROW, 64): (64, 4, 2, 2),
    ("other", 1, NARROW, 128): (32, 4, 2, 2),
    ("other", 1, NARROW, 256): (32, 8, 2, 1),
    ("other", 1, NARROW, 512): (32, 8, 2, 1),
    ("other", 1, WIDE, 64): (32, 4, 2, 2),
    ("other", 1, WIDE, 128): (32, 4, 2, 1),
    ("other", 1, WIDE, 256): (32, 8, 2, 1),
    ("other", 1, WIDE, 512): (32, 8, 1, 1),
    ("other", 4, NARROW, 64): (16, 4, 2, 2),
    ("other", 4, NARROW, 128): (16, 4, 2, 2),
    ("other", 4, NARROW, 256): (16, 4, 1, 1),
    ("other", 4, NARROW, 512): (16, 4, 1, 1),
}


def row_blocks(table_family: str, element_bytes: int, width: int) -> tuple[int, ...]:
    """Return the values of BLOCK_M in the table for this element size and padded head size, in order."""
    width = max(width, HEAD_DIMS[0])
    blocks = (NARROW, WIDE, TALL)
    return tuple(block for block in blocks if (table_family, element_bytes, block, width) in _TABLE)


def row(table_family: str, element_bytes: int, BLOCK_M: int, width: int) -> DecodeConfig:
    """Return the configuration in the table for these arguments; ``width`` is a padded head_dim."""
    key = (table_family, element_bytes, BLOCK_M, max(width, HEAD_DIMS[0]))
    BLOCK_N, num_warps, num_stages, programs_per_sm = _TABLE[key]
    tile = KernelConfig(BLOCK_M, BLOCK_N, num_warps, num_stages)
    return DecodeConfig(tile, programs_per_sm, precision_of(table_family, element_bytes))


def choose(problem: DecodeProblem) -> DecodeConfig:
    """The configuration for a problem."""
    element_bytes = operand_bytes(problem)
    rows = problem.seqlen_q * problem.group_size
    if problem.invariant:  # the tile decides the order of sums: chunks of prompts have that of single tokens
        rows = 1
    width = padded(max(problem.head_dim, problem.head_dim_v))
    table_family = family(problem.device)
    blocks = row_blocks(table_family, element_bytes, width)
    BLOCK_M = next((block for block in blocks if rows <= block), blocks[-1])
    return row(table_family, element_bytes, BLOCK_M, width)
