"""examples/train_gpt.py, run as a user runs it."""

from __future__ import annotations

import json

import pytest

import script_runner

SMALL = ("--device", "cpu", "--layers", "1", "--heads", "2", "--embed", "32", "--batch", "2")
SMALL += ("--seqlen", "64", "--steps", "12", "--sample", "20")


@pytest.fixture(scope="module")
def run():
    return script_runner.runner(script_runner.load("examples/train_gpt.py"))


def test_training_prints_its_numbers_and_writes_them(run, tmp_path):
    result = run(*SMALL, "--json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    for part in ("tokens/s", "validation loss", "bits a byte", "step     12"):
        assert part in result.output
    record = json.loads((tmp_path / "run.json").read_text())
    assert len(record["losses"]) == 12
    assert record["losses"][-1] < record["losses"][0]
    assert {"layers": 1, "heads": 2, "embed": 32}.items() <= record["config"]["model"].items()
    assert record["sample"].startswith("class Reader:\n    def __init__(self")


def test_attentions_train_alike(run, tmp_path):
    losses = {}
    for attention in ("flashtile", "standard", "sdpa"):
        file = tmp_path / f"{attention}.json"
        result = run(*SMALL, "--attention", attention, "--sample", "0", "--json", file)
        assert result.exit_code == 0, result.output
        losses[attention] = json.loads(file.read_text())["losses"]
    assert losses["flashtile"] == pytest.approx(losses["standard"], abs=5e-3)
    assert losses["sdpa"] == pytest.approx(losses["standard"], abs=5e-3)


def test_it_reads_another_folder(run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 'some text to learn from'\n" * 100)
    result = run(*SMALL, "--text", tmp_path)
    assert result.exit_code == 0, result.output
    assert "2 files" in result.output


@pytest.mark.parametrize(
    "wrong",
    [("--size", "huge"), ("--attention", "fast"), ("--dtype", "int4"), ("--device", "abacus")],
)
def test_wrong_options_are_refused_before_anything_runs(run, wrong):
    result = run(*SMALL, *wrong)
    assert result.exit_code == 2
    assert wrong[1] in result.output
