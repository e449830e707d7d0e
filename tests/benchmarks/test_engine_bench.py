"""``python -m benchmarks -w engine``: what it refuses, and a measurement on the CPU beside Transformers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.suite import engine_bench
from benchmarks.suite.command import application
from benchmarks.suite.engine_bench import EngineWorkload
from walk import walk


@walk(
    ("arguments", "text"),
    [
        (["-w", "engine-else"], "workload must be engine or one of"),
        (["-w", "engine"], "must be a GPU for engine-llama-2-7b-b1-ctx1024, got cpu, where engine-ci runs"),
        (["-w", "engine-ci", "--dtype", "float16"], "engine workloads take --peers"),
        (["-w", "engine-ci", "--peers", "vllm"], "peer must be none or one of flashtile"),
        (["-w", "engine-ci", "--peers", "transformers-compile"], "needs a CUDA device"),
    ],
)
def test_bad_options_are_refused(arguments, text):
    result = CliRunner().invoke(application(), ["--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("\u2502", " ").split())


def test_engines_are_measured_and_compared(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "found.json"
    arguments = ["-w", "engine-ci", "--device", "cpu", "--rounds", "1", "--rep", "1", "--json", str(path)]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    step, requests = json.loads(path.read_text())["cells"]
    assert {name: one["status"] for name, one in step["results"].items()} == {
        "flashtile": "ok", "transformers": "ok"
    }  # fmt: skip
    assert list(requests["results"]) == ["flashtile"]
    assert requests["results"]["flashtile"]["tokens_per_second"] > 0


def test_other_tokens_than_those_of_transformers_are_wrong():
    names = ("flashtile", "transformers")
    results = {name: {"status": "ok", "tokens": [[1, i]]} for i, name in enumerate(names)}
    engine_bench.compare(results)
    assert results["flashtile"]["status"] == "wrong"
    assert results["transformers"] == {"status": "ok"}


def test_bytes_of_a_step():
    """Llama-2-7B reads 13.21 GB of weights, and 512 KiB of keys and values for each token."""
    for model, batch, expected in (("llama-2-7b", 1, 13.21e9 + 2**29), ("llama-3-8b", 64, 15.01e9 + 2**33)):
        assert engine_bench.floor_bytes(EngineWorkload(model, batch)) == pytest.approx(expected, rel=1e-3)
