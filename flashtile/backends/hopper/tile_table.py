"""The tiles of a variable-length batch, dearest first, found on the device: no host ever reads the lengths."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 256
"""Sequences that are looked at together."""


@triton.jit
def lengths(cu_seqlens, sequence, total, mask):
    """(first row, rows) of sequences, kept inside the ``total`` rows that there are."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence, mask=mask, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1, mask=mask, other=0), start), total)
    return start, end - start


@triton.jit
def key_length(cu_seqlens_k, seqused_k, sequence, total_k, mask, SEQUSED: tl.constexpr):
    start, length = lengths(cu_seqlens_k, sequence, total_k, mask)
    if SEQUSED:
        used = tl.load(seqused_k + sequence, mask=mask, other=0)
        length = tl.minimum(tl.maximum(used, 0), length)
    return start, length


@triton.jit
def dearer_tiles(cost, tiles, seqlen_q, seqlen_k, right, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many tiles of sequences have their last key behind ``cost`` keys. Tile m of a sequence ends with
    key ``min(seqlen_k, (m + 1) BLOCK_M + seqlen_k - seqlen_q + right)``, or seqlen_k without a right edge."""
    found = tl.where(seqlen_k > cost, tiles, 0)
    if HAS_RIGHT:
        cheaper = (cost - (seqlen_k - seqlen_q + right)) // BLOCK_M
        found = tl.minimum(found, tiles - tl.minimum(tl.maximum(cheaper, 0), tiles))
    return found


@triton.jit
def tile_table_kernel(
    table,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    batch,
    blocks,
    total_q,
    total_k,
    right,
    capacity,
    SEQUSED: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Row 1 + rank of ``table``: sequence, block, start_q, start_k, seqlen_q, seqlen_k. Row 0: their number.

    One program for each of ``batch`` sequences and ``blocks`` blocks of rows. A tile's rank is the number of
    tiles before it: those that end behind it, and among equals those of earlier sequences and later blocks.
    """
    b = tl.program_id(0)
    m = tl.program_id(1)
    start_q, seqlen_q = lengths(cu_seqlens_q, b, total_q, True)
    start_k, seqlen_k = key_length(cu_seqlens_k, seqused_k, b, total_k, True, SEQUSED)
    my_tiles = tl.minimum(tl.cdiv(seqlen_q, BLOCK_M), blocks)
    end = seqlen_k
    if HAS_RIGHT:
        end = tl.minimum(end, (m + 1) * BLOCK_M + seqlen_k - seqlen_q + right)
    rank = tl.where(end == seqlen_k, my_tiles - 1 - m, 0)
    total = 0
    for first in range(0, batch, CHUNK):
        j = first + tl.arange(0, CHUNK)
        inside = j < batch
        _, others_q = lengths(cu_seqlens_q, j, total_q, inside)
        _, others_k = key_length(cu_seqlens_k, seqused_k, j, total_k, inside, SEQUSED)
        tiles = tl.minimum(tl.cdiv(others_q, BLOCK_M), blocks)
        least = end - (j < b).to(tl.int32)
        before = dearer_tiles(least, tiles, others_q, others_k, right, HAS_RIGHT, BLOCK_M)
        rank += tl.sum(tl.where(inside, before, 0))
        total += tl.sum(tl.where(inside, tiles, 0))
    if (b == 0) & (m == 0):
        tl.store(table, tl.minimum(total, capacity))
    if (m < my_tiles) & (rank < capacity):
        row = table + (1 + rank) * WIDTH
        tl.store(row, b)
        tl.store(row + 1, m)
        tl.store(row + 2, start_q)
        tl.store(row + 3, start_k)
        tl.store(row + 4, seqlen_q)
        tl.store(row + 5, seqlen_k)


def capacity(total_q: int, batch: int, block_m: int) -> int:
    """The most tiles that ``batch`` sequences of together ``total_q`` rows can have."""
    return total_q // block_m + batch


def grid(batch: int, seqlen_q: int, block_m: int) -> tuple[int, int]:
    """Programs of the kernel; ``seqlen_q`` is that of the longest sequence."""
    return batch, triton.cdiv(seqlen_q, block_m)
