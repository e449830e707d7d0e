"""Timing of calls, CUDA graphs and the host; peak memory; measured limits of a machine."""

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
from torch.nn import functional

from flashtile.hardware import machine
from flashtile.hardware.cards import Card, card_of_device
from flashtile.torch_private import cuda_sleep

MIN_CALLS = 3
CEILING_SIZE = {"cuda": 8192, "cpu": 2048}
"""Rows and columns of the matrices of :func:`matmul_ceiling`."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
FLUSHED_BYTES = 2**28
"""Bytes that are written to flush the L2 cache, more than the L2 cache of any GPU."""
ESTIMATED_CALLS = 5
WAITED = 2
"""Time for which the GPU sleeps before a call, in multiples of the host's time to issue the call."""
CYCLES_PER_MS = 2_000_000
"""Approximate clock cycles of a GPU per millisecond."""

FP8 = "float8_e4m3fn"

Function = Callable[[], Any]


def time_call(function: Function, rep: float, device: torch.device, *, warm_up: bool = True) -> list[float]:
    """Call ``function`` for about ``rep`` milliseconds, and return the milliseconds of each call.

    On CUDA, events measure the time. The L2 cache is flushed before each call, and the host's time to issue
    the call is hidden. On the CPU, the wall clock measures the time. ``warm_up=False`` omits the unmeasured
    first call on the CPU, and allows a single measured call. On CUDA, ``warm_up`` has no effect.
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
    """Return the milliseconds between events around each call, on the current device.

    If the host takes longer to issue a call than the GPU takes to run it, the GPU sleeps before each call
    until the launches of the call are queued.
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
            cuda_sleep(waits)
        begin.record()
        function()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def median_time(function: Function, rep: float, device: torch.device) -> float:
    """Return the median of :func:`time_call`, in milliseconds."""
    return statistics.median(time_call(function, rep, device))


def capture(functions: Sequence[Function]) -> torch.cuda.CUDAGraph:
    """Capture one call of each function in a CUDA graph, on the current device."""
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
    """Return milliseconds per replay, for back-to-back replays over about ``rep`` milliseconds."""

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


def peak_allocated(function: Function, device: torch.device) -> int:
    """Return the peak number of bytes that a call and its results take in torch's CUDA allocator."""
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
    """Measure the TFLOP/s of a square matrix product in ``dtype``, an upper bound for attention's products.

    Each of ``rounds`` rounds takes the median time of the products that run within about ``rep``
    milliseconds. The fastest round counts.
    """
    size = CEILING_SIZE[device.type]
    made_in = torch.bfloat16 if dtype == FP8 else getattr(torch, dtype)
    a, b = (torch.randn(size, size, device=device).to(made_in) for _ in range(2))
    multiply: Callable[[], Tensor] = partial(torch.matmul, a, b)
    if dtype == FP8 and device.type == "cuda":  # on CPUs, the bfloat16 product is measured
        one = torch.ones((), device=device)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        per_tensor = functional.ScalingType.TensorWise
        scales = one, per_tensor, one, per_tensor
        multiply = partial(functional.scaled_mm, a, b, *scales, output_dtype=made_in)
    return 2 * size**3 / min(median_time(multiply, rep, device) for _ in range(rounds)) * 1e-9


def copy_ceiling(device: torch.device, rounds: int, rep: float) -> float:
    """Measure the GB/s of a copy within the device's memory. Each byte counts twice, as read and as written.

    Each of ``rounds`` rounds takes the median time of the copies that run within about ``rep`` milliseconds.
    The fastest round counts.
    """
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * source.numel() / min(median_time(copy, rep, device) for _ in range(rounds)) * 1e-6


def measured_card(device: torch.device, dtypes: Sequence[str], rep: float = 25.0) -> Card:
    """Return a device's measured peaks: FLOP/s of a matrix product in each dtype, and GB/s of a copy.

    Memory sizes come from the driver. The clock and the size of L1 come from the table of cards, and are 0 if
    the table does not have the card. On a CPU, threads count as SMs, and the size of shared memory is 0. The
    measurement takes a few seconds.

    Args:
        device: the device to measure.
        dtypes: names of dtypes of the products.
        rep: milliseconds of each measurement.

    Examples:
        >>> from flashtile.io_model import measured_card
        >>> card = measured_card(torch.device("cpu"), ["float32"], rep=1.0)
        >>> card.peak_tflops("float32") > 0 and card.bandwidth_gbps > 0
        True
    """
    described = machine.describe_device(device)
    known = card_of_device(described["name"])
    on_gpu = device.type == "cuda"
    properties: Any = torch.cuda.get_device_properties(device) if on_gpu else None
    return Card(
        name=f"{described['name']}, measured",
        sm_count=described["sm_count"] if on_gpu else described["threads"],
        clock_mhz=known.clock_mhz if known is not None else 0,
        tflops={dtype: matmul_ceiling(dtype, device, 2, rep) for dtype in dtypes},
        bandwidth_gbps=copy_ceiling(device, 2, rep),
        memory_bytes=described["memory_bytes"] or 0,
        l2_bytes=properties.L2_cache_size if on_gpu else 0,
        shared_bytes=properties.shared_memory_per_multiprocessor if on_gpu else 0,
        l1_bytes=known.l1_bytes if known is not None else 0,
        capability=(properties.major, properties.minor) if on_gpu else (0, 0),
        device_name=described["name"],
        source="measured here: a matrix product and a copy",
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
