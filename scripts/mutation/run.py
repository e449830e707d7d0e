"""Tests of a copy of the checkout, recorded as it is or run with a fault, in processes with torch loaded."""

from __future__ import annotations

import compileall
import json
import multiprocessing
import os
import py_compile
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mutation.areas import ROOT
from mutation.cover import Map, Recorder
from mutation.draw import Mutant

MODES = {
    "plain": "not gpu and not interpreter and not exhaustive and not slow",
    "interpreted": "interpreter and not slow",
}
"""Tests that run in one process, by their markers. The second is Triton's interpreter's."""
PASSED, FAILED, EMPTY, STOPPED = 0, 1, 5, (2, 4)
"""Exit codes of pytest; the last are for files that cannot be imported."""
RAN = 100
"""Is added to them, lest a process that never came to pytest passes for a test that failed."""
PROCESSES = multiprocessing.get_context("forkserver")
FRESH = multiprocessing.get_context("spawn")
"""For interpreted tests: what the fork server has imported includes a Triton that compiles."""
LEFT_OUT = ("__pycache__", "*.pyc", "*.egg-info", "build", "dist")
FIRST_SECONDS, FIRST_FILES = 2.0, 3
"""Most faults are noticed by a few quick tests: those come first, without the time to import the others."""
MAX_SECONDS = 120.0
"""Most seconds of tests for one fault, by their recorded time."""
MAX_BYTES = 24 * 2**30
"""Address space of a process, because a fault may allocate all memory."""


class Checkout:
    """A copy in which faults are planted."""

    def __init__(self, folder: Path, original: Checkout | None = None) -> None:
        self.root = folder
        if original is not None:
            shutil.copytree(original.root, folder)
            return
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", *LEFT_OUT))
        # By default Python tells versions of a file apart by their seconds: too coarse for faults.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "flashtile", quiet=2, invalidation_mode=by_content)

    def record(self, mode: str, file: str, patience: float) -> dict[str, Any]:
        """Return the lines that the tests of a file run."""
        answer = self.root / ".answer"
        code = _in_process(patience, _record, self.root, mode, file, answer)
        if code not in (PASSED, FAILED, EMPTY):
            output = (self.root / ".output").read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"without a fault, pytest ends with {code}: {file}, {mode}\n{output}")
        return json.loads(answer.read_text("utf-8"))

    def run(self, mode: str, tests: Sequence[tuple[str, float]]) -> str:
        """The first of the tests that fails; nothing if all pass. Each comes with its seconds."""
        answer = self.root / ".answer"
        answer.unlink(missing_ok=True)
        patience = 30 + 4 * sum(seconds for _, seconds in tests)
        code = _in_process(patience, _run, self.root, mode, [name for name, _ in tests], answer)
        if code is None:
            return "time"
        if code == FAILED and answer.exists():
            return answer.read_text("utf-8")
        if code in (FAILED, *STOPPED):
            return "import"
        if code in (PASSED, EMPTY):
            return ""
        return str(code)


def _in_process(patience: float, act: Callable[..., None], *arguments: Any) -> int | str | None:
    """Exit code of pytest, or what ended the process before it had one; None if it took over ``patience``
    seconds of the CPU, or many more in all."""
    processes: Any = FRESH if "interpreted" in arguments else PROCESSES
    process = processes.Process(target=_begin, args=(patience, act, arguments))
    process.start()
    process.join(10 * patience)
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its children, and itself if it hangs
    process.join()
    code = process.exitcode
    assert code is not None
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return None
    return code - RAN if code >= RAN else f"end of the process ({code})"


def _begin(patience: float, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # that its children can be ended with it
    resource.setrlimit(resource.RLIMIT_CPU, (int(patience), int(patience) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    act(*arguments)


def _prepare(root: Path, mode: str, *more: str) -> None:
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join((str(root), *more))
    os.environ["TRITON_INTERPRET"] = "1" if mode == "interpreted" else "0"
    sink = os.open(root / ".output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


def _record(root: Path, mode: str, file: str, answer: Path) -> None:
    import pytest

    _prepare(root, mode, str(Path(__file__).with_name("in_children")))
    children = root / ".lines"
    children.unlink(missing_ok=True)
    recorder = Recorder(root, children)
    options = ("-q", "-p", "no:cacheprovider", "-m", MODES[mode], file)
    code = pytest.main(list(options), plugins=[recorder])
    answer.write_text(json.dumps(recorder.result()), "utf-8")
    os._exit(RAN + int(code))


class _Chosen:
    """A plugin of pytest: these tests alone, in this order."""

    def __init__(self, names: Iterable[str], answer: Path) -> None:
        self._order = {name: number for number, name in enumerate(names)}
        self._answer = answer

    def pytest_sessionstart(self) -> None:
        """A failure of a generated call is enough: the smallest one takes long to find."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._answer.write_text(report.nodeid, "utf-8")


def _run(root: Path, mode: str, names: list[str], answer: Path) -> None:
    import pytest

    _prepare(root, mode)
    files = list(dict.fromkeys(name.split("::")[0] for name in names))
    options = ("-x", "-q", "-p", "no:cacheprovider", *files)
    os._exit(RAN + int(pytest.main(list(options), plugins=[_Chosen(names, answer)])))


def in_turn(tests: Iterable[tuple[str, str, float]]) -> list[tuple[str, list[tuple[str, float]]]]:
    """(mode, tests) of the processes that a fault meets: quick tests first, one call of each function before
    further ones, within MAX_SECONDS."""
    calls: dict[str, int] = {}
    ranked = []
    for mode, name, seconds in sorted(tests, key=lambda test: test[2]):
        function = mode + name.split("[")[0]
        calls[function] = calls.get(function, 0) + 1
        ranked.append((calls[function], seconds, mode, name))
    ranked.sort()
    first: dict[str, list[tuple[str, float]]] = {}
    rest: dict[str, list[tuple[str, float]]] = {}
    left, early, files = MAX_SECONDS, FIRST_SECONDS, set[str]()
    for _, seconds, mode, name in ranked:
        if seconds > left and (first or rest):
            break
        left -= seconds
        file = name.split("::")[0]
        if seconds <= early and (file in files or len(files) < FIRST_FILES):
            early -= seconds
            files.add(file)
            first.setdefault(mode, []).append((name, seconds))
        else:
            rest.setdefault(mode, []).append((name, seconds))
    return [(mode, sorted_by_file(found)) for part in (first, rest) for mode, found in part.items()]


def sorted_by_file(tests: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The tests of one file together, files as they come."""
    files = list(dict.fromkeys(name.split("::")[0] for name, _ in tests))
    return sorted(tests, key=lambda test: files.index(test[0].split("::")[0]))


class Judge:
    """Says of faults whether the tests notice."""

    def __init__(self, covered: Map) -> None:
        self._covered = covered
        self._fit: dict[tuple[str, str], bool] = {}
        """(mode, test) that failed with a fault: whether it passes alone without one."""

    def tests(self, mutant: Mutant) -> list[tuple[str, str, float]]:
        at_import = not mutant.in_function
        found = self._covered.covering(mutant.file, mutant.first, mutant.last, anywhere=at_import)
        return [test for test in found if self._fit.get(test[:2], True)]

    def judge(self, checkout: Checkout, mutant: Mutant) -> dict[str, Any]:
        """``status``: killed (``by`` a test), survived, or uncovered by any test."""
        began = time.perf_counter()
        tests = self.tests(mutant)
        status, by = "survived" if tests else "uncovered", ""
        path = checkout.root / mutant.file
        source = path.read_text("utf-8")
        for mode, some in in_turn(tests):
            path.write_text(mutant.planted(source), "utf-8")
            try:
                by = checkout.run(mode, some)
            finally:
                path.write_text(source, "utf-8")
            if by and "::" in by:
                if (mode, by) not in self._fit:
                    self._fit[mode, by] = not checkout.run(mode, [(by, 10.0)])
                if not self._fit[mode, by]:
                    return self.judge(checkout, mutant)
            if by:
                status = "killed"
                break
        seconds = round(time.perf_counter() - began, 1)
        return {"status": status, "by": by, "tests": len(tests), "seconds": seconds}
