"""Measures the engine on a GPU, part by part; the results of all parts are printed at the end.

    python -m benchmarks.engine                               # all parts of one model on one GPU
    python -m benchmarks.engine --parts kernels,waits         # some parts
    python -m benchmarks.engine --model llama-2-7b --parts decode --batches 1,32
    torchrun --nproc-per-node 2 -m benchmarks.engine --parts decode,requests   # tensor parallel on two GPUs

Weights are random, with the shapes of real models. `python -m benchmarks -w engine` compares with
Transformers.
The parts:

    decode    ms per step by batch size, the time to read weights and cache, the share of host waits
    kernels   kernels per layer and per step, the GPU's idle time, and the kernels that take the most time
    waits     places where the host synchronises with the device while the batch changes (expected: none)
    prompt    host and device time of a step with a whole prompt, for new shapes and for known ones
    mixed     a step with a prompt's chunk and single tokens together, and with each of them alone
    prefix    time to the first token with nine tenths of the prompt in the prefix cache, and without
    groups    sampled answers of shared prompts: tokens per second with groups and without, in turns
    sampled   us of the choice of tokens and ms of a step, greedy and with each parameter of sampling
    guesses   speculative decoding: ms per step, and tokens per second on a text that repeats itself
    requests  new tokens per second for 1,000 requests of ShareGPT-like lengths
    start     seconds from the start of a process to its first token
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.suite.engine_bench import (
    SERVED,
    EngineWorkload,
    floor_bytes,
    measure,
    tokens,
    write_model,
)
from benchmarks.suite.engine_peers import Flashtile
from benchmarks.suite.model_bench import SMALL_MODEL
from flashtile import SamplingParams
from flashtile.engine import groups as prefix_groups
from flashtile.engine.groups import Cascades
from flashtile.engine.request import Sequence
from flashtile.engine.runner import InFlight, Runner
from flashtile.engine.scheduler import Entry
from flashtile.hardware import machine

READ = 4.47e12
"""Read bandwidth of one H200 in bytes per second."""
Rows = list[dict[str, Any]]


class Stopped(BaseException):
    """Raised if a part takes too long.

    It derives from BaseException, because the engine treats an Exception as a failed step and goes on.
    """


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`Stopped` in the block after ``seconds``."""

    def stop(signum: int, frame: Any) -> None:
        raise Stopped(f"after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """Loads the model with the options of a part, and keeps it while the next part has the same options."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.device = machine.find_device(options.device)
        self.vocab_size = SERVED[options.model][1]
        self._loaded: tuple[Any, Flashtile] | None = None

    def engine(self, **more: Any) -> Flashtile:
        key = json.dumps(more, sort_keys=True, default=str)
        if self._loaded is not None and self._loaded[0] == key:
            return self._loaded[1]
        self._loaded = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        options = self.options
        found = Flashtile(
            max_num_seqs=options.seqs, max_num_batched_tokens=8192, enforce_eager=options.eager,
            kv_cache_dtype=options.kv_cache_dtype, quantization=options.quantization,
            tensor_parallel_size=int(os.environ.get("WORLD_SIZE", "1")),
            batch_invariant=options.batch_invariant, **more,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            found.load(write_model(options.model, Path(place)), options.model, self.device, 0)
        self._loaded = key, found
        return found

    def prompts(self, count: int, length: int, first: int = 0) -> list[list[int]]:
        return [tokens(length, self.vocab_size, first + seed) for seed in range(count)]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def decode(bench: Bench) -> Rows:
    rows = []
    for batch in bench.options.batches:
        workload = EngineWorkload(bench.options.model, batch, bench.options.context, bench.options.steps)
        found = measure(bench.engine(), workload, bench.device, 2)
        floor = floor_bytes(workload) / READ * 1e3 / int(os.environ.get("WORLD_SIZE", "1"))
        rows.append(
            {"batch": batch, "ms": found["ms"], "floor_ms": floor,
             "tokens_per_second": found["tokens_per_second"], "host_waits": found["host_waits"]}
        )  # fmt: skip
    return rows


def kernels(bench: Bench) -> Rows:
    """Count kernels in 20 steps of the largest batch, and time the replay of its CUDA graph alone.

    The graph reads the buffers of the last step, so it is replayed before the sequences are aborted.
    """
    from torch.profiler import ProfilerActivity, profile

    batch, steps = max(bench.options.batches), 20
    engine = bench.engine().llm.engine
    for i, prompt in enumerate(bench.prompts(batch, bench.options.context)):
        engine.add_request(f"k{i}", prompt, greedy(200))
    while any(sequence.wanted > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    for _ in range(5):
        engine.step()
    bench.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        bench.synchronize()
        seconds = time.perf_counter() - begun
    graph = next((run for form, run in engine.runner.graphs.items() if form.tokens == batch), None)
    graph_ms = None
    if graph is not None:
        begun = time.perf_counter()
        for _ in range(50):
            graph()
        bench.synchronize()
        graph_ms = (time.perf_counter() - begun) / 50 * 1e3
    engine.abort(list(engine.requests))
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        names[event.name] += event.device_time
        counts[event.name] += 1
    layers = len(engine.runner.model.layers)
    busy, end = 0.0, -1.0  # with dependent launches, kernels overlap: count the overlap once
    for first, last in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    rows: Rows = [
        {"kernel": "all", "a_step": len(events) / steps, "a_layer": len(events) / steps / layers,
         "us_a_step": busy / steps, "idle": 1 - busy * 1e-6 / seconds, "graph_ms": graph_ms}
    ]  # fmt: skip
    for name, time_of in names.most_common(14):
        rows.append({"kernel": name[:70], "a_step": counts[name] / steps, "us_a_step": time_of / steps})
    return rows


def waits(bench: Bench) -> Rows:
    """Find synchronisations while requests of different lengths start and end, so the batch changes often."""
    llm = bench.engine().llm
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=3 + i % 17) for i in range(48)]
    prompts = [prompt[: 20 + 13 * i % 300] for i, prompt in enumerate(bench.prompts(48, 320))]
    llm.generate(prompts, params)  # compiles and captures
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm.generate(prompts, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{one.filename}:{one.lineno}" for one in caught if "synchron" in str(one.message))
    return [{"place": place, "times": count} for place, count in places.most_common()] or [
        {"place": "none", "times": 0}
    ]


def prompt(bench: Bench) -> Rows:
    """Time a step with a whole prompt, until the host has launched it and until the device is done."""
    engine, rows = bench.engine().llm.engine, []
    engine.overlap = True
    most = 32 if bench.options.model == SMALL_MODEL else 4096
    shapes = ((most, "new"), (most, "known"), (most - 5, "new"), (most // 8, "new"), (most // 8, "known"))
    for length, kind in shapes:
        engine.add_request("p", bench.prompts(1, length)[0], greedy(1))
        bench.synchronize()
        begun = time.perf_counter()
        engine.step()
        launched = time.perf_counter() - begun
        bench.synchronize()
        seconds = time.perf_counter() - begun
        while engine.has_unfinished:
            engine.step()
        times = {"launched_ms": launched * 1e3, "done_ms": seconds * 1e3}
        rows.append({"tokens": length, "shape": kind, **times})
    return rows


def mixed(bench: Bench) -> Rows:
    """Time steps of single tokens with and without a prompt's chunk, and a chunk alone.

    In a mixed step, the kernel for the chunk also computes the attention of the single tokens.
    """
    engine, batch = bench.engine().llm.engine, max(bench.options.batches)
    chunk = 16 if bench.options.model == SMALL_MODEL else 512
    engine.overlap = False
    for i, one in enumerate(bench.prompts(batch, bench.options.context)):
        engine.add_request(f"m{i}", one, greedy(64))
    while any(sequence.wanted > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()

    def seconds(prompt: list[int] | None) -> float:
        if prompt is not None:
            engine.add_request("chunk", prompt, greedy(1))
        bench.synchronize()
        begun = time.perf_counter()
        engine.step()
        bench.synchronize()
        return time.perf_counter() - begun

    times = [(seconds(None), seconds(bench.prompts(1, chunk, 500 + i)[0])) for i in range(6)][1:]
    engine.abort(list(engine.requests))
    alone = [seconds(bench.prompts(1, chunk, 600 + i)[0]) for i in range(6)][1:]
    engine.overlap = bench.device.type == "cuda"
    singles, both = (sorted(column)[len(column) // 2] for column in zip(*times, strict=True))
    return [
        {"sequences": batch, "chunk": chunk, "singles_ms": singles * 1e3,
         "chunk_ms": sorted(alone)[len(alone) // 2] * 1e3, "both_ms": both * 1e3}
    ]  # fmt: skip


def prefix(bench: Bench) -> Rows:
    most = 60 if bench.options.model == SMALL_MODEL else 4000
    found, rows = bench.engine(), []
    llm = found.llm
    llm.engine.scheduler.prefix_caching = True
    (common,) = bench.prompts(1, most * 9 // 10, 900)
    for round_ in range(3):
        times = []
        for seed, begin in ((0, None), (1, common), (2, common)):
            (own,) = bench.prompts(1, most, 10 * round_ + seed + 1000)
            given = own if begin is None else [*begin, *own[len(begin) :]]
            bench.synchronize()
            start = time.perf_counter()
            (output,) = llm.generate([given], greedy(1))
            times.append((time.perf_counter() - start, output.num_cached_tokens))
        rows.append({"without_ms": times[0][0] * 1e3, "with_ms": times[2][0] * 1e3, "found": times[2][1]})
    llm.engine.scheduler.prefix_caching = False
    return rows


def groups(bench: Bench) -> Rows:
    """Time steps of sampled answers of shared prompts with groups and without, in turns.

    ``saved`` is the number of tokens that groups save a step from reading, and ``gain`` the time without
    groups by the time with them. Groups are formed however little they save, so the rows tell what
    ``MIN_SAVED_BYTES`` must be: the bytes in a layer of the least ``saved`` whose ``gain`` is above 1. All
    prompts begin with ``common`` tokens, which the prefix cache finds. With ``chunk``, each step also
    computes a prompt of so many tokens. ``host_us`` is the time in which the scheduler looks for groups. In
    the second shape nothing is shared.
    """
    shapes = [
        # (prompts, answers, tokens, common, chunk)
        (32, 8, 1024, 0, 0), (256, 1, 1024, 0, 0), (8, 16, 4096, 0, 0), (31, 8, 1024, 0, 512),
        (31, 8, 320, 0, 512), (32, 8, 64, 0, 0), (32, 8, 128, 0, 0), (32, 8, 256, 0, 0), (1, 8, 256, 0, 0),
        (1, 8, 1024, 0, 0), (1, 8, 4096, 0, 0), (32, 8, 1024, 512, 0), (8, 8, 256, 0, 0), (128, 2, 256, 0, 0),
    ]  # fmt: skip
    steps, rounds = 24, 6
    if bench.options.model == SMALL_MODEL:
        steps, rounds, shapes = 2, 2, [(2, 3, 40, 0, 0), (6, 1, 20, 0, 0), (2, 2, 40, 32, 80)]
    llm = bench.engine(cascade_attention=True).llm
    engine, scheduler = llm.engine, llm.engine.scheduler
    finder, layers = scheduler.groups, len(llm.model_config.windows)
    assert finder is not None
    names, host, rows = (f"chunk{i}" for i in itertools.count()), list[float](), list[dict[str, Any]]()

    def find(entries: list[Entry]) -> tuple[list[Entry], Cascades]:
        begun = time.perf_counter()
        found = finder(entries)
        host.append(time.perf_counter() - begun)
        return found

    def step_seconds(way: Any, chunk: list[int]) -> float:
        scheduler.groups = way
        for i in range(-3, steps):  # the first steps capture graphs
            if i == 0:
                bench.synchronize()
                begun = time.perf_counter()
            if chunk:
                engine.add_request(next(names), chunk, greedy(1))
            engine.step()
        bench.synchronize()
        return (time.perf_counter() - begun) / steps

    for prompts, answers, length, common, chunk in shapes:
        scheduler.groups, scheduler.prefix_caching = None, common > 0
        (system,) = bench.prompts(1, common, 700)
        if common:
            llm.generate([system], greedy(1))
        for i, own in enumerate(bench.prompts(prompts, length - common, 701)):
            params = SamplingParams(n=answers, seed=i, max_tokens=4000, ignore_eos=True)
            engine.add_request(f"g{i}", [*system, *own], params)
        while any(sequence.wanted > 1 for sequence in scheduler.running) or scheduler.waiting:
            engine.step()
        (given,) = bench.prompts(1, chunk, 699)
        read, before = finder.num_read, finder.num_saved
        times: dict[bool, list[float]] = {False: [], True: []}
        host.clear()
        with mock.patch.object(prefix_groups, "MIN_SAVED_BYTES", 1):
            for turn in range(rounds):
                for grouped in (turn % 2 > 0, turn % 2 == 0):
                    times[grouped].append(step_seconds(find if grouped else None, given))
        gains = sorted(without / used for without, used in zip(times[False], times[True], strict=True))
        saved = finder.num_saved - before
        rows.append(
            {"prompts": prompts, "answers": answers, "tokens": length, "common": common, "chunk": chunk,
             "saved": saved / len(host) / layers, "share_not_read": saved / (finder.num_read - read),
             "host_us": statistics.median(host) * 1e6,
             **{f"tokens_per_second_{name}": prompts * answers / statistics.median(times[grouped])
                for name, grouped in (("without", False), ("with", True))},
             "gain": statistics.median(gains), "least_gain": gains[0], "largest_gain": gains[-1]}
        )  # fmt: skip
        engine.abort(list(engine.requests))
        while engine.has_unfinished:
            engine.step()
    scheduler.groups, scheduler.prefix_caching = finder, False
    return rows


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "temperature": {}, "top_k": {"top_k": 50}, "top_k 5000": {"top_k": 5000},
    "top_p": {"top_p": 0.9}, "min_p": {"min_p": 0.05}, "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {token: 1.0 for token in range(100)}},
    "greedy with penalties": {"temperature": 0, "presence_penalty": 0.5},
}  # fmt: skip


def sampled(bench: Bench) -> Rows:
    """Time the choice of tokens for logits of two shapes, and steps of the largest batch, for each parameter.

    ``flat_us`` is the device's time for normally distributed logits, of which top-p keeps tens of thousands;
    ``peaked_us`` that for logits of which it keeps a few, as of trained models. ``over_greedy`` is how much
    longer it takes than for greedy rows. In the last row, the sequences have all parameters in turn.
    """
    llm, batch = bench.engine().llm, max(bench.options.batches)
    engine, runner = llm.engine, llm.engine.runner
    rows: Rows = []
    logits = torch.randn(batch, bench.vocab_size, device=bench.device).to(runner.model.embedding.dtype)
    peaked, positions = logits * 5, torch.zeros(batch, dtype=torch.int32, device=bench.device)
    table_rows = torch.arange(batch, device=bench.device)
    every = list(SAMPLING.values())
    for name, given in [*SAMPLING.items(), ("all in turn", None)]:
        for i, prompt in enumerate(bench.prompts(batch, bench.options.context)):
            own = every[i % len(every)] if given is None else given
            params = SamplingParams(**{"seed": i, "max_tokens": 60, "ignore_eos": True, **own})
            engine.add_request(f"s{i}", prompt, params)
        while any(one.wanted > 1 for one in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        for _ in range(5):
            engine.step()
        bench.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            engine.step()
        bench.synchronize()
        row: dict[str, Any] = {
            "sampling": name,
            "batch": batch,
            "step_ms": (time.perf_counter() - begun) / 20 * 1e3,
        }
        samples = list(engine.scheduler.running)
        for shape, tensor in (("flat", logits), ("peaked", peaked)):
            begin_draw = functools.partial(draw, runner, samples, tensor, table_rows, positions)
            row[f"{shape}_us"] = found = device_seconds(begin_draw, bench) * 1e6
            row[f"{shape}_over_greedy"] = found - (rows or [row])[0][f"{shape}_us"]
        rows.append(row)
        engine.abort(list(engine.requests))
        while engine.has_unfinished:
            engine.step()
    return rows


@torch.inference_mode()
def draw(runner: Runner, samples: list[Sequence], logits: Tensor, rows: Tensor, positions: Tensor) -> None:
    runner.draw(InFlight([], torch.empty(0)), samples, logits, rows, positions)


def device_seconds(call: Callable[[], Any], bench: Bench, count: int = 20) -> float:
    """Return the seconds that the kernels and copies of a call take on the device, or a CPU for the call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    bench.synchronize()
    begun = time.perf_counter()
    if bench.device.type != "cuda":
        for _ in range(count):
            call()
        return (time.perf_counter() - begun) / count
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            call()
        bench.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in events) * 1e-6 / count


def guesses(bench: Bench) -> Rows:
    """Time speculative decoding.

    A model with random weights does not repeat itself. For n-gram look-up, only one token is therefore
    allowed.
    """
    rows: Rows = []
    length = 24 if bench.options.model == SMALL_MODEL else 256
    only = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, allowed_token_ids=[7])
    ways: list[tuple[str, Any, SamplingParams]] = [
        ("none", None, only), ("look-up, all right", {"method": "ngram", "num_speculative_tokens": 4}, only)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        if bench.options.draft:
            folder = write_model(bench.options.draft, Path(place))
            draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
            ways += [
                ("draft, all wrong", draft, greedy(length)),
                ("draft, a tree of 12, all wrong", {**draft, "tree_width": 3}, greedy(length)),
            ]
        for name, config, params in ways:
            llm = bench.engine(**({} if config is None else {"speculative_config": config})).llm
            for batch in sorted({1, min(16, max(bench.options.batches))}):
                given = bench.prompts(batch, min(length, 64))
                llm.generate(given, params)
                before, begun = llm.engine.num_guessed_tokens, time.perf_counter()
                llm.generate(given, params)
                seconds = time.perf_counter() - begun
                guessed = llm.engine.num_guessed_tokens - before
                steps = length - guessed / batch
                rows.append(
                    {"guesses": name, "batch": batch, "tokens_per_second": batch * length / seconds,
                     "ms_a_step": seconds / steps * 1e3, "tokens_a_step": length / steps}
                )  # fmt: skip
            del llm  # frees its memory for the next engine
    return rows


def requests(bench: Bench) -> Rows:
    workload = EngineWorkload(bench.options.model, bench.options.requests, 0, 0)
    return [measure(bench.engine(), workload, bench.device, 1)]


def start(bench: Bench) -> Rows:
    code = (
        "import sys, flashtile; llm = flashtile.LLM(sys.argv[1], load_format='dummy', "
        "skip_tokenizer_init=True, device=sys.argv[2], warmup=False); "
        "llm.generate([[1, 2, 3]], flashtile.SamplingParams(max_tokens=1))"
    )
    bench._loaded = None
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for run in ("first", "second"):
        with tempfile.TemporaryDirectory() as place:
            folder = write_model(bench.options.model, Path(place))
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", code, str(folder), str(bench.device)], check=True)
            rows.append({"run": run, "seconds": time.perf_counter() - begun})
    return rows


PARTS: dict[str, Callable[[Bench], Rows]] = {
    part.__name__: part
    for part in (decode, kernels, waits, prompt, mixed, prefix, groups, sampled, guesses, requests, start)
}
ON_A_GPU = ("kernels", "waits")


def table(rows: Rows) -> str:
    """Return the rows as text with aligned columns; numbers have four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[shown(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", default="llama-3-8b", help=f"of {', '.join(SERVED)}")
    parser.add_argument("--draft", default="llama-3.2-1b", help="a model that guesses, '' for none")
    parser.add_argument("--device", default=None)
    parser.add_argument("--limit", type=float, default=90, help="seconds of each part")
    parser.add_argument("--batches", default="1,64", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seqs", type=int, default=256, help="sequences computed at a time")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default=None, help="fp8")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--batch-invariant", action="store_true", help="not for the parts groups and guesses")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = options.parts.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {sorted(unknown)}")
    if "LOCAL_RANK" in os.environ and options.device is None and torch.cuda.is_available():
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
    speaks = os.environ.get("RANK", "0") == "0"
    bench = Bench(options)
    found: dict[str, Rows] = {}
    for name in chosen:
        if name in ON_A_GPU and bench.device.type != "cuda":
            continue
        if speaks:
            print(f"{name} ...", flush=True)
        try:
            with limited(options.limit):
                found[name] = PARTS[name](bench)
        except (Exception, Stopped):
            traceback.print_exc()
            bench._loaded = None
        if speaks and options.json is not None:  # the run may be killed in a later part
            document = {"versions": machine.versions(), "devices": machine.devices(), "parts": found}
            options.json.write_text(json.dumps(document, indent=1))
    if not speaks:
        return
    for name, rows in reversed(found.items()):
        print(f"\n{options.model}: {name}\n{table(rows)}")


if __name__ == "__main__":
    main()
