"""Masks and blocks of the portable kernels, run as Python and compared with the rule."""

from __future__ import annotations

import itertools
import operator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from flashtile.backends.portable import masking as device
from flashtile.problems.masking import BEYOND_WINDOW, EVERYTHING, Masking
from kernels_as_python import functions_of
from walk import walk

LENGTHS = [(1, 1), (1, 70), (70, 1), (17, 40), (40, 17), (32, 64), (64, 8), (5, 0), (48, 48)]
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (20, 5), (-1, 9), (7, -1), (0, -1), (100, 100)]
OPTIONS = ({}, *({name: size} for name in BEYOND_WINDOW for size in (1, 4, 7, 100)))
MASKINGS = [
    Masking(window_left=left, window_right=right, **options)
    for (left, right), options in itertools.product(WINDOWS, OPTIONS)
]


def _remainder(a: int, b: int) -> int:
    """Triton's remainder, which has the sign of ``a``."""
    return abs(a) % b * (1 if a >= 0 else -1)


class _Int(int):
    """An integer of a kernel."""

    __mod__ = _remainder

    def __add__(self, other: int) -> _Int:
        return _Int(int(self) + other)

    def __sub__(self, other: int) -> _Int:
        return _Int(int(self) - other)


IN_PYTHON = functions_of(
    device,
    tl=SimpleNamespace(
        where=lambda condition, a, b: a if condition else b, minimum=min,
        full=lambda shape, value, dtype: value, int1=None,
    ),
)  # fmt: skip
window_at, visible, block_range = operator.itemgetter("window_at", "visible", "block_range")(IN_PYTHON)


class _Distance(int):
    shape = ()


def constants_of(masking: Masking, *lengths: int) -> tuple[Any, SimpleNamespace]:
    mask = masking.for_kernels(*lengths)
    return mask, SimpleNamespace(**mask.constants)


@walk("masking", MASKINGS)
@walk(("seqlen_q", "seqlen_k"), LENGTHS)
def test_rows_see_the_keys_of_the_masking(masking: Masking, seqlen_q: int, seqlen_k: int) -> None:
    mask, C = constants_of(masking, seqlen_q, seqlen_k)
    rows, keys = range(seqlen_k - seqlen_q, seqlen_k), range(seqlen_k)
    for row, expected in zip(rows, masking.visible(rows, keys).tolist(), strict=True):
        window = window_at(_Int(row), 0, mask, C)
        assert [visible(_Distance(key - row), window, mask, C) for key in keys] == expected


@walk("mirrored", [False, True])
@walk("masking", MASKINGS)
@walk(("seqlen_q", "seqlen_k"), LENGTHS)
def test_blocks_are_those_of_the_masking(
    masking: Masking, seqlen_q: int, seqlen_k: int, mirrored: bool
) -> None:
    """Blocks of keys for rows, or mirrored, blocks of rows for keys."""
    mask, C = constants_of(masking, seqlen_q, seqlen_k)
    seen = masking.visible(range(seqlen_k - seqlen_q, seqlen_k), range(seqlen_k))
    offset, sides = seqlen_k - seqlen_q, (C.HAS_LEFT, C.HAS_RIGHT)
    if mirrored:
        seen, sides = seen.T, sides[::-1]
    own, others = seen.shape
    to_position = 0 if mirrored else offset
    for (block_own, block), start in itertools.product([(8, 16), (16, 8)], range(0, own, 8)):
        end = min(start + block_own, own)
        windows = [
            window_at(_Int(at + to_position), 0, mask, C, MIRRORED=mirrored) for at in (start, end - 1)
        ]
        first, full_first, full_last, last = block_range(
            start, end, -offset if mirrored else offset, others, *windows, *sides, block
        )
        assert first <= full_first <= full_last <= last
        for n in range(others // block + 2):
            part = seen[start:end, n * block : (n + 1) * block]
            whole = part.shape[1] == block and bool(part.all())
            assert not masking.in_one_range or whole is (full_first <= n < full_last)
            assert not part.any() or first <= n < last
            assert not (whole and end == start + block_own and mask.cuts_every_tile(block_own, block))


def test_options_without_effect_are_left_out() -> None:
    assert EVERYTHING.for_kernels(5, 9) == (-1, -1, None)
    assert Masking(window_left=8, window_right=4).for_kernels(5, 9) == (-1, -1, None)
    assert Masking(window_right=0, attention_chunk=9).for_kernels(5, 9) == (-1, 0, None)
    assert Masking(attention_chunk=9).for_kernels(1, 9) == (-1, -1, None)
    assert Masking(attention_chunk=20).for_kernels(12, 9) == (8, 8, 9)
    assert Masking(window_left=2, attention_chunk=4).for_kernels(1, 9) == (2, -1, 4)
