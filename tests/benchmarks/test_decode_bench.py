"""Benchmarks of decoding: contestants, gate, command and committed documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

import flashtile
from benchmarks.suite import contestants, documents, runner, workload, workloads
from benchmarks.suite.command import bench
from benchmarks.suite.documents import summarize
from benchmarks.suite.gate import Oracle
from benchmarks.suite.inputs import Inputs, make_inputs
from walk import walk

CPU = torch.device("cpu")
CI = workloads.select(["ci-decode"])
PAGED, DENSE, FP8, PREFIX = CI
RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*-decode*.json"))


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_contestants_pass_the_gate(workload: workloads.Workload) -> None:
    inputs = make_inputs(workload, CPU)
    oracle = Oracle(workload, inputs, gradients=False)
    ran = []
    for peer in contestants.contestants("decode", [], [], CPU):
        if peer.refuses(workload, CPU) is None:
            call = peer.prepare(workload, inputs)
            (comparison,) = oracle.check(runner.results_of(call, inputs, "forward"))
            assert comparison.holds, comparison
            ran.append(peer.name)
    assert ran == ["flashtile"] + ["flashtile-prefix"] * (workload is PREFIX)


@pytest.mark.parametrize("workload", workloads.select(["ci-mla"]), ids=lambda w: w.name)
def test_latent_attention_passes_the_gate(workload: workloads.Workload) -> None:
    inputs = make_inputs(workload, CPU)
    oracle = Oracle(workload, inputs, gradients=False)
    ran = {}
    for peer in contestants.contestants("decode", [], [], CPU):
        if peer.refuses(workload, CPU) is None:
            call = peer.prepare(workload, inputs)
            (comparison,) = oracle.check(runner.results_of(call, inputs, "forward"))
            assert comparison.holds, comparison
            ran[peer.name] = len(call.copies)
    assert ran == {"flashtile": 1} | ({"sdpa-latent": 1} if workload.seqlen_q == 1 else {})
    assert inputs.qv is not None
    wrong = oracle.check({"out": flashtile.flash_attn_with_kvcache(
        inputs.q, inputs.k, inputs.v, cache_seqlens=inputs.cache_seqlens, block_table=inputs.block_tables[0],
        causal=workload.causal, qv=inputs.qv.roll(1, -1),
    )})  # fmt: skip
    assert not wrong[0].holds


def test_latent_vectors_are_read_once() -> None:
    (workload,) = workloads.select(["decode-mla-8x4096-h16"])
    assert workload.kv_bytes() == 8 * 4096 * 576 * 2
    assert workload.flops() == 2 * 8 * 4096 * 16 * (576 + 512)


def test_the_gate_sees_a_wrong_page_and_a_wrong_length() -> None:
    inputs = make_inputs(PAGED, CPU)
    oracle = Oracle(PAGED, inputs, gradients=False)

    def holds(table: torch.Tensor, lengths: torch.Tensor) -> bool:
        out = flashtile.flash_attn_with_kvcache(
            inputs.q, inputs.k, inputs.v, cache_seqlens=lengths, block_table=table
        )
        return oracle.check({"out": out})[0].holds

    table, lengths = inputs.block_tables[0], inputs.cache_seqlens
    assert lengths is not None
    assert holds(table, lengths)
    assert not holds(table, lengths - 1)
    wrong = table.clone()
    wrong[0, 1] = table[2, 0]
    assert not holds(wrong, lengths)


def test_bytes_and_flops_by_hand() -> None:
    q, keys = 3 * 1 * 4 * 32 * 4, (70 + 9 + 130) * 2 * 32 * 4
    assert PAGED.bytes() == 2 * q + 2 * keys + 3 * 4 * 4
    assert PAGED.bytes("graph") == PAGED.bytes()
    assert PAGED.flops() == 4 * (70 + 9 + 130) * 4 * 32
    assert PREFIX.kv_bytes() == 2 * (64 + 16 + 6) * 2 * 32 * 4
    assert FP8.kv_bytes() * 2 == replace(FP8, cache=workloads.KVCache()).kv_bytes()


def test_pages_of_sequences_do_not_meet_but_in_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "L2_BYTES", 3.0 * PREFIX.kv_bytes())
    assert PREFIX.copies == 3
    inputs: Inputs = make_inputs(PREFIX, CPU)
    (table,) = inputs.block_tables
    first, second = table.tolist()
    assert first[:4] == second[:4]
    assert len({*first, second[4]}) == 6 == inputs.k.shape[0]


def test_flash_attention_3_gets_its_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package replaced by ours under its names."""

    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, page_table, causal):
        return flashtile.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=cache_seqlens, block_table=page_table, causal=causal
        )

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", module)
    workload, peer = replace(PAGED, dtype="bfloat16"), contestants.FlashAttention3OverCache()
    assert peer.unavailable(torch.device("cuda")) is None
    assert peer.refuses(workload, CPU) is None
    for refused in (PAGED, replace(workload, cache=DENSE.cache), replace(workload, head_dim=512), FP8):
        assert "only" in str(peer.refuses(refused, CPU))
    inputs = make_inputs(workload, CPU)
    results = runner.results_of(peer.prepare(workload, inputs), inputs, "forward")
    assert Oracle(workload, inputs, gradients=False).check(results)[0].holds


@pytest.mark.thorough
def test_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench)
    files = {name: tmp_path / f"run.{name}" for name in ("json", "png", "html")}
    arguments = [
        "-w",
        "ci-decode",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--rep",
        "1",
        "--json",
        str(files["json"]),
    ]
    arguments += ["--plot", str(files["png"]), "--report", str(files["html"])]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "GB/s" in result.output
    document = json.loads(files["json"].read_text())
    assert [cell["results"]["flashtile"]["status"] for cell in document["cells"]] == [runner.OK] * len(CI)
    assert document["host_time_us"]["flashtile-prefix"]["us"] > 0
    assert all(path.stat().st_size > 5000 for path in files.values())


@walk("path", RESULTS)
def test_committed_documents_of_decoding_are_read(path: Path) -> None:
    document = documents.read(path)
    known = {workload.name: workload for workload in workloads.WORKLOADS}
    for cell in document["cells"]:
        assert cell["bytes"] == known[cell["workload"]].bytes(cell["pass"])
    assert {row["peer"] for row in document["summary"]} == {"fa3", "best peer"}
    means = [row.pop("geometric_mean") for row in document["summary"]]
    again = summarize(document)
    assert means == pytest.approx([row.pop("geometric_mean") for row in again])
    assert document["summary"] == again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [
    "decode-1x8192-32/8", "decode-32x4096-dense", "decode-32x4096-32/8-fp8", "decode-mla-8x4096-h128",
    "decode-mla-4x4096-h16-q256",
])  # fmt: skip
def test_decoding_on_a_gpu(name: str) -> None:
    device = torch.device("cuda", 0)
    settings = runner.Settings(device, ("forward", "graph"), rounds=1, rep=5.0)
    entrants = contestants.contestants("decode", [], [], device)
    document = runner.run(workloads.select([name]), entrants, settings)
    assert [cell["pass"] for cell in document["cells"]] == ["forward", "graph"]
    for cell in document["cells"]:
        assert cell["results"]["flashtile"]["status"] == runner.OK, cell["results"]
        assert all(result["status"] != runner.WRONG for result in cell["results"].values()), cell["results"]
