"""Host time of a call, and memory of calls that are over."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from flashtile.hardware.timing import Function, synchronize

HOST_BATCHES = 7
"""Number of batches of calls. The host time of a call is the median of the batches' mean times."""
HOST_CALLS = {"cuda": 200, "cpu": 20}
"""Number of calls per batch. It is less than CUDA can queue, so that the host never waits for the GPU."""


def issue_time(function: Function, device: torch.device) -> float:
    """Return the host time of a call in microseconds, without waiting for the GPU."""
    batches, calls = [], HOST_CALLS[device.type]
    for batch in range(HOST_BATCHES + 1):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if batch:  # the first batch compiles and warms up
            batches.append((time.perf_counter() - start) / calls * 1e6)
        synchronize(device)
    return statistics.median(batches)


def release_memory(device: torch.device) -> None:
    """Free cached memory that no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
