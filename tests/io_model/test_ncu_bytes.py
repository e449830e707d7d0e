"""benchmarks/ncu_bytes.py: which launches it expects of ncu, and how it reads what ncu writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import script_runner
from flashtile.backends.portable.config import row
from flashtile.io_model import find_card

pytest.importorskip("triton")
compare = script_runner.load("scripts/docs/counters.py").compare
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ncu_bytes.py"


@pytest.fixture
def script(monkeypatch):
    """The script with an ncu that counts 1000, 1001, ... on the launches that it is asked for."""
    spec = importlib.util.spec_from_file_location("ncu_bytes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ncu_bytes", module)
    spec.loader.exec_module(module)
    module.surplus = 0

    def ncu(command, **_):
        wanted = [case for case in module.CASES if case.name in command]
        launches = [name for case in wanted for name in module.launches_of(case)]
        metrics = command[command.index("--metrics") + 1].split(",")
        lines = ["==PROF== Connected to process 1", '==PROF== Profiling "k": 0%....100% - 1 pass']
        lines.append(",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics)))
        lines.append(",".join('""' for _ in range(len(metrics) + 2)))
        for index, name in enumerate(launches[: len(launches) - module.surplus]):
            lines.append(",".join([f'"{index}"', f'"{name}"', *[f'"{1000 + index:,}"'] * len(metrics)]))
        Path(command[command.index("--log-file") + 1]).write_text("\n".join([*lines, "==PROF== done"]))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    def choose(problem):
        return row("hopper", problem.dtype.itemsize, problem.head_dim, problem.window_right != -1)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=ncu))
    monkeypatch.setattr(module, "choose", choose)
    return module


def test_each_kernel_gets_its_own_counters(script):
    cases = tuple(case for case in script.CASES if case.name in ("forward-d64-s512", "backward-d64-s4096"))
    found = script.measure(cases)
    assert found["dram_passes"] == 1
    rows = found["kernels"]
    assert [item["kernel"] for item in rows] == ["forward", "preprocess", "dkdv", "dq"]
    # Each stands between two passes over the buffer.
    assert [item["dram_read"] for item in rows] == [1001, 1004, 1007, 1010]
    assert [item["dram_written_after"] for item in rows] == [1002, 1005, 1008, 1011]
    comparisons = list(compare(found, find_card("h100")))
    assert [item.name for item in comparisons][-1] == "backward-d64-s4096 dq"
    assert all(item.ratio > 1 for item in comparisons)
    assert comparisons[0].l2_read == comparisons[0].l2_written == 1001 * 32


def test_other_launches_than_expected(script):
    script.surplus = 1
    with pytest.raises(RuntimeError, match="saw 2 launches of 3"):
        script.measure(script.CASES[:1])


def test_cases_are_unique_and_calls_are_valid(script):
    assert len({case.name for case in script.CASES}) == len(script.CASES)
    for case in script.CASES:
        problem, (q, k, _, _) = script.prepared(case, "meta")
        assert (problem.seqlen_q, problem.seqlen_k) == (case.seqlen_q, case.seqlen_k)
        assert (q.shape[2], k.shape[2]) == (case.num_heads_q, case.num_heads_kv)
        assert problem.window_right == (0 if case.causal else -1)
