"""Runs tests in copies of the checkout: once to record their lines, and then with planted faults.

Each run is a process that is forked from a server that has imported torch, which saves the time to import it.
"""

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
"""Marker expressions of the tests of each mode; "interpreted" tests run in Triton's interpreter."""
PASSED, FAILED, EMPTY, STOPPED = 0, 1, 5, (2, 4)
"""Exit codes of pytest. It ends with one of ``STOPPED`` if a file cannot be imported."""
RAN = 100
"""Added to pytest's exit codes, to tell them from that of a process that failed before pytest ran."""
PROCESSES = multiprocessing.get_context("forkserver")
FRESH = multiprocessing.get_context("spawn")
"""For interpreted tests, which need a process that has not yet imported Triton without the interpreter."""
LEFT_OUT = ("__pycache__", "*.pyc", "*.egg-info", "build", "dist")
FIRST_SECONDS, FIRST_FILES = 2.0, 3
"""Most recorded seconds and files of the tests that a fault meets first, in a process of their own.

A few quick tests notice most faults, and the other test files then need not be imported.
"""
MAX_SECONDS = 120.0
"""Most recorded seconds of the tests that one fault meets."""
MAX_BYTES = 24 * 2**30
"""Most bytes of address space per process, because a fault may try to allocate all memory."""


class Checkout:
    """A copy of the repository in ``folder``, in which faults are planted.

    It is copied from the repository, or from another copy, ``original``, which has compiled bytecode.
    """

    def __init__(self, folder: Path, original: Checkout | None = None) -> None:
        self.root = folder
        if original is not None:
            shutil.copytree(original.root, folder)
            return
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", *LEFT_OUT))
        # By default Python compares times in seconds, so it may run the bytecode without the fault.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "flashtile", quiet=2, invalidation_mode=by_content)

    def record(self, mode: str, file: str, patience: float) -> dict[str, Any]:
        """Run a test file without a fault and return the recorder's result, the lines of each test.

        ``patience`` limits the CPU seconds.

        Raises:
            RuntimeError: pytest could not run the file.
        """
        answer = self.root / ".answer"
        code = _in_process(patience, _record, self.root, mode, file, answer)
        if code not in (PASSED, FAILED, EMPTY):
            output = (self.root / ".output").read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"without a fault, pytest ends with {code}: {file}, {mode}\n{output}")
        return json.loads(answer.read_text("utf-8"))

    def run(self, mode: str, tests: Sequence[tuple[str, float]]) -> str:
        """Return the name of the first test that fails, or "" if all pass.

        Other failures give "time" for a process that ran out of time, "import" for a file that cannot be
        imported, or a description of how the process ended.

        Args:
            mode: key of ``MODES``.
            tests: (name, recorded CPU seconds) of each test, in the order in which to run them.
        """
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
    """Call ``act`` in a process of its own and return pytest's exit code.

    The result is a text if the process ended without an exit code of pytest. It is None if the process took
    more than ``patience`` seconds of CPU time, or ten times as long in wall-clock time.
    """
    processes: Any = FRESH if "interpreted" in arguments else PROCESSES
    process = processes.Process(target=_begin, args=(patience, act, arguments))
    process.start()
    process.join(10 * patience)
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ends its children, and the process itself if it hangs
    process.join()
    code = process.exitcode
    assert code is not None
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return None
    return code - RAN if code >= RAN else f"end of the process ({code})"


def _begin(patience: float, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # a process group of its own, so its children can be ended with it
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
    """pytest plugin that runs only the tests ``names``, in this order, and writes the failed test's name."""

    def __init__(self, names: Iterable[str], answer: Path) -> None:
        self._order = {name: number for number, name in enumerate(names)}
        self._answer = answer

    def pytest_sessionstart(self) -> None:
        """Let Hypothesis stop at the first failing example, because shrinking it takes long."""
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
    """Return (mode, tests) of each process to run for a fault, in order.

    Quick tests come first, and one case of each test function before all further cases. A test is left out if
    the recorded seconds would exceed MAX_SECONDS.

    Args:
        tests: (mode, name, recorded CPU seconds) of each test.
    """
    functions: set[str] = set()
    ranked = []
    for mode, name, seconds in sorted(tests, key=lambda test: test[2]):
        function = mode + name.split("[")[0]
        ranked.append((function in functions, seconds, mode, name))
        functions.add(function)
    ranked.sort()
    first: dict[str, list[tuple[str, float]]] = {}
    rest: dict[str, list[tuple[str, float]]] = {}
    left, early, files = MAX_SECONDS, FIRST_SECONDS, set[str]()
    for _, seconds, mode, name in ranked:
        if seconds > left and (first or rest):
            continue
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
    """Sort tests such that those of one file are adjacent; files are in the order of their first test."""
    files = list(dict.fromkeys(name.split("::")[0] for name, _ in tests))
    return sorted(tests, key=lambda test: files.index(test[0].split("::")[0]))


class Judge:
    """Plants faults and finds out whether the tests notice them."""

    def __init__(self, covered: Map) -> None:
        self._covered = covered
        self._fit: dict[tuple[str, str], bool] = {}
        """Whether a test that failed with a fault passes alone without one, by (mode, test)."""

    def tests(self, mutant: Mutant) -> list[tuple[str, str, float]]:
        at_import = not mutant.in_function
        found = self._covered.covering(mutant.file, mutant.first, mutant.last, anywhere=at_import)
        return [test for test in found if self._fit.get(test[:2], True)]

    def judge(self, checkout: Checkout, mutant: Mutant) -> dict[str, Any]:
        """Plant a fault in a checkout, run the tests that may notice it, and return the result.

        Its ``status`` is "killed" (``by`` a test or an error), "survived", or "uncovered" if no test runs the
        line. ``tests`` is the number of tests found, and ``seconds`` the wall-clock time.
        """
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
