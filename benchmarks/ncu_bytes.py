"""Counts the bytes that our kernels move with Nsight Compute, to hold flashtile.io_model to them.

    python benchmarks/ncu_bytes.py --json benchmarks/results/DATE-CARD-ncu-bytes.json

Each kernel runs between two passes over a large buffer, with one profiler pass and without ncu's cache
control: the first empties L2, and what the second writes to DRAM are the results that the kernel had left in
L2. A second profile takes what needs several passes: loads that SMs made, the launch, the time. Compilation
happens before either.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from flashtile.backends import hopper
from flashtile.backends.portable.attention import launch
from flashtile.backends.portable.config import choose
from flashtile.hardware import machine
from flashtile.problems.attention import NO_EXTRAS, Options, Problem

DRAM_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
OTHER_METRICS = (
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "lts__t_bytes.sum",
    "gpu__time_duration.sum",
    "launch__grid_size",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
)
SCRUB_BYTES = 2**30
SCRUB_BLOCK = 4096


@dataclass(frozen=True)
class Case:
    """A dense call; ``backward`` is for the three kernels of its backward pass instead of the forward one,
    ``hopper`` for the forward kernel of that backend instead of the portable one."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    causal: bool = False
    window_left: int = -1
    dtype: str = "bfloat16"
    backward: bool = False
    hopper: bool = False


CASES = (
    Case("forward-d64-s512", 32, 512, 512, 32, 32, 64),
    Case("forward-d64-s16384-causal", 1, 16384, 16384, 32, 32, 64, causal=True),
    Case("forward-d128-s512-causal", 32, 512, 512, 16, 16, 128, causal=True),
    Case("forward-d128-s4096", 4, 4096, 4096, 16, 16, 128),
    Case("forward-d128-s16384", 1, 16384, 16384, 16, 16, 128),
    Case("forward-d256-s2048-causal", 8, 2048, 2048, 8, 8, 256, causal=True),
    Case("forward-d128-gqa-s8192-causal", 2, 8192, 8192, 32, 8, 128, causal=True),
    Case("forward-d128-gqa-chunk", 8, 1024, 16384, 32, 8, 128, causal=True),
    Case("forward-d128-window-s16384", 1, 16384, 16384, 32, 8, 128, causal=True, window_left=4095),
    Case("forward-d64-s4096-fp32", 4, 4096, 4096, 16, 16, 64, dtype="float32"),
    Case("forward-d128-s65536", 1, 65536, 65536, 2, 2, 128),
    Case("forward-d64-s131072", 1, 131072, 131072, 2, 2, 64),
    Case("forward-d128-s131072", 1, 131072, 131072, 1, 1, 128),
    Case("forward-d128-s131072-causal", 1, 131072, 131072, 1, 1, 128, causal=True),
    Case("forward-d128-s262144", 1, 262144, 262144, 1, 1, 128),
    Case("forward-d256-s131072", 1, 131072, 131072, 1, 1, 256),
    Case("backward-d64-s4096", 4, 4096, 4096, 32, 32, 64, backward=True),
    Case("backward-d128-s512-causal", 32, 512, 512, 16, 16, 128, causal=True, backward=True),
    Case("backward-d128-s8192", 2, 8192, 8192, 16, 16, 128, backward=True),
    Case("backward-d128-gqa-s4096-causal", 4, 4096, 4096, 32, 8, 128, causal=True, backward=True),
    Case("backward-d256-s2048-causal", 8, 2048, 2048, 8, 8, 256, causal=True, backward=True),
    Case("backward-d128-s131072", 1, 131072, 131072, 1, 1, 128, backward=True),
    Case("hopper-d64-s16384", 1, 16384, 16384, 32, 32, 64, hopper=True),
    Case("hopper-d128-s512-causal", 32, 512, 512, 16, 16, 128, causal=True, hopper=True),
    Case("hopper-d128-s4096-causal", 4, 4096, 4096, 16, 16, 128, causal=True, hopper=True),
    Case("hopper-d128-s16384", 1, 16384, 16384, 16, 16, 128, hopper=True),
    Case("hopper-d128-s16384-causal", 1, 16384, 16384, 16, 16, 128, causal=True, hopper=True),
    Case("hopper-d128-gqa-s8192-causal", 2, 8192, 8192, 32, 8, 128, causal=True, hopper=True),
    Case("hopper-d128-gqa-chunk", 8, 1024, 16384, 32, 8, 128, causal=True, hopper=True),
    Case("hopper-d256-s8192-causal", 2, 8192, 8192, 8, 8, 256, causal=True, hopper=True),
    Case("hopper-d128-s65536", 1, 65536, 65536, 2, 2, 128, hopper=True),
    Case("hopper-d128-s131072-causal", 1, 131072, 131072, 4, 4, 128, causal=True, hopper=True),
    Case("hopper-d128-s262144", 1, 262144, 262144, 1, 1, 128, hopper=True),
)


@triton.jit
def scrub_kernel(source, sink, BLOCK: tl.constexpr):
    """Read a buffer of zeros; nothing is written, since its sums are never negative."""
    total = tl.sum(tl.load(source + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)))
    tl.store(sink, total, mask=total < 0)


class Profiled:
    """A function that launches one kernel, profiled between two passes over a large buffer."""

    def __init__(self, function: Callable[..., Any], scrub: Callable[[], Any]) -> None:
        self._function = function
        self._scrub = scrub

    def __call__(self, *arguments: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        self._scrub()
        result = self._function(*arguments)
        self._scrub()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return result


def run_cases(cases: tuple[Case, ...]) -> None:
    """Launch each kernel once to compile it, then once profiled."""
    source = torch.zeros(SCRUB_BYTES // 4, device="cuda")
    sink = torch.empty(1, device="cuda")

    def scrub() -> None:
        scrub_kernel[(source.numel() // SCRUB_BLOCK,)](source, sink, BLOCK=SCRUB_BLOCK)

    scrub()
    for case in cases:
        problem, (q, k, v, dout) = prepared(case)
        config = choose(problem)
        if case.hopper:
            forward = hopper.prepare_forward(problem, hopper.configure_forward(problem))
        else:
            forward = launch.PortableForwardLaunch(problem, config)
        out, lse = forward(q, k, v, NO_EXTRAS)
        if not case.backward:
            Profiled(forward, scrub)(q, k, v, NO_EXTRAS)
            continue
        backward = launch.PortableBackwardLaunch(problem, config)
        backward(dout, None, q, k, v, out, lse, NO_EXTRAS)
        assert backward.kernels is not None
        backward.kernels = tuple(Profiled(kernel, scrub) for kernel in backward.kernels)
        backward(dout, None, q, k, v, out, lse, NO_EXTRAS)


def prepared(case: Case, device: str = "cuda") -> tuple[Problem, tuple[torch.Tensor, ...]]:
    """The problem with q, k, v, dout."""
    dtype = getattr(torch, case.dtype)
    shapes = [
        (case.batch, length, heads, case.head_dim)
        for length, heads in (
            (case.seqlen_q, case.num_heads_q),
            (case.seqlen_k, case.num_heads_kv),
            (case.seqlen_k, case.num_heads_kv),
            (case.seqlen_q, case.num_heads_q),
        )
    ]
    generator = torch.Generator(device).manual_seed(0) if device != "meta" else None
    tensors = tuple(torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes)
    options = Options(causal=case.causal, window_left=case.window_left)
    return Problem.from_tensors(*tensors[:3], options=options), tensors


def launches_of(case: Case) -> list[str]:
    kernels = ("preprocess_kernel", "dkdv_kernel", "dq_kernel") if case.backward else ("forward_kernel",)
    return [name for kernel in kernels for name in ("scrub_kernel", kernel, "scrub_kernel")]


def profile(
    cases: tuple[Case, ...], metrics: tuple[str, ...], options: list[str]
) -> tuple[list[dict[str, str]], int]:
    """Run this script's cases under ncu: a row for each launch, in order, and how often ncu ran each kernel.

    Raises:
        RuntimeError: ncu failed, or saw other launches than expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            "ncu", "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(metrics),
            "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), *options,
            *own_command(cases),
        ]  # fmt: skip
        finished = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    rows = parse_csv(text)
    expected = [name for case in cases for name in launches_of(case)]
    found = [row["Kernel Name"].partition("(")[0] for row in rows]
    if finished.returncode != 0 or found != expected:
        messages = [line for line in text.splitlines() if line.startswith("==")]
        raise RuntimeError(
            f"ncu exited with {finished.returncode} and saw {len(found)} launches of {len(expected)}: "
            + "\n".join([*messages[-20:], finished.stdout[-1500:], finished.stderr[-1500:]])
        )
    passes = [int(count) for count in re.findall(r"- (\d+) pass", text + finished.stdout)]
    return rows, max(passes, default=0)


def parse_csv(text: str) -> list[dict[str, str]]:
    """Rows of ncu's raw page; the lines of ncu itself and the row of units are left out."""
    lines = text.splitlines()
    header = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return []
    rows = csv.DictReader(line for line in lines[header:] if not line.startswith("=="))
    return [row for row in rows if row["ID"]]


def number(row: dict[str, str], metric: str) -> float | None:
    """A metric of a row; None where ncu has none."""
    try:
        return float(row[metric].replace(",", ""))
    except (KeyError, ValueError):
        return None


def measure(cases: tuple[Case, ...]) -> dict[str, Any]:
    """The counters of each kernel of each case. More than one pass for DRAM would find a warm L2."""
    dram, passes = profile(cases, DRAM_METRICS, ["--cache-control", "none"])
    try:
        other, _ = profile(cases, OTHER_METRICS, ["--cache-control", "all"])
    except RuntimeError as error:
        print(f"without the second profile: {error}", file=sys.stderr)
        other = [{}] * len(dram)
    results, at = [], 0
    for case in cases:
        names = launches_of(case)
        config = choose(replace(prepared(case, "meta")[0], device=torch.device("cuda", 0)))
        for index in range(1, len(names), 3):
            before, kernel, after = dram[at + index - 1 : at + index + 2]
            name = names[index].removesuffix("_kernel")
            counters = {metric: number(other[at + index], metric) for metric in OTHER_METRICS}
            results.append(
                {
                    "case": asdict(case),
                    "kernel": name,
                    "tile": None if case.hopper or name == "preprocess" else asdict(getattr(config, name)),
                    "dram_read": number(kernel, DRAM_METRICS[0]),
                    "dram_written": number(kernel, DRAM_METRICS[1]),
                    "dram_written_after": number(after, DRAM_METRICS[1]),
                    "scrub_read": [number(before, DRAM_METRICS[0]), number(after, DRAM_METRICS[0])],
                    **counters,
                }
            )
        at += len(names)
    return {"dram_passes": passes, "kernels": results}


def own_command(cases: tuple[Case, ...]) -> list[str]:
    return [sys.executable, __file__, "--run", *(case.name for case in cases)]


def compile_all(cases: tuple[Case, ...], jobs: int) -> None:
    """Run cases in parallel processes, which leaves their kernels in Triton's disk cache."""

    def run(case: Case) -> None:
        subprocess.run(own_command((case,)), check=True, stdout=subprocess.DEVNULL)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, cases))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the counters go; default: standard output")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile at a time")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = arguments.run or arguments.cases
    cases = tuple(case for case in CASES if wanted is None or case.name in wanted)
    if arguments.run:
        run_cases(cases)
        return
    compile_all(cases, arguments.jobs)
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": machine.versions(),
        "source": machine.source_commit(),
        "device": machine.describe_device(torch.device("cuda", 0)),
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
        **measure(cases),
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
