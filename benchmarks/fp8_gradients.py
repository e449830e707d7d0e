"""Measure gradients of FP8 attention against those of bf16, and train a small GPT with both.

    python -m benchmarks.fp8_gradients --out benchmarks/results/DATE-fp8-gradients.json

The gradients are of normal numbers, of FlashAttention-3's outliers (Shah et al. 2024, arXiv:2407.08608,
section 4.3), and of q, k and v of the trained model, with normal numbers as the gradient of out. The model is
that of ``flashtile demo``; all runs start from the same weights and see the same batches. It takes about five
minutes on one core of a CPU, where FP8 rounds at the same points as on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.documents import source_commit
from flashtile import flash_attn_func, fp8
from flashtile.hardware import machine
from flashtile.tools.demo.corpus import Corpus, python_library, sample_batch
from flashtile.tools.demo.llama import PRESETS, Llama
from flashtile.tools.demo.training import TrainingConfig, bits_per_byte, fit, validate

BATCH, SEQLEN, HEADS, HEAD_DIM = 1, 1024, 4, 128
MODEL = TrainingConfig(PRESETS["tiny"], steps=300, batch=2, seqlen=256, dtype="bfloat16")
CURVE = 50
"""Steps of the loss curve whose mean is one number."""
CONSTANT_SCALE = 2.0**-4
"""Scale for numbers up to 28."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: (q, k, v) -> out, each (batch, seqlen, heads, head_dim)."""


def with_constant_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.full((1, 1), CONSTANT_SCALE)
    parts = [
        fp8.quantize(x.bfloat16(), role, method="head", scale=scale)
        for x, role in zip((q, k, v), "qkv", strict=True)
    ]
    return fp8.attention(*parts, causal=True)


def on_quantised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """bf16 attention over tensors that were quantised by block, with straight-through gradients."""

    def rounded(x: Tensor, role: str) -> Tensor:
        return x + (fp8.quantize(x.detach(), role).dequantize().to(x.dtype) - x).detach()

    return flash_attn_func(rounded(q, "q"), rounded(k, "k"), rounded(v, "v"), causal=True)


BF16: Attend = partial(flash_attn_func, causal=True)
METHODS: dict[str, Attend] = {
    "one scale per block, transformed": partial(fp8.attention, causal=True),
    "one scale per block": partial(fp8.attention, causal=True, hadamard=False),
    "one scale per head, transformed": partial(fp8.attention, causal=True, method="head"),
    "constant scale, transformed": with_constant_scale,
    "bf16 attention over q, k and v quantised by block": on_quantised,
}
TRAINED: dict[str, Attend] = {
    "bf16": BF16,
    "one scale per block, transformed": METHODS["one scale per block, transformed"],
    "constant scale, transformed": with_constant_scale,
}


def normal(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM, generator=generator).bfloat16()


def outliers(generator: torch.Generator) -> Tensor:
    """Return numbers distributed as N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    shape = (BATCH, SEQLEN, HEADS, HEAD_DIM)
    small, large, drawn = (f(shape, generator=generator) for f in (torch.randn, torch.randn, torch.rand))
    return (small + 10 * large * (drawn < 0.001)).bfloat16()


def activations(model: Llama, corpus: Corpus) -> list[list[Tensor]]:
    """Return q, k and v of each layer on text that the model has not seen."""
    seen: list[list[Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append([x.detach().bfloat16() for x in (q, k, v)])
        return flash_attn_func(q, k, v, causal=True)

    model.attention = attend
    with torch.no_grad():
        model(sample_batch(corpus.validation, 1, SEQLEN, torch.Generator().manual_seed(1))[0])
    return seen


def results(attend: Attend, tensors: list[list[Tensor]]) -> list[Tensor]:
    """Return out, dq, dk and dv over all calls, each as one vector in float64."""
    of_calls = []
    for number, qkv in enumerate(tensors):
        learning = [x.clone().requires_grad_() for x in qkv]
        out = attend(*learning)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(number)).to(out.dtype)
        of_calls.append([out.detach(), *torch.autograd.grad(out, learning, dout)])
    return [torch.cat([x.flatten() for x in parts]).double() for parts in zip(*of_calls, strict=True)]


def errors(data: str, tensors: list[list[Tensor]]) -> Iterator[dict[str, Any]]:
    expected = results(BF16, tensors)
    for method, attend in METHODS.items():
        found = results(attend, tensors)
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            yield {
                "data": data, "method": method, "result": name,
                "cosine": torch.cosine_similarity(ours, theirs, dim=0).item(),
                "relative": ((ours - theirs).norm() / theirs.norm()).item(),
            }  # fmt: skip


def train(name: str, corpus: Corpus) -> tuple[Llama, list[dict[str, Any]]]:
    """Train with ``TRAINED[name]``; return (model, its losses)."""
    torch.manual_seed(MODEL.seed)
    model = Llama(MODEL.model, TRAINED[name])
    losses = fit(model, MODEL, corpus).losses
    curve = {
        f"steps {i + 1} to {i + CURVE}": statistics.fmean(losses[i : i + CURVE])
        for i in range(0, len(losses), CURVE)
    }
    curve["held-out text"] = validate(model, corpus, MODEL, 2**15)
    return model, [
        {"attention": name, "loss": of, "bits_per_byte": bits_per_byte(nats)} for of, nats in curve.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = python_library()
    runs = {name: train(name, corpus) for name in TRAINED}
    generator = torch.Generator().manual_seed(0)
    data = {
        "normal": [[normal(generator) for _ in range(3)]],
        "outliers": [[outliers(generator) for _ in range(3)]],
        "small GPT": activations(runs["bf16"][0], corpus),
    }
    document = {
        "schema": 1, "kind": "fp8_gradients", "date": str(datetime.date.today()),
        "versions": machine.versions(), "source": source_commit(),
        "device": machine.describe_device(torch.device("cpu")),
        "shape": {"batch": BATCH, "seqlen": SEQLEN, "heads": HEADS, "head_dim": HEAD_DIM},
        "model": {"steps": MODEL.steps, "batch": MODEL.batch, "seqlen": MODEL.seqlen, "mean_of_steps": CURVE},
        "errors": [error for name, tensors in data.items() for error in errors(name, tensors)],
        "training": [loss for _, losses in runs.values() for loss in losses],
    }  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
