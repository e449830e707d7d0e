"""Train a small byte-level GPT with flashtile's attention on real text: Python's standard library.

    python examples/train_gpt.py                              # half a minute on two cores
    python examples/train_gpt.py --size medium --steps 2000   # on a GPU: bfloat16 and the GPU kernels
    python examples/train_gpt.py --attention standard         # the same training, the score matrix in memory

The model and the training loop are those of ``flashtile demo``, in flashtile/tools/demo.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flashtile.hardware.machine import find_device
from flashtile.tools.demo.attention import ATTENTIONS
from flashtile.tools.demo.corpus import python_library
from flashtile.tools.demo.llama import PRESETS, sized
from flashtile.tools.demo.training import (
    DTYPES,
    TrainingConfig,
    bits_per_byte,
    default_config,
    fastest_threads,
    generate,
    train,
    validate,
)

PROMPT = "class Reader:\n    def __init__(self"


def main(
    size: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of that of --size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Instead of that of --size.")] = None,
    embed: Annotated[int | None, typer.Option(help="Width, instead of that of --size.")] = None,
    seqlen: Annotated[int | None, typer.Option("--seqlen", "--block-size", help="Bytes of context.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 2000,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and sample.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu. Default: cuda if present.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Dtype of the arithmetic: {', '.join(DTYPES)}.")] = None,
    attention: Annotated[str, typer.Option(help=f"One of {', '.join(ATTENTIONS)}.")] = "flashtile",
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    prompt: Annotated[str, typer.Option(help="Beginning of the sample.")] = PROMPT,
    sample: Annotated[int, typer.Option(min=0, help="Bytes to sample after training.")] = 400,
    text: Annotated[Path | None, typer.Option(exists=True, help="Read the .py files of this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all numbers.")] = None,
) -> None:
    """Train, and print tokens/s, training and validation loss, and a sample.

    The defaults depend on the device: a tiny model in float32 on a CPU, a small one in bfloat16 on a GPU.
    """
    chosen = {
        "seqlen": seqlen,
        "batch": batch,
        "learning_rate": lr,
        "dtype": dtype,
        "attention": attention,
        "steps": steps,
        "seed": seed,
        "compile": compiled,
    }
    try:
        config = configure(size, {"layers": layers, "heads": heads, "embed": embed}, chosen, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    corpus = python_library(text)
    console.print(
        f"{corpus.files} files, {len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out",
        config,
    )

    def show(step: int, loss: float, share: float) -> None:
        if step == 1 or step % max(1, steps // 20) == 0:
            console.print(f"step {step:6d}  loss {loss:.4f} nats a byte")

    with fastest_threads(config, corpus):
        model, result = train(config, corpus, show)
        loss = validate(model, corpus, config)
        written = generate(model, prompt.encode(), sample, config).decode(errors="replace") if sample else ""
    console.print(
        f"{result.parameters:,} parameters, {result.tokens_per_second:,.0f} tokens/s, {result.seconds:.1f} s"
    )
    console.print(f"validation loss {loss:.4f} nats a byte = {bits_per_byte(loss):.3f} bits a byte")
    if sample:
        console.print(written, markup=False)
    if json_file is not None:
        derived = {"validation_loss": loss, "bits_per_byte": bits_per_byte(loss), "sample": written}
        record = {"config": asdict(config), **asdict(result), **derived}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


def configure(
    size: str | None, model: dict[str, int | None], chosen: dict[str, Any], device: str | None
) -> TrainingConfig:
    """Return the device's default with the preset ``size`` and all options that are not None."""
    if size is not None and size not in PRESETS:
        raise ValueError(f"size must be one of {', '.join(PRESETS)}, got {size!r}")
    config = default_config(find_device(device))
    preset = config.model if size is None else PRESETS[size]
    shape = {name: getattr(preset, name) for name in model} | _given(model)
    return replace(config, model=sized(**shape), **_given(chosen))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


if __name__ == "__main__":
    typer.run(main)
