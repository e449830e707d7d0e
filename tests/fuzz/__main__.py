"""``python -m fuzz --seconds 600 --seed 7``: see CONTRIBUTING."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import subprocess
import sys

import torch

from fuzz import FAMILIES, runner

WAIT_SECONDS = 900.0


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
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    if options.jobs > 1:
        own = ["--seconds", str(options.seconds), "--device", options.device]
        own += [word for family in options.family or () for word in ("--family", family)]
        own += [] if options.calls is None else ["--calls", str(options.calls)]
        started = [
            subprocess.Popen([sys.executable, "-m", "fuzz", *own, "--seed", str(seed + job)])
            for job in range(options.jobs)
        ]
        return max(process.wait() for process in started)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print(f"fuzz: seed {seed}, {options.seconds:g} s, {options.device}", flush=True)
    chosen = {name: FAMILIES[name] for name in options.family or FAMILIES}
    # A deadlocked call uses no CPU time, so the limit on CPU time does not end it.
    faulthandler.dump_traceback_later(options.seconds + WAIT_SECONDS, exit=True)
    outcome = runner.run(
        {name: family() for name, family in chosen.items()}, seed, options.seconds, options.calls, options.device,
        say=lambda text: print(text, flush=True),
    )  # fmt: skip
    faulthandler.cancel_dump_traceback_later()
    for reason, count in outcome.lacking.items():
        print(f"fuzz: {count} calls left out, {reason}")
    once = f", {len(outcome.once)} that failed once but not again" if outcome.once else ""
    print(f"fuzz: {outcome.calls} calls, {len(outcome.failures)} failures{once} (seed {seed})", flush=True)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
