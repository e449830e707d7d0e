"""Time and memory of a forward and backward pass by sequence length, compared with standard attention.

On a CPU every measurement runs in a new process. The memory is the peak resident memory of that process,
which includes buffers inside of kernels. On a GPU the memory is the peak of torch's allocator.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Column, Table

from flashtile.hardware import machine
from flashtile.hardware.timing import peak_allocated, time_call
from flashtile.learn.io_model.tables import format_number
from flashtile.tools.demo.attention import ATTENTIONS, Attention, later_keys, standard
from flashtile.tools.demo.exactness import Check

SCORE_MATRICES = 3
"""Number of matrices as large as the scores in standard attention's backward pass: P, dP and dS."""

CPU_MEMORY_CAP = 4 * 2**30
"""Largest memory of standard attention on a CPU. A second limit is half of the free memory."""

GPU_MEMORY_SHARE = 0.9

LONGEST_PASS_SECONDS = 20.0
"""Longest time of a pass. Longer passes are left out.

A pass is expected to take four times as long if the length is doubled.
"""


@dataclass(frozen=True)
class ScalingWorkload:
    """Causal self-attention, forward and backward."""

    device: str
    dtype: str
    batch: int
    heads: int
    head_dim: int
    seqlens: tuple[int, ...]
    seconds_each: float
    """Approximate seconds of a measurement, which repeats the pass and runs it at least once."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def described(self) -> str:
        return f"{self.dtype}, batch {self.batch}, {self.heads} heads of {self.head_dim}"

    def score_bytes(self, seqlen: int) -> int:
        """Return the minimum bytes that standard attention needs in addition to its inputs and outputs."""
        return SCORE_MATRICES * self.batch * self.heads * seqlen**2 * self.torch_dtype.itemsize


def workload_for(device: torch.device, dtype: torch.dtype, quick: bool) -> ScalingWorkload:
    name = str(dtype).removeprefix("torch.")
    if quick:
        return ScalingWorkload(str(device), name, 1, 4, 64, (256, 1024, 2048), 0.05)
    if device.type == "cpu":
        return ScalingWorkload(str(device), name, 1, 8, 64, (256, 512, 1024, 2048, 4096, 8192), 1.0)
    return ScalingWorkload(str(device), name, 1, 16, 128, tuple(2**n for n in range(9, 18)), 0.3)


@dataclass(frozen=True)
class Cost:
    """Median time of a pass, and its peak memory beyond q, k and v (None if it cannot be measured here)."""

    milliseconds: float
    peak_bytes: int | None
    passes: int


@dataclass(frozen=True)
class ScalingRow:
    """Costs at one length. If standard attention did not run, ``standard`` is None; ``obstacle`` says why.

    ``sdpa`` is the cost of PyTorch's scaled_dot_product_attention, None if it was not measured.
    """

    seqlen: int
    flashtile: Cost
    standard: Cost | None
    obstacle: str | None
    sdpa: Cost | None = None

    @property
    def speed_up(self) -> float | None:
        return None if self.standard is None else self.standard.milliseconds / self.flashtile.milliseconds

    @property
    def memory_ratio(self) -> float | None:
        if self.standard is None or not self.standard.peak_bytes or not self.flashtile.peak_bytes:
            return None
        return self.standard.peak_bytes / self.flashtile.peak_bytes


def measure(workload: ScalingWorkload) -> Iterator[ScalingRow]:
    """Yield a row for each sequence length, the shortest first, until flashtile is :func:`too_slow`."""
    ours: Cost | None = None
    theirs: Cost | None = None
    sdpa: Cost | None = None
    for seqlen in workload.seqlens:
        if too_slow(ours):
            return
        ours = cost("flashtile", workload, seqlen)
        obstacle = memory_obstacle(workload, seqlen) or too_slow(theirs)
        theirs = None
        if obstacle is None:
            try:
                theirs = cost("standard", workload, seqlen)
            except torch.OutOfMemoryError:
                obstacle = "ran out of the GPU's memory"
        sdpa = None if too_slow(sdpa) else cost("sdpa", workload, seqlen)
        yield ScalingRow(seqlen, ours, theirs, obstacle, sdpa)


def too_slow(at_half_length: Cost | None) -> str | None:
    """Return why a pass at a length would take too long; None if it would not.

    The time is estimated from the measured cost at half the length.
    """
    if at_half_length is None:
        return None
    expected = 4 * at_half_length.milliseconds / 1e3
    return f"would take about {expected:.0f} s a pass" if expected > LONGEST_PASS_SECONDS else None


def memory_obstacle(workload: ScalingWorkload, seqlen: int) -> str | None:
    """Return why standard attention does not fit into memory at this length; None if it fits."""
    if torch.device(workload.device).type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches from earlier passes counts as free
        budget = GPU_MEMORY_SHARE * torch.cuda.mem_get_info(torch.device(workload.device))[0]
        described = f"{GPU_MEMORY_SHARE:.0%} of the GPU's free memory"
    else:
        free = machine.free_memory()
        budget, described = float(CPU_MEMORY_CAP), "the demo's cap"
        if free is not None and free / 2 < budget:
            budget, described = free / 2, "half of the free memory"
    needed = workload.score_bytes(seqlen)
    if needed <= budget:
        return None
    return f"needs {needed / 2**30:.1f} GiB, does not fit in {budget / 2**30:.1f} GiB ({described})"


def cost(attention: str, workload: ScalingWorkload, seqlen: int) -> Cost:
    """Measure the attention "flashtile", "standard" or "sdpa" at one sequence length."""
    if torch.device(workload.device).type == "cuda":
        return _cost_on_gpu(attention, workload, seqlen)
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return _cost_on_cpu(attention, workload, seqlen)
    # The fork server imports all modules once, so its children start quickly. It computes nothing, so forking
    # it is safe.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "flashtile.backends.portable", "flashtile.backends.cpu"])
    with context.Pool(1) as pool:
        return pool.apply(_cost_on_cpu, (attention, workload, seqlen))


def _prepare(attention: str, workload: ScalingWorkload, seqlen: int):
    """Return a function without arguments that runs one forward and backward pass on inputs made here."""
    device = torch.device(workload.device)
    shape = (workload.batch, seqlen, workload.heads, workload.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=device).to(workload.torch_dtype) for _ in range(4)
    )
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    attend: Attention = ATTENTIONS[attention]
    if attention == "standard":  # the mask is made once, as in a model that keeps it between calls
        attend = partial(standard, hidden=later_keys(seqlen, seqlen, device))
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def _cost_on_cpu(attention: str, workload: ScalingWorkload, seqlen: int) -> Cost:
    _prepare(attention, workload, min(64, seqlen))()  # starts threads, loads libraries, allocates buffers
    run = _prepare(attention, workload, seqlen)
    before = _peak_resident_bytes()
    times = time_call(run, 1e3 * workload.seconds_each, torch.device("cpu"), warm_up=False)
    after = _peak_resident_bytes()
    peak = None if before is None or after is None else after - before
    return Cost(statistics.median(times), peak, len(times))


def _cost_on_gpu(attention: str, workload: ScalingWorkload, seqlen: int) -> Cost:
    device = torch.device(workload.device)
    with torch.cuda.device(device):
        run = _prepare(attention, workload, seqlen)
        run()  # compiles kernels
        peak = peak_allocated(run, device)
        times = time_call(run, 1e3 * workload.seconds_each, device)
    return Cost(statistics.median(times), peak, len(times))


def _peak_resident_bytes() -> int | None:
    """Peak resident memory of this process so far; None if the operating system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def table(rows: Sequence[ScalingRow]) -> Table:
    """Return a table with a row for each sequence length."""
    headings = (
        "tokens", "flashtile\nms", "SDPA\nms", "standard\nms", "speed-up", "flashtile\nMiB", "SDPA\nMiB",
        "standard\nMiB", "memory\nratio",
    )  # fmt: skip
    columns = [Column(heading, justify="right") for heading in headings]
    found = Table(*columns, box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        costs = row.flashtile, row.sdpa, row.standard
        times = (None if cost is None else cost.milliseconds for cost in costs)
        peaks = (
            None if cost is None or cost.peak_bytes is None else cost.peak_bytes / 2**20 for cost in costs
        )
        speed_up = "" if row.speed_up is None else f"{row.speed_up:.2f}x"
        ratio = "" if row.memory_ratio is None else f"{row.memory_ratio:.1f}x"
        found.add_row(f"{row.seqlen:,}", *map(_number, times), speed_up, *map(_number, peaks), ratio)
    return found


def _number(value: float | None) -> str:
    return "–" if value is None else format_number(value)


def compared(rows: Sequence[ScalingRow]) -> ScalingRow | None:
    """Return the row of the longest sequences that both flashtile and standard attention ran, or None."""
    return next((row for row in reversed(rows) if row.standard is not None), None)


def checks(rows: Sequence[ScalingRow]) -> list[Check]:
    """Check that flashtile needs less memory at the longest sequences that both ran.

    Times are shown and compared in words, but they are no check: other programs change them.
    """
    row = compared(rows)
    if row is None or row.memory_ratio is None:
        return []
    name = f"less memory than standard attention at sequence length {row.seqlen}"
    return [Check(name, row.memory_ratio > 1, f"{row.memory_ratio:.1f} times less")]
