"""Clocks: a call, a replayed CUDA graph, the host. What a machine reaches, and peak memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

MIN_CALLS = 3
HOST_BATCHES = 7
HOST_CALLS = {"cuda": 200, "cpu": 20}
"""In a batch; fewer than the launches that CUDA queues."""
CEILING_SIZE = {"cuda": 8192, "cpu": 2048}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
FLUSHED_BYTES = 2**28
"""More than the L2 cache of any GPU."""
ESTIMATED_CALLS = 5
WAITED = 2
"""How many times as long as a call's issue the GPU waits for it: hosts are not even."""
CYCLES_PER_MS = 2_000_000
"""Of a GPU's clock, about."""

FP8 = "float8_e4m3fn"

Function = Callable[[], Any]


def time_call(function: Function, rep: float, device: torch.device, *, warm_up: bool = True) -> list[float]:
    """Milliseconds of each call over about ``rep`` milliseconds of calls.

    On CUDA by events, the L2 cache flushed before each call and the time that the host takes to issue it
    hidden; on the CPU by wall time. ``warm_up=False``, on the CPU: every call counts, and one may be enough.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_on_gpu(function, rep)
    times: list[float] = []
    if warm_up:
        function()
    while len(times) < (MIN_CALLS if warm_up else 1) or sum(times) < rep:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _time_on_gpu(function: Function, rep: float) -> list[float]:
    """Milliseconds between the events around each call, on the current device.

    Before a call whose launches take the host longer than the GPU, the GPU waits until they are queued.
    """
    cache = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    function()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    issued = time.perf_counter()
    begin.record()
    for _ in range(ESTIMATED_CALLS):
        cache.zero_()
        function()
    end.record()
    issued = (time.perf_counter() - issued) / ESTIMATED_CALLS * 1e3
    torch.cuda.synchronize()
    estimate = begin.elapsed_time(end) / ESTIMATED_CALLS
    waits = round(WAITED * issued * CYCLES_PER_MS) if estimate < WAITED * issued else 0
    for _ in range(round(rep / 4 / estimate)):
        function()
    pairs = []
    for _ in range(max(MIN_CALLS, round(rep / estimate))):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        if waits:
            torch.cuda._sleep(waits)
        begin.record()
        function()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def median_time(function: Function, rep: float, device: torch.device) -> float:
    """Median milliseconds of a call, as :func:`time_call` takes them."""
    return statistics.median(time_call(function, rep, device))


def capture(functions: Sequence[Function]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call of each, on the current device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        functions[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph


def replay_time(graph: torch.cuda.CUDAGraph, rep: float) -> float:
    """Milliseconds of a replay among others, back to back for about ``rep`` milliseconds."""

    def mean(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays

    mean(1)
    return mean(max(1, math.ceil(rep / mean(2))))


def issue_time(function: Function, device: torch.device) -> float:
    """Microseconds of host time of a call, issued without waiting for the GPU."""
    batches, calls = [], HOST_CALLS[device.type]
    for batch in range(HOST_BATCHES + 1):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if batch:  # the first compiles and warms up
            batches.append((time.perf_counter() - start) / calls * 1e6)
        synchronize(device)
    return statistics.median(batches)


def peak_allocated(function: Function, device: torch.device) -> int:
    """Most bytes that a call holds at once in torch's CUDA allocator, beyond what is held before."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = function()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del results
    return peak - before


def matmul_ceiling(dtype: str, device: torch.device, rounds: int, rep: float) -> float:
    """Measured TFLOP/s of a square matrix product in ``dtype``: what attention's products could reach."""
    size = CEILING_SIZE[device.type]
    made_in = torch.bfloat16 if dtype == FP8 else getattr(torch, dtype)
    a, b = (torch.randn(size, size, device=device).to(made_in) for _ in range(2))
    multiply: Callable[[], Tensor] = partial(torch.matmul, a, b)
    if dtype == FP8 and device.type == "cuda":  # a CPU emulates it in bfloat16 at best
        one = torch.ones((), device=device)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        multiply = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=made_in)
    return 2 * size**3 / min(median_time(multiply, rep, device) for _ in range(rounds)) * 1e-9


def copy_ceiling(device: torch.device, rounds: int, rep: float) -> float:
    """Measured GB/s of a copy, bytes read and written together."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * source.numel() / min(median_time(copy, rep, device) for _ in range(rounds)) * 1e-6


def release_memory(device: torch.device) -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
