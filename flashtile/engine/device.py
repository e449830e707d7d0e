"""Transfer of a step's inputs to the device in one copy, and capture of CUDA graphs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RING = 3
"""Number of pinned buffers: one step runs, one is queued, and one is being written."""

MAX_GRAPH_BATCH = 512
"""Largest number of tokens of a step that is captured in a graph."""


class Transfer:
    """A device buffer for the int32 inputs of a step. Every step overwrites it from its start.

    The inputs are copied from pinned memory, so the host does not wait for the copy. A step has at most
    ``count`` numbers.
    """

    def __init__(self, count: int, device: torch.device):
        self.numbers = torch.zeros(count, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._pinned = [
            torch.empty(count, dtype=torch.int32, pin_memory=pinned, device="cpu") for _ in range(RING)
        ]
        self._turn = 0

    def __call__(self, parts: Sequence[Sequence[int]], tensors: Sequence[Tensor] = ()) -> list[Tensor]:
        """Copy lists of integers and int32 tensors to the device. Return views of the buffer for each."""
        self._turn = (self._turn + 1) % RING
        flat = array("i")
        for part in parts:
            flat.extend(part if isinstance(part, array) else array("i", part))
        written: list[Tensor] = [torch.frombuffer(flat, dtype=torch.int32)] if flat else []
        pinned, at = self._pinned[self._turn], 0
        for tensor in (*written, *tensors):
            pinned[at : at + len(tensor)] = tensor
            at += len(tensor)
        sizes = [*map(len, parts), *map(len, tensors)]
        self.numbers[:at].copy_(pinned[:at], non_blocking=True)
        return list(self.numbers[:at].split(sizes))


def on_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``torch.tensor(numbers)`` on the device, copied from pinned memory.

    A copy from pageable memory would wait for all work queued on the device. ``numbers`` may be an array of
    int32.
    """
    if isinstance(numbers, array):
        numbers = torch.frombuffer(numbers, dtype=torch.int32)  # a list of thousands of numbers takes long
        pinned = numbers.pin_memory() if device.type == "cuda" else numbers
        return pinned.to(device, dtype, non_blocking=True)
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True, device="cpu").to(device, non_blocking=True)


def graph_batch(batch: int) -> int:
    """Return the batch size to which a step is padded if it runs as a CUDA graph.

    The sizes are 1, 2, 4, 8, the multiples of 8 up to 64, and the multiples of 32 above 64.
    """
    if batch <= 8:
        return 1 << (batch - 1).bit_length()
    step = 8 if batch <= 64 else 32
    return -(-batch // step) * step


class Capture:
    """Captures CUDA graphs. They share one memory pool, because only one graph runs at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture ``run`` in a CUDA graph and return a function that replays it.

        ``run`` is called once before the capture, so that its kernels are compiled.
        """
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay
