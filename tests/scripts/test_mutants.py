"""Faults can be drawn everywhere, and lines that run are recorded; ``make mutants`` plants the faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from mutation.areas import AREAS, NOT_PLANTED, area_of, files_of, unmatched  # noqa: E402
from mutation.cover import FOLLOWED, Lines, Map, masked  # noqa: E402
from mutation.draw import KINDS, Source, drawn  # noqa: E402
from mutation.run import MAX_SECONDS, in_turn  # noqa: E402

from walk import walk  # noqa: E402

AREA_NAMES = [area.name for area in AREAS]


def faults(text: str, file: str = "flashtile/example.py") -> set[tuple[str, str]]:
    return {(mutant.line, mutant.fault) for mutant in Source(file, text).mutants()}


@walk("area", AREAS)
def test_an_area_has_files_tests_and_enough_faults_of_every_kind(area):
    kinds: Counter[str] = Counter()
    for file in files_of(area.name):
        kinds.update(mutant.kind for mutant in Source(file, (ROOT / file).read_text("utf-8")).mutants())
        if min(kinds[kind] for kind in KINDS) >= 20:
            break
    else:
        pytest.fail(f"too few in {area.name}: {kinds}")


def test_every_pattern_of_an_area_matches_a_file():
    assert unmatched() == []


def test_a_seed_draws_the_same_faults_and_another_one_others():
    first, again, other = (drawn("cache", 20, seed) for seed in (0, 0, 1))
    assert first == again
    assert sum(not mutant.reason for mutant in first) == 20
    assert {mutant.key for mutant in first} != {mutant.key for mutant in other}
    assert {mutant.kind for mutant in first} == set(KINDS)


def test_the_lines_that_a_fault_waits_for():
    loop = "    while x:\n        if y:\n            break\n"
    text = f"LIMIT = 1\n\n\ndef f(x, y=1):\n{loop}    return g(\n        x + 1\n    )\n"
    found = {(m.line, m.fault): (m.first, m.last, m.in_function) for m in Source("a.py", text).mutants()}
    assert found["LIMIT = 1", "LIMIT = 2"] == (1, 1, False)
    assert found["def f(x, y=1):", "def f(x, y=2):"] == (4, 10, True)  # a default: those of the body
    assert found["break", "pass"] == (6, 6, True)  # Python may leave its own line out
    assert found["x + 1", "x - 1"] == (8, 10, True)


def test_a_draw_survives_lines_that_move():
    text = (ROOT / "flashtile/api/merge.py").read_text("utf-8")
    path = "flashtile/api/merge.py"
    before, after = Source(path, text), Source(path, f"x = y\n\n{text}")
    assert [m.key for m in before.mutants()] == [m.key for m in after.mutants()]
    assert [m.rank(0) for m in before.mutants()] == [m.rank(0) for m in after.mutants()]


def test_what_a_fault_may_be():
    text = "def f(a, b, n):\n    if a < b and n:\n        a = a.clamp(0)\n    return g(a[1:n], -b), b\n"
    assert faults(text) == {
        ("if a < b and n:", "if a <= b and n:"),
        ("if a < b and n:", "if a < b or n:"),
        ("if a < b and n:", "if True and n:"),
        ("if a < b and n:", "if True:"),
        ("if a < b and n:", "if False:"),
        ("a = a.clamp(0)", "pass"),
        ("a = a.clamp(0)", "a = a"),
        ("a = a.clamp(0)", "a = a.clamp(1)"),
        ("return g(a[1:n], -b), b", "return g(a[2:n], -b), b"),
        ("return g(a[1:n], -b), b", "return g(a[(1) + 1:n], -b), b"),
        ("return g(a[1:n], -b), b", "return g(a[1:n + 1], -b), b"),
        ("return g(a[1:n], -b), b", "return g(a[1:n], (b)), b"),
        ("return g(a[1:n], -b), b", "return g(-b, a[1:n]), b"),
        ("return g(a[1:n], -b), b", "return b, g(a[1:n], -b)"),
    }


@walk(
    "text",
    [
        'def f():\n    """1 < 2"""\n',
        "def f(x: g(1, 2)) -> g(1, 2):\n    ...\n",
        '@cache(1, 2)\ndef f(x):\n    raise ValueError(f"{x + 1}, not {g(1, 2)}")\n',
        "def f(x):\n    assert x > 1, g(x, 2)\n",
        "def f(x):\n    logger.warning(x + 1, 2)\n",
        "def f(x):\n    return kernel(x, num_warps=8, maxnreg=24)\n",
        "def f(x):\n    return gl.warp_specialize(x, [4, 1], [240, 24])\n",
        "if TYPE_CHECKING:\n    x = 1\n",
        "def f(x):\n    torch.cuda.synchronize(x, 1)\n",
        "def __repr__(self):\n    return self.x + 1\n",
        'x = "a" + "b"\n',
    ],
)
def test_where_no_fault_is_planted(text):
    assert faults(text) == set()


def test_faults_without_a_result_are_still_there():
    """An entry whose line is gone says nothing; each has a reason."""
    of_file: dict[str, set[tuple[str, str]]] = {}
    for entry in NOT_PLANTED["faults"]:
        file = entry["file"]
        assert area_of(file)
        if file not in of_file:
            of_file[file] = faults((ROOT / file).read_text("utf-8"), file)
        assert (entry["line"], entry["fault"]) in of_file[file], entry
    for entry in (*NOT_PLANTED["faults"], *NOT_PLANTED["code"]):
        assert entry["reason"]


def test_code_without_a_result_gets_no_fault():
    files = [file for area in AREAS for file in files_of(area.name)]
    for entry in NOT_PLANTED["code"]:
        assert any(fnmatchcase(file, entry["file"]) for file in files), entry


RECORDED = """
import sys, threading
sys.path[:0] = [{root!r}, {scripts!r}]
from mutation.cover import Lines
lines = Lines({root!r})
lines.start()
from flashtile import code
lines.reset()
code.f(0)
first = lines.seen()
lines.reset()
thread = threading.Thread(target=code.f, args=(1,))
thread.start()
thread.join()
print(first, lines.seen())
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "flashtile").mkdir()
    (tmp_path / "flashtile" / "__init__.py").write_text("")
    (tmp_path / "flashtile" / "code.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    return tmp_path


def test_lines_are_recorded_by_test_and_in_threads(package):
    script = RECORDED.format(root=str(package), scripts=str(ROOT / "scripts"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'flashtile/code.py': [2, 4]} {'flashtile/code.py': [2, 3]}"


def test_lines_that_dynamo_looks_at_are_recorded(package, monkeypatch):
    translator = pytest.importorskip("torch._dynamo.symbolic_convert").InstructionTranslatorBase
    monkeypatch.setattr(translator, "starts_line", translator.starts_line)  # put back afterwards
    lines = Lines(str(package))
    lines.follow_dynamo()
    names: dict[str, Any] = {}
    path = package / "flashtile" / "code.py"
    exec(compile(path.read_text(), str(path), "exec"), names)
    torch.compile(names["f"], backend="eager")(0)
    assert {2, 4} <= set(lines.seen()["flashtile/code.py"]) <= {1, 2, 4}  # 1: its head


def test_lines_are_recorded_in_child_processes_however_they_end(package):
    found = package / "found"
    environment = os.environ | {
        FOLLOWED: f"{package}{os.pathsep}{found}",
        "PYTHONPATH": f"{package}{os.pathsep}{ROOT / 'scripts/mutation/in_children'}",
    }
    script = "import os; from flashtile import code; code.f(1); os._exit(0)"
    subprocess.run([sys.executable, "-c", script], cwd=package, env=environment, check=True)
    lines = {tuple(row.split("\t")) for row in found.read_text().splitlines()}
    assert lines >= {("flashtile/code.py", "2"), ("flashtile/code.py", "3")}
    assert ("flashtile/code.py", "4") not in lines


def test_slow_tests_leave_time_for_all_cases_of_quick_ones():
    """A check of arguments may be tested by the last of a thousand cases."""
    quick = [("plain", f"a.py::quick[{case}]", 1 / 128) for case in range(1000)]  # a sum without rounding
    slow = [("plain", f"b.py::slow_{n}[{case}]", 10.0) for n in range(5) for case in range(5)]
    met = [test for _, tests in in_turn(slow + quick) for test in tests]
    assert {name for name, _ in met} >= {name for _, name, _ in (*quick, *slow[::5])}
    assert MAX_SECONDS - 10 < sum(seconds for _, seconds in met) <= MAX_SECONDS


def test_a_fault_meets_the_tests_of_its_line_quick_ones_first():
    covered = Map()
    recorded = {
        "tests": {
            "a.py::slow": {"seconds": 9.0, "lines": {"f.py": masked([3, 4])}},
            "a.py::quick[1]": {"seconds": 0.1, "lines": {"f.py": masked([4])}},
            "a.py::quick[2]": {"seconds": 0.2, "lines": {"f.py": masked([4, 5])}},
            "b.py::other": {"seconds": 0.3, "lines": {"f.py": masked([9])}},
            "b.py::elsewhere": {"seconds": 0.3, "lines": {"g.py": masked([9])}},
        },
        "imports": {"f.py": masked([5, 12])},
        "children": {"ranks.py": masked([7])},
    }
    covered.add("plain", recorded)
    tests = list(covered.covering("f.py", 4, 4))
    assert in_turn(tests) == [
        ("plain", [("a.py::quick[1]", 0.1), ("a.py::quick[2]", 0.2)]),
        ("plain", [("a.py::slow", 9.0)]),
    ]
    assert list(covered.covering("f.py", 6, 8)) == []
    assert len(list(covered.covering("f.py", 6, 8, anywhere=True))) == 4
    assert len(list(covered.covering("f.py", 12, 12))) == 4  # a line that runs at import alone
    assert len(list(covered.covering("f.py", 5, 5))) == 1
    assert len(list(covered.covering("ranks.py", 7, 7))) == 5  # lines of a child
