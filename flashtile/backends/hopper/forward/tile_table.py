"""The work of a variable-length batch, dearest first, found on the device: no host ever reads the lengths."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel

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
def item_count(seqlen_q, blocks, PAIRED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Items of one head of sequences, as ``schedule.items_of`` counts them."""
    count = tl.minimum(tl.cdiv(seqlen_q, BLOCK_M), blocks)
    if PAIRED:
        count = (count + 1) // 2
    return count


@kernel(do_not_specialize=("batch", "blocks", "total_q", "total_k", "capacity"))
def tile_table_kernel(
    table,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    batch,
    blocks,
    total_q,
    total_k,
    capacity,
    SEQUSED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Row 1 + rank of ``table``: sequence, place, start_q, start_k, seqlen_q, seqlen_k. Row 0: their number,
    and that none was taken yet.

    One program for each of ``batch`` sequences. Sequences with more keys come first, and all items of one
    cost about the same.
    """
    b = tl.program_id(0)
    start_q, seqlen_q = lengths(cu_seqlens_q, b, total_q, True)
    start_k, seqlen_k = key_length(cu_seqlens_k, seqused_k, b, total_k, True, SEQUSED)
    rank = 0
    total = 0
    for first in range(0, batch, CHUNK):
        j = first + tl.arange(0, CHUNK)
        inside = j < batch
        _, others_q = lengths(cu_seqlens_q, j, total_q, inside)
        _, others_k = key_length(cu_seqlens_k, seqused_k, j, total_k, inside, SEQUSED)
        counts = tl.where(inside, item_count(others_q, blocks, PAIRED, BLOCK_M), 0)
        before = (others_k > seqlen_k) | ((others_k == seqlen_k) & (j < b))
        rank += tl.sum(tl.where(before, counts, 0))
        total += tl.sum(counts)
    if b == 0:
        tl.store(table, tl.minimum(total, capacity))
        tl.store(table + 1, 0)
    count = tl.minimum(item_count(seqlen_q, blocks, PAIRED, BLOCK_M), capacity - rank)
    for first in range(0, count, CHUNK):
        place = first + tl.arange(0, CHUNK)
        row = table + (1 + rank + place) * WIDTH
        inside = place < count
        tl.store(row, b, mask=inside)
        tl.store(row + 1, place, mask=inside)
        tl.store(row + 2, start_q, mask=inside)
        tl.store(row + 3, start_k, mask=inside)
        tl.store(row + 4, seqlen_q, mask=inside)
        tl.store(row + 5, seqlen_k, mask=inside)


def capacity(total_q: int, batch: int, block_m: int) -> int:
    """The most items of one head that ``batch`` sequences of together ``total_q`` rows can have."""
    return total_q // block_m + batch
