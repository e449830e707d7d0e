"""Offline search for the portable kernels' tiles: ``python -m benchmarks.tune -w paper -w decode-grid``.

Parallel processes first compile the candidates into Triton's disk cache. Each kernel is then timed alone with
a cold L2 cache. Decoding kernels are also timed in a CUDA graph that rotates over several KV caches. A
candidate that does not fit the device or gives wrong results is listed with the reason. Copy the fastest rows
into the tables of ``flashtile/backends/portable/config.py`` and
``flashtile/backends/portable/decode/config.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import Inputs, make_inputs
from benchmarks.suite.timing import release_memory
from benchmarks.suite.workload import Workload
from benchmarks.suite.workloads import select
from flashtile.backends.common.config import KernelConfig, padded
from flashtile.backends.portable import config as attention_config
from flashtile.backends.portable.decode import config as decode_config
from flashtile.hardware import timing
from flashtile.problems.attention import NO_EXTRAS, Options, Problem
from flashtile.problems.decode import CacheTensors, DecodeOptions, DecodeProblem

PRODUCTS = {"forward": 2, "dkdv": 4, "dq": 3}
"""Number of matrix products of each attention kernel."""
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory of a multiprocessor."""
SHOWN = 10
"""Number of candidates of a series that are printed, the fastest first."""


@dataclass(frozen=True)
class Candidate:
    """A tile configuration of one kernel; ``programs_per_sm`` is None except for decoding."""

    kernel: str
    tile: KernelConfig
    programs_per_sm: int | None = None


def candidates(kernel: str, workload: Workload, problem: Any) -> Iterator[Candidate]:
    """Yield the configuration of the table, then others that roughly fit registers and shared memory."""
    sizes = (16, 32, 64, 128)
    if kernel == "decode":
        chosen = decode_config.choose(problem)
        yield Candidate(kernel, chosen.tile, chosen.programs_per_sm)
        row_bytes = 2 * workload.head_dim * workload.cache_dtype.itemsize
        for block_n, warps, stages, programs in itertools.product(sizes, (4, 8), (2, 3, 4, 5), (1, 2, 3)):
            shared = (block_n * row_bytes * (stages - 1) + 4096) * programs
            if SHARED_LIMIT // 4 <= shared <= SHARED_LIMIT:
                yield Candidate(kernel, KernelConfig(chosen.tile.BLOCK_M, block_n, warps, stages), programs)
        return
    yield Candidate(kernel, getattr(attention_config.choose(problem), kernel))
    size, width = workload.torch_dtype.itemsize, padded(workload.head_dim)
    accumulated, scored = {"forward": (1, 1), "dkdv": (2, 2), "dq": (1, 2)}[kernel]
    for block_m, block_n, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3)):
        owned, walked = (block_n, block_m) if kernel == "dkdv" else (block_m, block_n)
        registers = (accumulated * owned * width + scored * block_m * block_n) / (warps * 32)
        shared = (scored * owned + stages * 2 * walked) * width * size
        if owned < warps * 16 and not (owned == 64 and size == 2):  # fewer than 16 rows per warp
            continue
        if owned < 64 or walked < 32 // (size // 2):
            continue
        if registers > 232 or registers < 24 or shared > 260 * 1024:
            continue
        yield Candidate(kernel, KernelConfig(block_m, block_n, warps, stages))


def describe(workload: Workload, inputs: Inputs) -> tuple[Any, CacheTensors]:
    """Return (problem, decoding's tensors except q and the caches) of a workload's call."""
    qkv = inputs.q, inputs.k, inputs.v
    if workload.cache is None:
        options = Options(masking=workload.masking, softcap=workload.softcap)
        return Problem.from_tensors(*qkv, options=options), CacheTensors()
    table = inputs.block_tables[0] if inputs.block_tables else None
    tensors = CacheTensors(cache_seqlens=inputs.cache_seqlens, block_table=table, **inputs.descales)
    return DecodeProblem.from_tensors(*qkv, tensors, DecodeOptions(masking=workload.masking)), tensors


def calls(candidate: Candidate, workload: Workload, inputs: Inputs) -> list[Callable[[], dict[str, Tensor]]]:
    """Return functions that run the candidate's kernel alone, one for each copy of the inputs."""
    from flashtile.backends.portable.attention import launch
    from flashtile.backends.portable.decode.launch import DecodeLaunch

    q, k, v = inputs.q, inputs.k, inputs.v
    problem, tensors = describe(workload, inputs)
    if candidate.programs_per_sm is not None:
        precision = decode_config.choose(problem).precision
        decode = DecodeLaunch(
            problem, decode_config.DecodeConfig(candidate.tile, candidate.programs_per_sm, precision)
        )
        each = [tensors._replace(block_table=table) for table in inputs.block_tables or (None,)]
        return [partial(lambda copy: {"out": decode(q, k, v, copy)[0]}, copy) for copy in each]
    tile: dict[str, Any] = {candidate.kernel: candidate.tile}
    config = replace(attention_config.choose(problem), **tile)
    forward = launch.PortableForwardLaunch(problem, config)
    if candidate.kernel == "forward":
        return [lambda: {"out": forward(q, k, v, NO_EXTRAS)[0]}]
    out, lse = forward(q, k, v, NO_EXTRAS)
    backward = launch.PortableBackwardLaunch(problem, config)
    preprocess, dkdv, dq = backward.prepare(None, q, k, v, NO_EXTRAS)
    neg_lse, neg_delta = (q.new_empty(backward.statistics_shape, dtype=torch.float32) for _ in range(2))
    launch.preprocess_rows(preprocess, neg_lse, neg_delta, out, inputs.dout, lse, None, NO_EXTRAS)
    kernel, names = (dkdv, ("dk", "dv")) if candidate.kernel == "dkdv" else (dq, ("dq",))
    results = {name: torch.empty_like(q if name == "dq" else k) for name in names}
    statistics = (neg_lse, neg_delta, None)  # None: no gradient of the entropy
    arguments = (q, k, v, inputs.dout, *statistics, *results.values(), *launch.optional_pointers(NO_EXTRAS))

    def run() -> dict[str, Tensor]:
        kernel(q.device, *arguments)
        return results

    return [run]


def _compile(candidate: Candidate, workload: Workload) -> None:
    """Compile a candidate by running it on a small problem. Errors are ignored; they recur in its timing."""
    small = replace(workload, batch=1, seqlen_q=128, seqlen_k=128)
    try:
        calls(candidate, small, make_inputs(small, "cuda"))[0]()
        torch.cuda.synchronize()
    except Exception:
        return


def time_candidate(
    candidate: Candidate, workload: Workload, inputs: Inputs, oracle: Oracle, rep: float
) -> dict[str, Any]:
    """Return {"us": microseconds} of a candidate, for decoding also "cold_us", or {"refused": the reason}."""
    try:
        functions = calls(candidate, workload, inputs)
        wrong = [found for found in oracle.check(functions[0]()) if not found.holds]
        if wrong:
            return {"refused": str(wrong[0])}
        cold = timing.median_time(functions[0], rep, inputs.q.device) * 1e3
        if candidate.kernel != "decode":
            return {"us": cold}
        in_graph = timing.replay_time(timing.capture(functions), rep) * 1e3 / len(functions)
    except Exception as error:  # for example, too much shared memory for this device
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    return {"us": in_graph, "cold_us": cold}


def tune(kernel: str, series: list[Workload], rep: float) -> list[dict[str, Any]]:
    """Time every candidate on the workloads of a series, and return a row for each, the fastest first.

    The workloads of a series differ only in sequence length. ``rep`` is the milliseconds of a measurement.
    """
    rows: dict[Candidate, dict[str, Any]] = {}
    for workload in series:
        inputs = make_inputs(workload, "cuda")
        every = list(dict.fromkeys(candidates(kernel, workload, describe(workload, inputs)[0])))
        if not rows and kernel != "decode":
            workers = max(1, (os.cpu_count() or 2) - 2)
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                list(pool.map(_compile, every, [workload] * len(every), chunksize=2))
        oracle = Oracle(workload, inputs, gradients=kernel in ("dkdv", "dq"))
        for candidate in every:
            row = rows.setdefault(candidate, asdict(candidate) | {"series": workload.series, "times": {}})
            row["times"][workload.name] = time_candidate(candidate, workload, inputs, oracle, rep)
        del inputs, oracle
        release_memory(torch.device("cuda"))

    def mean(row: dict[str, Any]) -> float:
        return math.prod(found.get("us", math.inf) for found in row["times"].values())

    return sorted(rows.values(), key=mean)


def main(
    workload: Annotated[
        list[str], typer.Option("-w", "--workload", help="Names, series or tags; repeatable.")
    ],
    kernel: Annotated[
        list[str] | None,
        typer.Option(help=f"Kernels of attention: {', '.join(PRODUCTS)}; repeatable. Default: all."),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="Head size of dense workloads, instead of their own.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of all workloads, instead of their own.")] = None,
    rep: Annotated[float, typer.Option(help="Milliseconds of calls for each measurement.")] = 20.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="File for all numbers.")] = None,
) -> None:
    """Time tiles of the portable kernels on the GPU of this machine."""
    searches: dict[tuple[str, str], list[Workload]] = {}
    try:
        for name in kernel or ():
            if name not in PRODUCTS:
                raise ValueError(f"kernel must be one of {', '.join(PRODUCTS)}, got {name!r}")
        for one in select(workload, dtype=dtype):
            if head_dim is not None and one.cache is None:  # keep heads * head_dim
                heads = max(1, one.num_heads_q * one.head_dim // head_dim)
                one = replace(one, head_dim=head_dim, num_heads_q=heads, num_heads_kv=heads)
            if one.kind == "fp8" or one.varlen:
                raise ValueError(f"workloads must be of dense attention or of decoding, got {one.name}")
            for name in ["decode"] if one.kind == "decode" else kernel or PRODUCTS:
                searches.setdefault((one.series, name), []).append(one)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows: list[dict[str, Any]] = []
    for (series, name), workloads in searches.items():
        ranked = tune(name, workloads, rep)
        rows += ranked
        typer.echo(f"{series}, {name}: BLOCK_M, BLOCK_N, num_warps, num_stages, programs_per_sm")
        for row in ranked[:SHOWN]:
            tile = (*list(row["tile"].values())[:4], row["programs_per_sm"])
            times = (
                f"{one.name} {found['us']:.1f} us {one.bytes() / found['us'] * 1e-6:.2f} TB/s "
                f"{one.flops() * PRODUCTS.get(name, 2) / 2 / found['us'] * 1e-6:.0f} TFLOP/s"
                if "us" in found
                else found["refused"]
                for one, found in zip(workloads, row["times"].values(), strict=True)
            )
            typer.echo(f"  {tile}  {'; '.join(times)}")
        if json_path is not None:
            json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
