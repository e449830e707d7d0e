"""The tile table of packed sequences: their work tiles, longest sequences first, listed by a kernel.

The host never reads the lengths, so a captured CUDA graph can be replayed with other lengths.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH

CHUNK = 256
"""Sequences that a program compares with its own at a time, and rows of the table that it writes at a
time."""


@triton.jit
def lengths(cu_seqlens, sequence, total, mask):
    """Return (first row, number of rows) of sequences, clamped to the ``total`` rows of the tensor."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence, mask=mask, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1, mask=mask, other=0), start), total)
    return start, end - start


@triton.jit
def key_lengths(cu_seqlens_k, seqused_k, sequence, total_k, mask, SEQUSED: tl.constexpr):
    """Return (first row, number of keys) of sequences in k. ``seqused_k`` may shorten the sequences."""
    start, length = lengths(cu_seqlens_k, sequence, total_k, mask)
    if SEQUSED:
        used = tl.load(seqused_k + sequence, mask=mask, other=0)
        length = tl.minimum(tl.maximum(used, 0), length)
    return start, length


@triton.jit
def num_tiles(seqlen_q, num_blocks, PAIRED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the number of work tiles per head for sequences of ``seqlen_q`` rows.

    A work tile is a block of rows, or a pair of blocks if PAIRED. A sequence has at most ``num_blocks``
    blocks.
    """
    count = tl.minimum(tl.cdiv(seqlen_q, BLOCK_M), num_blocks)
    if PAIRED:
        count = (count + 1) // 2
    return count


@kernel(do_not_specialize=("batch", "num_blocks", "total_q", "total_k", "capacity"))
def tile_table_kernel(
    table,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    batch,
    num_blocks,
    total_q,
    total_k,
    capacity,
    SEQUSED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fill ``table``. Grid: one program for each of ``batch`` sequences.

    Row 0 is a header: the number of work tiles per head, then the counter of work tiles that have been taken
    from the work queue, which starts at 0. Each other row is a work tile: sequence, tile_in_head, start_q,
    start_k, seqlen_q, seqlen_k. Sequences with more keys come first. In the backward, work tiles are blocks
    of keys, so the caller exchanges q and k.
    """
    b = tl.program_id(0)
    start_q, seqlen_q = lengths(cu_seqlens_q, b, total_q, True)
    start_k, seqlen_k = key_lengths(cu_seqlens_k, seqused_k, b, total_k, True, SEQUSED)
    rank = 0
    total = 0
    for first in range(0, batch, CHUNK):
        j = first + tl.arange(0, CHUNK)
        inside = j < batch
        _, others_q = lengths(cu_seqlens_q, j, total_q, inside)
        _, others_k = key_lengths(cu_seqlens_k, seqused_k, j, total_k, inside, SEQUSED)
        counts = tl.where(inside, num_tiles(others_q, num_blocks, PAIRED, BLOCK_M), 0)
        before = (others_k > seqlen_k) | ((others_k == seqlen_k) & (j < b))
        rank += tl.sum(tl.where(before, counts, 0))
        total += tl.sum(counts)
    if b == 0:
        tl.store(table, tl.minimum(total, capacity))
        tl.store(table + 1, 0)
    count = tl.minimum(num_tiles(seqlen_q, num_blocks, PAIRED, BLOCK_M), capacity - rank)
    for first in range(0, count, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        row = table + (1 + rank + tile) * WIDTH
        inside = tile < count
        tl.store(row, b, mask=inside)
        tl.store(row + 1, tile, mask=inside)
        tl.store(row + 2, start_q, mask=inside)
        tl.store(row + 3, start_k, mask=inside)
        tl.store(row + 4, seqlen_q, mask=inside)
        tl.store(row + 5, seqlen_k, mask=inside)


class TileTable:
    """Allocates and fills tile tables for the calls of one signature.

    Args:
        batch: sequences.
        seqlen: rows of the longest sequence: queries in the forward, keys in the backward.
        total: rows of all sequences.
        total_others: rows of the other side: keys in the forward, queries in the backward.
        block: rows of a block.
        seqused: whether calls limit the number of used rows of each sequence on the other side.
        paired: whether a work tile is a pair of blocks, not one block.
    """

    def __init__(
        self,
        batch: int,
        seqlen: int,
        total: int,
        total_others: int,
        block: int,
        seqused: bool = False,
        paired: bool = False,
    ) -> None:
        self.capacity = capacity(total, batch, block)
        """Maximum number of work tiles of one head."""
        scalars = (batch, triton.cdiv(seqlen, block), total, total_others, self.capacity)
        constants = (seqused, paired, block, TABLE_WIDTH.value, CHUNK)
        self._fill = CachedLaunch(tile_table_kernel, batch, scalars, constants, None)

    def __call__(
        self, cu_seqlens: Tensor | None, cu_seqlens_others: Tensor | None, seqused: Tensor | None
    ) -> Tensor:
        """Return a filled table: (1 + capacity, TABLE_WIDTH), int32, on the device of ``cu_seqlens``."""
        assert cu_seqlens is not None
        table = cu_seqlens.new_empty(1 + self.capacity, TABLE_WIDTH.value)
        self._fill(
            cu_seqlens.device, table, cu_seqlens, cu_seqlens_others, table if seqused is None else seqused
        )
        return table


def capacity(total: int, batch: int, block: int) -> int:
    """Return the maximum number of blocks in ``batch`` packed sequences with ``total`` rows in all."""
    return total // block + batch
