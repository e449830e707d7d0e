"""Uploading of weights to a GPU, ahead of their use.

A copy from mapped memory goes through the driver's own pinned buffer. One thread fills that buffer, one page
fault at a time. Here several threads read parts of the files into pinned memory, and each part is copied to
the GPU while others are read. Weights that will be needed next are read in advance.
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
"""Bytes per read of one thread."""
THREADS = 8
AHEAD_BYTES = 2**28
"""Largest number of bytes of weights that are read ahead of their use."""


class ByteRange(NamedTuple):
    """The bytes of a tensor in a file: ``nbytes`` bytes from ``offset`` on."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Upload:
    """Loads tensors by name: ``upload(name)`` returns the tensor on the device.

    Args:
        ranges: the tensors' bytes by name, in about the order of use. Each tensor may be loaded once.
        device: the target device. Copies run on the stream that is current when this object is made; use the
            tensors on that stream.
    """

    def __init__(self, ranges: dict[str, ByteRange], device: torch.device):
        self.ranges, self.device = ranges, device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        threads = min(THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, "flashtile-upload")
        self._buffers: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        for buffer in torch.empty(
            2 * threads, PART_BYTES, dtype=torch.uint8, pin_memory=on_gpu, device="cpu"
        ):
            self._buffers.put((buffer, torch.cuda.Event() if on_gpu else None))
        self._files = {path: os.open(path, os.O_RDONLY) for path in {one.path for one in ranges.values()}}
        for file in self._files.values():
            weakref.finalize(self, os.close, file)
        self._unsent = list(reversed(ranges))  # names of tensors to send; the last name is sent next
        self._sent: dict[str, tuple[Tensor, Sequence[Future[None]]]] = {}
        self._send_ahead()

    def __call__(self, name: str) -> Tensor:
        if name not in self._sent:
            self._unsent.remove(name)
            self._send(name)
        out, parts = self._sent.pop(name)
        for part in parts:
            part.result()
        self._send_ahead()
        return out

    def _send_ahead(self) -> None:
        while self._unsent and sum(out.nbytes for out, _ in self._sent.values()) < AHEAD_BYTES:
            self._send(self._unsent.pop())

    def _send(self, name: str) -> None:
        span = self.ranges[name]
        out = torch.empty(span.shape, dtype=span.dtype, device=self.device)
        target, file = out.reshape(-1).view(torch.uint8), self._files[span.path]
        parts = [
            self._threads.submit(self._copy, file, span.offset + at, target[at : at + PART_BYTES])
            for at in range(0, span.nbytes, PART_BYTES)
        ]
        self._sent[name] = out, parts

    def _copy(self, file: int, offset: int, target: Tensor) -> None:
        buffer, event = self._buffers.get()
        try:
            if event is not None:
                event.synchronize()  # the previous copy may still read the buffer
            _read(file, offset, buffer[: len(target)])
            # Inference mode and the current stream are thread-local, so they are set in this thread.
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                target.copy_(buffer[: len(target)], non_blocking=True)
                if event is not None:
                    event.record(self._stream)
        finally:
            self._buffers.put((buffer, event))


def _read(file: int, offset: int, buffer: Tensor) -> None:
    """Fill a pinned buffer from a file, beginning at ``offset``."""
    view = memoryview((ctypes.c_char * len(buffer)).from_address(buffer.data_ptr())).cast("B")
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError("a file of weights has become shorter while it was read")
        view, offset = view[count:], offset + count
