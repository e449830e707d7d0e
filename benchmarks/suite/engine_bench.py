"""End-to-end benchmarks of engines: decoding steps at a batch size, and requests of different lengths.

Two runs with different numbers of steps are timed. The time per step is the difference of their times,
divided by the difference of their numbers of steps. It excludes prompts and start-up. It is compared with the
time to read the weights, keys and values from memory.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.suite.engine_peers import CONTENDERS, Contender, Flashtile, seconds_of
from benchmarks.suite.model_bench import SMALL_MODEL, cells_table, check_peers, new_document
from benchmarks.suite.timing import release_memory
from flashtile.engine.config import read_config
from flashtile.engine.weights import EMBEDDING, parameters, random_weights
from flashtile.learn.io_model.models import Model, find_model

NAME = "engine"
OURS = Flashtile.name


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA2_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DRAFT = Model("Llama-3.2-1B", 16, 32, 8, 64, 8192, 1.24e9, 8192, "Meta 2024, the model card of Llama 3.2")
"""Draft model for Llama-3-8B."""
SMALL = Model("Small", 2, 4, 4, 16, 160, 1.2e5, 256, "ours")
"""Model with fixed weights and a byte-level tokenizer; all engines must give the same tokens with it."""
QWEN = Model("Qwen3-0.6B", 28, 16, 8, 128, 3072, 0.6e9, 40960, "Qwen 2025, arXiv:2505.09388")
OF_QWEN = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
"""What the configuration of Qwen3-0.6B has besides its sizes."""
SERVED: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "llama-2-7b": (find_model("llama-2-7b"), 32000, LLAMA2_ROPE),
    "llama-3-8b": (find_model("llama-3-8b"), 128256, LLAMA3_ROPE),
    "llama-3.2-1b": (DRAFT, 128256, {**LLAMA3_ROPE, "factor": 32.0}),
    "qwen3-0.6b": (QWEN, 151936, {"rope_type": "default", "rope_theta": 1000000.0}),
    SMALL_MODEL: (SMALL, 256, LLAMA2_ROPE),
}
"""(sizes, vocabulary size, RoPE parameters) by name of the model."""


def write_model(name: str, folder: Path, weights: bool = False) -> Path:
    """Write a model's configuration to ``folder`` and return ``folder``.

    Random weights are written with ``weights``, and for the small model, which has a byte-level tokenizer,
    too. For other models each engine makes random weights.
    """
    model, vocab_size, rope = SERVED[name]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
        "dtype": "float32" if model is SMALL else "bfloat16", "eos_token_id": None, "bos_token_id": None,
        "tie_word_embeddings": model is DRAFT, "vocab_size": vocab_size,
        "hidden_size": model.num_heads_q * model.head_dim, "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers, "num_attention_heads": model.num_heads_q,
        "num_key_value_heads": model.num_heads_kv, "head_dim": model.head_dim,
        "max_position_embeddings": model.longest, "rope_parameters": rope,
        **(OF_QWEN if model is QWEN else {}),
    }  # fmt: skip
    if weights:  # else the likeliest token would be the last one again, whatever came before it
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    if model is SMALL or weights:
        from safetensors.torch import save_file

        found = read_config(folder)
        device = torch.device("cuda" if weights and torch.cuda.is_available() else "cpu")
        drawn = random_weights(found, device, getattr(torch, str(config["dtype"])))
        save_file({name: drawn(name) for name in parameters(found)}, folder / "model.safetensors")
    if model is SMALL:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return folder


def tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Return ``count`` random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


def lengths(count: int, mean: float, most: int, seed: int) -> list[int]:
    """Return log-normal lengths (sigma 1) from 1 to ``most``, similar to the lengths in ShareGPT."""
    draw = random.Random(seed)
    return [min(most, max(1, round(draw.lognormvariate(math.log(mean) - 0.5, 1.0)))) for _ in range(count)]


def sharegpt_lengths(count: int) -> tuple[list[int], list[int]]:
    """Return the lengths of ``count`` prompts, 161 tokens on average, and of their answers, 338."""
    return lengths(count, 161, 2048, 1), lengths(count, 338, 2048, 2)


@dataclass(frozen=True)
class EngineWorkload:
    """A workload of an engine: decoding steps, or requests of different lengths.

    With a ``context``, ``batch`` sequences of about ``context`` tokens decode together for ``steps`` steps.
    With a context of 0, the workload is ``batch`` requests with prompts of 161 tokens on average. Their
    answers then have ``steps`` tokens, or 338 on average if ``steps`` is 0.
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
        """Return (prompts as token ids, number of new tokens of each answer)."""
        counts, answers = sharegpt_lengths(self.batch)
        if self.context:
            counts = [self.context - self.steps // 2] * self.batch
        elif self.model == SMALL_MODEL:
            counts = lengths(self.batch, 12, 2048, 1)
        answers = [self.steps] * self.batch if self.steps else answers
        return [tokens(count, vocab_size, seed) for seed, count in enumerate(counts)], answers


WORKLOADS = tuple(
    EngineWorkload(*of)
    for of in (
        ("llama-2-7b", 1), ("llama-2-7b", 32), ("llama-3-8b", 1), ("llama-3-8b", 64),
        ("llama-3-8b", 256, 0, 200), ("llama-3-8b", 1000, 0, 0),
        (SMALL_MODEL, 2, 24, 6), (SMALL_MODEL, 3, 0, 5),
    )
)  # fmt: skip


def run(
    chosen: Sequence[EngineWorkload],
    device: torch.device,
    rounds: int,
    rep: float,
    names: Sequence[str] = (),
    after_cell: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure every workload with every named contender and return a document that is ready for JSON.

    Without names, all contenders that can run are measured. One contender is in memory at a time. ``rep``
    (milliseconds) and ``rounds`` also apply to the measurement of the read bandwidth. After each result,
    ``after_cell`` is called with the unfinished document.

    Raises:
        ValueError: a name is unknown, a named contender cannot run here, or a large model is chosen on a CPU.
    """
    large = [workload.name for workload in chosen if workload.model != SMALL_MODEL]
    if large and device.type == "cpu":
        raise ValueError(f"device must be a GPU for {large[0]}, got cpu, where {NAME}-{SMALL_MODEL} runs")
    check_peers(names, CONTENDERS)
    for name in names:
        reason = None if name == "none" else CONTENDERS[name]().unavailable(device)
        if reason is not None:
            raise ValueError(f"peer {name!r} cannot run here: {reason}")
    named = [kind for name, kind in CONTENDERS.items() if not names or name in (OURS, *names)]
    entrants = [kind for kind in named if kind().unavailable(device) is None]
    cells: dict[EngineWorkload, dict[str, Any]] = {w: {"workload": w.name, "results": {}} for w in chosen}
    document = new_document(NAME, device, rounds, rep, list(cells.values()))
    for model in dict.fromkeys(workload.model for workload in chosen):
        own = [workload for workload in chosen if workload.model == model]
        for kind in entrants:
            for workload, result in _measured(kind(), model, own, device, rounds):
                cells[workload]["results"][kind.name] = result
                after_cell(document)
            gc.collect()
            release_memory(device)
    for workload, cell in cells.items():
        cell["floor_ms"] = floor_bytes(workload) / document["read_tbps"] * 1e-9
        compare(cell["results"])
    after_cell(document)
    return document


def _measured(
    contender: Contender, model: str, workloads: Sequence[EngineWorkload], device: torch.device, rounds: int
) -> list[tuple[EngineWorkload, dict[str, Any]]]:
    """Load the model once, and return (workload, result) of each workload that the contender runs."""
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
    """Measure a workload on a loaded contender: tokens per second, and milliseconds per decoding step."""
    prompts, answers = workload.requests(SERVED[workload.model][1])
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
    """Mark flashtile's result as wrong if its tokens differ from those of Transformers.

    Only results of the small model have tokens, because its weights are the same in all contenders and in
    float32. Other results are not compared.
    """
    tokens_of = {name: found.pop("tokens") for name, found in results.items() if "tokens" in found}
    if tokens_of.get("transformers", tokens_of.get(OURS)) != tokens_of.get(OURS):
        results[OURS]["status"] = "wrong"
        results[OURS]["text"] = "tokens that are not Transformers'"


def floor_bytes(workload: EngineWorkload) -> float:
    """Return the number of bytes that a decoding step must read.

    The step reads the keys, the values, and all weights except the embedding, in bf16. The result is 0 for
    the small model, and for workloads that measure whole requests instead of decoding steps.
    """
    if workload.model == SMALL_MODEL or not workload.context:
        return 0.0
    model = SERVED[workload.model][0]
    with tempfile.TemporaryDirectory() as place:
        config = read_config(write_model(workload.model, Path(place)))
    weights = parameters(config)
    if not config.tie_word_embeddings:
        del weights[EMBEDDING]
    read = sum(math.prod(one.shape) for one in weights.values())
    return 2.0 * read + workload.batch * workload.context * model.kv_bytes_per_token("bfloat16")


def table(document: dict[str, Any]) -> Table:
    """Return a table with a row for each workload and a column for each contestant.

    Decoding steps are shown in milliseconds per step. The number in parentheses is this time divided by the
    time to read the bytes of :func:`floor_bytes`. Requests are shown in tokens per second.
    """

    def text_of(cell: dict[str, Any], result: dict[str, Any]) -> str:
        if "ms" not in result:
            return f"{result['tokens_per_second']:,.0f}"
        floor = cell.get("floor_ms")
        return f"{result['ms']:.4g}" + (f" ({result['ms'] / floor:.2f})" if floor else "")

    title = "ms per step (in multiples of the time to read all bytes), or new tokens/s"
    return cells_table(title, document, text_of)
