"""Decoding steps whose attention kernel also appends, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import flashtile
from cases import FP16, FP32
from decode_cases import DecodeCase, build, case
from flashtile.backends.portable.decode import append, attend, launch
from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES
from flashtile.operators import decode as operators
from flashtile.problems.decode import FP8

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("balanced_work")]

SERVED = (
    case("plain", new=1, page_size=4, causal=True),
    case("rotary", new=1, page_size=5, rotary_dim=16, rotary_interleaved=False, lengths=(0, 7, 40),
         capacity=50),
    case("splits", new=1, page_size=4, rotary_dim=8, num_splits=3),
    case("split-size", new=1, page_size=4, rotary_dim=8, split_size=16, softcap=20.0),
    case("window", new=1, page_size=1, rotary_dim=6, rotary_seqlens=(5, 1, 30), window_size=(7, 0),
         capacity=44),
    case("whole", new=1, page_size=4, num_splits=1, sink="own", heads=(6, 2)),
    case("last-place", new=1, page_size=48, lengths=(47, 46, 0)),
    case("invariant", new=1, page_size=4, rotary_dim=8, invariant=True),
)  # fmt: skip
LEFT = (
    case("dense", new=1),
    case("fp8", new=1, page_size=4, rotary_dim=8, cache_dtype=FP8, descale="block"),
    case("two-tokens", new=2, page_size=4),
    case("two-queries", new=1, seqlen_q=2, page_size=4),
    case("packed", new=(1, 2, 0), page_size=4),
    case("wide", new=1, page_size=4, head_dim=136),
    case("large-group", new=1, page_size=4, heads=(20, 1)),
    case("invariant-large-group", new=1, page_size=4, invariant=True, heads=(20, 1)),
    case("invariant-two-tokens", new=2, page_size=4, invariant=True),
)


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention kernels append as they do on a GPU for which this was timed."""
    monkeypatch.setattr(launch, "family", lambda device: "hopper")
    monkeypatch.setattr(operators, "_append_and_decode", BoundedCache(CACHE_BYTES))


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


@pytest.mark.parametrize("given", [*SERVED, *LEFT], ids=lambda given: given.name)
def test_the_attention_kernel_appends(given: DecodeCase, request: pytest.FixtureRequest) -> None:
    """The same bits in results and caches as by a kernel that appends before, which serves other calls."""
    expected = step(given, FP16)
    request.getfixturevalue("as_on_hopper")
    monkeypatch = request.getfixturevalue("monkeypatch")
    if given in SERVED:
        monkeypatch.setattr(launch, "append_kernel", None)
    torch.testing.assert_close(step(given, FP16), expected, rtol=0, atol=0, equal_nan=True)


def test_a_program_loads_everything_before_it_stores_the_new_token(
    as_on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads do not pass stores, so each would wait for those before it."""
    seen: list[str] = []

    def note(module: Any, name: str) -> None:
        function = getattr(module, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            seen.append(name)
            return function(*arguments, **more)

        monkeypatch.setattr(module, name, noted)

    for module, name in ((attend, "cache_of"), (append, "as_cached"), (append, "store_rows")):
        note(module, name)
    step(case("one", new=1, page_size=4, lengths=(30,), heads=(2, 1)), FP16)
    stored = seen.index("store_rows")
    assert seen[stored - 3 : stored + 2] == ["cache_of", "as_cached", "as_cached", "store_rows", "store_rows"]
    assert seen.count("store_rows") == 2


def test_float32_is_appended_before(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in float32 were not timed with an append, so another kernel appends."""
    launched: list[Any] = []
    monkeypatch.setattr(launch.AppendLaunch, "__call__", lambda *given: launched.append(given))
    step(SERVED[0], FP32)
    assert len(launched) == 1


def test_invalid_pages_and_lengths(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written outside of the cache, and the results of such sequences are NaN."""
    monkeypatch.setattr(launch, "append_kernel", None)
    tensors, arguments = build(case("plain", new=1, page_size=4), FP16, "cpu")
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


def test_a_refused_call_writes_nothing(as_on_hopper: None) -> None:
    """The whole call is checked before the kernel that appends is launched."""
    tensors, arguments = build(SERVED[1], FP16, "cpu")
    before = [cache.clone() for cache in tensors[1:3]]
    for wrong in ({"sink": torch.zeros(3)}, {"rotary_seqlens": torch.zeros(2, dtype=torch.int32)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            flashtile.flash_attn_with_kvcache(*tensors, backend="portable", **arguments | wrong)
    for cache, kept in zip(tensors[1:3], before, strict=True):
        torch.testing.assert_close(cache, kept, rtol=0, atol=0, equal_nan=True)
