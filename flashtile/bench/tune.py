"""Offline search for the configuration table of the portable kernels; prints rows and keeps every timing.

Candidates are compiled in parallel processes first (they land in Triton's disk cache), then timed one by one
in one process. A candidate that does not fit the device is listed with its reason.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flashtile.attn.problem import NO_EXTRAS, Options, Problem
from flashtile.backends.common.launch import padded

KERNELS = ("forward", "dkdv", "dq")
TOKENS = 16384
HIDDEN = 2048


@dataclass(frozen=True)
class Candidate:
    kernel: str
    head_dim: int
    dtype: str
    causal: bool
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    @property
    def tile(self) -> tuple[int, int, int, int]:
        return (self.BLOCK_M, self.BLOCK_N, self.num_warps, self.num_stages)


def candidates(kernel: str, head_dim: int, dtype: str, causal: bool) -> Iterator[Candidate]:
    """Tiles worth timing: accumulators fit the register file and operands shared memory, roughly."""
    size = 4 if dtype == "float32" else 2
    width = padded(head_dim)
    for block_m, block_n, warps, stages in itertools.product(
        (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)
    ):
        owned = block_n if kernel == "dkdv" else block_m
        walked = block_m if kernel == "dkdv" else block_n
        accumulators = {"forward": 1, "dkdv": 2, "dq": 1}[kernel] * owned * width
        scores = {"forward": 1, "dkdv": 2, "dq": 2}[kernel] * block_m * block_n
        registers = (accumulators + scores) / (warps * 32)
        resident = {"forward": 1, "dkdv": 2, "dq": 2}[kernel] * owned * width * size
        shared = resident + stages * 2 * walked * width * size
        if owned < warps * 16 and not (owned == 64 and size == 2):  # a warp without rows of its own
            continue
        if owned < 64 or walked < 32 // (size // 2):
            continue
        if registers > 232 or registers < 24 or shared > 260 * 1024:
            continue
        yield Candidate(kernel, head_dim, dtype, causal, block_m, block_n, warps, stages)


def _tensors(seqlen: int, candidate: Candidate, batch: int | None = None) -> tuple[torch.Tensor, ...]:
    heads = HIDDEN // candidate.head_dim
    batch = max(1, TOKENS // seqlen) if batch is None else batch
    dtype = getattr(torch, candidate.dtype)
    shape = (batch, seqlen, heads, candidate.head_dim)
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))


def _launch(candidate: Candidate, tensors: tuple[torch.Tensor, ...]) -> Any:
    """A zero-argument callable that runs the candidate's kernel alone on prepared tensors."""
    from flashtile.backends.common.config import KernelConfig
    from flashtile.backends.portable import launch
    from flashtile.backends.portable.config import Config, choose

    q, k, v, dout = tensors
    problem = Problem.from_tensors(q, k, v, options=Options(causal=candidate.causal))
    base = choose(problem)
    tile = KernelConfig(*candidate.tile)
    config = Config(
        **{**{name: getattr(base, name) for name in KERNELS}, candidate.kernel: tile},
        precision=base.precision,
    )
    forward = launch.ForwardLaunch(problem, config)
    if candidate.kernel == "forward":
        return lambda: forward(q, k, v, NO_EXTRAS)
    out, lse = forward(q, k, v, NO_EXTRAS)
    backward = launch.BackwardLaunch(problem, config)
    preprocess, dkdv, dq = backward.prepare(None, q, k, v, NO_EXTRAS)
    neg_lse, neg_delta = (q.new_empty(backward.statistics_shape, dtype=torch.float32) for _ in range(2))
    launch.preprocess_rows(preprocess, neg_lse, neg_delta, out, dout, lse, None, NO_EXTRAS)
    inputs = (q, k, v, dout, neg_lse, neg_delta)
    grads = tuple(torch.empty_like(t) for t in (q, k, v))
    if candidate.kernel == "dkdv":
        return lambda: dkdv(q.device, *inputs, grads[1], grads[2], *NO_EXTRAS[:-1])
    return lambda: dq(q.device, *inputs, grads[0], *NO_EXTRAS[:-1])


def _compile(candidate: Candidate) -> str | None:
    """Compile by running on a small problem; the reason if it cannot run."""
    try:
        _launch(candidate, _tensors(128, candidate, batch=1))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def tune(
    kernels: list[str],
    head_dims: list[int],
    dtypes: list[str],
    seqlens: list[int],
    rep: int,
    path: Path | None,
) -> list[dict[str, Any]]:
    """Time every candidate on the card; returns and prints, per kernel and problem, the ranking by geometric
    mean."""
    from triton.testing import do_bench

    every = [
        candidate
        for kernel, head_dim, dtype, causal in itertools.product(kernels, head_dims, dtypes, (False, True))
        for candidate in candidates(kernel, head_dim, dtype, causal)
    ]
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        refusals = list(pool.map(_compile, every, chunksize=2))
    rows: list[dict[str, Any]] = []
    for candidate, refusal in zip(every, refusals, strict=True):
        row: dict[str, Any] = {**asdict(candidate), "refusal": refusal, "tflops": {}}
        if refusal is None:
            for seqlen in seqlens:
                torch.manual_seed(0)
                run = _launch(candidate, _tensors(seqlen, candidate))
                seconds = do_bench(run, warmup=5, rep=rep, return_mode="median") * 1e-3
                products = {"forward": 2, "dkdv": 4, "dq": 3}[candidate.kernel]
                flops = 2 * products * TOKENS * seqlen * HIDDEN / (2 if candidate.causal else 1)
                row["tflops"][seqlen] = flops / seconds * 1e-12
        rows.append(row)
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))
    for kernel, head_dim, dtype, causal in itertools.product(kernels, head_dims, dtypes, (False, True)):
        ranked = sorted(
            (
                (math.exp(sum(map(math.log, row["tflops"].values())) / len(seqlens)), row)
                for row in rows
                if row["tflops"]
                and (row["kernel"], row["head_dim"], row["dtype"], row["causal"])
                == (kernel, head_dim, dtype, causal)
            ),
            key=lambda pair: -pair[0],
        )
        print(f"{kernel} head_dim {head_dim} {dtype} causal {causal}")
        for mean, row in ranked[:5]:
            tile = f"{row['BLOCK_M']}x{row['BLOCK_N']} warps {row['num_warps']} stages {row['num_stages']}"
            print(
                f"   {tile:32} {mean:6.1f}  " + "  ".join(f"{s}: {t:.0f}" for s, t in row["tflops"].items())
            )
    return rows


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--rep", type=int, default=15, help="milliseconds a measurement")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune(
        arguments.kernels,
        arguments.head_dims,
        arguments.dtypes,
        arguments.seqlens,
        arguments.rep,
        arguments.json,
    )
