"""End-to-end benchmarks of engines: a decoding step at a batch size, and requests of different lengths.

The time of a step is the difference of two runs over the difference of their numbers of steps, which excludes
prompts and start-up. It is compared with the time to read the weights, keys and values.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from flashtile.hardware import machine, timing
from flashtile.tools.bench.engine_models import SERVED, lengths, tokens, vocabulary, write_model
from flashtile.tools.bench.engine_peers import CONTENDERS, Contender, Flashtile, seconds_of
from flashtile.tools.bench.linear_bench import read_tbps
from flashtile.tools.bench.workloads import SMALL_MODEL, select_models

NAME = "engine"
OURS = Flashtile.name


@dataclass(frozen=True)
class EngineWorkload:
    """``batch`` sequences of ``context`` tokens that decode together.

    With a context of 0, ``batch`` requests with prompts of 161 tokens on average. Their answers have
    ``steps`` tokens, or 338 on average if ``steps`` is 0.
    """

    model: str
    batch: int
    context: int = 1024
    steps: int = 64

    @property
    def name(self) -> str:
        kind = f"b{self.batch}-ctx{self.context}" if self.context else f"requests{self.batch}"
        return f"{NAME}-{self.model}-{kind}"

    @property
    def shape(self) -> str:
        return f"B {self.batch}, {self.context} tokens" if self.context else f"{self.batch} requests"

    def requests(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Return (prompts, number of tokens of each answer)."""
        if self.context:
            counts = [self.context - self.steps // 2] * self.batch
        else:
            counts = lengths(self.batch, 161 if self.model != SMALL_MODEL else 12, 2048, 1)
        answers = [self.steps] * self.batch if self.steps else lengths(self.batch, 338, 2048, 2)
        return [tokens(count, vocab_size, seed) for seed, count in enumerate(counts)], answers


WORKLOADS = tuple(
    EngineWorkload(*of)
    for of in (
        ("llama-2-7b", 1), ("llama-2-7b", 32), ("llama-3-8b", 1), ("llama-3-8b", 64),
        ("llama-3-8b", 256, 0, 200), ("llama-3-8b", 1000, 0, 0),
        (SMALL_MODEL, 2, 24, 6), (SMALL_MODEL, 3, 0, 5),
    )
)  # fmt: skip


def select(names: Sequence[str]) -> tuple[EngineWorkload, ...]:
    """Return the workloads named, see :func:`flashtile.tools.bench.workloads.select_models`."""
    return select_models(NAME, WORKLOADS, names)


def run(
    chosen: Sequence[EngineWorkload],
    device: torch.device,
    rounds: int,
    rep: float,
    names: Sequence[str] = (),
    after_cell: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure every workload with every named contender and return a document for JSON.

    Without names, all contenders that can run are measured. One contender is in memory at a time. ``rep``
    only applies to the measurement of the read bandwidth.
    """
    large = [workload.name for workload in chosen if workload.model != SMALL_MODEL]
    if large and device.type == "cpu":
        raise ValueError(f"device must be a GPU for {large[0]}, got cpu, where {NAME}-{SMALL_MODEL} runs")
    for name in names:
        if name not in (*CONTENDERS, "none"):
            raise ValueError(f"peer must be none or one of {', '.join(CONTENDERS)}, got {name!r}")
        reason = None if name == "none" else CONTENDERS[name]().unavailable(device)
        if reason is not None:
            raise ValueError(f"peer {name!r} cannot run here: {reason}")
    named = [kind for name, kind in CONTENDERS.items() if not names or name in (OURS, *names)]
    entrants = [kind for kind in named if kind().unavailable(device) is None]
    document: dict[str, Any] = {
        "kind": NAME,
        "versions": machine.versions(),
        "device": machine.describe_device(device),
        "source": machine.source_commit(),
        "read_tbps": read_tbps(device, rounds, rep),
        "cells": [{"workload": w.name, "results": {}} for w in chosen],
    }
    cells = dict(zip(chosen, document["cells"], strict=True))
    for model in dict.fromkeys(workload.model for workload in chosen):
        own = [workload for workload in chosen if workload.model == model]
        for kind in entrants:
            for workload, result in _measured(kind(), model, own, device, rounds):
                cells[workload]["results"][kind.name] = result
                after_cell(document)
            gc.collect()
            timing.release_memory(device)
    for workload, cell in cells.items():
        cell["floor_ms"] = floor_bytes(workload) / document["read_tbps"] * 1e-9
        compare(cell["results"])
    after_cell(document)
    return document


def _measured(
    contender: Contender, model: str, workloads: Sequence[EngineWorkload], device: torch.device, rounds: int
) -> list[tuple[EngineWorkload, dict[str, Any]]]:
    """Return the results of one contender, which is loaded once for all its workloads."""
    taken = [w for w in workloads if (contender.steps if w.context else contender.requests)]
    if not taken:
        return []
    found = []
    with tempfile.TemporaryDirectory() as place:
        try:
            folder = write_model(model, Path(place))
            contender.load(folder, model, device, max(w.batch * (w.context + w.steps) for w in taken))
        except Exception as error:
            return [(workload, _failed(error)) for workload in taken]
        for workload in taken:
            try:
                found.append((workload, measure(contender, workload, device, rounds)))
            except Exception as error:
                found.append((workload, _failed(error)))
    return found


def measure(
    contender: Contender, workload: EngineWorkload, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Measure a workload on a loaded contender."""
    prompts, answers = workload.requests(vocabulary(workload.model))
    if not workload.context:
        contender.generate(prompts[:4], [4] * len(prompts[:4]))  # compiles
        seconds = [seconds_of(contender, prompts, answers, device) for _ in range(rounds)]
        rate = sum(answers) / statistics.median(seconds)
        return {"status": "ok", "tokens_per_second": rate, "seconds": seconds, **contender.numbers()}
    short = [max(1, workload.steps // 8)] * workload.batch
    long = [short[0] + workload.steps] * workload.batch
    first = contender.generate(prompts, long)  # compiles, and captures
    contender.generate(prompts, short)
    times = [
        (seconds_of(contender, prompts, long, device) - seconds_of(contender, prompts, short, device))
        for _ in range(rounds)
    ]
    step = statistics.median(times) / workload.steps * 1e3
    all_rounds = [seconds / workload.steps * 1e3 for seconds in times]
    found: dict[str, Any] = {"status": "ok", "ms": step, "rounds_ms": all_rounds}
    if workload.model == SMALL_MODEL:
        found["tokens"] = first
    return {**found, "tokens_per_second": workload.batch / step * 1e3, **contender.numbers()}


def _failed(error: Exception) -> dict[str, Any]:
    lines = str(error).strip().splitlines()
    return {"status": "failed", "text": f"{type(error).__name__}: {lines[0][:200] if lines else ''}"}


def compare(results: dict[str, Any]) -> None:
    """Mark flashtile as wrong if its tokens differ from Transformers'.

    All contenders give the same tokens with the same weights in float32.
    """
    tokens_of = {name: found.pop("tokens") for name, found in results.items() if "tokens" in found}
    if tokens_of.get("transformers", tokens_of.get(OURS)) != tokens_of.get(OURS):
        results[OURS]["status"] = "wrong"
        results[OURS]["text"] = "tokens that are not Transformers'"


def floor_bytes(workload: EngineWorkload) -> float:
    """Bytes that a step must read in bf16: all weights except the embedding, and the keys and values."""
    if workload.model == SMALL_MODEL or not workload.context:
        return 0.0
    model, vocab_size, _ = SERVED[workload.model]
    products = model.layers * sum(rows * columns for rows, columns in model.products)
    head = vocab_size * model.num_heads_q * model.head_dim
    return 2.0 * (products + head) + workload.batch * workload.context * model.kv_bytes_per_token("bfloat16")


def table(document: dict[str, Any]) -> Table:
    """Table of milliseconds per step with the ratio to the time of reading, or of new tokens per second."""
    shown = Table(title=f"{document['device']['name']}: ms a step (times that of reading), or new tokens/s")
    names = list(dict.fromkeys(name for cell in document["cells"] for name in cell["results"]))
    for heading in ("workload", *names):
        shown.add_column(heading, justify="left" if heading == "workload" else "right")
    for cell in document["cells"]:
        texts = []
        for name in names:
            result = cell["results"].get(name, {"status": "-"})
            if result["status"] != "ok":
                texts.append(result.get("text", result["status"]))
            elif "ms" in result:
                floor = cell.get("floor_ms")
                texts.append(f"{result['ms']:.4g}" + (f" ({result['ms'] / floor:.2f})" if floor else ""))
            else:
                texts.append(f"{result['tokens_per_second']:,.0f}")
        shown.add_row(cell["workload"], *texts)
    return shown
