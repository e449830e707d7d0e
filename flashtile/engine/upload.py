"""Weights on their way to a GPU, before they are asked for.

A copy from mapped memory goes through the driver's own pinned buffer, which one thread fills, page fault by
page fault. Here several threads read parts of the files into pinned memory, and each part goes on to the GPU
while others are read. The weights that will be asked for next are on their way as well.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

PART_BYTES = 2**22
"""That one thread reads at a time."""
THREADS = 8
AHEAD_BYTES = 2**28
"""Of weights that are on their way and not asked for yet."""


class Stretch(NamedTuple):
    """Where a tensor lies: ``nbytes`` from ``offset`` on in a file."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Upload:
    """``upload(name)``: the tensor of a name, on the device.

    Args:
        stretches: by name, in about the order in which they will be asked for; each is asked for once.
        device: where to. The copies are part of the stream that is current now, and so is what uses them.
    """

    def __init__(self, stretches: dict[str, Stretch], device: torch.device):
        self.stretches, self.device = stretches, device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        threads = min(THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, "flashtile-upload")
        self._rooms: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        for room in torch.empty(2 * threads, PART_BYTES, dtype=torch.uint8, pin_memory=on_gpu):
            self._rooms.put((room, torch.cuda.Event() if on_gpu else None))
        self._files = {path: os.open(path, os.O_RDONLY) for path in {one.path for one in stretches.values()}}
        weakref.finalize(self, _close, list(self._files.values()))
        self._left = list(reversed(stretches))  # not sent yet, the next one last
        self._sent: dict[str, tuple[Tensor, Sequence[Future[None]]]] = {}
        self._send_ahead()

    def __call__(self, name: str) -> Tensor:
        if name not in self._sent:
            self._left.remove(name)
            self._send(name)
        out, parts = self._sent.pop(name)
        for part in parts:
            part.result()
        self._send_ahead()
        return out

    def _send_ahead(self) -> None:
        while self._left and sum(out.nbytes for out, _ in self._sent.values()) < AHEAD_BYTES:
            self._send(self._left.pop())

    def _send(self, name: str) -> None:
        stretch = self.stretches[name]
        out = torch.empty(stretch.shape, dtype=stretch.dtype, device=self.device)
        target, file = out.reshape(-1).view(torch.uint8), self._files[stretch.path]
        parts = [
            self._threads.submit(self._copy, file, stretch.offset + at, target[at : at + PART_BYTES])
            for at in range(0, stretch.nbytes, PART_BYTES)
        ]
        self._sent[name] = out, parts

    def _copy(self, file: int, offset: int, target: Tensor) -> None:
        room, event = self._rooms.get()
        try:
            if event is not None:
                event.synchronize()  # what it held before has arrived
            _read(file, offset, room[: len(target)])
            # A thread has neither of its caller's.
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                target.copy_(room[: len(target)], non_blocking=True)
                if event is not None:
                    event.record(self._stream)
        finally:
            self._rooms.put((room, event))


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _read(file: int, offset: int, room: Tensor) -> None:
    """Fill the room from a place in a file."""
    view = memoryview((ctypes.c_char * len(room)).from_address(room.data_ptr())).cast("B")
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError("a file of weights has become shorter while it was read")
        view, offset = view[count:], offset + count
