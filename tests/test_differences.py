"""What is said of results that should have the same bits."""

import torch

from differences import describe, same_bits


def test_places_and_sizes() -> None:
    expected = torch.ones(2, 8, 6, dtype=torch.bfloat16)
    found = expected.clone()
    assert same_bits(found, expected)
    assert describe(found, expected) == "the same bits"
    found[1, 3:5, 2] = 3.0
    found[1, 3, 5] = torch.nan
    assert not same_bits(found, expected)
    said = describe(found, expected)
    assert said.startswith(
        "3 of 96 elements of (2, 8, 6) differ, at indices 1 of [1, 1], 2 of [3, 4], 2 of [2, 5]"
    )
    assert said.endswith("1 are NaN, others differ by up to 2 (largest element: 1)")


def test_signs_of_zero_are_bits() -> None:
    zeros = torch.zeros(4)
    assert not same_bits(zeros, -zeros)
    assert same_bits(torch.full((4,), torch.nan), torch.full((4,), torch.nan))
