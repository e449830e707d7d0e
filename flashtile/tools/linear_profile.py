"""Finds the fastest kernel of a linear layer for each number of rows of x, offline.

This is FlashDecoding++'s heuristic dataflow (Hong et al. 2023, arXiv:2311.01282, section 5). Several copies
of a shape's weights are in memory. A replayed CUDA graph multiplies with each in turn, so weights are never
in the L2 cache. Every kernel prefetches its weights while the previous kernel is running, as in a forward
pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel
from flashtile.hardware.linear_table import FLAT, GEMV, LIBRARY, Row
from flashtile.hardware.timing import capture, replay_time
from flashtile.problems.linear import E4M3, LinearProblem, LinearTensors

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROTATED_BYTES = 2.5e8
"""Bytes of weights to rotate over, more than today's L2 caches hold."""
READ_BYTES = 2**31
"""Bytes that are read to measure the read bandwidth."""
LIBRARY_MARGIN = 0.99
"""Factor on the library's time: the library is also chosen if it is at most about 1 % slower."""
REP = 4.0
"""Milliseconds of a measurement. Each time is the smaller of two measurements."""

Launch = Callable[[Tensor, Tensor, LinearTensors], Tensor]


@kernel()
def read_kernel(source, sums, count, BLOCK: tl.constexpr):
    """Read all of ``source`` in blocks that are distributed over the programs."""
    acc = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), count // BLOCK, tl.num_programs(0)):
        acc += tl.load(source + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(acc, 0))


def read_bandwidth(device: torch.device) -> float:
    """Return the measured read bandwidth in TB/s."""
    source = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device=device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(16 * multiprocessors, dtype=torch.int32, device=device)
    best = 0.0
    for block, programs, warps in ((4096, 8, 4), (2048, 16, 4), (16384, 2, 16)):
        grid = (programs * multiprocessors,)
        read = partial(read_kernel[grid], source, sums, source.numel(), block, num_warps=warps)
        best = max(best, READ_BYTES / replay_time(capture([read]), 2 * REP) * 1e-9)
    return best


def problem_of(
    rows: int, N: int, K: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: Any
) -> LinearProblem:
    scales = "channel" if weight_dtype == E4M3 else "none"
    return LinearProblem(rows, N, K, dtype, weight_dtype, device, scales=scales, prefetch=True)


def candidates(problem: LinearProblem) -> Iterator[tuple[str, str, list[int], Launch]]:
    """Yield (kind, backend, configuration, launch) of each kernel that computes a problem.

    The kind is GEMV, FLAT (tensor cores on a tile with few rows) or LIBRARY (the vendor's library). The
    configuration is a list of numbers, as :mod:`flashtile.hardware.linear_table` stores it.
    """
    from flashtile.backends import hopper, portable
    from flashtile.backends.hopper import linear as ring
    from flashtile.backends.hopper.linear.config import candidates as ring_tiles
    from flashtile.backends.portable import linear as tiles
    from flashtile.backends.portable.linear.config import LinearConfig
    from flashtile.backends.portable.linear.config import candidates as portable_tiles

    for config in portable_tiles(problem):
        yield config.kind, portable.NAME, list(astuple(config)[2:]), tiles.prepare_linear(problem, config)
    if ring.reason_against(problem, explicit=True) is None:
        for flat in ring_tiles(problem):
            yield FLAT, hopper.NAME, list(astuple(flat)[2:]), ring.prepare_linear(problem, flat)
    yield LIBRARY, portable.NAME, [], tiles.prepare_linear(problem, LinearConfig(LIBRARY))


class ProfiledOperands:
    """Operands of a shape: x, and copies of the weight to rotate over, with scales if the weight is e4m3."""

    def __init__(
        self,
        N: int,
        K: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        device: torch.device,
        once: bool = False,
    ) -> None:
        copies = 1 if once else int(ROTATED_BYTES // (N * K * weight_dtype.itemsize)) + 2
        made = torch.randn(N, K, dtype=torch.float32, device=device).mul_(K**-0.5)
        scale = torch.ones(N, device=device) if weight_dtype == E4M3 else None
        self.weights = [made.to(weight_dtype) for _ in range(copies)]
        self.given = LinearTensors(weight_scale=scale)
        self.x = torch.randn(max(ROWS), K, dtype=dtype, device=device)

    def time(self, launch: Launch, rows: int) -> float:
        """Return the microseconds of one product with ``rows`` rows of x."""
        x = self.x[:rows]
        calls = [partial(launch, x, weight, self.given) for weight in self.weights]
        graph = capture(calls)
        return min(replay_time(graph, REP) for _ in range(2)) / len(calls) * 1e3

    def check(self, launch: Launch, rows: int) -> None:
        """Raise ArithmeticError if a kernel's product differs too much from torch's product in float32."""
        x, weight = self.x[:rows], self.weights[0]
        y = launch(x, weight, self.given).float()
        expected = x.float() @ weight.float().T
        if not torch.allclose(y, expected, rtol=0.05, atol=0.05):
            raise ArithmeticError(f"error {(y - expected).abs().max().item()}")


def measure_shape(
    N: int,
    K: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    rows: Sequence[int],
    read_tbps: float,
    say: Callable[[str], None] = lambda line: None,
) -> Row:
    """Measure every kernel on one weight shape (N, K), and return the shape's row of the profile table.

    ``rows`` are the numbers of rows of x to measure, and ``read_tbps`` is the read bandwidth in TB/s. ``say``
    is called with lines of progress.
    """
    operands = ProfiledOperands(N, K, dtype, weight_dtype, device)
    kernels: dict[str, dict[str, dict[str, Any]]] = {}
    for m in rows:
        best: dict[str, dict[str, Any]] = {}
        problem = problem_of(m, N, K, dtype, weight_dtype, device)
        for kind, backend, config, launch in candidates(problem):
            try:
                operands.check(launch, m)
                us = operands.time(launch, m)
            except (triton.OutOfResources, ArithmeticError) as error:
                say(f"{N} x {K}, {m} rows: {kind} {backend} {config} is left out: {error}")
                continue
            if kind not in best or us < best[kind]["us"]:
                best[kind] = {"us": round(us, 3), "backend": backend, "config": config}
        kernels[str(m)] = best
        floor = operands.weights[0].nbytes / read_tbps / 1e6
        times = ", ".join(
            f"{kind} {found['us']:.1f} us ({floor / found['us']:.2f})" for kind, found in best.items()
        )
        say(f"{N} x {K} {weight_dtype}, {m} rows: {times}")
    dtype_name, weight_name = (str(d).removeprefix("torch.") for d in (dtype, weight_dtype))
    gemv_below, library_from = inflections(kernels)
    return Row(
        card=torch.cuda.get_device_name(device),
        N=N,
        K=K,
        dtype=dtype_name,
        weight_dtype=weight_name,
        gemv_below=gemv_below,
        library_from=library_from,
        kernels=kernels,
        read_tbps=round(read_tbps, 3),
    )


def inflections(kernels: dict[str, dict[str, dict[str, Any]]]) -> tuple[int, int]:
    """Return (M1, M2), the numbers of rows of x at which the fastest kind of kernel changes.

    GEMV is fastest below M1 rows, and the vendor's library from M2 rows. From M1 to below M2, the fastest
    kernels are flat: they use tensor cores on tiles with few rows. The library is also chosen if it is
    at most about 1 % slower, because it is the better known implementation. A row count between two measured
    counts gets the kind that is fastest at the larger count, because the tiles of the smaller count may have
    too few rows.
    """
    gemv_below, library_from = 1, 1
    for m in sorted(map(int, kernels)):
        us = {kind: found["us"] for kind, found in kernels[str(m)].items()}
        us[LIBRARY] *= LIBRARY_MARGIN
        fastest = min(us, key=lambda kind: us[kind])
        if fastest == GEMV and gemv_below == library_from:
            gemv_below = m + 1
        if fastest == LIBRARY:
            break
        library_from = m + 1
    return gemv_below, library_from


def compile_share(
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    rows: Sequence[int],
    part: int,
    parts: int,
) -> None:
    """Compile every ``parts``-th kernel, beginning with kernel number ``part``, by running it once.

    Several processes, each with its own ``part``, compile all kernels in parallel. Later processes find the
    kernels in the compilation cache.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    every = (
        (N, K, m, launch)
        for (N, K), m in itertools.product(shapes, rows)
        for *_, launch in candidates(problem_of(m, N, K, dtype, weight_dtype, device))
    )
    own = itertools.islice(every, part, None, parts)
    for (N, K), kernels in itertools.groupby(own, key=lambda kernel: kernel[:2]):
        operands = ProfiledOperands(N, K, dtype, weight_dtype, device, once=True)
        for _, _, m, launch in kernels:
            with suppress(triton.OutOfResources):
                launch(operands.x[:m], operands.weights[0], operands.given)
        del operands  # before those of the next shape are made
    torch.cuda.synchronize(device)


CHART_NAMES = {GEMV: "GEMV (CUDA cores)", FLAT: "flat (tensor cores)", LIBRARY: "cuBLAS"}


def draw_chart(row: Row, path: Path) -> None:
    """Write a chart for one shape of weights: each kernel's time as a function of the number of rows in x."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    numbers = sorted(map(int, row.kernels))
    for kind, name in CHART_NAMES.items():
        known = [m for m in numbers if kind in row.kernels[str(m)]]
        axes.plot(known, [row.kernels[str(m)][kind]["us"] for m in known], marker="o", label=name)
    axes.axhline(row.weight_bytes / row.read_tbps / 1e6, color="grey", ls=":", label="reading the weight")
    for m, name in ((row.gemv_below, "M1"), (row.library_from, "M2")):
        axes.axvline(m, color="grey", lw=0.8)
        axes.annotate(name, (m, axes.get_ylim()[1]), ha="left", va="top")
    axes.set(xscale="log", yscale="log", xlabel="rows of x", ylabel="microseconds")
    axes.set_xticks(numbers, [str(m) for m in numbers], minor=False)
    axes.set_title(f"{row.N} x {row.K} {row.weight_dtype}, {row.card}")
    axes.legend(frameon=False)
    figure.savefig(path)
