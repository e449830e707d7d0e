"""Bad options of ``python -m benchmarks`` are one line and exit code 2, before anything is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite import runner
from benchmarks.suite.command import STOPPED, main
from flashtile.tools.commands import options
from refused_commands import refusals
from walk import walk

ROOT = Path(__file__).parents[2]
BENCH = ("--device", "cpu", "-w", "ci-full-s96")

BAD = [
    ((*BENCH, "--plot", "{tmp}/x.foo"), "must end in .png, .svg, .pdf, got"),
    ((*BENCH, "--plot", "{tmp}/missing/x.png"), "there is no folder"),
    ((*BENCH, "--json", "{tmp}"), "is a folder"),
    ((*BENCH, "--json", "{tmp}/file/x.json"), "there is no folder"),
    ((*BENCH, "--report", "{tmp}/missing/x.html"), "there is no folder"),
    ((*BENCH, "--json", "{tmp}/x.png", "--plot", "{tmp}/x.png"), "must be different files"),
    ((*BENCH, "--rounds", "0"), "--rounds"),
    ((*BENCH, "--rep", "0"), "--rep"),
    ((*BENCH, "--rep", "inf"), "must be finite"),
    ((*BENCH, "--rep", "nan"), "--rep"),
    ((*BENCH, "--seconds", "0"), "--seconds"),
    ((*BENCH, "--seed", "-1"), "--seed"),
    ((*BENCH, "--head-dim", "0"), "head-dim must be one of 32"),
    ((*BENCH, "--head-dim", "big"), "head-dim must be numbers"),
    ((*BENCH, "--dtype", "int8"), "got 'int8'"),
    ((*BENCH, "--unit", "miles"), "got 'miles'"),
    ((*BENCH, "--peers", "fa9"), "got 'fa9'"),
    ((*BENCH, "--peers", "flex"), "cannot run here"),
    ((*BENCH, "--backend", "tpu"), "got 'tpu'"),
    ((*BENCH, "--pass", "sideways"), "got 'sideways'"),
    ((*BENCH, "--pass", "backward", "--operations"), "--operations takes attention workloads"),
    ((*BENCH, "--pass", "graph"), "needs a CUDA device"),
    ((*BENCH, "-w", "papre"), "got 'papre'"),
    ((*BENCH, "-w", "ci-decode"), "one kind"),
    (("--device", "cpu", "-w", "ci-decode", "-p", "backward"), "forward or graph"),
    (("--device", "cpu", "-w", "ci-decode", "--dtype", "float8_e4m3fn"), "dtype"),
    (("--device", "tpu:0"), "got 'tpu:0'"),
    (("--device", "cuda:99"), "CUDA devices"),
    (("--show", "{tmp}/missing.json"), "missing.json"),
    (("--show", "{tmp}"), "directory"),
    (("--show", "{tmp}/file"), "cannot be read as JSON"),
    (("--show", "{tmp}/binary"), "cannot be read as JSON"),
    (("--show", "{tmp}/list.json"), "no document of the benchmarks"),
    (("--show", "{tmp}/other.json"), "no document of the benchmarks"),
    (("--show", "{tmp}/cells.json"), "no document of the benchmarks"),
]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command in a folder with files that are none; fails if it measures."""
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("the command began its work"))
    return refusals(main, "benchmarks", tmp_path, monkeypatch, capsys)


@walk(("arguments", "said"), BAD)
def test_one_line_and_exit_code_2(run, arguments, said):
    code, error = run(*arguments)
    assert code == 2, error
    assert error.startswith("benchmarks: ")
    assert error.count("\n") == 1
    assert said in error


def test_a_file_that_cannot_be_written(run, monkeypatch):
    monkeypatch.setattr(options.os, "access", lambda path, mode: False)
    code, error = run(*BENCH, "--json", "{tmp}/x.json")
    assert code == 2
    assert "permission denied" in error


@pytest.mark.parametrize(("workload", "warned"), [("packed-long", True), ("ci-packed", False)])
def test_workloads_for_a_gpu_are_named_on_a_cpu(monkeypatch, capsys, workload, warned):
    def measure(*_, after_cell, **__):
        after_cell({"contestants": [], "cells": []})

    monkeypatch.setattr(runner, "run", measure)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cpu", "-w", workload])
    with pytest.raises(SystemExit):
        main()
    assert ("GFLOP and takes minutes on a CPU" in capsys.readouterr().err) == warned


@pytest.mark.thorough
def test_a_reader_that_stops_reading_is_no_error():
    """As ``python -m benchmarks --list | head -1``."""
    command = [sys.executable, "-m", "benchmarks", "--list", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_benchmark_that_is_stopped_keeps_what_it_measured(monkeypatch, capsys):
    """In a pipe each cell is a line as soon as it is measured; SIGTERM ends the run, not the report."""
    results = {"flashtile": {"status": "ok", "ms": 2.0, "tflops": 2.0, "gbps": 1.0, "spread": 0.0}}
    cell = {
        "workload": "ci-full-s96", "pass": "forward", "seqlen_q": 96, "seqlen_k": 96, "dtype": "float32",
        "flops": 4e9, "bytes": 1e3, "resident_bytes": 1, "results": results,
    }  # fmt: skip
    document = {
        "versions": {"torch": "2", "triton": None, "cuda": None}, "date": "2026-01-01", "cells": [],
        "device": {"device": "cpu", "name": "a CPU"}, "settings": {"threads": 1, "rounds": 1, "rep_ms": 1.0},
        "ceilings": {"matmul_tflops": {"float32": 1.0}, "copy_gbps": 100.0},
        "contestants": [{"name": "flashtile", "ours": True}],
    }  # fmt: skip

    def measure(*_, after_cell, **__):
        document["cells"].append(cell)
        after_cell(document)
        assert "1/1 ci-full-s96 forward: flashtile 2 ms" in capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal did not end the run")

    monkeypatch.setattr(runner, "run", measure)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *BENCH])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == STOPPED
    written = capsys.readouterr().out
    assert "ci-full-s96" in written
    assert "faster than the measured ceilings: ci-full-s96" in written  # 4 GFLOP in 2 ms at 1 TFLOP/s
