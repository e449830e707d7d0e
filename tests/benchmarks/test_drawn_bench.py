"""Workloads that a seed draws: classes, contestants of serving steps, means by class, and limited time."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import flashtile
from benchmarks.suite import contestants, documents, drawn, runner, workloads
from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import make_inputs
from benchmarks.suite.workload import Workload
from flashtile.compat.flash_attn import cute
from walk import walk

CPU = torch.device("cpu")
SMALL = drawn.small_workloads()
STEPS = [workload for workload in SMALL if workload.cache]


def results(workload: Workload, peer: contestants.Peer, which: str) -> dict[str, torch.Tensor]:
    """The contestant's results, which pass the gate."""
    inputs = make_inputs(workload, CPU)
    found = runner.results_of(peer.prepare(workload, inputs), inputs, which)
    for comparison in Oracle(workload, inputs, gradients=runner.needs_gradients(which)).check(found):
        assert comparison.holds, comparison
    return found


@walk("workload", SMALL)
def test_every_class_passes_the_gate(workload: Workload) -> None:
    (ours, *_) = contestants.contestants(workload.kind, ["none"], [], CPU)
    which = "forward" if workload.cache else "backward"
    assert results(workload, ours, which)["out"].isfinite().all()


def test_a_class_has_eight_shapes_that_its_seed_draws() -> None:
    first, again, other = (drawn.workloads(seed) for seed in (0, 0, 5))
    assert first == again
    assert set(Counter(w.drawn_from for w in first).values()) == {drawn.COUNT}
    assert len({(w.shape, w.mask, w.lengths) for w in first + other}) == len(first + other)
    assert {w.drawn_from for w in first[: len(drawn.CLASSES)]} == set(drawn.CLASSES)
    for tag in dict.fromkeys(tag for w in first for tag in w.tags):
        contestants.kind_of(workloads.select([tag], seed=5))


def test_what_is_drawn() -> None:
    by_class: dict[str, list[Workload]] = {}
    for workload in drawn.workloads(0):
        by_class.setdefault(workload.drawn_from, []).append(workload)
    for name, (tag, _) in drawn.CLASSES.items():
        for workload in by_class[name]:
            if tag == "packed":
                assert workload.varlen
                assert sum(length for length, _ in workload.sequences) in (16384, 32768)
            if tag == "mixed":
                assert workload.varlen
                assert workload.sequences[-1][0] == 1 < workload.seqlen_q
    assert {w.cache.page_size for w in by_class["mixed-28/4"] if w.cache} == {16, 64}
    assert {w.group_size for w in by_class["mixed-groups"]} == {3, 5, 6, 7, 12, 14}
    assert not any(w.causal for w in by_class["packed-images"])


@walk("workload", STEPS)
def test_flash_attention_gets_packed_queries_and_pages(monkeypatch, workload: Workload) -> None:
    """Their packages are replaced by ours under their names."""
    workload = replace(workload, dtype="bfloat16")
    calls = []

    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, causal):
        calls.append("fa3")
        return flashtile.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=cache_seqlens, block_table=page_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, causal=causal,
        )  # fmt: skip

    def flash_attn_varlen_func(*arguments, **named):
        calls.append("fa4")
        return cute.flash_attn_varlen_func(*arguments, **named)

    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn_interface"].flash_attn_with_kvcache = flash_attn_with_kvcache
    sys.modules["flash_attn.cute"].flash_attn_varlen_func = flash_attn_varlen_func
    device = torch.device("cuda")
    for peer in contestants.peers("decode")[:2]:
        assert peer.unavailable(device) is peer.refuses(workload, device) is None
        results(workload, peer, "forward")
    assert calls == ["fa3", "fa4"]


def test_means_are_also_taken_by_class() -> None:
    def cell(name: str, ms: float) -> dict:
        timed = {"ours": {"status": "ok", "ms": 1.0}, "peer": {"status": "ok", "ms": ms}}
        return {"workload": f"{name}-{ms}", "class": name, "pass": "forward", "results": timed}

    document = {"contestants": [{"name": "ours", "ours": True}, {"name": "peer", "ours": False}]}
    cells = [cell("a", 1.0), cell("b", 2.0), cell("a", 4.0)]
    rows = documents.summarize({**document, "cells": cells})
    means = [(row.get("class"), row["peer"], row["geometric_mean"], row["cells"]) for row in rows]
    assert means == [
        (name, peer, pytest.approx(2.0), count)
        for name, count in ((None, 3), ("a", 2), ("b", 1))
        for peer in ("peer", documents.BEST_PEER)
    ]
    assert len(documents.summarize({**document, "cells": cells[::2]})) == 2  # one class is the whole


def test_a_run_ends_in_time_and_says_what_it_left_out(monkeypatch) -> None:
    """Each workload takes ten seconds of a clock that only measurements move."""
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])

    def measure(workload, *_):
        now[0] += 10.0
        yield {"workload": workload.name}

    monkeypatch.setattr(runner, "measure_workload", measure)
    for seconds, count in ((1.0, 1), (29.0, 2), (30.0, 3), (31.0, 3)):
        now[0] = 0.0
        settings = runner.Settings(CPU, host_time=False, seconds=seconds)
        document = runner.run(SMALL[:5], [], settings)
        assert [cell["workload"] for cell in document["cells"]] == [w.name for w in SMALL[:count]]
        assert document["left_out"] == [w.name for w in SMALL[count:5]]
