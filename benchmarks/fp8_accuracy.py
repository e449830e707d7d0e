"""How far FP8 attention is from exact attention, by method and ingredient, on three kinds of data.

    python benchmarks/fp8_accuracy.py        # four minutes on one core; prints, and writes JSON

Normal numbers; FlashAttention-3's outliers (Shah et al. 2024, arXiv:2407.08608, section 4.3: N(0, 1) + N(0,
100) Bernoulli(0.001)); and q, k and v of the small GPT of examples/train_gpt.py, trained here on the
standard library of Python, whose loss with each method in place of its attention is measured, too. Errors
are against float64 on the bfloat16 numbers that all methods get. It runs on the CPU, whose numbers are
those of the GPU kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from flashtile import flash_attn_func, fp8
from flashtile.hardware import machine
from flashtile.problems import fp8_layout as layout
from flashtile.reference import fp8 as fp8_reference
from flashtile.reference.attention import attention as exact_attention
from flashtile.testing import fp8 as fp8_testing
from flashtile.tools.demo.corpus import Corpus, python_library, sample_batch
from flashtile.tools.demo.llama import PRESETS, Llama
from flashtile.tools.demo.training import TrainingConfig, bits_per_byte, train, validate

BATCH, SEQLEN, HEADS, HEAD_DIM = 1, 4096, 4, 128
MODEL = TrainingConfig(PRESETS["tiny"], steps=600, batch=1, seqlen=512)
READ = 2048
"""Bytes of held-out text that the model reads for its q, k and v."""

Attend = Callable[..., Tensor]
"""(q, k, v, causal=...) -> out, in any floating dtype."""


def quantised(method: str, hadamard: bool) -> Attend:
    return partial(fp8.attention, method=method, hadamard=hadamard)


def standard(p_scale: float | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return fp8_testing.standard(q, k, v, p_scale=p_scale, causal=causal)[0]

    return attend


METHODS: dict[str, Attend] = {
    "bfloat16": flash_attn_func,
    "standard attention, a scale a tensor, P as it is": standard(1.0),
    "standard attention, a scale a tensor, P times 448": standard(layout.E4M3_MAX),
    "standard attention, a scale a tensor, P not rounded": standard(None),
    **{
        f"a scale a {method}{', transformed' if hadamard else ''}": quantised(method, hadamard)
        for hadamard in (False, True)
        for method in ("tensor", "head", "block")
    },
}


def in_part(in_e4m3: str, hadamard: bool = True, p_scale: float | None = None) -> Attend:
    """Blocks as in the best method, but only those of ``in_e4m3`` quantised."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        given = {"q": q, "k": k, "v": v}
        parts = [
            fp8.quantize(x, role, hadamard=hadamard) if role in in_e4m3 else x.double()
            for role, x in given.items()
        ]
        return fp8_reference.attention(*parts, p_scale=p_scale, causal=causal)[0]

    return attend


INGREDIENTS: dict[str, Attend] = {
    "q and k, not transformed": in_part("qk", hadamard=False),
    "q and k, transformed": in_part("qk"),
    "v": in_part("v"),
    "P times 256": in_part("", p_scale=256.0),
    "P as it is": in_part("", p_scale=1.0),
}
"""What alone is rounded to e4m3, everything else float64."""


@dataclass(frozen=True)
class Error:
    """Root mean square of the error, and over that of the exact output."""

    data: str
    method: str
    rmse: float
    relative: float


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def outliers(*shape: int, generator: torch.Generator) -> Tensor:
    rare = torch.rand(shape, generator=generator) < 0.001
    large = 10 * torch.randn(shape, generator=generator)
    return (torch.randn(shape, generator=generator) + large * rare).bfloat16()


def activations(model: Llama, corpus: Corpus) -> list[tuple[Tensor, ...]]:
    """q, k and v of each layer on text that the model has not seen."""
    seen: list[tuple[Tensor, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(tuple(x.detach().bfloat16() for x in (q, k, v)))
        return flash_attn_func(q, k, v, causal=True)

    with torch.no_grad(), with_attention(model, attend):
        model(sample_batch(corpus.validation, 1, READ, torch.Generator().manual_seed(1))[0])
    return seen


@contextmanager
def with_attention(model: Llama, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """The model with another attention, inside."""
    before, model.attention = model.attention, attend
    yield
    model.attention = before


def errors(
    data: str, tensors: list[tuple[Tensor, ...]], causal: bool, methods: dict[str, Attend]
) -> Iterator[Error]:
    """Of each method, over all of the tensors at once."""
    exact = [exact_attention(*qkv, causal=causal, upcast=torch.float64)[0] for qkv in tensors]
    size = torch.stack([out.square().mean() for out in exact]).mean().sqrt().item()
    for name, attend in methods.items():
        squares = [
            (attend(*qkv, causal=causal) - out).square().mean()
            for qkv, out in zip(tensors, exact, strict=True)
        ]
        rmse = torch.stack(squares).mean().sqrt().item()
        yield Error(data, name, rmse, rmse / size)


def losses(model: Llama, corpus: Corpus) -> Iterator[dict[str, float | str]]:
    """Bits a byte of held-out text with each method as the model's attention."""
    for name, attend in METHODS.items():

        def in_bfloat16(q: Tensor, k: Tensor, v: Tensor, attend: Attend = attend) -> Tensor:
            return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True).to(q.dtype)

        with with_attention(model, in_bfloat16):
            yield {"method": name, "bits_per_byte": bits_per_byte(validate(model, corpus, MODEL, 2**15))}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write every number.")] = None,
) -> None:
    console = Console(highlight=False)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, SEQLEN, HEADS, HEAD_DIM)
    found: list[Error] = []
    parts: list[Error] = []
    for data, draw in (("normal", normal), ("outliers", outliers)):
        qkv = tuple(draw(*shape, generator=generator) for _ in range(3))
        found += errors(data, [qkv], False, METHODS)
        parts += errors(data, [qkv], False, INGREDIENTS)
    corpus = python_library()
    model, result = train(MODEL, corpus)
    seen = activations(model, corpus)
    found += errors("small GPT", seen, True, METHODS)
    parts += errors("small GPT", seen, True, INGREDIENTS)
    loss = list(losses(model, corpus))
    for error in (*found, *parts):
        console.print(f"{error.data:10} {error.method:52} {error.rmse:.3e} {error.relative:.4f}")
    for row in loss:
        console.print(f"loss       {row['method']:52} {row['bits_per_byte']:.4f}")
    document = {
        "schema": 1,
        "kind": "fp8_accuracy",
        "date": date.today().isoformat(),
        "versions": machine.versions(),
        "source": machine.source_commit(),
        "device": machine.describe_device(torch.device("cpu")),
        "shape": dict(zip(("batch", "seqlen", "heads", "head_dim"), shape, strict=True)),
        "model": {"parameters": result.parameters, "bytes_read": READ, "steps": MODEL.steps},
        "errors": [asdict(error) for error in found],
        "one_ingredient_alone": [asdict(error) for error in parts],
        "loss_of_the_small_gpt": loss,
    }
    path = json_file or Path(__file__).parent / "results" / f"{date.today()}-fp8-accuracy.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
