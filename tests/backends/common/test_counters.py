"""Counters of kernels: who shares them, with streams and captured graphs that a stub stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashtile.backends.common import counters
from flashtile.caches import BoundedCache
from walk import walk

DEVICE = SimpleNamespace(type="cuda", index=0)


class Gpu:
    """A GPU without kernels. ``stream`` is the address of the current stream."""

    stream, captures = 0, False
    zeroing: Callable[[], object] = staticmethod(lambda: None)
    """Called before memory is zeroed."""

    def zeros(self, count: int, dtype: torch.dtype, device: object) -> Tensor:
        self.zeroing()
        return torch.zeros(count, dtype=dtype)

    def take(self, stream: int, count: int = 1, captures: bool = False) -> Tensor:
        self.stream, self.captures = stream, captures
        return counters.zeroed_counters(DEVICE, count)  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    idle = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(current_stream=lambda device: idle)
    monkeypatch.setattr(counters, "torch", SimpleNamespace(zeros=found.zeros, int32=torch.int32, cuda=cuda))
    monkeypatch.setattr(counters.torch_private, "cuda_stream", lambda index: found.stream)
    monkeypatch.setattr(counters, "is_capturing", lambda device: found.captures)
    monkeypatch.setattr(counters, "_reserves", {})
    monkeypatch.setattr(counters, "_of_stream", BoundedCache(counters.CACHE_BYTES))
    return found


def places(taken: Tensor) -> range:
    return range(taken.data_ptr(), taken.data_ptr() + taken.nbytes)


def streams(gpu: Gpu) -> list[Tensor]:
    """A new stream at the address of a destroyed one gets its counters, as it gets torch's memory."""
    small = [gpu.take(address) for address in (7, 8, 7)]
    large = [gpu.take(address, 2 * counters.LEAST) for address in (7, 8)]
    assert small[0] is small[2]
    assert large[0] is gpu.take(7)
    assert [*map(len, large)] == [2 * counters.LEAST] * 2
    return [*small[:2], *large]


def graphs(gpu: Gpu) -> list[Tensor]:
    counts = 1, 4, 1, counters.RESERVED, 2
    taken = [gpu.take(7, count, captures=True) for count in counts]
    assert (*map(len, taken),) == counts
    return taken


@walk("order", [(streams, graphs), (graphs, streams, graphs)])
def test_only_calls_on_one_address_share_counters(gpu: Gpu, order: tuple[Callable, ...]) -> None:
    counters._reserves.clear()
    counters._of_stream.clear()
    taken = [each for some in order for each in some(gpu)]
    for a, b in itertools.combinations(map(places, taken), 2):
        assert a.stop <= b.start or b.stop <= a.start


def test_counters_of_a_graph_stay_if_two_threads_make_their_reserve(gpu: Gpu) -> None:
    taken = []

    def other_thread() -> None:
        gpu.zeroing = lambda: None
        gpu.take(8)
        taken.append(gpu.take(8, captures=True))
        gpu.stream, gpu.captures = 7, False

    gpu.zeroing = other_thread
    gpu.take(7)
    kept = counters._reserves[0]._counters
    assert places(taken[0]).start in places(kept)
    assert gpu.take(7, captures=True).data_ptr() != taken[0].data_ptr()
