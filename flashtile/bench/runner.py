"""Measuring: contestants pass the gate, then take turns for some rounds; all numbers go into one document.

On CUDA a measurement is the median of ``triton.testing.do_bench`` (CUDA events, L2 flushed before each
call), on the CPU the median of wall times. A contestant that refuses, fails, runs out of memory or is wrong
is recorded as such with its reason, and the others go on.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile import machine, testing
from flashtile.bench.gate import Oracle
from flashtile.bench.peers import Call, Peer
from flashtile.bench.workloads import FP8, SMALL_CALL, Inputs, Workload, make_inputs

SCHEMA = 1
MIN_CALLS = 3
HOST_BATCHES = 7
HOST_CALLS = {"cuda": 200, "cpu": 20}
"""In a batch; fewer than the launches that CUDA queues."""
CEILING_SIZE = {"cuda": 8192, "cpu": 2048}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}

OK, WRONG, REFUSED, NO_MEMORY, FAILED = "ok", "wrong", "refused", "out of memory", "failed"


@dataclass(frozen=True)
class Settings:
    """How to measure: ``rep`` milliseconds a measurement, ``rounds`` turns of each contestant."""

    device: torch.device
    passes: tuple[str, ...] = ("forward",)
    rounds: int = 3
    rep: float = 25.0
    host_time: bool = True


@dataclass
class Entry:
    """One contestant in one cell: whether it may be timed, and what was found."""

    peer: Peer
    call: Call | None = None
    status: str = OK
    reason: str | None = None
    gate: list[dict[str, Any]] = field(default_factory=list)
    peak_memory: int | None = None
    times: list[float] = field(default_factory=list)

    def reject(self, status: str, reason: str) -> None:
        self.call, self.status, self.reason = None, status, reason


def run(
    workloads: Sequence[Workload],
    contestants: Sequence[Peer],
    settings: Settings,
    *,
    after_cell: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure; returns a JSON-ready document of everything.

    Args:
        after_cell: called with the document so far after each cell, so that a run cut short loses nothing.
    """
    document = describe_run(contestants, settings)
    document["ceilings"] = {
        "matmul_tflops": {d: matmul_ceiling(d, settings) for d in dict.fromkeys(w.dtype for w in workloads)},
        "copy_gbps": copy_ceiling(settings),
    }
    if settings.host_time:
        fp8 = any(workload.fp8 for workload in workloads)
        document["host_time_us"] = {peer.name: host_time(peer, settings.device, fp8) for peer in contestants}
    document["cells"] = []
    after_cell(document)
    for workload in workloads:
        for cell in measure_workload(workload, contestants, settings):
            document["cells"].append(cell)
            after_cell(document)
        release_memory(settings.device)
    return document


def describe_run(contestants: Sequence[Peer], settings: Settings) -> dict[str, Any]:
    """Where, when, with what and how."""
    versions = machine.versions()
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        versions[name] = machine.installed_version(name)
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "source": machine.source_commit(),
        "device": machine.describe_device(settings.device),
        "settings": {
            "passes": list(settings.passes),
            "rounds": settings.rounds,
            "rep_ms": settings.rep,
            "threads": torch.get_num_threads() if settings.device.type == "cpu" else None,
        },
        "contestants": [{"name": peer.name, "ours": peer.ours} for peer in contestants],
    }


def measure_workload(
    workload: Workload, contestants: Sequence[Peer], settings: Settings
) -> Iterator[dict[str, Any]]:
    """A cell for each pass of ``settings``."""
    inputs = make_inputs(workload, settings.device)
    oracle = Oracle(workload, inputs, gradients=any(which != "forward" for which in settings.passes))
    for which in settings.passes:
        entries = [Entry(peer) for peer in contestants]
        for entry in entries:
            with _contained(entry, settings.device):
                _admit(entry, workload, which, inputs, oracle)
        for turn in range(settings.rounds):
            for entry in _rotated([entry for entry in entries if entry.call is not None], turn):
                with _contained(entry, settings.device):
                    _measure(entry, inputs, which, settings)
        yield _cell(workload, which, entries, oracle)


def _admit(entry: Entry, workload: Workload, which: str, inputs: Inputs, oracle: Oracle) -> None:
    """Prepare a contestant and let it through the gate, or say why not."""
    reason = entry.peer.refuses(workload, inputs.q.device)
    if reason is not None:
        entry.reject(REFUSED, reason)
        return
    call = entry.peer.prepare(workload, inputs)
    with call.enter():
        comparisons = oracle.check(_results(call, inputs, which))
    entry.gate = [_gate_row(comparison) for comparison in comparisons]
    wrong = [comparison for comparison in comparisons if not comparison.holds]
    if wrong:
        entry.reject(WRONG, str(wrong[0]))
        return
    if inputs.q.is_cuda:
        entry.peak_memory = _peak_memory(call, inputs, which)
    entry.call = call


def _leaves(call: Call, inputs: Inputs, gradients: bool) -> list[Tensor]:
    """q, k, v in the contestant's layout, sharing the memory of the inputs."""
    return [call.arrange(t).detach().requires_grad_(gradients) for t in (inputs.q, inputs.k, inputs.v)]


def _results(call: Call, inputs: Inputs, which: str) -> dict[str, Tensor]:
    """out and, but for the forward pass, the gradients in the layout of the inputs."""
    with torch.set_grad_enabled(which != "forward"):
        leaves = _leaves(call, inputs, gradients=which != "forward")
        out = call.attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, call.arrange(inputs.dout)) if which != "forward" else ()
    results = zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=False)
    return {name: call.restore(result, inputs.q) for name, result in results}


@contextmanager
def _timed_function(call: Call, inputs: Inputs, which: str) -> Iterator[Callable[[], Any]]:
    """What is timed, with the rest done before: views, contexts, the graph of a backward pass."""
    leaves = _leaves(call, inputs, gradients=which != "forward")
    dout = call.arrange(inputs.dout)
    with call.enter():
        if which == "forward":
            with torch.no_grad():
                yield lambda: call.attend(*leaves)
        elif which == "backward":
            out = call.attend(*leaves)
            yield lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        else:
            yield lambda: torch.autograd.grad(call.attend(*leaves), leaves, dout)


def _measure(entry: Entry, inputs: Inputs, which: str, settings: Settings) -> None:
    """One turn."""
    assert entry.call is not None
    with _timed_function(entry.call, inputs, which) as function:
        entry.times.append(time_call(function, settings.rep, settings.device))


def time_call(function: Callable[[], Any], rep: float, device: torch.device) -> float:
    """Median milliseconds of one call over about ``rep`` milliseconds of calls."""
    if device.type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(device):
            return do_bench(
                function, warmup=max(1, round(rep / 4)), rep=max(1, round(rep)), return_mode="median"
            )
    function()
    times: list[float] = []
    while len(times) < MIN_CALLS or sum(times) < rep:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def host_time(peer: Peer, device: torch.device, fp8: bool = False) -> dict[str, Any]:
    """Microseconds of host time of a forward call without gradients, issued without waiting for the GPU.

    On the CPU there is no difference between issuing and computing, so it is the time of a small call.
    """
    dtype = FP8 if fp8 else "bfloat16" if device.type == "cuda" else "float32"
    workload = replace(SMALL_CALL, dtype=dtype)
    entry, microseconds = Entry(peer), None
    with _contained(entry, device):
        reason = peer.refuses(workload, device)
        if reason is not None:
            entry.reject(REFUSED, reason)
        else:
            inputs = make_inputs(workload, device)
            with _timed_function(peer.prepare(workload, inputs), inputs, "forward") as function:
                microseconds = _issue_time(function, device)
    return {"status": entry.status, "reason": entry.reason, "us": microseconds, "call": workload.shape}


def _issue_time(function: Callable[[], Any], device: torch.device) -> float:
    batches, calls = [], HOST_CALLS[device.type]
    for batch in range(HOST_BATCHES + 1):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if batch:  # the first compiles and warms up
            batches.append((time.perf_counter() - start) / calls * 1e6)
        _synchronize(device)
    return statistics.median(batches)


def matmul_ceiling(dtype: str, settings: Settings) -> float:
    """Measured TFLOP/s of a square matrix product in ``dtype``: what attention's products could reach."""
    size = CEILING_SIZE[settings.device.type]
    made_in = torch.bfloat16 if dtype == FP8 else getattr(torch, dtype)
    a, b = (testing.random_tensor((size, size), made_in, settings.device, seed=seed) for seed in (0, 1))
    multiply: Callable[[], Tensor] = partial(torch.matmul, a, b)
    if dtype == FP8 and settings.device.type == "cuda":  # a CPU emulates it in bfloat16 at best
        one = torch.ones((), device=settings.device)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        multiply = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=made_in)
    best = min(time_call(multiply, settings.rep, settings.device) for _ in range(settings.rounds))
    return 2 * size**3 / best * 1e-9


def copy_ceiling(settings: Settings) -> float:
    """Measured GB/s of a copy, bytes read and written together."""
    source = torch.zeros(COPY_BYTES[settings.device.type], dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    best = min(
        time_call(lambda: target.copy_(source), settings.rep, settings.device) for _ in range(settings.rounds)
    )
    return 2 * source.numel() / best * 1e-6


def _peak_memory(call: Call, inputs: Inputs, which: str) -> int:
    """Most bytes allocated at once during a pass (with the forward pass for gradients), inputs included."""
    device = inputs.q.device
    tensors = [inputs.q, inputs.k, inputs.v] + ([inputs.dout] if which != "forward" else [])
    with _timed_function(call, inputs, "forward" if which == "forward" else "both") as function:
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = function()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        del results
    return peak - before + sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def _contained(entry: Entry, device: torch.device) -> Iterator[None]:
    """Record an error as the contestant's own and go on, unless it left the device unusable.

    Raises:
        RuntimeError: the device does not answer any more.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            yield
            _synchronize(device)
            return
        except torch.OutOfMemoryError as error:
            said_first = _first_line(error).split(". ")[:2]  # the rest is about this process
            entry.reject(NO_MEMORY, ". ".join(said_first))
        except ArithmeticError as error:
            entry.reject(WRONG, str(error))
        except NotImplementedError as error:
            entry.reject(REFUSED, _first_line(error))
        except Exception as error:
            # torch says in warnings why a backend of its attention does not serve a call.
            said = [line for warning in caught for line in str(warning.message).splitlines()[:1]]
            reason = "; ".join([f"{type(error).__name__}: {_first_line(error)}", *dict.fromkeys(said)])
            refused = "No available kernel" in str(error) or "can't allocate memory" in str(error)
            entry.reject(REFUSED if refused else FAILED, reason)
    try:
        release_memory(device)
        _synchronize(device)
    except RuntimeError as error:
        raise RuntimeError(f"{entry.peer.name} left {device} unusable: {_first_line(error)}") from error


def release_memory(device: torch.device) -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _rotated(entries: list[Entry], turn: int) -> list[Entry]:
    """Another contestant begins each round."""
    first = turn % max(1, len(entries))
    return entries[first:] + entries[:first]


def _gate_row(comparison: testing.Comparison) -> dict[str, Any]:
    bounds = {
        bound.norm: {"error": bound.error, "plain_error": bound.plain_error, "allowed": bound.allowed}
        for bound in comparison.bounds
    }
    return {"result": comparison.name, "holds": comparison.holds, **bounds}


def _cell(workload: Workload, which: str, entries: Sequence[Entry], oracle: Oracle) -> dict[str, Any]:
    flops, moved = workload.flops(which), workload.bytes(which)
    return {
        "workload": workload.name,
        "series": workload.series,
        "pass": which,
        "shape": workload.shape,
        "mask": workload.mask,
        "seqlen_q": workload.seqlen_q,
        "seqlen_k": workload.seqlen_k,
        "head_dim": workload.head_dim,
        "dtype": workload.dtype,
        "flops": flops,
        "bytes": moved,
        "resident_bytes": workload.resident_bytes(),
        "heads_checked": len(oracle.heads),
        "results": {entry.peer.name: _result(entry, flops, moved) for entry in entries},
    }


def _result(entry: Entry, flops: float, moved: int) -> dict[str, Any]:
    result: dict[str, Any] = {"status": entry.status, "reason": entry.reason, "gate": entry.gate}
    if entry.status == OK:
        median = statistics.median(entry.times)
        result |= {
            "ms": median,
            "rounds_ms": entry.times,
            "spread": (max(entry.times) - min(entry.times)) / median,
            "tflops": flops / median * 1e-9,
            "gbps": moved / median * 1e-6,
            "peak_memory_bytes": entry.peak_memory,
        }
    return result
