"""examples/rollouts.py, run as a user runs it."""

import re

import pytest

import script_runner

pytest.importorskip("transformers")


def test_the_engine_the_trainer_and_the_scores_agree():
    run = script_runner.runner(script_runner.load("examples/rollouts.py"))
    result = run("--device", "cpu", "--steps", "2", "--prompts", "2", "--answers", "3", "--length", "6")
    assert result.exit_code == 0, result.output
    assert "36 log-probabilities; other bits in LLM.score: 0" in result.output
    assert re.search(r"step 1: reward 0\.\d+, sampled \d+ tokens/s, trained \d+ tokens/s", result.output)
