"""Which blocks the portable kernels visit and mask, run as Python and held to what a window is."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from flashtile.backends.portable.tiles import block_range, chunk_range
from walk import walk

WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (20, 5), (-1, 9), (7, -1), (0, -1), (100, 100)]
LENGTHS = [(1, 1), (1, 70), (70, 1), (17, 40), (40, 17), (32, 64), (64, 8), (5, 0), (48, 48)]


@walk("window", WINDOWS)
@walk(("seqlen_q", "seqlen_k"), LENGTHS)
@walk(("block_m", "block_n"), [(8, 16), (16, 8)])
def test_blocks_are_those_of_the_window(
    window: tuple[int, int], seqlen_q: int, seqlen_k: int, block_m: int, block_n: int
) -> None:
    left, right = window
    offset = seqlen_k - seqlen_q
    for start in range(0, seqlen_q, block_m):
        end = min(start + block_m, seqlen_q)
        first, full_first, full_last, last = block_range.fn(
            start, end, offset, seqlen_k, left, right, left >= 0, right >= 0, block_n
        )
        assert first <= full_first <= full_last <= last
        for block in range(seqlen_k // block_n + 2):
            keys = range(block * block_n, (block + 1) * block_n)
            seen = [
                key < seqlen_k
                and (left < 0 or row + offset - key <= left)
                and (right < 0 or key - row - offset <= right)
                for row, key in itertools.product(range(start, end), keys)
            ]
            assert all(seen) is (full_first <= block < full_last)
            assert not any(seen) or first <= block < last


@walk("chunk", [1, 4, 7, 100])
def test_chunks_are_those_of_the_positions(chunk: int) -> None:
    for start, end in itertools.combinations(range(-3, 20), 2):
        first, last = chunk_range.fn(start, end, chunk)
        chunks = {position // chunk for position in range(max(start, 0), end)}
        if chunks:
            assert (first, last) == (min(chunks) * chunk, (max(chunks) + 1) * chunk)
        else:
            assert first == last
