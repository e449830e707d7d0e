"""Benchmarks of forward mode."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.suite import contestants, jvp_peers, runner, workloads

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


PLAIN = replace(CI[0], num_heads_kv=CI[0].num_heads_q, dtype="bfloat16", causal=False)
"""A workload that every published kernel takes, but for its lengths."""


def test_a_published_kernel_that_is_not_there_says_so(monkeypatch):
    for peer in jvp_peers.published():
        monkeypatch.setitem(sys.modules, peer.needs[0], None)
        assert peer.unavailable(torch.device("cuda")) == f"{peer.needs[0]} is not installed"
        assert peer.unavailable(torch.device("cpu")) == "runs on cuda, not on cpu"


def test_published_kernels_refuse_what_they_do_not_take(monkeypatch):
    device = torch.device("cpu")
    for peer in jvp_peers.published():
        monkeypatch.setitem(sys.modules, peer.needs[0].partition(".")[0], SimpleNamespace())
        monkeypatch.setitem(
            sys.modules, peer.needs[0], SimpleNamespace(_attention=SimpleNamespace(forward=len))
        )
        assert peer.refuses(CI[0], device) == "takes as many heads of k and v as of q"
        assert peer.refuses(replace(PLAIN, dtype="float32"), device) == "takes 16-bit tensors"
        if peer.multiple == 1:
            assert peer.refuses(PLAIN, device) is None
            assert peer.refuses(replace(PLAIN, causal=True), device) == "takes no causal mask"
        else:
            assert "multiples of 128" in peer.refuses(PLAIN, device)


def test_an_adapter_passes_the_gate_forward_and_refuses_gradients(monkeypatch):
    """With a stand-in for the module, which takes (batch, heads, seqlen, head_dim)."""

    def wrapper(q, k, v, *tangents):
        def attend(q, k, v):
            return F.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v

        return torch.func.jvp(attend, (q, k, v), tangents)

    peer = jvp_peers.Tvm()
    monkeypatch.setitem(sys.modules, "jvp_utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, peer.needs[0], SimpleNamespace(**{peer.needs[1]: wrapper}))
    settings = runner.Settings(torch.device("cpu"), ("forward", "both"), rounds=1, rep=1.0, host_time=False)
    forward, both = runner.measure_workload(PLAIN, [peer], settings)
    assert forward["results"]["tvm"]["status"] == runner.OK
    refused = both["results"]["tvm"]
    assert (refused["status"], refused["reason"]) == (runner.REFUSED, "is called for its forward pass only")
