"""Every script under ``benchmarks/`` starts on the CPU, and finds what it names of the package."""

from __future__ import annotations

import ast
import functools
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flashtile
import script_runner
from benchmarks import host_backward, host_work, parallel, two_trees
from walk import walk

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("__"))


@walk("script", SCRIPTS)
def test_it_starts(monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    written = capsys.readouterr()
    assert not stopped.value.code, written.err
    assert "usage" in written.out.lower()


@walk("script", SCRIPTS)
def test_what_it_names_of_the_package_is_there(script):
    """Functions that are called only on several GPUs name modules as well."""
    names = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Attribute)
    }
    for name in names:
        first, *rest = name.split(".")
        if first == "flashtile":
            functools.reduce(getattr, rest, flashtile)


def test_the_hosts_work_is_measured_without_launches(monkeypatch):
    """Metadata of vLLM's plug-in by its stand-ins, and an engine whose model and draws are stubbed."""
    pytest.importorskip("triton")
    monkeypatch.setattr(host_work, "BATCHES", 1)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [*host_work.builder_rows(), *host_work.launch_rows()]
    assert len(rows) == 3 + 4 * 3
    assert all(row["us"] > 0 for row in rows)
    assert sum("us a fork" in row for row in rows) == 3 * 3


SMALL = {
    "batch": 1, "seqlen_q": 24, "seqlen_k": 40, "lengths": [5, 19], "page": 16, "tokens": 2,
}  # fmt: skip
OF_MASKS = {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads": (2, 2)}


def different_cells():
    """Small cells of two_trees, one of those that pass the same arguments."""
    makers = [value for name, value in vars(two_trees).items() if name.endswith("_cells")]
    kinds = {}
    for cell in (cell for make in makers for cell in make()):
        small = OF_MASKS if "mod" in cell else SMALL
        cell = cell | {name: small[name] for name in small if name in cell}
        if "cached" in cell:
            cell["cached"] = [33, 5] if len(set(cell["cached"])) > 1 else [32]
        flags = tuple(
            (name, bool(cell.get(name))) for name in ("window", "softcap", "alibi", "sink", "chunk")
        )
        kind = cell["name"] if cell["set"] == "host" else cell.get("mod", str(cell.get("cached")))
        kinds[cell["set"], cell["which"], kind, flags] = cell
    return kinds.values()


@walk("cell", different_cells())
def test_the_library_takes_the_calls_of_two_trees(monkeypatch, cell):
    monkeypatch.setattr(two_trees, "DEVICE", "cpu")
    if cell["which"] == "host":
        two_trees.host_call(cell["name"])()
    else:
        call, results = (two_trees.decode_call if cell["set"] == "decode" else two_trees.attention_call)(cell)
        call()
        assert two_trees.same(*[[[t.double().norm(), t.double().sum()] for t in results()]] * 2)


class TimedTree:
    """A tree of two_trees with given answers. All trees write into ``log`` which of them is timed."""

    def __init__(self, name, results, time, log):
        self.name, self.results, self.time, self.log = name, results, time, log

    def ask(self, question):
        self.question = question

    def answer(self):
        if self.question != "time":
            return self.results
        self.log.append(self.name)
        return self.time


def test_trees_are_timed_in_turns_against_the_first():
    log, results = [], [[3.0, 1.0]]
    trees = [
        TimedTree("old", results, 2.0, log),
        TimedTree("fast", results, 1.0, log),
        TimedTree("other bits", [[3.0, 1.001]], 2.0, log),
        TimedTree("wrong", [[4.0, 1.0]], 1.0, log),
        TimedTree("broken", {"error": "ValueError: no"}, 1.0, log),
    ]
    cell = {"set": "grid", "name": "d64", "which": "forward"}
    fast, other, wrong, broken = two_trees.measure(trees, cell)
    assert (fast["ratio"], fast["identical"]) == (2.0, True)
    assert (other["ratio"], other["identical"]) == (1.0, False)
    assert wrong["error"].startswith("results differ")
    assert broken["error"] == "ValueError: no"
    assert log[:6] == ["old", "fast", "other bits", "other bits", "fast", "old"]
    assert len(log) == 3 * two_trees.MAX_TURNS  # more turns, as one ratio is not near 1


def test_a_tree_runs_its_changes_first(tmp_path, monkeypatch, capsys):
    changes = tmp_path / "changes.py"
    changes.write_text("from benchmarks import two_trees\ntwo_trees.host_call = two_trees.changed\n")
    monkeypatch.setattr(two_trees, "changed", lambda name: lambda: print("called", name), raising=False)
    monkeypatch.setattr(two_trees, "host_call", two_trees.host_call)
    monkeypatch.setattr("sys.stdin", [json.dumps({"set": "host", "name": "forward", "which": "host"})])
    monkeypatch.setattr("sys.stderr", sys.stdout)
    two_trees.work(str(changes), warm=False)
    assert capsys.readouterr().out == "called forward\n[]\n"


def test_shared_prompts_have_the_states_of_separate_rows(tmp_path):
    pytest.importorskip("transformers")
    run = script_runner.runner(script_runner.load("benchmarks/shared_prompts.py"))
    small = ("--hidden", "32", "--heads", "4", "--kv-heads", "2", "--prompt-tokens", "24", "--rounds", "1")
    result = run(
        "--device", "cpu", *small, "--answer-tokens", "4", "--rep", "1", "--json", tmp_path / "run.json"
    )
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "run.json").read_text())["results"]
    assert {name: of["tokens"] for name, of in results.items()} == {
        "separate": 8 * 27, "separate, sdpa": 8 * 27, "shared": 23 + 8 * 4,
    }  # fmt: skip
    assert results["shared"]["difference"] < 64 * torch.finfo(torch.float32).eps
    result = run("--device", "cpu")
    assert result.exit_code == 2
    assert "--hidden must be less than 2048 on a CPU, got 4096" in " ".join(result.output.split())


def test_gradients_of_the_host_time_are_those_of_standard_attention():
    rows = host_backward.measured("1x16x2x8", [1, 16, 2, 8], 1, 1, torch.device("cpu"))
    timed = {row["name"]: row for row in rows if "error" not in row}
    assert timed.keys() >= {"flashtile", "sdpa", host_backward.EMPTY}
    assert all(row["us"] > 0 for row in timed.values())
    assert timed["flashtile"]["difference"] < host_backward.ALLOWED


def test_the_library_takes_the_calls_of_parallel():
    """On one rank. Memory that ranks share is on GPUs only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        here = torch.device("cpu")
        rows = [row for window in (-1, 16) for row in parallel.measured(64, window, 1, 1, False, here)]
        rows += parallel.decoding(64, 1, here)
    finally:
        dist.destroy_process_group()
    assert {row["name"] for row in rows} >= {"one GPU", "ring", "ulysses", "allgather", "reduce_scatter"}
    assert {row["name"]: row["error"] for row in rows if "error" in row}.keys() <= {"symmetric"}
