"""The search for tiles launches each kernel alone: with the arguments that it has today."""

from __future__ import annotations

from dataclasses import replace

import pytest

import script_runner

pytest.importorskip("triton")

from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import make_inputs
from benchmarks.suite.workloads import select
from flashtile.backends.common.config import KernelConfig

pytestmark = pytest.mark.interpreter
tune = script_runner.load("benchmarks/tune.py")


@pytest.mark.parametrize("kernel", [*tune.PRODUCTS, "decode"])
def test_a_candidate_of_each_kernel_is_right(kernel: str) -> None:
    (workload,) = select(["ci-causal-s96" if kernel != "decode" else "decode-ci"])
    inputs = make_inputs(workload, "cpu")
    oracle = Oracle(workload, inputs, gradients=True)
    programs = 1 if kernel == "decode" else None
    candidate = tune.Candidate(kernel, KernelConfig(16 if programs else 32, 32, 4, 1), programs)
    results = tune.calls(candidate, workload, inputs)[0]()
    assert results
    assert all(comparison.holds for comparison in oracle.check(results))


def test_candidates_begin_with_the_table() -> None:
    for name in ("paper-d64-s512", "decode-ci"):
        (workload,) = select([name])
        small = replace(workload, batch=1, seqlen_q=16, seqlen_k=16) if workload.cache is None else workload
        problem, _ = tune.describe(small, make_inputs(small, "cpu"))
        for kernel in ["decode"] if small.cache else tune.PRODUCTS:
            found = list(tune.candidates(kernel, small, problem))
            assert len(found) > 5
            assert len({candidate.tile for candidate in found}) > 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-w", "ci-varlen"), "got ci-varlen"),
        (("-w", "nothing"), "got 'nothing'"),
        (("-w", "paper", "--kernel", "dv"), "got 'dv'"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: tuple[str, ...], said: str) -> None:
    result = script_runner.runner(tune)(*options)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
