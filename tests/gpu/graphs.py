"""CUDA graphs of steps under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return (graph, results) of ``step``. Each replay writes to the results."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiled before capture
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
