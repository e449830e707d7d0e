"""FlashAttention-3: overlapping operations, and the error of FP8."""

from __future__ import annotations

import itertools

import pytest
import torch
from algorithm_heads import attention, random_head

from flashtile.algorithms import Memory, flash3, flash3_fp8
from flashtile.learn.algorithms.flash3_schedule import (
    SOFTMAX,
    TENSOR_CORE,
    TMA,
    Order,
    busy,
    needs,
    schedule,
    timeline,
)
from walk import walk

pytestmark = pytest.mark.numerical

MODES = [
    {"warpgroups": warpgroups, "pingpong": pingpong, "pipelined": pipelined}
    for warpgroups in (1, 2, 3)
    for pingpong in (False, True)
    for pipelined in (False, True)
]


def end(spans):
    return max(span.end for span in spans)


@walk("mode", MODES)
@walk("num_blocks", [1, 2, 7])
@walk("stages", [1, 2])
def test_a_schedule_is_complete_and_possible(mode, num_blocks, stages):
    spans = schedule(num_blocks, stages=stages, softmax=0.7, load=0.9, **mode)
    when = {Order(span.worker, span.label, span.block): span for span in spans}
    assert len(when) == len(spans) == num_blocks * (2 + 3 * mode["warpgroups"])
    for unit in (TMA, TENSOR_CORE, SOFTMAX):  # a unit does one thing at a time
        own = sorted((span for span in spans if span.unit == unit), key=lambda span: span.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    consumers = [f"warpgroup {w}" for w in range(mode["warpgroups"])]
    for order, span in when.items():
        for need in needs(order, consumers, mode["pingpong"], mode["pipelined"], stages):
            assert when[need].end <= span.start
    for worker in consumers:  # the data's own order, whatever the mode
        for block in range(num_blocks):
            s, softmax, pv = (when[Order(worker, label, block)] for label in ("S", "softmax", "P V"))
            assert when[Order("producer", "K", block)].end <= s.start
            assert s.end <= softmax.start
            assert max(softmax.end, when[Order("producer", "V", block)].end) <= pv.start


def test_turns_hide_the_softmax_beneath_the_other_warpgroup():
    """Section 3.1. One after the other a block takes S, softmax and P V: 3 units for each warpgroup."""
    n = 20
    together = schedule(n, pingpong=False, pipelined=False)
    turns = schedule(n, pingpong=True, pipelined=False)
    assert end(together) == pytest.approx(6 * n, rel=0.02)
    assert end(turns) == pytest.approx(4 * n, rel=0.02)
    assert busy(together, TENSOR_CORE) == pytest.approx(2 / 3, abs=0.02)
    assert busy(turns, TENSOR_CORE) > 0.98
    hidden = sum(
        any(
            p.unit == TENSOR_CORE and p.worker != s.worker and p.start <= s.start and s.end <= p.end
            for p in turns
        )
        for s in turns
        if s.unit == SOFTMAX
    )
    assert hidden >= 2 * n - 2


def test_the_pipeline_hides_the_softmax_within_one_warpgroup():
    """Section 3.2: softmax of the next block runs while P V of this one does."""
    n = 20
    plain, pipelined = (schedule(n, warpgroups=1, pipelined=p) for p in (False, True))
    assert end(plain) == pytest.approx(3 * n, rel=0.02)
    assert end(pipelined) == pytest.approx(2 * n, rel=0.05)
    spans = {(span.label, span.block): span for span in pipelined}
    for block in range(n - 1):
        assert spans["softmax", block + 1].start == spans["P V", block].start


def test_a_slow_load_is_what_remains():
    spans = schedule(10, load=5.0)
    assert end(spans) >= 10 * 2 * 5.0
    assert busy(spans, TENSOR_CORE) < 0.5


def test_an_empty_schedule():
    assert schedule(0) == []
    assert busy([], TENSOR_CORE) == 0.0


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_wait_ends_with_its_cause_and_its_worker_is_idle(pingpong, pipelined):
    spans, waits = timeline(6, pingpong=pingpong, pipelined=pipelined)
    assert spans == schedule(6, pingpong=pingpong, pipelined=pipelined)
    ends = {(span.worker, span.label, span.block): span.end for span in spans}
    assert {wait.barrier for wait in waits} == {"full", "empty", "turn"}
    for wait in waits:
        own = [span for span in spans if span.worker == wait.worker]
        assert ends[wait.cause] == wait.end
        assert wait.cause.worker != wait.worker
        assert all(span.end <= wait.start or span.start >= wait.end for span in own)
        assert any(span.start == wait.end and span.unit == wait.unit for span in own)


@pytest.mark.parametrize("argument", ["warpgroups", "stages"])
def test_bad_schedules_are_refused(argument):
    with pytest.raises(ValueError, match="must be at least 1"):
        schedule(4, **{argument: 0})


def test_two_warpgroups_share_each_load():
    head = random_head(64, 64, 8)
    memory = Memory(1 << 16, element_bytes=1)
    flash3.forward(*head[:3], memory, block_m=16, block_n=16)
    assert memory.traffic["K"].read == memory.traffic["V"].read == 2 * 64 * 8  # two thread blocks
    assert memory.traffic["Q"].read == memory.traffic["O"].written == 64 * 8


def error(head, **options) -> float:
    out, _ = flash3_fp8.forward(*head[:3], Memory(), block_m=32, block_n=32, **options)
    exact = attention(head).out
    return ((out - exact).square().mean() / exact.square().mean()).sqrt().item()


def test_fp8_is_near_and_moves_half_the_bytes():
    head = random_head(96, 96, 16, 24)
    for mask in ({}, {"causal": True}, {"window_size": (20, 5)}):
        out, lse = flash3_fp8.forward(*head[:3], Memory(), block_m=32, block_n=32, **mask)
        exact = attention(head, **mask)
        # A rounding to e4m3 is off by 1/16 at most and by about 1/40 in the mean; four of them meet in out.
        assert (out - exact.out).square().mean().sqrt() < 0.1 * exact.out.square().mean().sqrt()
        assert (lse - exact.lse).abs().max() < 0.3
    small, large = Memory(element_bytes=2), Memory(element_bytes=2)
    flash3_fp8.forward(*head[:3], small, block_m=32, block_n=32)
    flash3.forward(*head[:3], large, block_m=16, block_n=32)
    for name in "QKV":
        assert small.traffic[name].read == large.traffic[name].read / 2


def test_incoherent_processing_tames_outliers_in_shared_columns():
    head = random_head(128, 128, 64)
    for t in (head.q, head.k):
        t[:, 5] *= 12
        t[:, 40] *= 9
    plain, rotated = error(head, incoherent=False), error(head, incoherent=True)
    assert rotated < 0.5 * plain


def test_the_rotation_leaves_scores_alone():
    q, k, *_ = random_head(10, 12, 32)
    rotation = flash3_fp8.random_rotation(q, seed=3)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(32, dtype=torch.float64))
    torch.testing.assert_close((q @ rotation) @ (k @ rotation).T, q @ k.T)
    q[:, 7] = 1000.0
    assert (q @ rotation).abs().max() < 250  # spread over 32 columns


def test_a_rotation_needs_a_power_of_2():
    q, k, v, _ = random_head(4, 4, 12)
    with pytest.raises(ValueError, match="head_dim that is a power of 2, got 12"):
        flash3_fp8.forward(q, k, v, Memory())
    flash3_fp8.forward(q, k, v, Memory(), incoherent=False)
    with pytest.raises(ValueError, match="q must have 2 dimensions"):
        flash3_fp8.forward(q[None], k, v, Memory())


def test_block_scales_confine_an_outlier():
    head = random_head(128, 128, 16)
    head.q[3] *= 1e6
    exact = attention(head).out[32:]  # of the other blocks of rows
    errors = {}
    for block_scales in (False, True):
        out, _ = flash3_fp8.forward(
            *head[:3], Memory(), block_m=32, block_n=32, block_scales=block_scales, incoherent=False
        )
        errors[block_scales] = (out[32:] - exact).norm() / exact.norm()
    assert errors[True] < 0.1
    assert errors[False] > 0.5  # every query but the outlier was rounded to 0


def test_a_sum_of_few_bits_loses_what_is_below_them():
    """Once 1s make 2^14, another 1/2 is below the 14th bit; promoted before that, nothing is lost."""
    products = torch.cat([torch.ones(2**14), torch.full((32,), 2.0**-6)])
    one = flash3_fp8.sum_products(products)
    two = flash3_fp8.sum_products(products, promote=128)
    assert [one[-2].register, one[-1].added, one[-1].register] == [2.0**14, 0.5, 2.0**14]
    assert (two[-1].total, two[-1].register) == (2.0**14, 0.5)


def test_zeros_are_quantised_to_zeros():
    values, scales = flash3_fp8.quantise(torch.zeros(5, 4), 2)
    assert values.equal(torch.zeros(5, 4))
    assert scales.equal(torch.ones(3, 1))
