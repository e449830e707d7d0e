"""Workloads, adapters, gate, runner, summaries, reports and the command of the benchmarks."""

from __future__ import annotations

import gc
import json
import math
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.suite import (
    contestants,
    documents,
    engine_bench,
    gate,
    linear_bench,
    peers,
    report,
    report_charts,
    runner,
    workloads,
)
from benchmarks.suite.command import bench
from benchmarks.suite.inputs import Inputs, make_inputs
from benchmarks.suite.peers import PeerCall
from benchmarks.suite.timing import HOST_CALLS
from benchmarks.suite.workloads import WORKLOADS, Workload
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import positions
from flashtile.reference import attention as reference
from walk import walk

CPU = torch.device("cpu")
CI = workloads.select(["ci"])
QUICK = runner.Settings(CPU, ("forward", "backward"), rounds=1, rep=1.0, host_time=False)
FULL, CHUNK = (next(w for w in CI if w.name == name) for name in ("ci-full-s96", "ci-chunk"))

SHORT = list({(w.sequences, w.mask): w for w in WORKLOADS if w.seqlen_k <= 2048 and not w.mod}.values())
"""One workload of each mask and length."""


def entrants(names, backends, device):
    return contestants.contestants("attention", names, backends, device)


each_workload = pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """A run collects garbage after each contestant: what other tests have left would be walked each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Calls this small take no gain from more, and threads wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def standard_results(workload: Workload, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """out and gradients of the oracle of the test-suite."""
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    varlen = {
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": workload.seqlen_q,
        "max_seqlen_k": workload.seqlen_k,
    }
    out, _ = reference.attention(
        *leaves,
        **(varlen if workload.varlen else {}),
        causal=workload.causal,
        window_size=(workload.window_left, -1),
        softcap=workload.softcap,
        alibi_slopes=inputs.alibi_slopes,
        sink=inputs.sink,
        upcast=dtype,
    )
    gradients = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))
    results = zip(gate.RESULTS, (out, *gradients), strict=True)
    return {name: result.detach().to(workload.torch_dtype) for name, result in results}


class Fake:
    """A contestant that computes by a function of its own."""

    ours = False

    def __init__(self, name, attend=None, *, error=None, refusal=None):
        self.name, self.attend, self.error, self.refusal = name, attend, error, refusal
        self.calls = 0

    def unavailable(self, device):
        return None

    def refuses(self, workload, device):
        return self.refusal

    def prepare(self, workload, inputs):
        if self.error is not None:
            raise self.error
        correct = peers.Standard().prepare(workload, inputs)

        def attend(q, k, v):
            self.calls += 1
            out = correct.attend(q, k, v)
            return out if self.attend is None else self.attend(out, self.calls)

        return replace(correct, attend=attend)


class TestWorkloads:
    def test_names_are_unique(self):
        assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)

    def test_paper_grid(self):
        paper = workloads.select(["paper"])
        assert len(paper) == 3 * 2 * 6
        assert all(w.batch * w.seqlen_q == 16384 and w.seqlen_q == w.seqlen_k for w in paper)
        assert all(w.num_heads_q * w.head_dim == 2048 and w.dtype == "bfloat16" for w in paper)
        assert {(w.head_dim, w.causal, w.seqlen_q) for w in paper} == {
            (d, c, 2**s) for d in (64, 128, 256) for c in (False, True) for s in range(9, 15)
        }

    @walk("workload", SHORT)
    def test_visible_pairs_are_those_of_the_mask(self, workload):
        pairs = sum(
            count * int(workload.masking.visible(positions(*lengths), range(lengths[1])).sum())
            for lengths, count in Counter(workload.sequences).items()
        )
        whole = workload.causal and workload.window_left == UNLIMITED and workload.lengths is None
        if whole and workload.seqlen_q == workload.seqlen_k:
            pairs = (
                workload.batch * workload.seqlen_q**2 // 2
            )  # the papers' convention leaves out half the diagonal
        assert workload.visible_pairs() == pairs

    def test_flops_and_bytes_by_hand(self):
        workload = Workload("w", "w", 2, 10, 20, 4, 2, 8, "float16")
        assert workload.flops("forward") == 4 * 2 * 4 * 10 * 20 * 8
        assert workload.flops("backward") == 2.5 * workload.flops("forward")
        assert workload.flops("both") == 3.5 * workload.flops("forward")
        q, kv, lse = 2 * 10 * 4 * 8 * 2, 2 * 20 * 2 * 8 * 2, 2 * 10 * 4 * 4
        assert workload.bytes("forward") == 2 * q + 2 * kv + lse
        assert workload.resident_bytes() == 4 * q + 4 * kv + lse

    def test_shapes_are_many_and_their_flops_count_both_head_sizes(self):
        shapes = workloads.select(["shapes"])
        assert len(shapes) >= 60
        assert {w.head_dim for w in shapes} >= set(range(32, 257, 8))
        assert {w.group_size for w in shapes} >= {1, 2, 4, 6, 7, 8, 16}
        mla = next(w for w in shapes if w.name == "mla-s4096")
        pairs = mla.visible_pairs() * mla.num_heads_q
        assert mla.flops("forward") == 2 * pairs * (192 + 128)
        assert mla.flops("backward") == 2 * pairs * (3 * 192 + 2 * 128)

    def test_ragged_batches_have_equals(self):
        lengths = workloads.log_uniform_lengths(16384, 64, 8192)
        assert lengths == workloads.log_uniform_lengths(16384, 64, 8192)
        assert sum(lengths) == 16384
        assert all(64 <= length <= 8192 for length in lengths[:-1])
        drawn = workloads.log_uniform_lengths(2**24, 64, 8192)
        octaves = [sum(64 << i <= length < 128 << i for length in drawn) for i in range(7)]
        assert min(octaves) > 0.9 * len(drawn) / 7
        for suffix in ("", "-causal"):
            (ragged,) = workloads.select([f"ragged{suffix}"])
            (equal,) = workloads.select([f"ragged-equal{suffix}"])
            assert equal.flops() == pytest.approx(ragged.flops(), rel=0.1)
            assert ragged.varlen
            assert not equal.varlen

    def test_select(self):
        assert workloads.select(["gpt2"])[0].num_heads_q == 12
        assert [w.name for w in workloads.select(["paper-d64-s512"])] == ["paper-d64-s512"]
        assert len(workloads.select(["paper-d64-causal"])) == 6
        assert {w.head_dim for w in workloads.select(["paper"], head_dims=[64, 256])} == {64, 256}
        assert {w.dtype for w in workloads.select(["paper", "ci"], dtype="float16")} == {"float16"}

    def test_select_refuses_unknown_names(self):
        with pytest.raises(ValueError, match=r"workload must be .*paper.*got 'papre'"):
            workloads.select(["papre"])
        with pytest.raises(ValueError, match=r"dtype must be .*got 'int8'"):
            workloads.select(["paper"], dtype="int8")

    @each_workload
    def test_inputs_fit_and_repeat(self, workload):
        first, again = (make_inputs(workload, CPU) for _ in range(2))
        assert torch.equal(first.q, again.q)
        assert not torch.equal(first.k.flatten()[:50], first.v.flatten()[:50])
        tokens = sum(sq for sq, _ in workload.sequences)
        assert first.q.shape[:-2].numel() == first.dout.shape[:-2].numel() == tokens
        assert first.k.shape[-2:] == (workload.num_heads_kv, workload.head_dim)
        if workload.varlen:
            assert first.cu_seqlens_q.diff().tolist() == [sq for sq, _ in workload.sequences]


class TestGate:
    @each_workload
    def test_oracle_agrees_with_the_suite_s(self, workload):
        inputs = make_inputs(workload, CPU)
        oracle = gate.Oracle(workload, inputs, gradients=True)
        comparisons = oracle.check(standard_results(workload, inputs, torch.float64))
        assert [c.name for c in comparisons] == list(gate.RESULTS)
        assert all(c.holds for c in comparisons), "\n".join(map(str, comparisons))
        rounding = max(c.bounds[0].error / (c.bounds[0].unit + 1e-30) for c in comparisons)
        assert rounding <= 1.0  # the exact result is only rounded to float32

    def test_chunks_change_nothing(self, monkeypatch):
        inputs = make_inputs(CHUNK, CPU)
        whole = gate.Oracle(CHUNK, inputs, gradients=True)
        monkeypatch.setitem(gate.CHUNK_SCORES, "cpu", 7 * CHUNK.seqlen_k)
        chunked = gate.Oracle(CHUNK, inputs, gradients=True)
        for name in gate.RESULTS:
            torch.testing.assert_close(chunked._exact[name], whole._exact[name], rtol=1e-12, atol=1e-12)

    @walk("result", gate.RESULTS)
    @walk("dtype", ["float32", "bfloat16"])
    def test_one_wrong_element_is_found(self, result, dtype):
        workload = replace(FULL, dtype=dtype)
        inputs = make_inputs(workload, CPU)
        results = standard_results(workload, inputs, torch.float64)
        results[result][-1, 37, 1, 5] += 0.5
        wrong = [c.name for c in gate.Oracle(workload, inputs, True).check(results) if not c.holds]
        assert wrong == [result]

    def test_tf32_products_in_float32_are_found(self):
        inputs = make_inputs(FULL, CPU)
        rounded = replace(inputs, **{n: _round_to_tf32(getattr(inputs, n)) for n in ("q", "k", "v")})
        results = standard_results(FULL, rounded, torch.float64)
        assert not any(c.holds for c in gate.Oracle(FULL, inputs, True).check(results))

    def test_nan_outside_of_the_sample_is_found(self, monkeypatch):
        workload = replace(FULL, num_heads_q=8, num_heads_kv=8)
        monkeypatch.setitem(gate.SCORES_CHECKED, "cpu", 2 * workload.seqlen_q**2)
        inputs = make_inputs(workload, CPU)
        oracle = gate.Oracle(workload, inputs, False)
        results = {"out": standard_results(workload, inputs, torch.float64)["out"]}
        outside = next(h for h in range(8) if gate.Head(0, h) not in oracle.heads)
        assert len(oracle.heads) == 2
        assert oracle.check(results)[0].holds
        results["out"][0, 3, outside, 2] = torch.nan
        with pytest.raises(ArithmeticError, match="out holds"):
            oracle.check(results)

    def test_sample_of_heads(self, monkeypatch):
        workload = replace(FULL, batch=3, num_heads_kv=4, num_heads_q=8)
        assert len(gate.sample_heads(workload, "cpu")) == 12
        monkeypatch.setitem(gate.SCORES_CHECKED, "cpu", 5 * workload.seqlen_q**2 * 2)
        some = gate.sample_heads(workload, "cpu")
        assert some[:2] == [gate.Head(0, 0), gate.Head(2, 3)]
        assert len(set(some)) == 5
        assert some == gate.sample_heads(workload, "cpu")
        monkeypatch.setattr(gate, "HEADS_CHECKED", 3)
        assert gate.sample_heads(workload, "cpu") == some[:3]
        monkeypatch.setitem(gate.SCORES_CHECKED, "cpu", 1)
        assert gate.sample_heads(workload, "cpu") == [gate.Head(0, 0)]


def _round_to_tf32(tensor: Tensor) -> Tensor:
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)


class TestAdapters:
    CONTESTANTS = (
        peers.Flashtile(),
        peers.Flashtile("cpu"),
        peers.Standard(),
        peers.Sdpa("sdpa-cpu", "FLASH_ATTENTION", "cpu"),
        peers.FlexAttention(compiled=False),
    )

    @each_workload
    @pytest.mark.parametrize("peer", CONTESTANTS, ids=lambda p: p.name)
    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_computes_the_workload(self, peer, workload):
        if reason := peer.refuses(workload, CPU):
            pytest.skip(reason)
        self.check(peer, workload, gradients=peer.name != "flex")  # eager FlexAttention has none on the CPU

    @each_workload
    @pytest.mark.parametrize(("module", "unlimited"), [("flash_attn", -1), ("flash_attn.cute", None)])
    def test_flash_attention_packages(self, monkeypatch, workload, module, unlimited):
        self.install(monkeypatch, module, unlimited)
        peer = next(p for p in contestants.peers("attention") if p.needs == (module, "flash_attn_func"))
        assert peer.unavailable(torch.device("cuda")) is None
        if reason := peer.refuses(workload, CPU):
            pytest.skip(reason)
        self.check(peer, workload, gradients=True)

    def test_a_package_without_the_functions_is_not_available(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        reason = peers.FlashAttention("fa2", "flash_attn", -1).unavailable(torch.device("cuda"))
        assert "flash_attn_func" in reason
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        assert "flash_attn" in peers.FlashAttention("fa2", "flash_attn", -1).unavailable(torch.device("cuda"))

    def test_sdpa_refuses_what_it_would_compute_wrongly(self):
        sdpa = peers.Sdpa("sdpa-cpu", "FLASH_ATTENTION", "cpu")
        refused = {w.name for w in CI if sdpa.refuses(w, CPU)}
        assert refused == {
            "ci-window-s150", "ci-softcap-s100", "ci-alibi-s90", "ci-sink-s70", "ci-chunk", "ci-varlen"
        }  # fmt: skip

    def test_standard_refuses_more_than_the_memory(self):
        enormous = replace(FULL, seqlen_q=2**20, seqlen_k=2**20)
        assert "MiB" in peers.Standard().refuses(enormous, CPU)
        assert peers.Standard().refuses(FULL, CPU) is None

    def test_contestants(self):
        names = [p.name for p in entrants([], [], CPU)]
        assert names == ["flashtile", "sdpa-cpu", "standard"]
        assert [p.name for p in entrants(["none"], ["cpu"], CPU)] == ["flashtile:cpu"]
        assert [p.name for p in entrants(["standard"], [], CPU)] == ["flashtile", "standard"]

    @pytest.mark.parametrize(
        ("names", "backends", "message"),
        [
            (["fa5"], [], "peer must be none or one of .*got 'fa5'"),
            (["flex"], [], "peer 'flex' cannot run here: runs on cuda"),
            ([], ["hip"], "backend must be one of .*got 'hip'"),
        ],
    )
    def test_contestants_refuses(self, names, backends, message):
        with pytest.raises(ValueError, match=message):
            entrants(names, backends, CPU)

    @staticmethod
    def check(peer, workload, gradients):
        inputs = make_inputs(workload, CPU)
        call = peer.prepare(workload, inputs)
        with call.enter():
            results = runner.results_of(call, inputs, "backward" if gradients else "forward")
        assert results["out"].shape == inputs.dout.shape
        comparisons = gate.Oracle(workload, inputs, gradients).check(results)
        assert all(c.holds for c in comparisons), "\n".join(map(str, comparisons))

    @staticmethod
    def install(monkeypatch, name, unlimited):
        """Install FlashAttention's functions; -4 marks an unlimited side by None and returns a tuple."""

        def attend(q, k, v, window_size=(unlimited, unlimited), **options):
            window = tuple(-1 if side == unlimited else side for side in window_size)
            out, lse = reference.attention(q, k, v, window_size=window, **options)
            return (out, lse) if unlimited is None else out

        def dense(
            q, k, v, *, softmax_scale=None, causal=False, window_size=(unlimited,) * 2, softcap=0.0, **by_head
        ):
            (known, ours) = ("learnable_sink", "sink") if unlimited is None else ("alibi_slopes",) * 2
            by_head = {ours: by_head.pop(known)} | by_head if known in by_head else by_head
            options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
            return attend(q, k, v, window_size, **options, **by_head)

        def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
            offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            return attend(q, k, v, **offsets, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options)

        for part in ("flash_attn", name):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        sys.modules[name].flash_attn_func = dense
        sys.modules[name].flash_attn_varlen_func = varlen


class TestRunner:
    def test_a_contestant_s_failure_costs_nothing_else(self):
        def late_failure(out, calls):
            if calls > 2:
                raise RuntimeError("gave up\nsecond line")
            return out

        def off(out, calls):
            return out * 1.01

        contestants = [
            peers.Flashtile(),
            Fake("good"),
            Fake("refusing", refusal="not today"),
            Fake("unable", error=NotImplementedError("no such mask")),
            Fake("full", error=torch.OutOfMemoryError("tried to allocate 1 PiB")),
            Fake("broken", error=KeyError("x")),
            Fake("wrong", off),
            Fake("nan", lambda out, calls: out * torch.nan),
            Fake("late", late_failure),
        ]
        cells = list(runner.measure_workload(FULL, contestants, QUICK))
        assert [cell["pass"] for cell in cells] == ["forward", "backward"]
        for cell in cells:
            found = {name: result["status"] for name, result in cell["results"].items()}
            assert found == {
                "flashtile": "ok",
                "good": "ok",
                "refusing": "refused",
                "unable": "refused",
                "full": "out of memory",
                "broken": "failed",
                "wrong": "wrong",
                "nan": "wrong",
                "late": "failed",
            }
            reasons = {name: result["reason"] for name, result in cell["results"].items()}
            assert reasons["refusing"] == "not today"
            assert reasons["unable"] == "no such mask"
            assert reasons["late"] == "RuntimeError: gave up"
            assert "out" in reasons["wrong"]
            assert "ms" not in cell["results"]["wrong"]

    def test_nothing_wrong_is_ever_timed(self):
        wrong = Fake("wrong", lambda out, calls: out + 0.1)
        list(runner.measure_workload(FULL, [wrong], replace(QUICK, passes=("forward",))))
        assert wrong.calls == 1

    def test_another_contestant_begins_each_round(self):
        entries = [runner.Entry(Fake(str(i))) for i in range(3)]
        turns = [[e.peer.name for e in runner._rotated(entries, turn)] for turn in range(4)]
        assert turns == [["0", "1", "2"], ["1", "2", "0"], ["2", "0", "1"], ["0", "1", "2"]]

    def test_document(self):
        seen = []
        settings = replace(QUICK, passes=("forward", "backward", "both"), rounds=2)
        contestants = [peers.Flashtile(), peers.Standard()]
        document = runner.run(
            [FULL], contestants, settings, after_cell=lambda d: seen.append(len(d["cells"]))
        )
        assert seen == [0, 1, 2, 3]
        assert json.loads(json.dumps(document)) == document
        assert {"python", "torch", "triton", "flashtile", "cuda", "cudnn", "driver"} <= set(
            document["versions"]
        )
        assert document["settings"]["threads"] == torch.get_num_threads()
        assert document["device"]["name"]
        assert document["ceilings"]["matmul_tflops"]["float32"] > 0
        for cell in document["cells"]:
            result = cell["results"]["flashtile"]
            assert len(result["rounds_ms"]) == 2
            assert result["tflops"] == pytest.approx(FULL.flops(cell["pass"]) / (result["ms"] * 1e-3) / 1e12)
            compared = 1 if cell["pass"] == "forward" else 4
            assert [row["result"] for row in result["gate"]] == list(gate.RESULTS[:compared])

    def test_host_time(self, monkeypatch):
        monkeypatch.setitem(HOST_CALLS, "cpu", 1)
        found = runner.host_time(peers.Flashtile(), CPU)
        assert found["status"] == "ok"
        assert found["us"] > 0
        refused = runner.host_time(Fake("no", refusal="no"), CPU)
        assert (refused["status"], refused["us"]) == ("refused", None)

    def test_arranged_tensors_are_views(self):
        call = PeerCall(lambda q, k, v: q, heads_first=True)
        for shape in ((2, 5, 3, 4), (7, 3, 4)):
            tensor = torch.randn(shape)
            arranged = call.arrange(tensor)
            assert arranged.shape == ((2, 3, 5, 4) if len(shape) == 4 else (1, 3, 7, 4))
            assert arranged.data_ptr() == tensor.data_ptr()
            assert torch.equal(call.restore(arranged, tensor), tensor)


def made_up_document() -> dict:
    """Two workloads and both passes: ours takes 1 ms, the peers 2 and 0.5, or 4 and nothing."""

    def result(ms):
        if ms is None:
            return {"status": "out of memory", "reason": "too [large]", "gate": []}
        return {"status": "ok", "reason": None, "gate": [], "ms": ms, "rounds_ms": [ms], "spread": 0.02,
                "tflops": 100 / ms, "gbps": 10 / ms, "peak_memory_bytes": 220}  # fmt: skip

    def cell(which, seqlen, fa2, flex):
        return {
            "workload": f"w-s{seqlen}", "series": "w", "pass": which, "shape": "B 1", "mask": "causal",
            "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": 64, "dtype": "bfloat16", "flops": 1e11,
            "bytes": 1e7, "resident_bytes": 200, "heads_checked": 1,
            "results": {"flashtile": result(1.0), "fa2": result(fa2), "flex": result(flex)},
        }  # fmt: skip

    document = {
        "schema": 1, "date": "2026-01-02T03:04:05+00:00", "source": None,
        "versions": {"torch": "2.11", "triton": "3.6", "cuda": "13.0"},
        "device": {"device": "cuda:0", "name": "Card"},
        "settings": {"passes": ["forward", "backward"], "rounds": 1, "rep_ms": 1, "threads": None},
        "contestants": [{"name": n, "ours": n == "flashtile"} for n in ("flashtile", "fa2", "flex")],
        "ceilings": {"matmul_tflops": {"bfloat16": 400.0}, "copy_gbps": 40.0},
        "host_time_us": {"flashtile": {"status": "ok", "reason": None, "us": 12.25, "call": "B 1"},
                         "fa2": {"status": "refused", "reason": "no", "us": None, "call": "B 1"}},
        "cells": [cell(which, s, *times) for which in ("forward", "backward")
                  for s, times in ((512, (2.0, 0.5)), (1024, (4.0, None)))],
    }  # fmt: skip
    document["summary"] = documents.summarize(document)
    return document


class TestReports:
    def test_summary_by_hand(self):
        rows = {(r["pass"], r["peer"]): r for r in documents.summarize(made_up_document())}
        fa2 = rows["forward", "fa2"]
        assert fa2["geometric_mean"] == pytest.approx(math.sqrt(2 * 4))
        assert (fa2["cells"], fa2["lowest"], fa2["lowest_cell"]) == (2, 2.0, "w-s512")
        assert (rows["forward", "flex"]["geometric_mean"], rows["forward", "flex"]["cells"]) == (0.5, 1)
        assert rows["backward", "best peer"]["geometric_mean"] == pytest.approx(math.sqrt(0.5 * 4))

    def test_shares_of_the_ceilings(self):
        document = made_up_document()
        cell = document["cells"][1]
        assert documents.share_of_ceiling(document, cell, "flashtile", "tflops") == 100 / 400
        assert documents.share_of_ceiling(document, cell, "flashtile", "gbps") == 10 / 40
        assert documents.share_of_ceiling(document, cell, "flex", "tflops") is None
        assert documents.ratio(cell, "flashtile", "flex") is None

    def test_text(self):
        console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        report.print_report(made_up_document(), console)
        text = console.export_text()
        for expected in ("Card, torch 2.11", "OOM", "w-s1024", "12.2 us", "fa2 refused", "1.10", "best peer"):
            assert expected in text
        assert "flex: out of memory in 2 cells\n" in text
        assert text.index("speed over each peer's") > text.rindex("OOM")  # the means come last

    @pytest.mark.parametrize("suffix", ["png", "svg"])
    def test_plot(self, tmp_path, suffix):
        path = tmp_path / f"plot.{suffix}"
        report_charts.write_plot(made_up_document(), path)
        assert path.stat().st_size > 5000

    def test_plot_of_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="nothing to draw"):
            report_charts.write_plot(made_up_document() | {"cells": []}, tmp_path / "plot.png")


class TestCommands:
    @staticmethod
    def invoke(command, *arguments):
        app = typer.Typer()
        app.command()(command)
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})

    def test_bench_writes_everything(self, tmp_path):
        numbers, plot = tmp_path / "bench.json", tmp_path / "bench.png"
        result = self.invoke(
            bench, "-w", "ci-gqa,ci-varlen", "--pass", "forward,both", "--device", "cpu",
            "--rounds", "1", "--rep", "1", "--no-host-time", "--json", str(numbers), "--plot", str(plot),
            "--backend", "cpu", "--peers", "standard",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "best peer" in result.output
        document = json.loads(numbers.read_text())
        assert [c["workload"] for c in document["cells"]] == [
            "ci-gqa-s113",
            "ci-gqa-s113",
            "ci-varlen",
            "ci-varlen",
        ]
        assert {c["name"] for c in document["contestants"]} == {"flashtile:cpu", "standard"}
        assert document["summary"]
        assert plot.exists()
        shown = self.invoke(bench, "--show", str(numbers))
        assert shown.exit_code == 0
        assert "ci-varlen" in shown.output

    def test_a_wrong_result_of_ours_is_the_exit_code(self, monkeypatch):
        """A peer's is not."""
        arguments = ("-w", "ci-gqa", "--device", "cpu", "--rounds", "1", "--rep", "1", "--no-host-time")
        for ours, code in ((True, 1), (False, 0)):
            both = [Fake("wrong", lambda out, calls: out + 0.1), Fake("right")]
            both[0].ours, both[1].ours = ours, not ours
            monkeypatch.setattr(contestants, "contestants", lambda *_, both=both: both)
            result = self.invoke(bench, *arguments)
            assert result.exit_code == code, result.output

    def test_bench_lists(self):
        result = self.invoke(bench, "--list", "--device", "cpu")
        assert result.exit_code == 0
        others = (*linear_bench.WORKLOADS, *engine_bench.WORKLOADS)
        assert all(w.name in result.output for w in (*WORKLOADS, *others))
        assert all(p.name in result.output for p in contestants.peers("attention"))

    @walk(
        ("arguments", "message"),
        [
            (["-w", "papre"], "got 'papre'"),
            (["--pass", "sideways"], "forward, backward, both, graph, got 'sideways'"),
            (["--peers", "fa9"], "got 'fa9'"),
            (["--backend", "tpu"], "got 'tpu'"),
            (["--device", "tpu:0"], "got 'tpu:0'"),
            (["--device", "cuda:99"], "CUDA devices"),
            (["--unit", "miles"], "got 'miles'"),
            (["--head-dim", "64,big"], "head-dim must be numbers"),
            (["-w", "ci", "--head-dim", "77"], "head-dim must be one of 16, 32, 40, 48, 64 in"),
        ],
    )
    def test_bench_refuses(self, arguments, message):
        result = self.invoke(bench, *(["--device", "cpu"] if "--device" not in arguments else []), *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b-varlen"])
def test_bench_on_a_gpu(name):
    device = torch.device("cuda", 0)
    settings = runner.Settings(device, ("forward", "backward"), rounds=1, rep=5.0)
    document = runner.run(workloads.select([name]), entrants([], [], device), settings)
    for cell in document["cells"]:
        results = cell["results"]
        assert results["flashtile"]["status"] == "ok", results["flashtile"]
        assert all(r["status"] != "wrong" for r in results.values()), results
        assert sum(r["status"] == "ok" for r in results.values()) >= 2
        if cell["pass"] == "backward":
            assert results["flashtile"]["peak_memory_bytes"] >= cell["resident_bytes"]
