"""examples/shared_prompts.py, run as a user runs it."""

import re

import pytest

import script_runner

pytest.importorskip("transformers")


def test_both_ways_have_the_same_losses_and_shared_prompts_take_fewer_tokens():
    run = script_runner.runner(script_runner.load("examples/shared_prompts.py"))
    result = run(
        "--device", "cpu", "--steps", "3", "--answers", "3", "--prompt-tokens", "40", "--answer-tokens", "8"
    )
    assert result.exit_code == 0, result.output
    differences = [float(found) for found in re.findall(r"difference (\S+)", result.output)]
    assert len(differences) == 3
    assert max(differences) < 1e-5
    tokens, memory = (
        {
            way: float(number)
            for way, number in re.findall(rf"(shared|separate): .*?(\S+) {unit}", result.output)
        }
        for unit in ("tokens", "MiB")
    )
    assert tokens["shared"] < tokens["separate"] / 2
    assert memory["shared"] < memory["separate"]
