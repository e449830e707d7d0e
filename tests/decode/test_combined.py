"""Decoding in one kernel, in Triton's interpreter: attention programs append, and combine their parts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import interpreter_builder

import flashtile
from cases import FP16, FP32
from decode_cases import CASES, DecodeCase, build, case
from flashtile.backends.portable.decode import append_launch, config, launch
from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES
from flashtile.operators import decode as operators
from flashtile.problems.decode import FP8
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


APPENDED = (
    case("plain", new=1, page_size=4, causal=True),
    case("rotary", new=1, page_size=5, rotary_dim=16, rotary_interleaved=False, lengths=(0, 7, 40),
         capacity=50),
    case("splits", new=1, page_size=4, rotary_dim=8, cache_dtype=FP8, descale="block", num_splits=3),
    case("window", new=1, page_size=1, rotary_dim=6, rotary_seqlens=(5, 1, 30), window_size=(7, 0),
         capacity=44),
    case("whole", new=1, page_size=4, num_splits=1, sink=True, heads=(6, 2)),
    case("last-place", new=1, page_size=48, cache_dtype=FP8, descale="head", lengths=(47, 46, 0)),
)  # fmt: skip
LEFT = (
    case("dense", new=1),
    case("two-tokens", new=2, page_size=4),
    case("two-queries", new=1, seqlen_q=2, page_size=4),
    case("packed", new=(1, 2, 0), page_size=4),
)


def step(given: DecodeCase, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return (out, lse, k_cache, v_cache) after a decoding step."""
    torch.manual_seed(0)
    tensors, arguments = build(given, dtype, "cpu")
    q = tensors[0].clone()
    results = flashtile.flash_attn_with_kvcache(
        *tensors, return_softmax_lse=True, backend="portable", **arguments
    )
    assert torch.equal(tensors[0], q)
    return *results, *(cache.float() for cache in tensors[1:3])


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("given", [*APPENDED, *LEFT], ids=lambda given: given.name)
def test_the_attention_kernel_appends(given, dtype, monkeypatch):
    """The same bits in results and caches as by a kernel that appends before, which serves other calls."""
    expected = step(given, dtype)
    monkeypatch.setattr(operators, "_append_and_decode", BoundedCache(CACHE_BYTES))
    monkeypatch.setattr(config, "APPENDS", True)
    monkeypatch.setattr(config, "COMBINES", True)
    if given in APPENDED:
        monkeypatch.setattr(append_launch, "append_kernel", None)
    torch.testing.assert_close(step(given, dtype), expected, rtol=0, atol=0, equal_nan=True)


def test_invalid_pages_and_lengths(counters, monkeypatch):
    """Nothing is written outside of the cache, and the results of such sequences are NaN."""
    monkeypatch.setattr(config, "APPENDS", True)
    tensors, arguments = build(case("plain", new=1, page_size=4), FP32, "cpu")
    for operation in (operators.APPEND, operators.DECODE):  # on a GPU, values are not checked
        monkeypatch.setattr(operation, "check_values", lambda *_: None)
    arguments["block_table"][0, 17 // 4] = 1000
    arguments["cache_seqlens"][1] = 4800
    before = tensors[1].clone()
    out = flashtile.flash_attn_with_kvcache(*tensors, backend="portable", **arguments)
    assert out[:2].isnan().all()
    assert out[2].isfinite().all()
    changed = (tensors[1] != before) & ~(tensors[1].isnan() & before.isnan())
    assert int(changed.any(-1).any(-1).sum()) == 1
