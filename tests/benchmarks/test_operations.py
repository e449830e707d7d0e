"""The benchmark that times standard attention's operations one by one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.suite import contestants, operations, report, runner, workloads
from benchmarks.suite.command import application
from benchmarks.suite.documents import summarize
from benchmarks.suite.inputs import make_inputs
from benchmarks.suite.operations import Operations
from benchmarks.suite.peers import Flashtile
from benchmarks.suite.report_page import render_page
from flashtile.hardware import timing
from flashtile.tools import page
from flashtile.tools.demo.operations import DROP, DROPOUT, FIRST, MASK, NAMES, SECOND, SOFTMAX, compared_times
from walk import walk

CPU = torch.device("cpu")
CAUSAL, GROUPED = workloads.select(["ci-causal-s96", "ci-gqa-s113"])
SETTINGS = runner.Settings(CPU, ("forward",), rounds=2, rep=1.0, host_time=False, operations=True)


def measured(workload):
    entrants = contestants.contestants("attention", ["standard"], [], CPU)
    (cell,) = runner.measure_workload(workload, entrants, SETTINGS)
    return cell


@pytest.mark.parametrize("workload", [CAUSAL, GROUPED], ids=lambda w: w.name)
def test_each_operation_works_on_the_one_before(workload):
    inputs = make_inputs(workload, CPU)
    functions = Operations().functions(workload, inputs)
    assert tuple(functions) == NAMES
    scores, masked, p, dropped = (functions[name]() for name in (FIRST, MASK, SOFTMAX, DROP))
    assert scores.shape == (workload.batch, workload.num_heads_q, workload.seqlen_q, workload.seqlen_k)
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    torch.testing.assert_close(masked[..., ~hidden], scores[..., ~hidden])
    assert (masked[..., hidden] == -torch.inf).all()
    torch.testing.assert_close(p, torch.softmax(masked, -1))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], p[kept] / (1 - DROPOUT))
    assert 0.7 < kept[..., ~hidden].float().mean() < 1.0
    assert functions[SECOND]().shape == (*scores.shape[:-1], workload.head_dim)


def test_the_gate_comes_first(monkeypatch):
    wrong = {**operations._steps(CAUSAL, make_inputs(CAUSAL, CPU)), SOFTMAX: torch.sigmoid}
    monkeypatch.setattr(operations, "_steps", lambda workload, inputs: wrong)
    found = measured(CAUSAL)["operations"]
    assert found["status"] == runner.WRONG
    assert "ms" not in found


def test_a_cell_has_each_operation_and_their_sum():
    found = measured(CAUSAL)["operations"]
    assert found["status"] == runner.OK
    assert [row["holds"] for row in found["gate"]] == [True]
    assert tuple(found["ms"]) == NAMES
    assert all(milliseconds > 0 for milliseconds in found["ms"].values())
    assert found["together_ms"] == pytest.approx(sum(found["ms"].values()))
    assert found["fused_dropout_ms"] > 0


def test_the_fused_call_is_timed_with_the_dropout_of_the_operations(monkeypatch):
    prepare, given, results = Flashtile.prepare_with_dropout, [], []

    def recorded(self, workload, inputs, p):
        given.append(p)
        call = prepare(self, workload, inputs, p)
        return replace(call, attend=lambda q, k, v: results.append(call.attend(q, k, v)))

    monkeypatch.setattr(Flashtile, "prepare_with_dropout", recorded)
    found = measured(CAUSAL)["operations"]
    assert found["dropout_p"] == DROPOUT
    assert given == [DROPOUT]
    # The first query sees one key, so its result is 0 or v / (1 - p).
    v = make_inputs(CAUSAL, CPU).v
    first = (results[0][:, 0] / v[:, 0]).mean(-1)
    assert ((first.abs() < 1e-6) | ((first - 1 / (1 - DROPOUT)).abs() < 0.02)).all()


def test_a_fused_call_that_has_no_dropout_is_left_out(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("no dropout here")

    monkeypatch.setattr(Flashtile, "prepare_with_dropout", refuse)
    found = measured(CAUSAL)
    assert found["operations"]["status"] == runner.OK
    assert "fused_dropout_ms" not in found["operations"]
    times = compared_times(found, "flashtile")
    assert times["flashtile with dropout"] is None
    assert times["without dropout / flashtile"] > 0


@walk(
    ("workload", "reason"),
    [
        (workloads.select(["ci-varlen"])[0], "dense calls"),
        (replace(CAUSAL, alibi=True), "without soft-cap, ALiBi"),
        (replace(CAUSAL, sink=True), "without soft-cap, ALiBi"),
        (replace(CAUSAL, seqlen_q=200), "every row sees a key"),
        (replace(CAUSAL, seqlen_q=2**20, seqlen_k=2**20), "MiB"),
    ],
)
def test_what_it_does_not_take_is_said(workload, reason):
    assert reason in str(Operations().refuses(workload, CPU))


def test_bars_have_the_heights_of_the_times():
    cell = {
        "operations": {"ms": dict(zip(NAMES, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True)), "together_ms": 15.0},
        "results": {"flashtile": {"status": "ok", "ms": 2.5}},
    }
    cell["operations"] |= {"dropout_p": DROPOUT, "fused_dropout_ms": 4.5}
    bars, labels = _bars(cell)
    stack = [(False, 0, 1), (False, 1, 2), (False, 3, 3), (False, 6, 4), (False, 10, 5)]
    assert bars == [*stack, (True, 0, 4.5)]
    assert labels == ["standard attention,\ndropout 0.1", "flashtile,\ndropout 0.1"]
    del cell["operations"]["fused_dropout_ms"]  # a document of 0.1: both sides without dropout
    bars, labels = _bars(cell)
    assert bars == [*stack[:3], (False, 6, 5), (True, 0, 2.5)]
    assert labels == ["standard attention,\nno dropout", "flashtile,\nno dropout"]


def _bars(cell):
    figure = page.figure_of(lambda axes: page.operation_bars(axes, cell, "flashtile"), "")
    (axes,) = figure.axes
    bars = [(bar.get_x() > 0.5, bar.get_y(), bar.get_height()) for bar in axes.patches]
    return bars, [label.get_text() for label in axes.get_xticklabels()]


def test_the_command_reports_them(tmp_path, monkeypatch):
    monkeypatch.setitem(timing.CEILING_SIZE, "cpu", 64)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**16)
    files = [tmp_path / name for name in ("x.json", "x.html")]
    command = ["--device", "cpu", "-w", "ci-causal-s96", "--peers", "standard", "--rounds", "1"]
    command += ["--rep", "1", "--no-host-time", "--operations"]
    done = CliRunner().invoke(application(), [*command, "--json", str(files[0]), "--report", str(files[1])])
    assert done.exit_code == 0, done.output
    for expected in ("standard attention by operation", *NAMES, "flashtile with dropout", "without dropout"):
        assert expected in done.output
    document = json.loads(files[0].read_text())
    assert report.taken_apart(document) == document["cells"]
    page = files[1].read_text()
    assert "operations 96" in page
    del document["cells"][0]["operations"]  # a document of an earlier version
    document["summary"] = summarize(document)
    assert "by operation" not in render_page(document)


@pytest.mark.gpu
def test_on_a_gpu():
    (workload,) = workloads.select(["gpt2-s1024"])
    entrants = contestants.contestants("attention", ["standard"], [], torch.device("cuda"))
    settings = replace(SETTINGS, device=torch.device("cuda"))
    (cell,) = runner.measure_workload(workload, entrants, settings)
    assert cell["operations"]["status"] == runner.OK
    assert cell["results"]["flashtile"]["status"] == runner.OK
