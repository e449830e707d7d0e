"""Bad input of any command is one line and exit code 2, before anything is computed or written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from flashtile import cli
from flashtile.learn.visualizer import page
from flashtile.tools.commands import inspect, options
from flashtile.tools.demo import steps
from refused_commands import refusals
from walk import walk

ROOT = Path(__file__).parents[3]
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
    (("bench",), "python -m benchmarks"),
    # explain
    ((*EXPLAIN, "--batch", "-1"), "--batch"),
    ((*EXPLAIN, "--heads", "0"), "--heads"),
    ((*EXPLAIN, "--seqlen-q", "100000000000000000000"), "--seqlen-q"),
    ((*EXPLAIN, "--head-dim", "1000000000000"), "--head-dim"),
    ((*EXPLAIN, "--batch", "60000", "--seqlen-q", "2147483647", "--heads", "60000"), "do not fit a tensor"),
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

    def works(*_, **__):
        pytest.fail("the command began its work")

    monkeypatch.setattr(steps, "inspect_setting", works)
    monkeypatch.setattr(inspect, "reports", works)
    monkeypatch.setattr(page, "write_page", works)
    return refusals(cli.main, "flashtile", tmp_path, monkeypatch, capsys)


@walk(("arguments", "said"), BAD)
def test_one_line_and_exit_code_2(run, arguments, said):
    code, error = run(*arguments)
    assert code == 2, error
    assert error.startswith("flashtile: ")
    assert error.count("\n") == 1
    assert said in error


def test_costs_of_too_many_tokens_are_refused_before_a_kernel_is_chosen(run, monkeypatch):
    monkeypatch.setattr("flashtile.api.explain.explain", lambda *_, **__: pytest.fail("a kernel is chosen"))
    code, error = run(*EXPLAIN, "--seqlen-q", "1000000000", "--card", "h100")
    assert code == 2
    assert "costs are counted up to 4194304 tokens, got 1000000000" in error


@pytest.mark.parametrize(
    "arguments",
    [("demo", "--out", "{tmp}/out"), ("visualize", "-o", "{tmp}/x.html")],
    ids=lambda arguments: arguments[0],
)
def test_folders_that_cannot_be_written_to(run, monkeypatch, arguments):
    monkeypatch.setattr(options.os, "access", lambda path, mode: False)
    code, error = run(*arguments)
    assert code == 2
    assert "permission denied" in error


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
