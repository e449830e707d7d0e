"""FlashAttention's first loop order as a kernel: exact whatever the lengths, and a contestant."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from spills import beyond_limits

from benchmarks.suite import contestants, runner, workloads
from benchmarks.suite.flash1 import Flash1Launch
from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import make_inputs
from benchmarks.suite.peers import LoopsOfFlash1
from flashtile import testing
from flashtile.reference import attention as reference
from flashtile.tools.inspection.recording import case_of, launches_of
from flashtile.tools.inspection.report import report

CALLS = {
    "several-blocks-both-ways": (1, 70, 140, 2, 2, 16, 16, False),
    "causal": (1, 70, 70, 2, 2, 16, 16, True),
    "causal-more-keys": (1, 33, 100, 4, 2, 24, 40, True),
    "causal-rows-without-keys": (1, 70, 33, 2, 1, 16, 16, True),
    "whole-blocks": (1, 64, 64, 2, 2, 32, 32, False),
    "one-query": (2, 1, 65, 2, 1, 16, 16, True),
}
(FULL,) = workloads.select(["ci-full-s96"])
LATER = [
    replace(FULL, name=name, **{name: value})
    for name, value in (("alibi", True), ("sink", True), ("head_dim_v", 192))
]


@pytest.mark.interpreter
@pytest.mark.parametrize("call", CALLS)
def test_it_is_exact(call):
    dtype = torch.float32 if call.startswith("causal-") else torch.float16
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v, causal = CALLS[call]
    q, k, v = (
        testing.random_tensor((batch, seqlen, number, width), dtype, "cpu", seed=seed)
        for seed, (seqlen, number, width) in enumerate(
            ((seqlen_q, heads, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v))
        )
    )
    padded = torch.full((batch, seqlen_q, heads, head_dim + 3), torch.nan, dtype=dtype)
    padded[..., :head_dim] = q  # strides of the caller's, NaN beyond
    launch = Flash1Launch(causal, head_dim**-0.5)
    wide = torch.float32 if dtype != torch.float32 else torch.float64
    exact, plain = (reference.attention(q, k, v, causal=causal, upcast=up)[0] for up in (wide, None))
    for _ in range(2):  # the first launch compiles, the second is kept
        out = launch(padded[..., :head_dim], k, v)
        assert out.shape == exact.shape
        comparison = testing.compare("out", out, exact, plain, factor=testing.FACTORS["out"])
        assert comparison.holds, str(comparison)


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_compiles_without_spills(head_dim):
    q = torch.empty(2, 4096, 8, head_dim, dtype=torch.bfloat16, device="meta")
    (launched,) = launches_of((9, 0), partial(Flash1Launch(True, 1.0), q, q, q))
    found = report(case_of(launched, f"flash1 head_dim {head_dim}"), "sm_90a")
    assert beyond_limits(found) == []
    assert "wgmma" in found.tensor_core


def test_it_refuses_what_it_would_compute_wrongly():
    device = torch.device("cuda")
    refused = {
        workload.name
        for workload in (*workloads.select(["ci", "paper"]), *LATER)
        if LoopsOfFlash1().refuses(workload, device) is not None
    }
    assert {workload.name for workload in LATER} <= refused
    assert {"ci-varlen", "ci-window-s150", "ci-softcap-s100", "paper-d256-s512"} <= refused
    assert not {"ci-gqa-s113", "ci-chunk", "paper-d64-s512", "paper-d128-causal-s16384"} & refused


def test_it_is_a_contestant_on_a_gpu_alone():
    assert "flash1-loops" in [peer.name for peer in contestants.peers("attention")]
    assert "cuda" in str(LoopsOfFlash1().unavailable(torch.device("cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["ci-causal-s160", "ci-gqa-s113", "ci-chunk", "paper-d64-s512", "paper-d128-causal-s1024"]
)
def test_it_passes_the_gate_on_a_gpu(name):
    (workload,) = workloads.select([name])
    inputs = make_inputs(workload, "cuda")
    oracle = Oracle(workload, inputs, gradients=False)
    call = LoopsOfFlash1().prepare(workload, inputs)
    assert [c for c in oracle.check(runner.results_of(call, inputs, "forward")) if not c.holds] == []


@pytest.mark.gpu
def test_it_has_no_backward_pass():
    (workload,) = workloads.select(["ci-causal-s160"])
    settings = runner.Settings(torch.device("cuda"), ("backward",), 1, 1.0, host_time=False)
    (cell,) = runner.measure_workload(workload, [LoopsOfFlash1()], settings)
    assert cell["results"]["flash1-loops"]["status"] == runner.REFUSED
