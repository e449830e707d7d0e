"""Capture of steps in CUDA graphs, one for each padded batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MAX_GRAPH_BATCH = 512


def graph_batch(batch: int) -> int:
    """Return the batch size that a captured step is padded to: 1, 2, 4, 8, multiples of 8 up to 64, then
    multiples of 32."""
    if batch <= 8:
        return 1 << (batch - 1).bit_length()
    step = 8 if batch <= 64 else 32
    return -(-batch // step) * step


class Capture:
    """Captures CUDA graphs that share one memory pool, because only one runs at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture ``run`` and return a function that replays it. ``run`` is called once before, so that its
        kernels are compiled."""
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
