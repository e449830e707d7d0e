"""Measure the host's part of a step of 256 sequences on a CPU: groups and forks.

    python -m benchmarks.host_work --out benchmarks/results/DATE-cpu-host-work.json

Kernels are not launched. The plug-in's launches are replaced by empty functions, and vLLM by the tests'
modules with its interface. The scheduler has no device, and where the whole engine is measured, its model and
its choice of tokens are functions that return zeros. So the times are those of everything but launches. Each
is the least of many batches, because other processes only add to it. Garbage is not collected meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.suite.documents import source_commit
from flashtile.engine import LLM, runner
from flashtile.engine.groups import PrefixGroups
from flashtile.engine.request import Request
from flashtile.engine.sampling_params import SamplingParams
from flashtile.engine.scheduler import Scheduler, SchedulerOutput
from flashtile.hardware import machine
from flashtile.integrations import paged_groups
from flashtile.integrations.paged import Step
from flashtile.kv_cache import BlockManager
from flashtile.tools.demo.llama import Llama, save_llama, sized

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


def launch_nothing(*given: Any) -> None:
    """Take the place of a launch. A mock would take longer than what is measured."""


def builder_rows() -> Iterator[dict[str, Any]]:
    """Time the whole metadata of a step of single tokens, as vLLM asks for it, without groups and with them.

    A step is not known if no step before had as many sequences. Its launches are then made anew, of kernels
    that are compiled.
    """
    from flashtile.backends.common.launch import CachedLaunch  # imports triton

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
    stand_in = importlib.import_module("vllm_stand_in")
    for groups in "01":
        with (
            mock.patch.dict(os.environ, FLASHTILE_CASCADE_ATTENTION=groups),
            mock.patch.object(CachedLaunch, "__call__", launch_nothing),
            stand_in.plugin(stand_in.modules_of(list(stand_in.RECORD)[-1])) as backend,
        ):
            layers = {"layer": SimpleNamespace(impl=backend.Impl(32, 128, 128**-0.5, 8))}
            config = SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=SEQUENCES),
                compilation_config=SimpleNamespace(static_forward_context=layers), speculative_config=None,
            )  # fmt: skip
            spec = SimpleNamespace(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128)
            builder = backend.Builder(spec, list(layers), config, torch.device("cpu"))
            starts, lengths = torch.arange(SEQUENCES + 1).int(), torch.full((SEQUENCES,), PROMPT).int()
            table = torch.ones((SEQUENCES, 2 * PROMPT // BLOCK_SIZE), dtype=torch.int32)
            common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
                seq_lens_cpu_upper_bound=lengths, num_reqs=SEQUENCES, num_actual_tokens=SEQUENCES,
                max_query_len=1, max_seq_len=PROMPT, block_table_tensor=table,
                slot_mapping=torch.arange(SEQUENCES), causal=True,
            )  # fmt: skip
            build = partial(builder.build, 0, common)
            assert (build().groups is None) == (groups == "0")
            if groups == "0":
                yield {"what": "plug-in: metadata of a step without groups", "us": least(build, 200)}
                continue
            yield {
                "what": "plug-in: metadata of a known step with groups, launches stubbed",
                "us": least(build, 200),
            }
            known = builder._shared._launches

            def build_anew(build: Callable[[], Any] = build, known: Any = known) -> None:
                known.clear()
                build()

            yield {
                "what": "plug-in: metadata of a step that is not known with groups, launches stubbed",
                "us": least(build_anew, 100),
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
            sequence.append(1)
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
    """Time the plan of a step that completes a prompt and forks its answers.

    A fork is the difference to one answer.
    """
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
            "what": f"engine: the step of a prompt of {PROMPT} tokens with {answers} answers is scheduled",
            "us": round(times[answers], 2),
        }
        yield row | ({"us a fork": round((times[answers] - times[1]) / forks, 2)} if forks else {})


class StubbedEngine:
    """An engine whose model and draws return zeros, and the times at which its steps reach the model.

    It launches each step before it reads the results of the one before.
    """

    def __init__(self, folder: Path) -> None:
        self.engine = LLM(
            folder, device="cpu", block_size=BLOCK_SIZE, max_num_seqs=SEQUENCES, warmup=False,
            num_gpu_blocks_override=8 * SEQUENCES, async_scheduling=True, skip_tokenizer_init=True,
        ).engine  # fmt: skip
        self.times = list[float]()
        self.num_requests = 0
        run: Any = self.engine.runner
        hidden, logits = torch.zeros(PROMPT, 64), torch.zeros(SEQUENCES, 256)

        def compute(views: Any, form: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return hidden[: form.tokens]

        run._compute, run.model.logits = compute, lambda rows: logits[: len(rows)]

    def microseconds(self, answers: int) -> list[float]:
        """Return the time until a prompt's step reaches the model, and the times between the next steps."""
        self.num_requests += 1
        name, params = str(self.num_requests), SamplingParams(n=answers, max_tokens=PROMPT, ignore_eos=True)
        self.engine.add_request(name, [self.num_requests % 256] * PROMPT, params)
        self.times = [time.perf_counter()]
        for _ in range(5):
            self.engine.step()
        self.engine.abort(name)
        return [(after - before) * 1e6 for before, after in itertools.pairwise(self.times)]


def launch_rows() -> Iterator[dict[str, Any]]:
    """Time the engine's host work between launches, for a prompt with one answer or many.

    The first launch is that of the prompt's step, the second that of the answers' first own step. A later
    step has the same sequences, so it costs nothing for forks. A fork is the difference to one answer.
    """
    tokens, best = torch.zeros(SEQUENCES, dtype=torch.int64), torch.zeros(SEQUENCES)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(runner, "choose", lambda rows, *given: (tokens[: len(rows)], best[: len(rows)])),
    ):
        model = Llama(sized(layers=2, heads=4, embed=64))
        save_llama(model, Path(folder), max_position_embeddings=2 * PROMPT)
        stubbed, alone = StubbedEngine(Path(folder)), dict[str, float]()
        for answers in (1, 8, 64, 256):
            runs = [stubbed.microseconds(answers) for _ in range(BATCHES)]
            prompt, first, *later = map(min, zip(*runs, strict=True))
            for what, found in (
                ("until the launch of a prompt's step", prompt),
                ("from there until the launch of the answers' first own step", first),
                ("between the launches of later steps", min(later)),
            ):
                row = {"what": f"engine: {what}, {answers} answers", "us": round(found, 2)}
                fork = (found - alone.setdefault(what, found)) / max(1, answers - 1)
                yield row | ({"us a fork": round(fork, 2)} if answers > 1 else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the numbers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    rows = [*plugin_rows(), *builder_rows(), *engine_rows(), *fork_rows(), *launch_rows()]
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
