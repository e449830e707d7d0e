"""flashtile bench of functions of scores and masks: contestants pass the gate, which sees a wrong mask."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.bench import contestants, mods, workloads
from flashtile.bench.gate import Oracle
from flashtile.bench.inputs import make_inputs
from flashtile.bench.peers import FlexAttention

CPU = torch.device("cpu")
CI = workloads.select(["ci-masks"])


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_contestants_pass_the_gate(workload: workloads.Workload) -> None:
    inputs = make_inputs(workload, CPU)
    oracle = Oracle(workload, inputs, gradients=False)
    for peer in (*contestants.contestants("masks", [], [], CPU), FlexAttention(compiled=False)):
        call = peer.prepare(workload, inputs)
        out = call.restore(call.attend(*map(call.arrange, (inputs.q, inputs.k, inputs.v))), inputs.q)
        (comparison,) = oracle.check({"out": out})
        assert comparison.holds, comparison


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
