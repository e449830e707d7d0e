"""``flashtile demo`` and its training on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from flashtile.tools.commands.demo import demo
from flashtile.tools.demo import scaling
from flashtile.tools.demo.corpus import python_library
from flashtile.tools.demo.training import agreement, default_config, generate, train

pytestmark = pytest.mark.gpu


def test_memory_on_a_gpu_tells_score_matrices_from_tiles():
    workload = scaling.ScalingWorkload("cuda", "bfloat16", 1, 8, 64, (2048,), 0.05)
    (row,) = scaling.measure(workload)
    assert row.standard is not None
    assert row.standard.peak_bytes is not None
    assert row.flashtile.peak_bytes is not None
    assert row.standard.peak_bytes >= workload.score_bytes(2048)
    assert row.flashtile.peak_bytes < workload.score_bytes(2048) / 4


def test_what_does_not_fit_in_a_gpu_is_not_run():
    workload = scaling.ScalingWorkload("cuda", "bfloat16", 1, 64, 64, (), 0.05)
    assert scaling.memory_obstacle(workload, 1024) is None
    assert "of the GPU's free memory" in str(scaling.memory_obstacle(workload, 2**20))


@pytest.mark.parametrize("compiled", [False, True])
def test_default_training_on_a_gpu_agrees_with_standard_attention(compiled):
    corpus = python_library()
    config = replace(default_config(torch.device("cuda")), steps=200, stop=40, batch=4, compile=compiled)
    model, result = train(config, corpus)
    _, twin = train(replace(config, attention="standard"), corpus)
    agreed = agreement(result.losses, twin.losses, config.dtype)
    assert agreed.holds, agreed
    assert result.losses[-1] < result.losses[0]
    assert len(generate(model, b"def ", 30, config)) == 34


def test_command_on_a_gpu(tmp_path):
    app = typer.Typer()
    app.command()(demo)
    options = ["--quick", "--seconds", "2", "--device", "cuda", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "results.json").read_text())
    served = {entry["backend"] for entry in record["setting"]["served"]}
    assert served <= {"hopper", "portable"}
