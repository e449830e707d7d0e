"""Bad input of any command is one line and exit code 2, before anything is computed or written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from flashtile import cli
from flashtile.tools.bench import runner
from flashtile.tools.commands import demo, inspect, options, visualize

ROOT = Path(__file__).parents[2]
BENCH = ("bench", "--device", "cpu", "-w", "ci-full-s96")
EXPLAIN = ("explain", "--device", "cpu")

BAD = [
    (("nonsense",), "nonsense"),
    (("info", "--nonsense"), "--nonsense"),
    # compile, record
    (("compile", "{tmp}/kernels"), "--calls, --model, --preset"),
    (("compile", "{tmp}/kernels", "--preset", "all"), "one of training, serving, everything, got 'all'"),
    (("compile", "{tmp}/kernels", "--preset", "training", "--arch", "sm_10"), "got 'sm_10'"),
    (("compile", "{tmp}/kernels", "--preset", "training", "--purpose", "fun"), "got 'fun'"),
    (("compile", "{tmp}/kernels", "--calls", "{tmp}/list.json"), "must be a file of recorded calls"),
    (("compile", "{tmp}/kernels", "--model", "{tmp}/missing"), "missing"),
    (("compile", "{tmp}/file", "--preset", "training"), "is a file"),
    (("record", "{tmp}/x.txt", "{tmp}/file"), "must end in .json"),
    (("record", "{tmp}/x.json", "{tmp}/missing.py"), "missing.py"),
    # bench
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
    (("bench", "--device", "cpu", "-w", "ci-decode", "-p", "backward"), "forward or graph"),
    (("bench", "--device", "cpu", "-w", "ci-decode", "--dtype", "float8_e4m3fn"), "dtype"),
    (("bench", "--device", "tpu:0"), "got 'tpu:0'"),
    (("bench", "--device", "cuda:99"), "CUDA devices"),
    (("bench", "--show", "{tmp}/missing.json"), "missing.json"),
    (("bench", "--show", "{tmp}"), "directory"),
    (("bench", "--show", "{tmp}/file"), "cannot be read as JSON"),
    (("bench", "--show", "{tmp}/binary"), "cannot be read as JSON"),
    (("bench", "--show", "{tmp}/list.json"), "no document of flashtile bench"),
    (("bench", "--show", "{tmp}/other.json"), "no document of flashtile bench"),
    (("bench", "--show", "{tmp}/cells.json"), "no document of flashtile bench"),
    # explain
    ((*EXPLAIN, "--batch", "-1"), "--batch"),
    ((*EXPLAIN, "--heads", "0"), "--heads"),
    ((*EXPLAIN, "--seqlen-q", "100000000000000000000"), "--seqlen-q"),
    ((*EXPLAIN, "--head-dim", "1000000000000"), "--head-dim"),
    ((*EXPLAIN, "--batch", "60000", "--seqlen-q", "2147483647", "--heads", "60000"), "are no tensor"),
    ((*EXPLAIN, "--seqlen-q", "1000000000", "--card", "h100"), "costs are counted up to"),
    ((*EXPLAIN, "--heads", "6", "--kv-heads", "4"), "multiple of the 4 heads"),
    ((*EXPLAIN, "--dtype", "int8"), "got 'int8'"),
    ((*EXPLAIN, "--softcap", "nan"), "softcap"),
    ((*EXPLAIN, "--backend", "tpu"), "got 'tpu'"),
    ((*EXPLAIN, "--card", "voodoo2"), "got 'voodoo2'"),
    (("explain", "--device", "meta"), "got 'meta'"),
    ((*EXPLAIN, "--cache-dtype", "float32"), "--cache-dtype is for --page-size"),
    ((*EXPLAIN, "--page-size", "16", "--varlen"), "--page-size is for a cache, whose calls take no --varlen"),
    ((*EXPLAIN, "--page-size", "16", "--cache-dtype", "int8"), "must be float32 or float8_e4m3fn, got"),
    ((*EXPLAIN, "--model", "llama-9"), "got 'llama-9'"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--seqlen", "2k"), "--seqlen must be numbers from 1 to 4194304"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--seqlen", "2048,0"), "got '2048,0'"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--heads", "4"), "--model takes --seqlen"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--card", "here"), "got 'here'"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--batch", "0"), "--batch must be at least 1"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--dtype", "int8"), "got 'int8'"),
    ((*EXPLAIN, "--model", "llama-2-7b", "--card", "v100", "--dtype", "bfloat16"), "got 'bfloat16'"),
    ((*EXPLAIN, "--seqlen", "2048"), "--seqlen is for --model"),
    # demo
    (("demo", "--out", "{tmp}/file"), "is a file"),
    (("demo", "--out", "{tmp}/file/below"), "is a file"),
    (("demo", "--seconds", "0"), "--seconds"),
    (("demo", "--seconds", "inf"), "must be finite"),
    (("demo", "--device", "toaster"), "got 'toaster'"),
    # inspect
    (("inspect", "--arch", "sm_1"), "got 'sm_1'"),
    (("inspect", "--kernel", "no such kernel"), "no such kernel"),
    (("inspect", "--json", "{tmp}/missing/x.json"), "there is no folder"),
    (("inspect", "--jobs", "0"), "--jobs"),
    # visualize
    (("visualize", "-o", "{tmp}"), "is a folder"),
    (("visualize", "-o", "{tmp}/missing/x.html"), "there is no folder"),
    (("visualize", "--algorithm", "flash9"), "got 'flash9'"),
    (("visualize", "--mask", "holes"), "got 'holes'"),
    (("visualize", "--block", "0x4"), "got '0x4'"),
    (("visualize", "--seqlen", "100000000"), "--seqlen"),
    (("visualize", "--sram-kib", "99999999999999999999"), "--sram-kib"),
]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command in a folder with files that are none; fails if it begins its work."""
    (tmp_path / "file").write_text("not JSON")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text(json.dumps({"date": "2026", "versions": {}}))
    (tmp_path / "cells.json").write_text(
        json.dumps({"cells": [{"results": 3}], "settings": {}, "contestants": 7})
    )
    before = sorted(tmp_path.iterdir())

    def works(*_, **__):
        pytest.fail("the command began its work")

    for module, name in (
        (runner, "run"), (demo, "inspect_setting"), (inspect, "reports"), (visualize, "write_page"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, works)

    def call(*arguments: str) -> tuple[int, str]:
        given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["flashtile", *given])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert sorted(tmp_path.iterdir()) == before
        written = capsys.readouterr()
        assert written.out == ""
        return stopped.value.code, written.err

    return call


@pytest.mark.parametrize(
    ("arguments", "said"), BAD, ids=lambda given: " ".join(given) if isinstance(given, tuple) else ""
)
def test_one_line_and_exit_code_2(run, arguments, said):
    code, error = run(*arguments)
    assert code == 2, error
    assert error.startswith("flashtile: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    "arguments",
    [(*BENCH, "--json", "{tmp}/x.json"), ("demo", "--out", "{tmp}/out"), ("visualize", "-o", "{tmp}/x.html")],
    ids=lambda arguments: arguments[0],
)
def test_folders_that_cannot_be_written_to(run, monkeypatch, arguments):
    monkeypatch.setattr(options.os, "access", lambda path, mode: False)
    code, error = run(*arguments)
    assert code == 2
    assert "permission denied" in error


@pytest.mark.thorough
def test_a_reader_that_stops_reading_is_no_error():
    """As ``flashtile bench --list | head -1``."""
    command = [sys.executable, "-m", "flashtile", "bench", "--list", "--device", "cpu"]
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
    monkeypatch.setattr(sys, "argv", ["flashtile", *BENCH])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == options.STOPPED
    written = capsys.readouterr().out
    assert "ci-full-s96" in written
    assert "faster than the measured ceilings: ci-full-s96" in written  # 4 GFLOP in 2 ms at 1 TFLOP/s


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_model_that_has_no_room_in_memory(run, tmp_path, monkeypatch, where):
    pytest.importorskip("aiohttp")
    sizes = {"vocab_size": 2**24, "hidden_size": 2**24, "head_dim": 2, "num_hidden_layers": 1}
    config = json.dumps({"model_type": "llama", **sizes})
    said = "allocate"
    if where == "cuda":
        said = "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has 1.00 GiB free."

        def load(*_, **__):
            raise torch.OutOfMemoryError(f"{said} Process 7 has 70.00 GiB memory in use. If reserved ...")

        monkeypatch.setattr("flashtile.engine.LLM", load)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
        options = ("--device", "cpu", "--load-format", "dummy")
        code, error = run("serve", folder, *options)
    assert code == 2, error
    assert error.startswith("flashtile: ")
    assert error.count("\n") == 1
    assert f"there is not enough memory for the model: {said if where == 'cuda' else ''}" in error
    assert said in error
    assert "Process 7" not in error
