"""``python -m fuzz --seconds 600 --seed 7``: see docs/tests.md.

With several jobs, and on a GPU, calls run in processes of their own. A launch that fails on a GPU makes every later call
of its process fail, so such a process is replaced by one with another seed. Its last calls are then repeated one by one
in a fresh process, to name the call. A kernel that does not end cannot be interrupted, so its process is ended, and the
call is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fuzz import FAMILIES, runner

WAIT_SECONDS = 900.0
STUCK_SECONDS = 150.0
"""So long may pass on a GPU, kernels compiled and the call made smaller, until the next call begins."""
STUCK = 4
"""Code of a process that was ended because of that."""
POISONED = 3
"""Exit code of a process whose GPU has failed."""
NEXT_SEED = 1_000_003
"""From the seed of a process that has died to that of the process which takes its place."""
MAX_REPEATED = 40
"""Number of last calls that are repeated."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Random calls of every public function.")
    parser.add_argument("--seconds", type=float, default=600.0, help="default: 600")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--family", action="append", choices=list(FAMILIES), help="default: all; may be repeated"
    )
    parser.add_argument("--calls", type=int, help="stop after so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a seed of its own")
    parser.add_argument("--log", type=Path, help="file for a line per call, written before the call runs")
    parser.add_argument("--repeat", type=Path, help="run the calls of such a file, one by one")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.repeat is not None:
        return repeat(options.repeat, options.device)
    if options.log is None and (options.jobs > 1 or options.device != "cpu"):
        with ThreadPoolExecutor(options.jobs) as pool:
            return max(pool.map(lambda job: supervise(options, seed + job), range(options.jobs)))
    return run(options, seed)


def run(options: argparse.Namespace, seed: int) -> int:
    """Run calls in this process."""
    print(f"fuzz: seed {seed}, {options.seconds:g} s, {options.device}", flush=True)
    chosen = {name: FAMILIES[name] for name in options.family or FAMILIES}

    def begun(family: str, number: int) -> None:
        if options.log is not None:
            with options.log.open("a") as log:
                log.write(f"{seed} {family} {number}\n")

    # A deadlocked call uses no CPU time, so the limit on CPU time does not end it.
    faulthandler.dump_traceback_later(options.seconds + WAIT_SECONDS, exit=True)
    try:
        outcome = runner.run(
            {name: family() for name, family in chosen.items()}, seed, options.seconds, options.calls, options.device,
            say=lambda text: print(text, flush=True), begun=begun,
        )  # fmt: skip
    except runner.Poisoned as error:
        print(f"fuzz: the GPU has failed (seed {seed}): {error}", flush=True)
        return POISONED
    faulthandler.cancel_dump_traceback_later()
    for reason, count in outcome.lacking.items():
        print(f"fuzz: {count} calls left out, {reason}")
    once = f", {len(outcome.once)} that failed once but not again" if outcome.once else ""
    print(f"fuzz: {outcome.calls} calls, {len(outcome.failures)} failures{once} (seed {seed})", flush=True)
    return 1 if outcome.failures else 0


def supervise(options: argparse.Namespace, seed: int) -> int:
    """Run calls in a process, and in another one whenever it has died, until the time is up."""
    until, code = time.monotonic() + options.seconds, 0
    own = [
        "--device",
        options.device,
        *(word for name in options.family or () for word in ("--family", name)),
    ]
    own += [] if options.calls is None else ["--calls", str(options.calls)]
    while (seconds := until - time.monotonic()) > 0 or code == 0:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "calls")
            log.touch()
            arguments = *own, "--seconds", str(seconds), "--seed", str(seed), "--log", str(log)
            found = started(*arguments, log=None if options.device == "cpu" else log)
            if found in (0, 1):
                return max(code, found)
            code = 1
            if found == STUCK:
                begun = log.read_text().splitlines()
                if begun:  # otherwise it stood still before its first call
                    print_call(begun[-1], options.device)
                print(f"fuzz: this call has not ended after {STUCK_SECONDS:g} s", flush=True)
            else:
                print(
                    f"fuzz: a process has ended with code {found} (seed {seed}); its last calls again:",
                    flush=True,
                )
                repeat_last(log, options.device)
        seed += NEXT_SEED
    return code


def started(*arguments: str, log: Path | None = None, **environment: str) -> int:
    """Run this command in a process. Return its code, or STUCK if ``log`` has got no new line for STUCK_SECONDS."""
    command = [sys.executable, "-m", "fuzz", *arguments]
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        while log is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(STUCK_SECONDS / 30)
            if time.time() - log.stat().st_mtime > STUCK_SECONDS:
                process.kill()
                return STUCK
        return process.wait()


def repeat_last(log: Path, device: str) -> None:
    """Repeat the last call of a process that has died, or, if it does not fail alone, the calls before it."""
    last = log.read_text().splitlines()[-MAX_REPEATED:]
    for lines in (last[-1:], last):
        log.write_text("\n".join(lines))
        if started("--device", device, "--repeat", str(log), CUDA_LAUNCH_BLOCKING="1"):
            return
    print(f"fuzz: the last {len(last)} calls do not fail again", flush=True)


def print_call(line: str, device: str) -> runner.Call:
    """Print and return the call of a line of a log: seed, family, number."""
    seed, family, number = line.split()
    call = runner.drawn_call(FAMILIES[family](), int(seed), family, int(number), device)
    print(f"\n--- {family}, call {number} of seed {seed}\n{call}\n", flush=True)
    return call


def repeat(calls: Path, device: str) -> int:
    """Run the calls of a log. If the process dies, the call that was printed last is the one that failed."""
    for line in calls.read_text().splitlines():
        try:
            runner.failure(print_call(line, device))
        except runner.Lacking:
            continue
        except runner.Poisoned as error:
            print(f"fuzz: this call makes the GPU fail: {error}", flush=True)
            return POISONED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
