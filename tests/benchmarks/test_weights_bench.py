"""Benchmarks of attention with its weights."""

from __future__ import annotations

import pytest
import torch

from benchmarks.suite import contestants, runner, workloads
from benchmarks.suite.inputs import make_inputs
from benchmarks.suite.workload import Workload

CI = workloads.select(["ci-weights"])


def measured(workload: Workload, device: torch.device, rep: float) -> dict:
    settings = runner.Settings(device, rounds=1, rep=rep, host_time=False)
    (cell,) = runner.measure_workload(workload, contestants.contestants("weights", [], [], device), settings)
    return cell["results"]


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.weights)
def test_contestants_pass_the_gate(workload: Workload) -> None:
    results = measured(workload, torch.device("cpu"), 1.0)
    assert {name: result["status"] for name, result in results.items()} == {
        "flashtile": runner.OK, "eager": runner.OK,
    }  # fmt: skip


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.weights)
def test_the_form_is_asked_for(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attention(q, k, v, *, return_attn_weights, **options):
        asked.append(return_attn_weights)
        return q, None

    monkeypatch.setattr(contestants.flashtile, "attention", attention)
    inputs = make_inputs(workload, "cpu")
    contestants.Weighing().prepare(workload, inputs).attend(inputs.q, inputs.k, inputs.v)
    assert asked == [{"full": "full", "columns": "columns", "top": contestants.TOP}[workload.weights]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["weights-full-s2048", "weights-columns-s2048", "weights-top-s2048"])
def test_weights_on_a_gpu(name: str) -> None:
    (workload,) = workloads.select([name])
    results = measured(workload, torch.device("cuda", 0), 5.0)
    assert all(result["status"] == runner.OK for result in results.values()), results
