"""What keeps a call from Hopper's tensor memory accelerator, as the problem says it: each obstacle alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtile.problems.common import find_tma_obstacle
from walk import walk

BATCH, TOKENS, HEADS, D = 2, 8, 2, 16


def tensor() -> Tensor:
    """Aligned to 64 bytes and dense."""
    return torch.zeros(BATCH, TOKENS, HEADS, D, dtype=torch.bfloat16)


def behind(elements: int) -> Tensor:
    """``elements`` behind an aligned address, with aligned strides."""
    memory = torch.zeros(BATCH * TOKENS * HEADS * D + 64, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    return memory[elements:].as_strided((BATCH, TOKENS, HEADS, D), (TOKENS * HEADS * D, HEADS * D, D, 1))


def strided(*strides: int) -> Tensor:
    return torch.zeros(BATCH * 1024, dtype=torch.bfloat16).as_strided(
        (BATCH, TOKENS, HEADS, D), (*strides, 1)
    )


PLACES = ("q", "k", "v")


def obstacle(name: str, changed: Tensor, ends_early: bool = False) -> str | None:
    return find_tma_obstacle(*(changed if place == name else tensor() for place in PLACES), ends_early)


@pytest.mark.parametrize("name", PLACES)
class TestEveryTensor:
    @walk("elements", [1, 4])
    def test_address(self, name: str, elements: int) -> None:
        assert f"{name} must start at a multiple of 16 bytes" in obstacle(name, behind(elements))
        assert obstacle(name, behind(8)) is None

    @walk(
        "strides",
        [(516, 64, 16), (512, 36, 16), (512, 64, 20), (0, 32, 16), (256, 0, 16), (256, 32, 0)],
    )
    def test_strides(self, name: str, strides: tuple[int, ...]) -> None:
        assert f"{name} must have positive strides in multiples of 16 bytes" in obstacle(
            name, strided(*strides)
        )

    def test_the_stride_of_an_extent_of_one_may_be_anything(self, name: str) -> None:
        one = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 1, 2, D), (3, 5, D, 1))
        assert obstacle(name, one) is None


@pytest.mark.parametrize("name", ["k", "v"])
def test_used_keys_want_sequences_whole_rows_apart(name: str) -> None:
    apart = strided(8 * 32 + 8, 32, 16)  # a quarter of a row more
    assert f"{name} must have sequences whole rows apart" in obstacle(name, apart, ends_early=True)
    assert obstacle(name, apart) is None
    assert obstacle("q", apart, ends_early=True) is None


def test_used_keys_want_k_and_v_equally_far_apart() -> None:
    wider = strided(16 * 32, 32, 16)
    assert "the same number of rows between sequences" in obstacle("v", wider, ends_early=True)
    assert obstacle("v", wider) is None
    assert find_tma_obstacle(tensor(), wider, wider, True) is None
