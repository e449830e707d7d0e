"""Benchmarks of forward mode."""

from __future__ import annotations

import pytest
import torch

from benchmarks.suite import contestants, runner, workloads

CI = workloads.select(["ci-jvp"])


@pytest.mark.parametrize("which", ["forward", "both"])
@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_contestants_pass_the_gate(workload, which):
    device = torch.device("cpu")
    settings = runner.Settings(device, (which,), rounds=1, rep=1.0, host_time=False)
    (cell,) = runner.measure_workload(workload, contestants.contestants("jvp", [], [], device), settings)
    found = {name: result["status"] for name, result in cell["results"].items()}
    assert found == {"flashtile": runner.OK, "standard": runner.OK}


def test_a_wrong_tangent_does_not_pass_the_gate(monkeypatch):
    residual = contestants.residual
    monkeypatch.setattr(
        contestants, "residual", lambda attend, t, moving: residual(attend, t, (*moving[:2], t[2]))
    )
    device = torch.device("cpu")
    settings = runner.Settings(device, ("forward",), rounds=1, rep=1.0, host_time=False)
    (cell,) = runner.measure_workload(CI[0], contestants.contestants("jvp", ["none"], [], device), settings)
    assert cell["results"]["flashtile"]["status"] == runner.WRONG
