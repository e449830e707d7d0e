"""Run test files of other projects, unmodified, and count what passes, what fails and what is refused.

:func:`main` is the command line of the scripts that do this for one project, such as
``flash_attention_tests.py``. This module is also the pytest plugin of the processes that collect and run.

A run has a *record*, a file of JSON lines. Its first line has the chosen cases, and each further line the
result of one case; the last result of a case counts. A second call with the same record runs the cases that
have no result yet. Cases run again where a first result does not say enough: alone after they found no memory
among other processes, and without flashtile after they failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WITHOUT = "fails without flashtile"
OUTCOMES = ("passed", "failed", "refused", WITHOUT, "skipped", "not run")
"""Outcomes of a case.

``refused``: flashtile raised a ValueError, TypeError or NotImplementedError. ``fails without flashtile``: the
case fails for the same reason with the project's own functions. ``skipped``: the file skips the case itself,
or the case tests another subject than flashtile. ``not run``: the case took too long, needed too much memory,
or its process died.
"""
UNFINISHED = 3
"""Exit code of a run that was out of time, or stopped by SIGTERM or SIGINT."""
REFUSALS = ("NotImplementedError", "TypeError", "ValueError")
KNOWN_RATIO = 1.5
"""Error of a known failure, relative to the reference's, above which the failure is no longer known."""
NO_ROOM = "out of memory"
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemory|MemoryError")
STICKY = re.compile(r"CUDA error|cudaError|device-side assert")
"""Errors after which a process cannot use its GPU any longer."""


@dataclass(frozen=True)
class Suite:
    """Test files of one project.

    Args:
        folder: the folder in which pytest runs, for example the checkout.
        files: arguments of pytest that name the files, relative to ``folder``.
        plugin: module next to this one that is a pytest plugin and prepares each process, or "" for none.
        arguments: further arguments of pytest, for example ``-k EXPRESSION``.
        environment: further environment variables of each process.
        other_subjects: test functions that cannot say anything about flashtile, with reasons. A key is a
            regular expression of a name, or of a name with parameters, ``name[parameters]``.
        run_time: names of parameters that kernels read at run time. Cases of a function with equal other
            parameters share compiled kernels (``--group``).
        known: reasons of failures and refusals by a regular expression, which is searched in "CASE REASON".
            If it has the groups ``error`` and ``reference``, the error must be at most ``KNOWN_RATIO`` times
            that of the reference.
        without: environment variables with which the cases run without flashtile. Empty: they cannot.
    """

    folder: Path
    files: tuple[str, ...]
    plugin: str = ""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    other_subjects: dict[str, str] = field(default_factory=dict)
    run_time: frozenset[str] = frozenset()
    known: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def start(self, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start pytest with this module and ``plugin`` as plugins; its output goes to a file."""
        plugins = [name for name in ("original_tests", self.plugin) if name]
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(self.folder)]
        command += ["-p", "no:cacheprovider"]
        command += [part for name in plugins for part in ("-p", name)]
        command += [*self.arguments, *arguments, *self.files]
        # Pytest does not put the folder of a file in a package on the path, but its helpers may be there.
        helpers = sorted({str((self.folder / file).parent) for file in self.files})
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", ""), *helpers]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | self.environment
        with output.open("wb") as file:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=subprocess.STDOUT
            )


# The processes that collect and run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("original tests")
    group.addoption("--cases-to", help="file that gets a line of JSON for each case; nothing runs")
    group.addoption("--run-time", default="", help="parameters that do not choose kernels, with commas")
    group.addoption("--cases-from", help="file with the ids of the cases to run, one per line")
    group.addoption("--results-to", help="file that gets a line of JSON for each case")
    group.addoption("--stop-at", type=float, default=float("inf"), help="no case begins after this time")
    group.addoption("--limit", type=int, default=0, help="most seconds of one case, 0: no limit")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cases-to"):
        config.pluginmanager.register(_Collector(config), "original-tests-collector")
    if config.getoption("--cases-from"):
        config.pluginmanager.register(_Runner(config), "original-tests-runner")


CASE = "case"
"""Attribute of an item with another name of the case than its id, which a plugin may set."""


def case_of(item: pytest.Item) -> str:
    """Return the name of a case."""
    return getattr(item, CASE, item.nodeid)


class Refused(Exception):  # noqa: N818 - it is no error
    """Raised in a case by a plugin, because flashtile does not support one of the case's calls."""


class _Collector:
    """Writes (id, configuration) of all cases.

    The configuration is the function with its parameters, except those of ``--run-time``.

    pytest needs minutes to make the items of a file with hundreds of thousands of cases. Unless ``-k`` or
    ``-m`` must see each item, only the first case of a parametrised function becomes an item.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._to = Path(config.getoption("--cases-to"))
        self._run_time = config.getoption("--run-time").split(",")
        self._needs_items = bool(config.option.keyword or config.option.markexpr)
        self._cases: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if not self._needs_items:
            name = metafunc.definition.nodeid
            for call in metafunc._calls:
                self._cases[f"{name}[{call.id}]"] = self._configuration(name, call)
            del metafunc._calls[1:]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            case = case_of(item)
            self._cases.setdefault(case, self._configuration(item.nodeid, getattr(item, "callspec", None)))
        self._to.write_text("\n".join(map(json.dumps, self._cases.items())), "utf-8")
        items.clear()

    def _configuration(self, name: str, call: Any) -> str:
        if call is None:
            return name
        chosen = sorted((key, str(value)) for key, value in call.params.items() if key not in self._run_time)
        return f"{name.split('[')[0]} {chosen}"


class _TooLongError(BaseException):
    """Raised in a case that takes more than ``--limit`` seconds; no ``except Exception`` catches it."""


class _Runner:
    """Runs the cases of a file in its order, and writes the result of each as soon as it is known."""

    def __init__(self, config: pytest.Config) -> None:
        cases = Path(config.getoption("--cases-from")).read_text("utf-8").splitlines()
        self._order = {case: number for number, case in enumerate(cases)}
        self._results = Path(config.getoption("--results-to"))
        self._stop_at: float = config.getoption("--stop-at")
        self._limit: int = config.getoption("--limit")
        self._result: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if calls := metafunc._calls:
            name = metafunc.definition.nodeid
            calls[:] = [call for call in calls if f"{name}[{call.id}]" in self._order] or calls[:1]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = (item for item in items if case_of(item) in self._order)
        items[:] = sorted(wanted, key=lambda item: self._order[case_of(item)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.time() > self._stop_at:
            item.session.shouldstop = "out of time"
        if item.session.shouldstop:
            return (yield)
        self._result, start = {"case": case_of(item), "outcome": "passed", "reason": ""}, time.monotonic()
        self._write({"begun": case_of(item)})
        done = yield
        self._write(self._result | {"seconds": round(time.monotonic() - start, 2)})
        _give_back_memory()
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        def too_long(*_: object) -> None:
            raise _TooLongError

        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(self._limit)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.excinfo is not None and self._result["outcome"] == "passed":
            outcome, reason = _judged(call.excinfo, report)
            self._result |= {"outcome": outcome, "reason": reason}
            if STICKY.search(str(call.excinfo.value)):
                item.session.shouldstop = "the GPU is unusable in this process"
        return report

    def _write(self, line: dict[str, Any]) -> None:
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _give_back_memory() -> None:
    """Free what torch's allocator keeps on the GPU, because other processes use the same GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _judged(failure: pytest.ExceptionInfo[BaseException], report: Any) -> tuple[str, str]:
    """Return the (outcome, reason) of a case that raised."""
    first_line = (str(failure.value).strip().splitlines() or [""])[0]
    if report.skipped:
        return "skipped", first_line or failure.typename
    if failure.errisinstance(_TooLongError):
        return "not run", "too long"
    if NO_MEMORY.search(f"{failure.typename} {first_line}"):
        return "not run", NO_ROOM
    last = failure.traceback[-1]
    if failure.errisinstance(Refused) or (failure.typename in REFUSALS and _is_ours(Path(last.path))):
        return "refused", first_line
    statement = str(last.statement).strip().splitlines()[0]
    if failure.errisinstance(AssertionError):  # of an assert, or of a method of unittest.TestCase
        message = " ".join(str(failure.value).split())
        return "failed", statement if statement.startswith("assert ") else message
    return "failed", f"{failure.typename}: {first_line}"


def _is_ours(path: Path) -> bool:
    return (ROOT / "flashtile") in path.parents


# The process that chooses cases and counts their results


def collect(suite: Suite) -> dict[str, str]:
    """Return the configurations of all cases, by id.

    Raises:
        RuntimeError: pytest cannot import one of the files. The message has pytest's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        to, output = Path(folder) / "cases", Path(folder) / "output"
        arguments = ("--cases-to", str(to), "--run-time", ",".join(suite.run_time))
        code = suite.start(output, *arguments).wait()
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest could not collect the cases:\n{output.read_text('utf-8')[-4000:]}")
        return dict(map(json.loads, to.read_text("utf-8").splitlines()))


def sample(cases: dict[str, str], count: int | None, seed: int, group: int = 1) -> list[list[str]]:
    """Draw ``count`` cases in random order, as evenly from all test functions as their numbers allow.

    None: all cases in random order. The same cases and seed give the same sample.

    Args:
        cases: configurations by case.
        group: size of the groups.

    Returns:
        Groups of cases of one configuration each. A group is smaller if no more cases are left.
    """
    draws = random.Random(seed)
    configurations: dict[str, list[str]] = defaultdict(list)
    for case, configuration in cases.items():
        configurations[configuration].append(case)
    functions: dict[str, list[list[str]]] = defaultdict(list)
    for some in configurations.values():
        draws.shuffle(some)
        groups = (some[start : start + group] for start in range(0, len(some), group))
        functions[function_of(some[0])] += groups
    for of_function in functions.values():
        draws.shuffle(of_function)
    rounds = [(turn, name) for name, some in functions.items() for turn in range(len(some))]
    chosen, left = [], len(cases) if count is None else count
    for turn, name in sorted(rounds, key=lambda at: at[0]):
        if left > 0:
            chosen.append(functions[name][turn][:left])
            left -= len(chosen[-1])
    draws.shuffle(chosen)
    return chosen


def function_of(case: str) -> str:
    """Return the name of a case's test function, with its class and without the parameters."""
    return case.split("[")[0].split("::", 1)[-1]


class Deadline:
    """The time after which no case begins."""

    def __init__(self, seconds: float) -> None:
        self.time = time.time() + seconds
        self.stopped = threading.Event()

    @property
    def over(self) -> bool:
        return self.stopped.is_set() or time.time() >= self.time


def run(
    suite: Suite,
    groups: Sequence[Sequence[str]],
    jobs: int,
    deadline: Deadline,
    limit: int,
    found: Callable[[dict], None],
) -> None:
    """Run cases in ``jobs`` processes and call ``found`` with each result.

    Args:
        groups: cases that one process runs one after the other.
        deadline: no case begins after it. If it is stopped, running cases end without a result.
        limit: most seconds of one case, 0 for no limit.
        found: gets {case, outcome, reason, seconds}.
    """
    if jobs > 1:  # each process compiles its own kernels, so they need no further ones
        suite = replace(suite, environment={"FLASHTILE_COMPILE_WORKERS": "0"} | suite.environment)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def work(number: int) -> None:
            left = [case for group in groups[number::jobs] for case in group]
            while left and not deadline.over:
                done = set()
                for result in _run_some(suite, left, Path(folder) / str(number), deadline, limit):
                    done.add(result["case"])
                    found(result)
                left = [case for case in left if case not in done]

        tasks = [pool.submit(work, number) for number in range(jobs)]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            deadline.stopped.set()
            raise


def _run_some(suite: Suite, cases: list[str], folder: Path, deadline: Deadline, limit: int) -> Iterator[dict]:
    """Run cases in one process until all are done, the deadline is over, or the process dies.

    Yields:
        The results, as soon as they are known.

    Raises:
        RuntimeError: the process ended without a result although there was time. The message has its output.
    """
    folder.mkdir(exist_ok=True)
    source, results, output = folder / "cases", folder / "results", folder / "output"
    source.write_text("\n".join(cases), "utf-8")
    results.write_text("", "utf-8")
    arguments = ("--cases-from", source, "--results-to", results, "--stop-at", deadline.time)
    process = suite.start(output, *map(str, (*arguments, "--limit", limit)))
    last: dict[str, Any] = {}
    for last in _lines(results, process, deadline.stopped):
        if "case" in last:
            yield last
    if deadline.stopped.is_set():
        return
    if "begun" in last:
        reason = f"its process died with exit code {process.returncode}"
        yield {"case": last["begun"], "outcome": "not run", "reason": reason, "seconds": 0}
    elif not last and not deadline.over:
        raise RuntimeError(f"pytest ran no case:\n{output.read_text('utf-8')[-4000:]}")


def _lines(path: Path, process: subprocess.Popen[bytes], stopped: threading.Event) -> Iterator[dict]:
    """Yield the lines of JSON that ``process`` writes to ``path``, until it has ended.

    The process is ended if ``stopped`` is set.
    """
    with path.open(encoding="utf-8") as file:
        rest, running = "", True
        while running:
            running = process.poll() is None
            *lines, rest = (rest + file.read()).split("\n")
            yield from map(json.loads, lines)
            if running and stopped.is_set():
                process.kill()
                process.wait()
            elif running:
                time.sleep(0.1)


def table(results: Iterable[dict]) -> str:
    """Return two Markdown tables: outcomes by test function, and reasons of what did not pass."""
    by_function: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[tuple[str, str]] = Counter()
    for result in results:
        by_function[function_of(result["case"])][result["outcome"]] += 1
        if result["outcome"] != "passed":
            reasons[result["outcome"], general(result["reason"])] += 1
    total = sum(by_function.values(), Counter())
    shown = [outcome for outcome in OUTCOMES if total[outcome]]
    lines = [f"| test | {' | '.join(shown)} |", "|---|" + "---:|" * len(shown)]
    for name, counts in [*sorted(by_function.items()), ("all", total)]:
        lines.append(f"| `{name}` | {' | '.join(str(counts[outcome]) for outcome in shown)} |")
    if reasons:
        lines += ["", "| outcome | cases | reason |", "|---|---:|---|"]
        order = sorted(reasons.items(), key=lambda item: (OUTCOMES.index(item[0][0]), -item[1]))
        lines += [f"| {outcome} | {count} | {reason} |" for (outcome, reason), count in order]
    return "\n".join(lines)


def general(reason: str) -> str:
    """Replace the numbers and names of types of a reason, so that equal faults are counted together."""
    reason = re.sub(r"(?<![\w.])\d+(\.\d+)?(e[-+]?\d+)?", "N", reason)
    return re.sub(r"N(, N)+", "N, ...", reason).replace("|", "\\|")[:160]


def _shard(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text}")
    return number, count


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sample", type=int, help="number of cases; without it, all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample and of the order")
    parser.add_argument(
        "--group", type=int, default=1, metavar="N", help="draw N cases that share compiled kernels at a time"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose id contains it")
    parser.add_argument("--without", metavar="REGEX", help="leave out cases whose id contains it")
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N",
        help="every N-th of the chosen cases from the I-th",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--limit", type=int, default=0, help="most seconds of one case; 0: no limit")
    parser.add_argument("--out", type=Path, help="record of the run; a second call goes on with it")
    parser.add_argument("--add", type=Path, nargs="+", help="print what these records have, and run nothing")
    return parser


def command(
    description: str, project: str, suites: Sequence[Any], suite: Callable[[Path, Any], Suite]
) -> int:
    """Run the command line of a script for one project, and return the exit code of :func:`main`.

    Args:
        description: first line of the script's help.
        project: name of the repository.
        suites: the choices of ``--suite``, all of one type.
        suite: returns the suite of a checkout, by its choice.
    """
    options_of = parser(description)
    options_of.add_argument("--checkout", type=Path, help=f"folder of a checkout of {project}")
    options_of.add_argument("--suite", type=type(suites[0]), choices=suites, help="test files to run")
    options = options_of.parse_args()
    if not options.add and not (options.checkout and options.suite):
        options_of.error("expected --checkout and --suite, or --add")
    return main(options, lambda: suite(options.checkout, options.suite))


def main(options: argparse.Namespace, suite: Callable[[], Suite]) -> int:
    """Choose cases, run them and print their results. Return the exit code.

    Args:
        options: of :func:`parser`.
        suite: is called only if something runs.

    Returns:
        0, or 1 if a case failed, or 3 if the time was up or a signal stopped the run.
    """
    if options.add:
        results = {result["case"]: result for path in options.add for result in _read(path)[1].values()}
        print(table(results.values()))
        return int(any(result["outcome"] == "failed" for result in results.values()))
    deadline = Deadline(options.seconds)
    tests = suite()
    groups, results = _begun(options, tests)

    def found(result: dict, **more: Any) -> None:
        result["reason"] = _explained(tests, result)
        results[result["case"]] = result | more
        _append(options.out, result | more)
        if result["outcome"] in ("failed", "refused", "not run", WITHOUT):
            print(f"{result['outcome']}: {result['case']}\n    {result['reason']}", flush=True)

    with contextlib.suppress(_Stopped), _stopped_by_signals():
        _run_left(options, tests, groups, results, deadline, found)
    print(table(results.values()))
    left = sum(map(len, groups)) - len(results)
    left += sum(_open(result) or _may_fail_without(tests, result) for result in results.values())
    if left:
        print(f"out of time: {left} cases are left")
        return UNFINISHED
    return int(any(result["outcome"] == "failed" for result in results.values()))


def _explained(tests: Suite, result: dict) -> str:
    """Return the known reason of a failure or refusal, or its own reason."""
    if result["outcome"] in ("failed", "refused"):
        for regex, reason in tests.known.items():
            found = re.search(regex, f"{result['case']} {result['reason']}")
            errors = found.groupdict() if found else {}
            limit = KNOWN_RATIO * float(errors.get("reference", 1))
            if found and float(errors.get("error", 0)) <= limit:
                return reason
    return result["reason"]


def _other_subject(tests: Suite, case: str) -> str | None:
    """Return why a case says nothing about flashtile, or None if it does."""
    function, _, parameters = case.partition("[")
    name = f"{function.rsplit('::', 1)[-1]}[{parameters}"
    matching = (why for key, why in tests.other_subjects.items() if re.fullmatch(rf"(?:{key})(\[.*)?", name))
    return next(matching, None)


def _begun(options: argparse.Namespace, tests: Suite) -> tuple[list[list[str]], dict[str, dict]]:
    """Return the groups of chosen cases, and the results that the record has, by case."""
    key = {"files": list(tests.files), "arguments": list(tests.arguments), "sample": options.sample}
    key |= {"seed": options.seed, "shard": list(options.shard), "only": options.only}
    key |= {"without": options.without, "group": options.group}
    if options.out and options.out.exists():
        chosen, results = _read(options.out)
        if (of := {name: chosen.get(name) for name in key}) != key:
            raise SystemExit(f"--out: expected a record of {key}, got one of {of}")
        return chosen["cases"], results
    number, shards = options.shard
    cases = {case: chosen for case, chosen in collect(tests).items() if re.search(options.only, case)}
    if options.without:
        cases = {case: chosen for case, chosen in cases.items() if not re.search(options.without, case)}
    groups = sample(cases, options.sample, options.seed, options.group)[number - 1 :: shards]
    _append(options.out, key | {"cases": groups})
    return groups, {}


def _run_left(
    options: argparse.Namespace,
    tests: Suite,
    groups: list[list[str]],
    results: dict[str, dict],
    deadline: Deadline,
    found: Callable[..., None],
) -> None:
    """Run the cases without a result, then those that must run again, and call ``found`` with each result."""
    for case in [case for group in groups for case in group if case not in results]:
        if reason := _other_subject(tests, case):
            found({"case": case, "outcome": "skipped", "reason": reason, "seconds": 0})
    left = [[case for case in group if case not in results] for group in groups]
    again = {"again": True} if options.jobs == 1 else {}
    run(tests, left, options.jobs, deadline, options.limit, lambda result: found(result, **again))
    alone = [[case] for case, result in results.items() if _open(result)]
    run(tests, alone, 1, deadline, options.limit, lambda result: found(result, again=True))
    failed = {case: result for case, result in results.items() if _may_fail_without(tests, result)}

    def without(result: dict) -> None:
        first = failed[result["case"]]
        fails = result["outcome"] in ("failed", "refused")
        equally = fails and general(_explained(tests, result)) == general(first["reason"])
        found(first | {"outcome": WITHOUT if equally else first["outcome"]}, compared=True)

    compared = replace(tests, environment=tests.environment | tests.without)
    run(compared, [[case] for case in failed], options.jobs, deadline, options.limit, without)


def _open(result: dict) -> bool:
    """Whether a case found no memory while other processes ran."""
    return result["reason"] == NO_ROOM and not result.get("again")


def _may_fail_without(tests: Suite, result: dict) -> bool:
    """Whether a case failed that has not run without flashtile."""
    return bool(tests.without) and result["outcome"] == "failed" and not result.get("compared")


class _Stopped(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT."""


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(path: Path) -> tuple[dict, dict[str, dict]]:
    """Return the first line of a record, and its results by case."""
    first, *results = map(json.loads, path.read_text("utf-8").splitlines())
    return first, {result["case"]: result for result in results}


def _append(path: Path | None, line: dict) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
