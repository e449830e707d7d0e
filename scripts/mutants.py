"""Plant faults drawn from the source, one at a time, and count those that the tests notice.

    python scripts/mutants.py                           # 32 faults in each area; exit code 1 below 95 %
    python scripts/mutants.py --areas cache,engine --count 8 --seed 3
    python scripts/mutants.py --sample 30               # 3 faults in each area, and the tests near it
    python scripts/mutants.py --shard 2/4 --out 2.json  # one part of four
    python scripts/mutants.py --add 1.json 2.json 3.json 4.json  # report the results of all parts
    python scripts/mutants.py --list                    # print the faults without planting them

A seed draws the same faults as long as their lines do not change. ``scripts/mutation/areas.py`` lists the
files of each area. ``not_planted.json`` lists code and faults that change no result, with reasons. Each fault
is planted in a copy of the checkout. The tests that run its line then run, quick ones first, until one fails.
The lines of all tests are recorded once and kept in ``build/mutants``. A long run can be split: with
``--seconds 300 --out found.json`` no fault is planted after that time, and the same command continues later.
The exit code is 0 if the tests notice enough faults, 1 if not, and 3 if the time was up.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutation.areas import AREAS, ROOT, TESTS, files_matching
from mutation.cover import Map, read
from mutation.draw import Mutant, drawn
from mutation.run import MODES, PROCESSES, Checkout, Judge

KEPT = ROOT / "build" / "mutants"
LEAST = 0.95
"""Least share of noticed faults, over all areas and in each area with at least ENOUGH faults."""
SPARE = 8
"""Faults drawn for each fault of a sample, which takes only faults whose lines the tests near them run."""
ENOUGH = 20
"""Least number of faults of an area for which its own share is judged."""
PATIENCE = 1800
"""Most CPU seconds to record one test file."""
UNFINISHED = 3
"""Exit code of a run that was out of time."""


class Workers:
    """A pool of ``count`` threads, each with a checkout of its own; no task starts after the time ``end``."""

    def __init__(self, count: int, folder: Path, end: float) -> None:
        self._end = end
        self._checkouts: SimpleQueue[Checkout] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        first = Checkout(folder / "0")
        for checkout in (first, *(Checkout(folder / str(number), first) for number in range(1, count))):
            self._checkouts.put(checkout)

    def each(self, act: Callable[[Checkout, Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (task, ``act(checkout, task)``) as tasks are done. Tasks that did not start are left out."""

        def one(task: Any) -> tuple[Any, Any] | None:
            checkout = self._checkouts.get()
            try:
                return None if time.monotonic() > self._end else (task, act(checkout, task))
            finally:
                self._checkouts.put(checkout)

        for done in as_completed([self._threads.submit(one, task) for task in tasks]):
            if (result := done.result()) is not None:
                yield result

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *failure: object) -> None:
        self._threads.shutdown(cancel_futures=True)


def recordings(test_files: list[str]) -> dict[tuple[str, str], Path]:
    """Return the path of the recording of each (mode, test file).

    The name of a recording contains a digest of everything that it depends on, so changes make it obsolete.
    """
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    shared = blake2b(f"{sys.version_info[:2]}".encode(), digest_size=8)
    recorder = ROOT / "scripts/mutation/cover.py"
    for path in (recorder, *sorted((ROOT / "flashtile").rglob("*.py")), *sorted(helpers)):
        shared.update(path.read_bytes())
    found = {}
    for file in test_files:
        text, digest = (ROOT / file).read_text("utf-8"), shared.copy()
        digest.update(text.encode())
        name = f"{file.removesuffix('.py').replace('/', '-')}-{{}}-{digest.hexdigest()}.json"
        for mode in MODES:
            if mode == "plain" or re.search(r"\btarget\b|interpreter", text):
                found[mode, file] = KEPT / name.format(mode)
    return found


def record(workers: Workers, test_files: list[str]) -> Map | None:
    """Record test files that have no recording yet; return the lines of all tests, or None if time was up."""
    wanted = recordings(test_files)
    KEPT.mkdir(parents=True, exist_ok=True)
    missing = [task for task, path in wanted.items() if not path.exists()]
    missing.sort(key=lambda task: (ROOT / task[1]).stat().st_size, reverse=True)

    def one(checkout: Checkout, task: tuple[str, str]) -> float:
        found = checkout.record(*task, PATIENCE)
        path = wanted[task]
        path.with_suffix(".part").write_text(json.dumps(found), "utf-8")
        path.with_suffix(".part").rename(path)
        for name in found["failed"]:
            print(f"fails without a fault: {name}", flush=True)
        return found["seconds"]

    for (mode, file), seconds in workers.each(one, missing):
        print(f"recorded {file}, {mode}: {seconds:.0f} s", flush=True)
    if any(not path.exists() for path in wanted.values()):
        return None
    covered = Map()
    for (mode, _), path in wanted.items():
        covered.add(mode, read(path))
    return covered


def judge(workers: Workers, mutants: list[tuple[str, Mutant]], covered: Map, out: Path | None) -> list[dict]:
    """Judge the faults and return an entry for each, also for those that change no result.

    Entries that ``out`` already has are taken from it, and new ones are written to it at once. Faults for
    which there was no time have no entry.
    """
    known = {tuple(entry["key"]): entry for entry in read(out)} if out and out.exists() else {}
    entries = [known[m.key] for _, m in mutants if m.key in known]
    for area, mutant in mutants:
        if mutant.reason and mutant.key not in known:
            entries.append(_entry(area, mutant, {"status": "no result", "by": mutant.reason}))
    judges = Judge(covered)
    to_plant = [(area, m) for area, m in mutants if not m.reason and m.key not in known]
    for (area, mutant), found in workers.each(lambda c, task: judges.judge(c, task[1]), to_plant):
        entries.append(_entry(area, mutant, found))
        print(f"{found['status']:9} {found['seconds']:6.1f} s {mutant}\n    {found['by']}", flush=True)
        if out:
            out.write_text(json.dumps(entries, indent=1), "utf-8")
    return entries


def _entry(area: str, mutant: Mutant, found: dict[str, Any]) -> dict[str, Any]:
    return {"area": area, "key": mutant.key, "kind": mutant.kind, "at": mutant.at, **found}


def report(entries: list[dict]) -> bool:
    """Print the unnoticed faults, and the shares that were noticed; return whether these are high enough."""
    for entry in entries:
        if entry["status"] in ("survived", "uncovered"):
            file, line, fault, _ = entry["key"]
            print(f"{entry['status'].upper()} {file}:{entry['at']}\n    - {line}\n    + {fault}")
    good = True
    for area in (*dict.fromkeys(entry["area"] for entry in entries), None):
        some = [e for e in entries if e["status"] != "no result" and area in (e["area"], None)]
        noticed = sum(entry["status"] == "killed" for entry in some)
        share = noticed / len(some) if some else 1.0
        good &= share >= LEAST or (area is not None and len(some) < ENOUGH)
        print(f"{area or 'all':14}{noticed:5} of {len(some):4} noticed, {share:.1%}")
    return good


def _shard(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text}")
    return number, count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [area.name for area in AREAS]
    parser.add_argument(
        "--areas", default=",".join(names), help="names, separated by commas: " + ", ".join(names)
    )
    parser.add_argument("--count", type=int, default=32, help="faults in each area")
    parser.add_argument("--sample", type=int, help="faults in all, met by the tests near their areas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a fault's file, line or kind")
    parser.add_argument("--near", action="store_true", help="record the tests near the areas alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="every N-th from the I-th"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after that time")
    parser.add_argument("--out", type=Path, help="JSON of what is found; what it has is not planted again")
    parser.add_argument("--add", type=Path, nargs="+", help="report what these files have, and plant nothing")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant nothing")
    options = parser.parse_args()
    options.areas = options.areas.split(",")
    for name in options.areas:
        if name not in names:
            parser.error(f"--areas: expected some of {', '.join(names)}, got {name}")
    return options


def draw(options: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Return (area, fault) of each fault of the chosen areas that is in the shard."""
    count = options.count
    if options.sample:
        count = SPARE * -(-options.sample // len(options.areas))
    every = [(area, mutant) for area in options.areas for mutant in drawn(area, count, options.seed)]
    number, shards = options.shard
    return [(area, mutant) for area, mutant in every if options.only in str(mutant)][number - 1 :: shards]


def sample(mutants: list[tuple[str, Mutant]], judges: Judge, count: int) -> list[tuple[str, Mutant]]:
    """Return the first ``count`` faults of each area that may change a result and whose lines a test runs."""
    left = Counter({area: count for area, _ in mutants})
    found = []
    for area, mutant in mutants:
        if left[area] and not mutant.reason and judges.tests(mutant):
            left[area] -= 1
            found.append((area, mutant))
    return found


def main() -> None:
    options = arguments()
    end = time.monotonic() + options.seconds
    if options.add:
        sys.exit(not report([entry for path in options.add for entry in read(path)]))
    mutants = draw(options)
    if options.list:
        print("\n".join(f"{mutant}\n    {mutant.reason}" for _, mutant in mutants))
        return
    tests = TESTS
    if options.sample or options.near:
        needed = {area for area, _ in mutants}
        tests = tuple(pattern for area in AREAS if area.name in needed for pattern in area.near)
    os.environ["OMP_NUM_THREADS"] = "1"
    if Path("/proc/driver/nvidia").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    PROCESSES.set_forkserver_preload(["torch._dynamo.symbolic_convert", "pytest", "hypothesis", "numpy"])
    with tempfile.TemporaryDirectory() as folder, Workers(options.jobs, Path(folder), end) as workers:
        covered = record(workers, files_matching(tests))
        if covered is None:
            print("out of time before all tests were recorded: call again to go on")
            sys.exit(UNFINISHED)
        if options.sample:
            mutants = sample(mutants, Judge(covered), -(-options.sample // len(options.areas)))
        entries = judge(workers, mutants, covered, options.out)
    good = report(entries)
    if len(entries) < len(mutants):
        print(f"out of time: {len(mutants) - len(entries)} faults are left")
        sys.exit(UNFINISHED)
    sys.exit(not good)


if __name__ == "__main__":
    main()
