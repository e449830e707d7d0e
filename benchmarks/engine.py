"""The engine end to end, through ``LLM``: random weights of true shapes, made on the device.

    python benchmarks/engine.py                       # every part, tables at the end
    python benchmarks/engine.py --parts llama3-8b --limit 90 --json engine.json

A decode step is timed as the difference of two runs of ``LLM.generate`` that differ in their length, so that
prompts and start-up are not in it. Each part has a time limit, and one that fails leaves the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashtile import LLM, SamplingParams, machine
from flashtile.engine.model import Matrix
from flashtile.engine.runner import InFlight

READ = 4.47e12
"""Bytes a second that one H200 reads."""

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_parameters": LLAMA3_ROPE,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 2048,
    },
}  # fmt: skip
BATCHES = {"llama2-7b": (1, 32), "llama3-8b": (1, 64), "tiny": (1, 4)}


class Stopped(BaseException):
    """A part took too long. No Exception: the engine would take it for a step that failed."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stopped inside after so long."""

    def stop(signum: int, frame: Any) -> None:
        raise Stopped(f"after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Seconds that the host waits for results inside: where it does, the device has work queued."""
    waits: list[float] = []
    plain = InFlight.wait

    def timed(self: InFlight) -> list[int]:
        start = time.perf_counter()
        tokens = plain(self)
        waits.append(time.perf_counter() - start)
        return tokens

    InFlight.wait = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        InFlight.wait = plain  # type: ignore[method-assign]


def load(name: str, options: argparse.Namespace, **more: Any) -> tuple[LLM, float]:
    """The model, and the seconds that it took."""
    start = time.perf_counter()
    config = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
        "eos_token_id": None, **MODELS[name],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, device=options.device,
            kv_cache_dtype=options.kv_cache_dtype, quantization=options.quantization,
            enforce_eager=options.eager, **more,
        )  # fmt: skip
    return llm, time.perf_counter() - start


def tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


def floor_bytes(llm: LLM, batch: int, context: int) -> float:
    """Bytes that a step must read: all weights but the embedding, and the keys and values."""
    c, model = llm.model_config, llm.engine.runner.model
    parts = [part for layer in model.layers for part in (layer.attention, layer.mlp)]
    matrices = [matrix for part in parts for matrix in vars(part).values() if isinstance(matrix, Matrix)]
    weights = sum(m.weight.numel() * m.weight.element_size() for m in (*matrices, model.head))
    item = llm.engine.runner.memory.k.element_size()
    return weights + batch * context * 2 * c.num_layers * c.num_kv_heads * c.head_dim * item


def decode(llm: LLM, name: str, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step at a batch size, of the whole path and of the bare CUDA graph."""
    c = llm.model_config
    prompts = [tokens(context - steps, c.vocab_size, seed) for seed in range(batch)]

    def run(length: int) -> tuple[float, float]:
        with waiting() as waits:
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
            return time.perf_counter() - start, sum(waits)

    run(8)  # compiles and captures
    short, long = run(8), run(8 + 2 * steps)
    step = (long[0] - short[0]) / (2 * steps) * 1e3
    found = {
        "model": name, "batch": batch, "context": context, "ms": step,
        "floor_ms": floor_bytes(llm, batch, context) / READ * 1e3,
        "tokens_per_second": batch / step * 1e3, "prefill_s": short[0],
        "host_waits": (long[1] - short[1]) / (long[0] - short[0]),
    }  # fmt: skip
    graphs = llm.engine.runner.graphs
    if batch in graphs:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            graphs[batch]()
        torch.cuda.synchronize()
        found["graph_ms"] = (time.perf_counter() - start) / 50 * 1e3
    return found


def lengths(count: int, mean: float, most: int, draw: random.Random) -> list[int]:
    """Log-normal, with a deviation of 1 of the logarithm."""
    return [
        min(most, max(1, round(draw.lognormvariate(math.log(mean) - 0.5, 1.0)))) for _ in range(count)
    ]


def throughput(llm: LLM, name: str, count: int, temperature: float) -> dict[str, Any]:
    """Requests of ShareGPT-like lengths (means 161 and 338), all there at the start."""
    c, draw = llm.model_config, random.Random(1)
    scale = 1.0 if name != "tiny" else 0.1
    prompts = [
        tokens(length, c.vocab_size, seed)
        for seed, length in enumerate(lengths(count, 161 * scale, 2048, draw))
    ]
    answers = lengths(count, 338 * scale, 2048, draw)
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=1)
        for length in answers
    ]
    llm.generate(prompts[:4], SamplingParams(temperature=temperature, max_tokens=4))
    with waiting() as waits:
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    return {
        "model": name, "requests": count, "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(answers), "seconds": seconds, "new_tokens_per_second": sum(answers) / seconds,
        "host_waits": sum(waits) / seconds, "steps": len(waits), "temperature": temperature,
        "preemptions": llm.get_metrics().num_preemptions,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Columns aligned, numbers with four digits."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[shown(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="llama2-7b,llama3-8b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--device", default=None)
    parser.add_argument("--limit", type=float, default=60, help="seconds of each measurement")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000, help="0 leaves the throughput out")
    parser.add_argument("--seqs", type=int, default=256, help="sequences computed at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default=None, help="fp8")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    decoded: list[dict[str, Any]] = []
    served: list[dict[str, Any]] = []
    loaded: list[dict[str, Any]] = []

    def part(what: str, into: list[dict[str, Any]], measure: Callable[[], dict[str, Any]]) -> None:
        print(f"{what} ...", flush=True)
        try:
            with limited(options.limit):
                into.append(measure())
        except (Exception, Stopped):
            traceback.print_exc()

    for name in options.parts.split(","):
        try:
            with limited(2 * options.limit):
                llm, seconds = load(
                    name, options, max_num_seqs=options.seqs, max_num_batched_tokens=8192,
                    enable_prefix_caching=False,
                )  # fmt: skip
        except (Exception, Stopped):
            traceback.print_exc()
            continue
        blocks = llm.engine.scheduler.manager.pool.num_blocks
        loaded.append({"model": name, "load_s": seconds, "blocks": blocks})
        for batch in BATCHES[name]:
            part(
                f"{name} batch {batch}", decoded,
                lambda llm=llm, name=name, batch=batch: decode(
                    llm, name, batch, options.context, options.steps
                ),
            )  # fmt: skip
            llm.engine.abort(list(llm.engine.requests))
        if options.requests and name != "llama2-7b":
            part(
                f"{name} throughput", served,
                lambda llm=llm, name=name: throughput(llm, name, options.requests, options.temperature),
            )  # fmt: skip
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if options.json is not None:
        document = {"versions": machine.versions(), "devices": machine.devices(), "loaded": loaded,
                    "decode": decoded, "throughput": served}  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1))
    for rows in (loaded, decoded, served):
        print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
