"""Measure the host's part of a step of 256 sequences on a CPU: groups and forks.

    python -m benchmarks.host_work --out benchmarks/results/DATE-cpu-host-work.json

Kernels are not launched: the plug-in's launch is replaced by an empty function, and the engine's scheduler
has no device. So the times are those of everything before a launch. Each is the least of many batches,
because other processes only add to it. Garbage is not collected meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.documents import source_commit
from flashtile.engine.groups import PrefixGroups
from flashtile.engine.request import Request
from flashtile.engine.sampling_params import SamplingParams
from flashtile.engine.scheduler import Scheduler, SchedulerOutput
from flashtile.hardware import machine
from flashtile.integrations import paged_groups
from flashtile.integrations.paged import Step
from flashtile.kv_cache import BlockManager

SEQUENCES, BLOCK_SIZE, PROMPT = 256, 16, 1024
BATCHES = 60


def least(call: Callable[[], Any], calls: int) -> float:
    """Return the microseconds of a call, the least mean of ``calls`` calls."""
    return round(min(timeit.repeat(call, number=calls, repeat=BATCHES)) / calls * 1e6, 2)


def plugin_rows() -> Iterator[dict[str, Any]]:
    """Time how the plug-in finds the groups of a known step."""
    shared = paged_groups.SharedBlocks(SEQUENCES, BLOCK_SIZE, torch.device("cpu"))
    blocks = 2 * PROMPT // BLOCK_SIZE
    table, lengths = torch.ones((SEQUENCES, blocks), dtype=torch.int32), torch.full((SEQUENCES,), PROMPT)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32)
    most = paged_groups.MAX_GROUP_QUERIES
    sizes = SEQUENCES, table.stride(0), BLOCK_SIZE, most, paged_groups.MIN_SAVED_TOKENS
    launches: Any = shared._launches
    launches[sizes] = lambda *given: None
    step = Step(SEQUENCES, 1, starts, lengths, table, True)
    yield {
        "what": "plug-in: groups of a known step, launch stubbed",
        "us": least(lambda: shared.find(step), 200),
    }


def world() -> Scheduler:
    """Return a scheduler with room for all sequences."""
    blocks = 2 * SEQUENCES * PROMPT // BLOCK_SIZE
    manager = BlockManager(blocks, BLOCK_SIZE, max_sequences=SEQUENCES, max_seqlen=2 * PROMPT)
    return Scheduler(manager, SEQUENCES * PROMPT)


def ask(scheduler: Scheduler, number: int, answers: int) -> None:
    tokens = [7 * number + i for i in range(PROMPT)]
    params = SamplingParams(n=answers, max_tokens=PROMPT)
    scheduler.add(Request(str(number), number, None, tokens, params, max_outputs=PROMPT))


def receive(schedule: SchedulerOutput) -> None:
    """Append a token to each sequence of a step."""
    for entry in schedule.entries:
        for sequence in entry.samples:
            sequence.tokens.append(1)
            sequence.pending -= 1


def engine_rows() -> Iterator[dict[str, Any]]:
    """Time the steps of 32 prompts with 8 answers each, and the groups of such a step."""
    scheduler = world()
    for number in range(SEQUENCES // 8):
        ask(scheduler, number, 8)
    receive(scheduler.schedule())
    step = scheduler.schedule()
    groups = PrefixGroups(scheduler.manager, token_bytes=2**20)  # so that a level is worth it
    found, cascades = groups(step.entries)
    assert len(found) == SEQUENCES
    assert len(cascades) == 1
    yield {
        "what": "engine: groups of a step with the sequences of the last one",
        "us": least(lambda: groups(step.entries), 20),
    }
    fewer = step.entries[:-1]

    def change() -> None:
        groups(fewer)
        groups(step.entries)

    yield {
        "what": "engine: groups of a step that a sequence left or entered",
        "us": round(least(change, 10) / 2, 2),
    }

    # Each sequence takes a new block in one of BLOCK_SIZE steps, all in the same one.
    times: list[list[float]] = [[] for _ in range(BLOCK_SIZE)]
    for number in range(BLOCK_SIZE * BATCHES // 4):
        receive(step)
        begun = time.perf_counter()
        step = scheduler.schedule()
        times[number % BLOCK_SIZE].append((time.perf_counter() - begun) * 1e6)
    steps = sorted(map(min, times))
    yield {"what": "engine: a step of 256 sequences is scheduled", "us": round(steps[0], 2)}
    yield {"what": "engine: the same, with a new block for each sequence", "us": round(steps[-1], 2)}


def fork_rows() -> Iterator[dict[str, Any]]:
    """Time the step that completes a prompt and forks its answers. A fork is the difference to one answer."""
    times = {}
    for answers in (1, 8, 64, 256):
        of_steps = []
        for _ in range(BATCHES):
            scheduler = world()
            ask(scheduler, 0, answers)
            begun = time.perf_counter()
            schedule = scheduler.schedule()
            of_steps.append((time.perf_counter() - begun) * 1e6)
            assert len(schedule.entries[0].samples) == answers
        times[answers] = min(of_steps)
        forks = answers - 1
        row = {
            "what": f"engine: the step of a prompt of {PROMPT} tokens with {answers} answers",
            "us": round(times[answers], 2),
        }
        yield row | ({"us a fork": round((times[answers] - times[1]) / forks, 2)} if forks else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the numbers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    rows = [*plugin_rows(), *engine_rows(), *fork_rows()]
    for row in rows:
        print(row)
    head = {
        "schema": 1,
        "kind": "host_work",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": machine.versions(),
        "source": source_commit(),
        "device": machine.describe_device(torch.device("cpu")),
        "note": "Stubbed launches: no kernel is launched. Microseconds, the least of several batches, "
        "without garbage collection.",
    }
    if given.out is not None:
        lines = [json.dumps({key: value})[1:-1] + "," for key, value in head.items()]
        body = ",\n".join(f" {json.dumps(row)}" for row in rows)
        given.out.write_text("\n".join(["{", *lines, '"rows": [', body, "]", "}"]) + "\n")


if __name__ == "__main__":
    main()
