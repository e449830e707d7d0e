"""The engine's warm-up lists every kernel that its steps need, and the process that compiles them."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.compilation.calls import calls_of
from flashtile.op.operation import remembering
from targets import INTERPRETING

pytest.importorskip("triton")
pytest.importorskip("safetensors")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from test_compilation import APPEND

from flashtile.compilation.ahead import compile_in_process
from flashtile.compilation.compiling import Compiled
from flashtile.engine import model, step_calls
from flashtile.engine.config import parse_config
from flashtile.engine.llm import _steps_of
from needed_kernels import H200, kernels, lacking, traffic

SMALL = {"model_type": "llama", "vocab_size": 99, "num_hidden_layers": 2, "max_position_embeddings": 64}
MODELS = {
    "soak": (
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"max_num_seqs": 12, "max_num_batched_tokens": 24, "block_size": 4},
    ),
    "guesses": (
        {"hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1},
        {"max_num_seqs": 6, "max_num_batched_tokens": 32, "speculative_config": {"method": "ngram"}},
    ),
}  # fmt: skip
"""(config, options of the engine) of small models."""


@pytest.mark.parametrize("name", MODELS)
def test_no_step_needs_a_kernel_that_the_warm_up_lacks(tmp_path, name):
    config, options = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(SMALL | config))
    llm = flashtile.LLM(
        tmp_path, device="cpu", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
        num_gpu_blocks_override=48, **options,
    )  # fmt: skip
    with remembering() as remembered:
        traffic(llm, 25)
    needed = calls_of(remembered)
    assert {"decode", "copy_blocks"} <= {call.operation for call in needed}
    listed = step_calls.calls_of_all(_steps_of(llm.engine.runner))
    missing, count = lacking(needed, listed)
    assert missing == set()
    assert count > 5


def test_a_decoding_step_of_any_batch_needs_listed_kernels(monkeypatch):
    heads = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = parse_config(SMALL | heads | {"intermediate_size": 256, "torch_dtype": "bfloat16"})
    # So long sequences are divided into parts, and how many of them depends on the batch.
    limits = step_calls.Limits(4096, max_num_seqs=12, max_num_batched_tokens=14)
    monkeypatch.setattr(model, "SHORT_TILES", 10)
    listed = kernels(step_calls.step_calls(config, limits))

    def steps(limits, windows, drafts, may_be_short):
        for batch in range(1, limits.max_num_seqs + 1):
            step = step_calls._step(limits, windows, batch, batch, 1)
            yield step
            if may_be_short(batch):
                yield step._replace(short=True)

    monkeypatch.setattr(step_calls, "_steps", steps)
    assert kernels(step_calls.step_calls(config, limits)) <= listed


@pytest.mark.compile
def test_kernels_are_compiled_once_in_a_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compile_in_process(functools.partial(list, [APPEND]), H200, workers=1) == Compiled(1, ())
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    assert compile_in_process(functools.partial(list, [APPEND]), H200, workers=1) == Compiled(0, ())
    assert [path.stem for path in tmp_path.rglob("*.cubin")] == ["append_kernel"]


@pytest.mark.compile
@pytest.mark.skipif(os.name == "nt", reason="the assembler is a shell script")
def test_kernels_are_found_after_another_assembler_was_chosen(tmp_path, monkeypatch):
    """As torch.compile does, in a process that has compiled before."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas_version

    from flashtile.backends.common import first_calls, kernel_store
    from flashtile.backends.compat import compiling_driver
    from flashtile.compilation.compiling import launches

    get_ptxas_version(90)
    assembler = tmp_path / "ptxas"
    # What it says of its version ends differently.
    assembler.write_text(f'#!/bin/sh\n"{knobs.nvidia.ptxas.path}" "$@" && echo\n')
    assembler.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    try:
        assert compile_in_process([APPEND], H200, workers=1) == Compiled(1, ())
        with compiling_driver(H200.capability, only_named=True):
            for launch, tensors in launches(APPEND, H200):
                with first_calls.only_naming() as named:
                    launch.compile_ahead(tensors)
        assert [kernel_store.find(*source) is not None for source in named.values()] == [True]
    finally:
        get_ptxas_version.cache_clear()


def test_a_failure_is_told(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="compiling ahead has ended with code 1"):
        compile_in_process(functools.partial(torch.device, "nowhere"), H200)
    assert "nowhere" in capfd.readouterr().err


SLOW_TO_END = """
import os, runpy, time
end = os._exit
os._exit = lambda code: end(code) if code else (time.sleep(1), end(code))
runpy.run_module("flashtile.compilation.ahead", run_name="__main__")
"""


def test_the_answer_ends_only_with_the_process(tmp_path):
    """A program ends stdin when it has the answer. That must not be taken for the program's end."""
    task = pickle.dumps((functools.partial(list, []), H200, 1))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SLOW_TO_END]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        process.stdin.write(len(task).to_bytes(8, "little") + task)
        process.stdin.flush()
        assert pickle.loads(process.stdout.read()) == Compiled(0, ())
        process.stdin.close()
        assert process.wait(60) == 0


PROGRAM = """
import functools, time
from flashtile.backends.common.device import Target
from flashtile.compilation.ahead import compile_in_process
compile_in_process(functools.partial(time.sleep, 600), Target("H200", (9, 0), 132))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
def test_a_program_that_is_killed_leaves_no_process(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    deadline = time.monotonic() + 120
    while not (pids := children.read_text().split()):
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    program.kill()
    program.wait(60)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
