"""``benchmarks.beside_vllm``: what it writes, when, and how it compares greedy answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import beside_vllm
from benchmarks.suite.model_bench import SMALL_MODEL

ROOT = Path(__file__).parents[2]


def answer(tokens, near=()):
    return {"tokens": tokens, "near": [dict(near)] * len(tokens)}


def test_a_whole_run(tmp_path):
    file = tmp_path / "found.json"
    both = "flashtile,flashtile+invariant"
    given = ["--model", SMALL_MODEL, "--contestants", both, "--workloads", "2x2x24", "--new", "3"]
    command = [sys.executable, "-m", "benchmarks.beside_vllm", *given, "--seqs", "8", "--json", str(file)]
    command += ["--rounds", "1", "--written"]
    written = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert written.returncode == 0, written.stderr
    assert "equal answers" in written.stdout
    results = json.loads(file.read_text())["results"]
    assert results.keys() == {"flashtile", "flashtile+invariant"}
    for found in results.values():
        assert len(found["rounds"]["2x2x24"]) == 1
        assert found["first_round"]["2x2x24"] > 0
        assert found["equal_answers"] == {"alone": 1.0, "shared": 1.0}
        assert found["blind_answers"] < 0.5
        assert found["parted"] == {"alone": [], "shared": []}
        assert {len(one["tokens"]) for one in found["greedy"]["shared"]} == {32}
        assert "failed" not in found


def test_what_is_measured_is_kept_when_a_run_is_cut_off(tmp_path, monkeypatch):
    """Each round is in the file when the next one begins, also those of another engine before."""
    file = tmp_path / "found.json"
    command = ["beside_vllm", "--engine", "flashtile", "--workloads", "steps8,requests2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", [*command, "--model", SMALL_MODEL])
    monkeypatch.setattr(beside_vllm, "flashtile_engine", lambda *given: None)
    monkeypatch.setattr(beside_vllm, "greedy_answers", lambda *given: {"alone": [answer([1, 2])]})
    rates = iter([1.0, 2.0, 3.0, 4.0, KeyboardInterrupt()])

    def rate(*given):
        measured = next(rates)
        if isinstance(measured, BaseException):
            raise measured
        return measured

    monkeypatch.setattr(beside_vllm, "rate", rate)
    other = {"greedy": {"alone": [answer([1, 3])]}, "first_round": {}, "rounds": {"steps8": [5.0]}}
    file.write_text(json.dumps({"results": {"flashtile+invariant": other}}))
    with pytest.raises(KeyboardInterrupt):
        beside_vllm.main()
    results = json.loads(file.read_text())["results"]
    assert results["flashtile+invariant"]["rounds"] == {"steps8": [5.0]}
    assert results["flashtile"]["first_round"] == {"steps8": 1.0, "requests2": 4.0}
    assert results["flashtile"]["rounds"] == {"steps8": [2.0, 3.0]}
    assert results["flashtile"]["equal_answers"] == {"alone": 0.0}


def test_answers_part_at_ties_or_not():
    """The difference is that of the contestant at the first other token; None if there is no tie.

    flashtile's engine has other random weights than vLLM's, so their answers are not compared.
    """
    near = {"8": 0.01}
    results = {
        "one": {"greedy": {"alone": [answer([1, 8]), answer([4, 5]), answer([6, 7])]}},
        "two": {"greedy": {"alone": [answer([1, 2], near), answer([4, 5]), answer([7, 7], near)]}},
        "flashtile": {"greedy": {"alone": [answer([9, 9])] * 3}},
        "failed": {"greedy": {}},
    }
    beside_vllm.compare({"results": results})
    assert results["one"]["equal_answers"] == {"alone": 1.0}
    assert results["two"]["equal_answers"] == {"alone": pytest.approx(1 / 3)}
    assert results["two"]["parted"] == {"alone": [(1, 0.01), (0, None)]}
    assert results["flashtile"]["equal_answers"] == {"alone": 1.0}
    assert results["failed"]["parted"] == {}
    beside_vllm.compare({"results": results, "written": True})
    assert results["flashtile"]["equal_answers"] == {"alone": 0.0}  # all have the weights of "one"


def test_answers_that_follow_from_the_last_token_are_noted():
    """Equal ones then say nothing about attention to the tokens before."""
    greedy = {"alone": [answer([1, 2]), answer([3, 4])], "shared": [answer([1, 2]), answer([3, 5])]}
    results = {"one": {"greedy": greedy}, "failed": {"greedy": {}}}
    beside_vllm.compare({"results": results})
    assert (results["one"]["blind_answers"], results["failed"]["blind_answers"]) == (0.5, 0)


def test_an_engine_that_fails_is_noted(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["beside_vllm", "--contestants", "flashtile", "--json", str(file)])
    failed = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(beside_vllm.subprocess, "run", lambda *given, **named: failed)
    monkeypatch.setattr(beside_vllm, "new_document", lambda options: {"results": {}})
    beside_vllm.main()
    (found,) = json.loads(file.read_text())["results"].values()
    assert found["failed"] == "exit code 3"
