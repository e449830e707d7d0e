"""Benchmarks of calls whose rows have the same bits in every batch."""

from __future__ import annotations

import pytest
import torch

import flashtile
from benchmarks.suite import contestants, documents, runner, workloads
from benchmarks.suite.timing import HOST_CALLS
from flashtile.api import attention as functional

CPU = torch.device("cpu")
PROMPTS, STEP = CI = workloads.select(["ci-invariant"])


def measured(workload):
    settings = runner.Settings(CPU, ("forward",), rounds=1, rep=1.0, host_time=False)
    peers = contestants.contestants("invariant", [], [], CPU)
    document = runner.describe_run(peers, settings)
    document["cells"] = list(runner.measure_workload(workload, peers, settings))
    return document


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_invariant_calls_are_compared_with_free_ones(workload):
    document = measured(workload)
    (cell,) = document["cells"]
    parts = runner.REFUSED if workload is PROMPTS else runner.OK
    assert {name: result["status"] for name, result in cell["results"].items()} == {
        "flashtile-invariant": runner.OK, "flashtile-invariant-parts": parts, "flashtile-free": runner.OK,
    }  # fmt: skip
    compared = {(row["ours"], row["peer"]) for row in documents.summarize(document)}
    assert ("flashtile-invariant", "flashtile-free") in compared


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_rows_with_other_bits_are_not_timed(workload, monkeypatch):
    name = "flash_attn_varlen_func" if workload is PROMPTS else "flash_attn_with_kvcache"
    place = functional if workload is PROMPTS else flashtile
    attend = getattr(place, name)

    def last_bit(*tensors, **given):
        out = attend(*tensors, **given)
        # One unit in the last place, which the error rule allows; only of calls with several sequences
        return out if given.get("cu_seqlens_q") is None else out * (1 + 2**-23)

    monkeypatch.setattr(place, name, last_bit)
    (cell,) = measured(workload)["cells"]
    assert cell["results"]["flashtile-invariant"]["status"] == runner.WRONG
    assert "bits" in cell["results"]["flashtile-invariant"]["reason"]
    assert cell["results"]["flashtile-free"]["status"] == runner.OK


def test_a_small_call_is_packed(monkeypatch):
    monkeypatch.setitem(HOST_CALLS, "cpu", 1)
    assert workloads.small_call("invariant", "cpu").kind == "invariant"
    peer = contestants.contestants("invariant", ["none"], [], CPU)[0]
    assert runner.host_time(peer, CPU, "invariant")["status"] == runner.OK
