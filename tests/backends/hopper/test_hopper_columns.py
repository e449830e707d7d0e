"""Products over the columns that there are, run as Python: what is left out is zeros, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from flashtile.backends.hopper import layouts
from flashtile.backends.hopper.backward.wide_launch import gradient_columns
from flashtile.backends.hopper.config import padded
from kernels_as_python import functions_of
from walk import walk


class Tile:
    """Of shared memory, [rows, columns]."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape = values, values.shape

    def slice(self, start: int, length: int, dim: int) -> Tile:
        assert length & (length - 1) == 0, "tensors have powers of two"
        return Tile(self.values.narrow(dim, start, length))

    def permute(self, order: tuple[int, int]) -> Tile:
        return Tile(self.values.permute(order))


@walk("head_dim", range(8, 257, 8))
def test_accumulators_have_the_columns_that_there_are(head_dim: int) -> None:
    """In steps of 64, and what leaves together is of one of them."""
    gl = SimpleNamespace(
        constexpr=int, float32=None, NVMMADistributedLayout=lambda *_: None, full=lambda shape, *_: shape
    )
    widths = [shape[1] for shape in functions_of(layouts, gl=gl)["zero_sums"](head_dim)]
    assert sum(widths) == -(-head_dim // 64) * 64
    assert all(width % gradient_columns(head_dim) == 0 for width in widths)


@walk("head_dim", range(8, 257, 8))
@walk("use_acc", [False, True])
def test_product_of_rows(head_dim: int, use_acc: bool) -> None:
    multiplied: list[int] = []

    def warpgroup_mma(a: Tile, b: Tile, acc: torch.Tensor, use_acc: bool, is_async: bool) -> torch.Tensor:
        assert is_async
        multiplied.append(a.shape[1])
        return a.values @ b.values + (acc if use_acc else 0)

    functions: dict[str, Any] = functions_of(
        layouts, gl=SimpleNamespace(constexpr=int), warpgroup_mma=warpgroup_mma
    )
    a, b = (torch.randn(8, padded(head_dim), dtype=torch.float64) for _ in range(2))
    used = -(-head_dim // 16) * 16
    expected = a[:, :used] @ b[:, :used].T + (1 if use_acc else 0)
    a[:, used:] = torch.nan
    found = functions["product_of_rows"](Tile(a), Tile(b), torch.ones(8, 8).double(), head_dim, use_acc)
    torch.testing.assert_close(found, expected)
    assert sum(multiplied) == used
    assert len(multiplied) == functions["count_products"](head_dim)
