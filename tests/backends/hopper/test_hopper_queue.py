"""The work queue between the partitions of a Hopper kernel, run as Python: threads and counting barriers."""

from __future__ import annotations

import random
import threading
import time
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from flashtile.backends.hopper import pipeline
from kernels_as_python import functions_of
from walk import walk

PATIENCE = 20.0
"""Seconds after which a partition that waits is said to hang."""


class Barrier:
    """An mbarrier: a phase ends when ``count`` have arrived; who waits names the parity of the phase."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.phase = 0
        self.changed = threading.Condition()

    def arrive(self, count: int) -> None:
        with self.changed:
            self.missing -= count
            assert self.missing >= 0, "more arrivals than a phase has"
            if self.missing == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            ended = self.changed.wait_for(lambda: (self.phase - 1) % 2 == parity, PATIENCE)
            assert ended, "nobody arrives"


class Slot:
    """Memory that other threads see late, and that holds nonsense before it is written."""

    def __init__(self) -> None:
        self.value = -1

    def store(self, value: int) -> None:
        time.sleep(random.random() * 1e-4)
        self.value = value

    def load(self, layout: Any) -> int:
        return self.value


class Ring(list):
    def index(self, i: int) -> Any:  # type: ignore[override]
        return self[i]


MBARRIER = SimpleNamespace(
    wait=lambda barrier, parity: barrier.wait(parity), arrive=lambda barrier, count: barrier.arrive(count)
)
GL = SimpleNamespace(
    BlockedLayout=lambda *arguments: None,
    full=lambda shape, value, *rest: value,
    max=lambda x, axis: x,
    int32=None,
)
FUNCTIONS = functions_of(pipeline, pipeline, gl=GL, mbarrier=MBARRIER)


def make_queue(readers: int) -> SimpleNamespace:
    slots = FUNCTIONS["SLOTS"]
    queue = SimpleNamespace(
        tiles=Ring(Slot() for _ in range(slots)),
        full=Ring(Barrier(1) for _ in range(slots)),
        empty=Ring(Barrier(readers) for _ in range(slots)),
        STAGES=slots,
    )
    for name in ("acquire", "wait", "release"):
        plain = getattr(pipeline.Channel, name).fn
        function = type(make_queue)(plain.__code__, FUNCTIONS, name, plain.__defaults__)
        setattr(queue, name, MethodType(function, queue))
    return queue


@walk("readers", [1, 3])
def test_every_reader_takes_every_tile_in_order(readers: int) -> None:
    queue, tiles = make_queue(readers), [7 * t + 3 for t in range(40)]
    taken: list[list[int]] = [[] for _ in range(readers)]
    failures: list[BaseException] = []

    def produce() -> None:
        for t, tile in enumerate(tiles):
            FUNCTIONS["put"](queue, t, tile)

    def read(own: list[int], patience: float) -> None:
        for t in range(len(tiles)):
            time.sleep(patience * random.random())
            peeked = FUNCTIONS["peek"](queue, t, 4)
            own.append(FUNCTIONS["take"](queue, t, 4))
            assert peeked == own[-1], "the slot was written while it was read"

    def guarded(function: Any, *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run, daemon=True)

    threads = [guarded(produce), *(guarded(read, own, 1e-3 * i) for i, own in enumerate(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures, failures
    assert taken == [tiles] * readers
