"""The rule of a mask, and the ranges that kernels take from it, against the oracle of the random calls."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashtile.problems.masking import BEYOND_WINDOW, CAUSAL, RANGES, Masking, positions, split
from fuzz.oracle import seen_by
from walk import walk

LENGTHS = ((1, 1), (7, 7), (9, 4), (4, 9), (12, 1), (1, 12), (20, 6), (0, 2), (5, 0))
WINDOWS = ((-1, -1), (-1, 0), (0, 0), (3, -1), (-1, 4), (5, 2), (100, 100))


OPTIONS = ({}, *({name: size} for name in BEYOND_WINDOW for size in (1, 3, 5)))


@walk("options", OPTIONS)
@pytest.mark.parametrize("window", WINDOWS)
def test_ranges_agree_with_the_rule(window, options):
    masking = Masking(window_left=window[0], window_right=window[1], **options)
    for lengths, first in itertools.product(LENGTHS, (0, 2)):
        rows, keys = positions(*lengths), range(min(first, lengths[1]), lengths[1])
        seen = masking.visible(rows, keys)
        assert torch.equal(seen, seen_by(*lengths, **masking.arguments())[:, keys.start :])
        assert masking.sees_all(rows, keys) == bool(seen.all())
        with_keys = [row for row, sees in zip(rows, seen, strict=True) if sees.any()]
        assert set(with_keys) <= set(masking.row_range(rows, keys))
        for few in split(rows, 3):
            part = seen[few.start - rows.start : few.stop - rows.start]
            reached = [key for key, is_seen in zip(keys, part.T, strict=True) if is_seen.any()]
            assert set(reached) <= set(masking.key_range(few, keys))
            if reached and not options:  # a row that sees no key of its chunk may widen the range
                assert list(masking.key_range(few, keys)) == reached
        if not options:
            assert list(masking.row_range(rows, keys)) == with_keys


def test_causal_of_unequal_lengths():
    """The masks that FlashAttention's documentation draws: 2 queries of 5 keys, 5 queries of 2 keys."""
    seen = CAUSAL.visible(positions(2, 5), range(5)), CAUSAL.visible(positions(5, 2), range(2))
    assert seen[0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen[1].int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


def test_a_window_costs_by_the_window():
    masking = Masking(window_left=256, window_right=0)
    blocks = split(range(4096), 128)
    scores = sum(len(rows) * len(masking.key_range(rows, range(4096))) for rows in blocks)
    assert scores < 4096 * (256 + 128)


def test_narrow_windows_cut_every_tile():
    for left, right, rows, keys in itertools.product(range(5), range(5), (1, 3, 4), (1, 2, 4)):
        masking = Masking(window_left=left, window_right=right)
        tiles = ((range(start, start + rows), range(20, 20 + keys)) for start in range(40))
        some_tile_is_full = any(itertools.starmap(masking.sees_all, tiles))
        assert masking.for_kernels(60, 60).cuts_every_tile(rows, keys) is not some_tile_is_full
    for one_sided in (Masking(window_left=1), CAUSAL, Masking()):
        assert not one_sided.for_kernels(60, 60).cuts_every_tile(4, 4)
    assert Masking(attention_chunk=4).for_kernels(60, 60).cuts_every_tile(5, 5)


def test_options_that_a_kernel_does_not_know():
    assert Masking(window_left=3, window_right=0).beyond_window is None
    chunked = Masking(window_left=3, attention_chunk=4)
    assert chunked.beyond_window == chunked.beyond(()) == "attention_chunk"
    assert chunked.beyond(("attention_chunk",)) is None


def test_every_option_has_a_range():
    assert tuple(RANGES) == tuple(Masking.__annotations__)
