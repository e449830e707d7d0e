"""Runs measurements: checks the contestants' results, times them in turns, and collects one JSON document.

A cell of the document is one workload in one pass. A measurement is the median time of repeated calls. On
CUDA, the L2 cache is cold before each call. In the pass "graph", a measurement is the time per call of a
replayed CUDA graph. If a contestant refuses, fails, runs out of memory or is wrong, the reason is recorded.
The other contestants are still measured.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.contestants import kind_of
from benchmarks.suite.documents import source_commit
from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import Inputs, make_inputs
from benchmarks.suite.operations import Operations
from benchmarks.suite.peers import Flashtile, Peer, PeerCall
from benchmarks.suite.timing import issue_time, release_memory
from benchmarks.suite.workload import Workload
from benchmarks.suite.workloads import PASSES, small_call
from flashtile import testing
from flashtile.hardware import machine, timing
from flashtile.tools.demo.operations import DROPOUT, FUSED, summarized
from flashtile.version import installed_version

SCHEMA = 2

OK, WRONG, REFUSED, NO_MEMORY, FAILED = "ok", "wrong", "refused", "out of memory", "failed"


@dataclass(frozen=True)
class Settings:
    """Settings of a run: ``rep`` milliseconds per measurement, ``rounds`` measurements of each contestant.

    With ``host_time``, the host time of a small call is measured as well. With ``operations``, standard
    attention's operations are also timed one by one in the pass "forward". A workload is left out if the run
    would probably last longer than ``seconds`` with it.

    Raises:
        ValueError: a pass is unknown or not possible on this device.
    """

    device: torch.device
    passes: tuple[str, ...] = ("forward",)
    rounds: int = 3
    rep: float = 25.0
    host_time: bool = True
    operations: bool = False
    seconds: float = math.inf

    def __post_init__(self) -> None:
        for which in self.passes:
            if which not in PASSES:
                raise ValueError(f"pass must be one of {', '.join(PASSES)}, got {which!r}")
            if which == "graph" and self.device.type != "cuda":
                raise ValueError(f"pass graph needs a CUDA device, got {self.device}")


@dataclass
class Entry:
    """State of a contestant in one cell, and its measurements.

    ``call`` is None if the contestant is not timed; ``status`` and ``reason`` then say why. ``times`` has
    milliseconds, one per round, and ``peak_memory`` is in bytes.
    """

    peer: Peer
    call: PeerCall | None = None
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
    """Measure all workloads and return a document that is ready for JSON.

    Args:
        after_cell: called with the unfinished document, once before the first cell and then after each cell.
            A caller that saves the document loses no finished cell if the run is interrupted.
    """
    start = time.monotonic()
    document = describe_run(contestants, settings)
    measured = (settings.device, settings.rounds, settings.rep)
    dtypes = dict.fromkeys(w.dtype for w in workloads)
    document["ceilings"] = {
        "matmul_tflops": {dtype: timing.matmul_ceiling(dtype, *measured) for dtype in dtypes},
        "copy_gbps": timing.copy_ceiling(*measured),
    }
    if settings.host_time:
        kind = kind_of(workloads)
        document["host_time_us"] = {peer.name: host_time(peer, settings.device, kind) for peer in contestants}
    document["cells"] = []
    after_cell(document)
    longest, ended = 0.0, time.monotonic()
    for number, workload in enumerate(workloads):
        # The most expensive workload so far estimates the next one. At least one is measured.
        if number and ended - start + longest > settings.seconds:
            document["left_out"] = [left.name for left in workloads[number:]]
            after_cell(document)
            break
        for cell in measure_workload(workload, contestants, settings):
            document["cells"].append(cell)
            after_cell(document)
        release_memory(settings.device)
        began, ended = ended, time.monotonic()
        longest = max(longest, ended - began)
    return document


def describe_run(contestants: Sequence[Peer], settings: Settings) -> dict[str, Any]:
    """Describe the run: device, date, versions, contestants and settings."""
    versions = machine.versions()
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        versions[name] = installed_version(name)
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "source": source_commit(),
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
    """Yield a cell of the JSON document, with the results of all contestants, for each pass."""
    inputs = make_inputs(workload, settings.device)
    oracle = Oracle(workload, inputs, gradients=any(map(needs_gradients, settings.passes)))
    for which in settings.passes:
        entries = [Entry(peer) for peer in contestants]
        for entry in entries:
            with _contained(entry, settings.device):
                _admit(entry, workload, which, inputs, oracle)
        apart = None
        if settings.operations and which == "forward":
            admitted = (entry.peer for entry in entries if entry.call is not None)
            ours = next((peer for peer in admitted if isinstance(peer, Flashtile)), None)
            apart = Apart(workload, inputs, oracle, settings, ours)
        for turn in range(settings.rounds):
            for entry in _rotated([entry for entry in entries if entry.call is not None], turn):
                with _contained(entry, settings.device):
                    _measure(entry, inputs, which, settings)
            if apart is not None:
                apart.measure()
        cell = _cell(workload, which, entries, oracle)
        yield cell if apart is None else {**cell, "operations": apart.result()}


class Apart:
    """Times the operations of standard attention one by one, if their result is correct.

    The correctness check is that of :mod:`benchmarks.suite.gate`. The operations include dropout, so
    ``ours`` (flashtile, if it takes part) is also timed with dropout.
    """

    def __init__(
        self, workload: Workload, inputs: Inputs, oracle: Oracle, settings: Settings, ours: Flashtile | None
    ) -> None:
        peer, self._settings = Operations(), settings
        self._entry = Entry(peer)
        self._timed: list[tuple[Entry, str, Callable[[], Tensor], list[float]]] = []
        """(entry, name, function, milliseconds of each round) of the operations and of the fused call."""
        with _contained(self._entry, settings.device), torch.no_grad():
            _admit(self._entry, workload, "forward", inputs, oracle)
            functions = peer.functions(workload, inputs) if self._entry.call is not None else {}
            self._timed = [(self._entry, name, function, []) for name, function in functions.items()]
        if ours is not None:
            fused = Entry(ours)
            with _contained(fused, settings.device):
                call = ours.prepare_with_dropout(workload, inputs, DROPOUT)
                attend = partial(call.attend, inputs.q, inputs.k, inputs.v)
                self._timed.append((fused, FUSED, attend, []))

    def measure(self) -> None:
        """Time each operation once, and flashtile's fused call with dropout once."""
        for entry, _, function, times in self._timed:
            if self._entry.status == entry.status == OK:
                with _contained(entry, self._settings.device), torch.no_grad():
                    times.append(timing.median_time(function, self._settings.rep, self._settings.device))

    def result(self) -> dict[str, Any]:
        entry = self._entry
        found = {"status": entry.status, "reason": entry.reason, "gate": entry.gate}
        times = {name: times for timed, name, _, times in self._timed if timed.status == OK}
        return found | (summarized(times) if entry.status == OK else {})


def _admit(entry: Entry, workload: Workload, which: str, inputs: Inputs, oracle: Oracle) -> None:
    """Prepare a contestant's call and check its results. If they are wrong, reject the contestant."""
    reason = entry.peer.refuses(workload, inputs.q.device)
    if reason is not None:
        entry.reject(REFUSED, reason)
        return
    call = entry.peer.prepare(workload, inputs)
    with call.enter():
        comparisons = oracle.check(results_of(call, inputs, which))
    entry.gate = [_gate_row(comparison) for comparison in comparisons]
    wrong = [comparison for comparison in comparisons if not comparison.holds]
    if wrong:
        entry.reject(WRONG, str(wrong[0]))
        return
    if inputs.q.is_cuda and workload.cache is None:
        entry.peak_memory = _peak_memory(call, inputs, which)
    entry.call = call


def needs_gradients(which: str) -> bool:
    """Whether a pass computes gradients."""
    return which in ("backward", "both")


def _leaves(call: PeerCall, inputs: Inputs, which: str) -> list[Tensor]:
    """Return q, k and v as leaf tensors that share the memory of ``inputs``, in the layout of ``call``."""
    gradients = needs_gradients(which)
    return [call.arrange(t).detach().requires_grad_(gradients) for t in (inputs.q, inputs.k, inputs.v)]


def results_of(call: PeerCall, inputs: Inputs, which: str) -> dict[str, Tensor]:
    """Return out and, if the pass computes them, the gradients, in the layout of the inputs."""
    gradients: tuple[Tensor, ...] = ()
    with torch.set_grad_enabled(needs_gradients(which)):
        leaves = _leaves(call, inputs, which)
        out = call.attend(*leaves)
        if needs_gradients(which):
            gradients = torch.autograd.grad(out, leaves, call.arrange(inputs.dout))
    results = zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=False)
    return {name: call.restore(result, inputs.q) for name, result in results}


@contextmanager
def _timed_function(call: PeerCall, inputs: Inputs, which: str) -> Iterator[Callable[[], Any]]:
    """Prepare a pass, and yield a function without arguments that runs it once.

    Views, contexts and, for the pass "backward", the forward pass are prepared here. They are not timed.
    """
    leaves = _leaves(call, inputs, which)
    dout = call.arrange(inputs.dout)
    with call.enter():
        if not needs_gradients(which):
            with torch.no_grad():
                yield lambda: call.attend(*leaves)
        elif which == "backward":
            out = call.attend(*leaves)
            yield lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        else:
            yield lambda: torch.autograd.grad(call.attend(*leaves), leaves, dout)


def _measure(entry: Entry, inputs: Inputs, which: str, settings: Settings) -> None:
    """Measure a contestant once and add the milliseconds to its times."""
    assert entry.call is not None
    if which == "graph":
        milliseconds = _graph_time(entry.call, inputs, settings)
    else:
        with _timed_function(entry.call, inputs, which) as function:
            milliseconds = timing.median_time(function, settings.rep, settings.device)
    entry.times.append(milliseconds)


def _graph_time(call: PeerCall, inputs: Inputs, settings: Settings) -> float:
    """Return the milliseconds per call in a replayed CUDA graph.

    The graph has one call for each copy of the KV cache, so that reads miss the L2 cache.
    """
    leaves = _leaves(call, inputs, "graph")
    copies = [partial(attend, *leaves) for attend in call.copies or (call.attend,)]
    with call.enter(), torch.no_grad(), torch.cuda.device(settings.device):
        return timing.replay_time(timing.capture(copies), settings.rep) / len(copies)


def host_time(peer: Peer, device: torch.device, kind: str = "attention") -> dict[str, Any]:
    """Measure the microseconds that the host takes to issue a small forward call without gradients.

    The host does not wait for the device. On the CPU the time includes the computation of the call.
    """
    workload = small_call(kind, device.type)
    entry, microseconds = Entry(peer), None
    with _contained(entry, device):
        reason = peer.refuses(workload, device)
        if reason is not None:
            entry.reject(REFUSED, reason)
        else:
            inputs = make_inputs(workload, device)
            with _timed_function(peer.prepare(workload, inputs), inputs, "forward") as function:
                microseconds = issue_time(function, device)
    return {"status": entry.status, "reason": entry.reason, "us": microseconds, "call": workload.shape}


def _peak_memory(call: PeerCall, inputs: Inputs, which: str) -> int:
    """Return the peak bytes of a pass, including its inputs.

    If the pass computes gradients, this is the peak over the forward and the backward pass.
    """
    tensors = [inputs.q, inputs.k, inputs.v] + ([inputs.dout] if needs_gradients(which) else [])
    with _timed_function(call, inputs, "both" if needs_gradients(which) else "forward") as function:
        peak = timing.peak_allocated(function, inputs.q.device)
    return peak + sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def _contained(entry: Entry, device: torch.device) -> Iterator[None]:
    """Catch errors of the ``with`` block, and record them as the contestant's result.

    Raises:
        RuntimeError: the device no longer works after the error.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            yield
            timing.synchronize(device)
            return
        except torch.OutOfMemoryError as error:
            said_first = _first_line(error).split(". ")[:2]  # later sentences describe this process
            entry.reject(NO_MEMORY, ". ".join(said_first))
        except ArithmeticError as error:
            entry.reject(WRONG, str(error))
        except NotImplementedError as error:
            entry.reject(REFUSED, _first_line(error))
        except Exception as error:
            # When torch's attention finds no backend for a call, the reasons are in its warnings.
            said = [line for warning in caught for line in str(warning.message).splitlines()[:1]]
            reason = "; ".join([f"{type(error).__name__}: {_first_line(error)}", *dict.fromkeys(said)])
            refused = "No available kernel" in str(error) or "can't allocate memory" in str(error)
            entry.reject(REFUSED if refused else FAILED, reason)
    try:
        release_memory(device)
        timing.synchronize(device)
    except RuntimeError as error:
        raise RuntimeError(f"{entry.peer.name} left {device} unusable: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _rotated(entries: list[Entry], turn: int) -> list[Entry]:
    """Return the contestants in the order of a round. Each round begins with a different one."""
    first = turn % max(1, len(entries))
    return entries[first:] + entries[:first]


def _gate_row(comparison: testing.Comparison) -> dict[str, Any]:
    bounds = {
        bound.norm: {"error": bound.error, "plain_error": bound.plain_error, "allowed": bound.allowed}
        for bound in comparison.bounds
    }
    return {"result": comparison.name, "holds": comparison.holds, **bounds}


def _cell(workload: Workload, which: str, entries: Sequence[Entry], oracle: Oracle) -> dict[str, Any]:
    copied = ("series", "shape", "mask", "seqlen_q", "seqlen_k", "head_dim", "dtype", "copies")
    return {
        "workload": workload.name,
        "pass": which,
        **{name: getattr(workload, name) for name in copied},
        "flops": workload.flops(which),
        "bytes": workload.bytes(which),
        "resident_bytes": workload.resident_bytes(),
        "heads_checked": len(oracle.heads),
        **({"class": workload.drawn_from} if workload.drawn_from else {}),
        "results": {entry.peer.name: _result(entry, workload, which) for entry in entries},
    }


def _result(entry: Entry, workload: Workload, which: str) -> dict[str, Any]:
    result: dict[str, Any] = {"status": entry.status, "reason": entry.reason, "gate": entry.gate}
    if entry.status == OK:
        median = statistics.median(entry.times)
        result |= {
            "ms": median,
            "rounds_ms": entry.times,
            "spread": (max(entry.times) - min(entry.times)) / median,
            "tflops": workload.flops(which) / median * 1e-9,
            "gbps": workload.bytes(which) / median * 1e-6,
            "peak_memory_bytes": entry.peak_memory,
        }
    return result
