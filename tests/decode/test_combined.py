"""Decoding whose attention programs combine their parts, in Triton's interpreter."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import interpreter_builder

import flashtile
from cases import FP16, FP32
from decode_cases import CASES, build
from flashtile.backends.portable.decode import config, launch
from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES
from flashtile.operators import decode as operators
from flashtile.testing import decode as testing

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("balanced_work")]

BY_NAME = {case.name: case for case in CASES}
NAMES = (
    "dense", "empty-cache", "group-of-7", "heads-in-blocks", "paged", "window-left", "sink-without-keys",
    "ragged-queries", "chunk-splits", "tree-by-batch", "fp8-by-block", "append-paged", "rotary", "everything",
)  # fmt: skip


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The counters of each launch, in a test whose attention programs combine parts."""
    given: list[torch.Tensor] = []
    zeroed = launch.zeroed_counters

    def noted(*arguments: Any) -> torch.Tensor:
        given.append(zeroed(*arguments))
        return given[-1]

    monkeypatch.setattr(config, "COMBINES", True)
    monkeypatch.setattr(launch, "zeroed_counters", noted)
    return given


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_features(name, dtype, counters, monkeypatch):
    monkeypatch.setattr(launch, "combine_kernel", None)
    tensors, arguments = build(BY_NAME[name], dtype, "cpu")
    testing.check(*tensors, backend="portable", **arguments)
    assert counters
    assert not any(bool(numbers.any()) for numbers in counters)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"split_size": 16}], ids=str)
def test_any_order_of_programs(splits, counters, monkeypatch):
    """Which program comes last does not change the bits, and they are those of the combining kernel."""
    (q, *caches, _, _), arguments = build(BY_NAME["paged"], FP32, "cpu")
    arguments |= {"backend": "portable", "return_softmax_lse": True, **splits}

    def attend(combines: bool) -> Any:
        monkeypatch.setattr(config, "COMBINES", combines)
        monkeypatch.setattr(operators.DECODE, "launches", BoundedCache(CACHE_BYTES))
        return flashtile.flash_attn_with_kvcache(q, *caches, **arguments)

    expected = attend(False)
    assert not counters
    set_grid_idx = interpreter_builder.set_grid_idx
    for seed in range(4):

        def moved(x: int, y: int, z: int, seed: int = seed) -> None:
            order = list(range(interpreter_builder.grid_dim[0]))
            Random(seed).shuffle(order)
            set_grid_idx(order[x], y, z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", moved)
        torch.testing.assert_close(attend(True), expected, rtol=0, atol=0)
    assert len(counters) == 4
    assert not any(bool(numbers.any()) for numbers in counters)
