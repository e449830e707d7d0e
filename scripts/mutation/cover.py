"""Records which lines of the package each test runs, also in its child processes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLLOWED = "FLASHTILE_LINES_OF"
"""Environment variable with the checkout, and the file to which child processes append their lines."""
OFTEN, OFTEN_IN_CHILDREN = 20, 1000
"""Most calls of a function that are traced if Python has no ``sys.monitoring``, to save time: per test, and
per child process, which does not know when another test begins."""


class Lines:
    """Records which lines of the package in the checkout ``root`` this process runs after :meth:`reset`."""

    often = OFTEN

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/") + "/"
        self.files: dict[str, set[int] | None] = {}
        """Line numbers by path; None for a file outside the package."""
        self._calls: dict[int, int] = {}

    def reset(self) -> None:
        self._calls.clear()
        for lines in self.files.values():
            if lines:
                lines.clear()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()

    def count_anew(self) -> None:
        """Trace further calls of functions that were called ``often``, and keep what was recorded."""
        self._calls.clear()

    def seen(self) -> dict[str, list[int]]:
        """Return the recorded line numbers by file, relative to the checkout."""
        return {name.removeprefix(self._root): sorted(lines) for name, lines in self.files.items() if lines}

    def _of(self, name: str) -> set[int] | None:
        if name not in self.files:
            self.files[name] = set() if name.startswith(f"{self._root}flashtile/") else None
        return self.files[name]

    def start(self) -> None:
        if "torch._dynamo.symbolic_convert" in sys.modules:
            self.follow_dynamo()
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def follow_dynamo(self) -> None:
        """Also record the lines that Dynamo traces instead of running them."""
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase

        starts_line = InstructionTranslatorBase.starts_line

        def add(translator: Any, number: int) -> None:
            starts_line(translator, number)
            self.add(translator.f_code.co_filename, number)

        InstructionTranslatorBase.starts_line = add  # type: ignore[assignment, method-assign]

    def _monitor(self) -> None:
        if sys.version_info >= (3, 12):
            monitoring, tool = sys.monitoring, sys.monitoring.COVERAGE_ID
            monitoring.use_tool_id(tool, "lines")

            def start(code: CodeType, offset: int) -> Any:
                if self._of(code.co_filename) is not None:
                    monitoring.set_local_events(tool, code, monitoring.events.LINE)
                return monitoring.DISABLE

            def line(code: CodeType, number: int) -> Any:
                self.add(code.co_filename, number)
                return monitoring.DISABLE

            monitoring.register_callback(tool, monitoring.events.PY_START, start)
            monitoring.register_callback(tool, monitoring.events.LINE, line)
            monitoring.set_events(tool, monitoring.events.PY_START)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        name = code.co_filename
        if (self.files[name] if name in self.files else self._of(name)) is None:
            return None
        calls = self._calls[id(code)] = self._calls.get(id(code), 0) + 1
        return self._trace_line if calls <= self.often else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.add(frame.f_code.co_filename, frame.f_lineno)
        return self._trace_line

    def add(self, name: str, number: int) -> None:
        lines = self._of(name)
        if lines is not None:
            lines.add(number)


class AppendedLines(Lines):
    """Records the lines of a child process.

    Each line is written to a file immediately, because the process may be killed at any time.
    """

    often = OFTEN_IN_CHILDREN

    def __init__(self, root: str, file: str) -> None:
        super().__init__(root)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, name: str, number: int) -> None:
        lines = self._of(name)
        if lines is not None and number not in lines:
            lines.add(number)
            os.write(self._descriptor, f"{name.removeprefix(self._root)}\t{number}\n".encode())


def follow() -> None:
    """Record the lines of this child process. They count for every test of the test file that is recorded."""
    root, file = os.environ[FOLLOWED].split(os.pathsep)
    AppendedLines(root, file).start()


class Recorder:
    """pytest plugin that records the CPU time and the lines of each test. Only tests that pass are kept."""

    def __init__(self, root: Path, children: Path) -> None:
        self._children = children
        self._lines = Lines(str(root))
        self._lines.start()
        self.tests: dict[str, dict[str, Any]] = {}
        self._imports: dict[str, str] | None = None
        """Lines that run before the first test."""
        os.environ[FOLLOWED] = os.pathsep.join((str(root), str(children)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._imports is None:
            self._imports = masks_of(self._lines.seen())
        self._lines.reset()
        self._began = cpu_seconds()
        self.tests[nodeid] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._lines.count_anew()  # a subtest may run lines that those before it did not
        if not report.passed:
            self.tests[report.nodeid]["failed"] = "skipped" if report.skipped else "failed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid] |= {
            "seconds": round(cpu_seconds() - self._began, 3),
            "lines": masks_of(self._lines.seen()),
        }

    def result(self) -> dict[str, Any]:
        passed = {name: test for name, test in self.tests.items() if "failed" not in test}
        failed = [name for name, test in self.tests.items() if test.get("failed") == "failed"]
        return {
            "tests": passed,
            "failed": failed,
            "imports": self._imports or {},
            "children": self._lines_of_children(),
            "seconds": round(cpu_seconds(), 1),
        }

    def _lines_of_children(self) -> dict[str, str]:
        found: dict[str, list[int]] = {}
        if self._children.exists():
            for row in self._children.read_text("utf-8").splitlines():
                file, number = row.split("\t")
                found.setdefault(file, []).append(int(number))
        return masks_of(found)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children, in seconds."""
    return sum(os.times()[:4])


def masked(lines: list[int]) -> str:
    """Return line numbers as a bit mask in hexadecimal."""
    bits = 0
    for line in lines:
        bits |= 1 << line
    return f"{bits:x}"


def masks_of(lines: dict[str, list[int]]) -> dict[str, str]:
    """Return the bit masks of lines by file."""
    return {file: masked(numbers) for file, numbers in lines.items()}


class Map:
    """The lines that all recorded tests run, to look up the tests that run a line."""

    def __init__(self) -> None:
        self._tests: dict[str, list[tuple[str, str, float, int]]] = {}
        """(mode, test, CPU seconds, lines as a bit mask) of each test, by file of the package."""
        self._run_by_tests: dict[str, int] = defaultdict(int)
        self._run_by_imports: dict[str, int] = defaultdict(int)
        """Lines by file, as bit masks: those of all tests, and those that run while files are imported."""

    def add(self, mode: str, recorded: dict[str, Any]) -> None:
        for file, lines in recorded["imports"].items():
            self._run_by_imports[file] |= int(lines, 16)
        for name, test in recorded["tests"].items():
            for file in {*test["lines"], *recorded["children"]}:
                bits = int(test["lines"].get(file, "0"), 16)
                self._run_by_tests[file] |= bits
                bits |= int(recorded["children"].get(file, "0"), 16)
                self._tests.setdefault(file, []).append((mode, name, test["seconds"], bits))

    def covering(
        self, file: str, first: int, last: int, anywhere: bool = False
    ) -> Iterator[tuple[str, str, float]]:
        """Yield (mode, test, CPU seconds) of each test that runs a line from ``first`` to ``last``.

        With ``anywhere``, any line of the file counts. It also counts if the lines run only during imports:
        tests of the whole file use what they made.
        """
        wanted = ((1 << (last + 1)) - 1) & ~((1 << first) - 1)
        if not wanted & self._run_by_tests[file] and wanted & self._run_by_imports[file]:
            anywhere = True
        for mode, name, seconds, bits in self._tests.get(file, ()):
            if anywhere or bits & wanted:
                yield mode, name, seconds


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
