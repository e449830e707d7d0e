"""Plant one-line faults, one at a time, and count those that the tests notice.

    python scripts/mutants.py                  # all of scripts/mutants.json; exit code 1 below 95 %
    python scripts/mutants.py --only kv_cache  # those in files whose path has this in it
    python scripts/mutants.py --list           # plant nothing

An entry of the list has the ``file``, a piece of a ``line`` that the file has once, the ``fault`` to put in
its place, and the ``tests`` that should fail: arguments of pytest, as few files as do. ``interpreted`` runs
those that Triton's interpreter runs. ``equivalent`` says why no test could fail: it is not planted.

Each fault is planted in a copy of the checkout. The tests must pass there beforehand, and stop at their first
failure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".json")
LEAST = 0.95
"""Of the faults that are not equivalent."""
PATIENCE = 300
"""Seconds after which tests count as failed: a fault may never end."""
PASSED, FAILED = 0, (1, 2)
"""Exit codes of pytest; 2 is a file that cannot be imported."""
RAN = 100
"""Is added to them, lest a process that never came to pytest passes for a test that failed."""
PROCESSES = multiprocessing.get_context("forkserver")
LEFT_OUT = ("__pycache__", "*.pyc", "*.egg-info", "build", "dist")


@dataclass(frozen=True)
class Mutant:
    """One planted fault."""

    file: str
    line: str
    fault: str
    tests: str
    interpreted: bool = False
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.line.strip()}  ->  {self.fault.strip() or '(nothing)'}"

    def planted(self, source: str) -> str:
        """The file's text with the fault; ValueError unless it has the line once."""
        if source.count(self.line) != 1 or "\n" in self.line:
            raise ValueError(
                f"{self.file} must have {self.line!r} once, has it {source.count(self.line)} times"
            )
        return source.replace(self.line, self.fault)

    @property
    def command(self) -> tuple[str, ...]:
        marks = "interpreter and not slow" if self.interpreted else "not gpu and not interpreter and not slow"
        return ("-x", "-q", "-p", "no:cacheprovider", "-m", marks, *shlex.split(self.tests))


def read_list() -> list[Mutant]:
    return [Mutant(**entry) for entry in json.loads(LIST.read_text("utf-8"))]


class Checkout:
    """A copy in which faults are planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        folder.mkdir()
        for source in ROOT.iterdir():
            if source.name.startswith(".") or source.name in LEFT_OUT:
                continue
            if source.is_dir():
                shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns(*LEFT_OUT))
            else:
                shutil.copy2(source, folder / source.name)

    def run(self, mutant: Mutant) -> int:
        """Exit code of its tests, in a process of their own that has torch already."""
        process = PROCESSES.Process(target=_run_tests, args=(self.root, mutant))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            return FAILED[0]
        return process.exitcode - RAN

    def is_killed(self, mutant: Mutant) -> bool:
        path = self.root / mutant.file
        source = path.read_text("utf-8")
        path.write_text(mutant.planted(source), "utf-8")
        try:
            code = self.run(mutant)
        finally:
            path.write_text(source, "utf-8")
        if code not in (PASSED, *FAILED):
            raise RuntimeError(f"pytest ended with {code} for {mutant}: {mutant.tests}")
        return code in FAILED


def _run_tests(root: Path, mutant: Mutant) -> None:
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["TRITON_INTERPRET"] = "1" if mutant.interpreted else "0"
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    import pytest

    sys.exit(RAN + int(pytest.main(list(mutant.command))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a file's path, of a line or of its fault")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    options = parser.parse_args()
    mutants = [m for m in read_list() if options.only in str(m)]
    planted = [m for m in mutants if not m.equivalent]
    if options.list:
        print("\n".join(map(str, mutants)))
        return
    killed = 0
    os.environ["OMP_NUM_THREADS"] = "1"
    PROCESSES.set_forkserver_preload(["torch", "pytest"])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        checkouts: SimpleQueue[Checkout] = SimpleQueue()
        for number in range(options.workers):
            checkouts.put(Checkout(Path(folder) / str(number)))

        def in_one(act: str, mutant: Mutant) -> int | bool:
            checkout = checkouts.get()
            try:
                return getattr(checkout, act)(mutant)
            finally:
                checkouts.put(checkout)

        if not options.trust:
            distinct = list({mutant.command: mutant for mutant in planted}.values())
            codes = pool.map(lambda m: in_one("run", m), distinct)
            for mutant, code in zip(distinct, codes, strict=True):
                if code != PASSED:
                    sys.exit(f"without a fault, pytest ends with {code}: {mutant.tests}")
        for mutant, dead in zip(planted, pool.map(lambda m: in_one("is_killed", m), planted), strict=True):
            killed += dead
            print(f"{'killed  ' if dead else 'SURVIVED'} {mutant}", flush=True)
    share = killed / len(planted) if planted else 1.0
    print(f"{killed} of {len(planted)} killed ({share:.1%}), {len(mutants) - len(planted)} equivalent")
    sys.exit(share < LEAST)


if __name__ == "__main__":
    main()
