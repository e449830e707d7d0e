"""examples/train_pictures.py, run as a user runs it."""

import re
import sys

import pytest

import script_runner

TINY = ("--tokens", "96", "--longest", "50", "--picture", "12", "--window", "20", "--hidden", "16")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Train on the CPU as the only rank, also where torchrun or a GPU is at hand."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="module")
def run():
    return script_runner.runner(script_runner.load("examples/train_pictures.py"))


def losses_of(output: str) -> list[float]:
    """The loss of each step, which the script numbers from 0."""
    found = re.findall(r"step (\d+): loss (\d+\.\d+), \d+\.\d ms, \d+ tokens/s", output)
    assert [int(step) for step, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


def test_one_rank_trains_with_the_losses_and_gradients_of_a_single_device(run):
    result = run(*TINY, "--steps", "3")
    assert result.exit_code == 0, result.output
    ((of_loss, of_gradients),) = re.findall(r"loss (\S+), gradients (\S+) \(relative\)", result.output)
    assert float(of_loss) < 1e-5
    assert float(of_gradients) < 1e-4
    losses = losses_of(result.output)
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.parametrize(("steps", "counted"), [(4, 3), (1, 1)])
def test_the_time_of_a_step_is_that_of_the_steps_after_the_first(run, monkeypatch, steps, counted):
    script = sys.modules["examples_train_pictures"]
    seconds = iter([9.0, 0.002, 0.004, 0.003])
    monkeypatch.setattr(script, "timed_step", lambda *_: (1.0, next(seconds)))
    result = run(*TINY, "--steps", steps, "--no-comparison")
    assert result.exit_code == 0, result.output
    usual = {3: "3.0 ms, 32000 tokens/s", 1: "9000.0 ms, 11 tokens/s"}[counted]
    assert f"processes: 1; median of {counted} steps: {usual}" in result.output


def test_the_comparison_may_be_left_out(run):
    result = run(*TINY, "--steps", "1", "--no-comparison")
    assert result.exit_code == 0, result.output
    assert "differences" not in result.output
    assert len(losses_of(result.output)) == 1
