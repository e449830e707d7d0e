"""Benchmarks of functions of scores and masks: contestants pass the gate, which sees a wrong mask."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashtile
from benchmarks.suite import contestants, mods, workloads
from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import make_inputs
from benchmarks.suite.peers import FlexAttention, Peer
from benchmarks.suite.runner import results_of

CPU = torch.device("cpu")
CI = workloads.select(["ci-masks"])
TREE = workloads.select(["ci-tree"])[0]


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_contestants_pass_the_gate(workload: workloads.Workload) -> None:
    inputs = make_inputs(workload, CPU)
    oracle = Oracle(workload, inputs, gradients=False)
    peers = contestants.contestants("masks", [], [], CPU)
    if workload is CI[0]:  # FlexAttention takes seconds, even for as little as this
        peers.append(FlexAttention(compiled=False))
    for peer in peers:
        call = peer.prepare(workload, inputs)
        out = call.restore(call.attend(*map(call.arrange, (inputs.q, inputs.k, inputs.v))), inputs.q)
        (comparison,) = oracle.check({"out": out})
        assert comparison.holds, comparison


@pytest.mark.parametrize("peer", contestants.contestants("tree", ["repeated"], [], CPU), ids=lambda p: p.name)
def test_contestants_for_trees_pass_the_gate(peer: Peer) -> None:
    inputs = make_inputs(TREE, CPU)
    results = results_of(peer.prepare(TREE, inputs), inputs, "backward")
    assert set(results) == {"out", "dq", "dk", "dv"}
    for comparison in Oracle(TREE, inputs, gradients=True).check(results):
        assert comparison.holds, comparison


def test_the_answers_of_a_tree() -> None:
    chosen = workloads.select(["tree"])
    assert {(w.seqlen_q - 8704, w.head_dim) for w in chosen} == set(
        itertools.product((1024, 4096, 16384), (64, 128, 256))
    )
    cu_seqlens, parent = mods.tree_segments(8704 + 4096, CPU)
    assert parent.tolist() == [-1] + [0] * 8
    answers = cu_seqlens.diff()[1:]
    assert (answers.min(), answers.max(), answers.sum()) == (512, 2048, 8704)
    exact = 4096 * 4097 // 2 + int((answers * 4096 + answers * (answers + 1) // 2).sum())
    assert abs(chosen[1].visible_pairs() / exact - 1) < 0.01


def test_the_gate_sees_another_mask_and_no_bias() -> None:
    workload = CI[0]
    inputs = make_inputs(workload, CPU)
    oracle = Oracle(workload, inputs, gradients=False)
    given = mods.MODS[workload.mod](workload.seqlen_q, workload.num_heads_q, CPU)
    for wrong in ({"mask_mod": given.mask_mod}, {"score_mod": given.score_mod}):
        out = flashtile.attention(inputs.q, inputs.k, inputs.v, **wrong)
        (comparison,) = oracle.check({"out": out})
        assert not comparison.holds


def test_what_is_measured() -> None:
    chosen = workloads.select(["masks"])
    assert len({workload.mod for workload in chosen}) >= 10
    assert {workload.seqlen_q for workload in chosen} == {2048, 4096, 8192, 16384}
    window = next(w for w in chosen if w.name == "masks-window-1024-s4096")
    exact = 1024 * (4096 - 1024) + 1024 * 1025 // 2
    assert abs(window.visible_pairs() / (window.batch * exact) - 1) < 0.01


def test_no_two_workloads_have_the_same_mask() -> None:
    zero, positions = torch.tensor(0), torch.arange(8192)
    seen = {}
    for name, make in mods.MODS.items():
        given = make(8192, 4, "cpu")
        if given.score_mod is None and given.mask_mod is not None:
            rows = torch.tensor([500, 1030, 5000, 7777])[:, None]
            seen[name] = tuple(given.mask_mod(zero, zero, rows, positions).sum(-1).tolist())
    assert len(set(seen.values())) == len(seen), seen
