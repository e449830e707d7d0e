"""Generate from a paged key/value cache: greedily, by parallel samples and by beams that share their prompt.

    python examples/paged_generation.py                       # trains a small Llama on Python's library first
    python examples/paged_generation.py --checkpoint small.pt # keeps it there, and takes it from there again
    python examples/paged_generation.py --model ~/Llama-3.2-1B --prompt "The tallest mountain"   # needs [hf]

Every text is computed twice, from the paged cache in one batch and without paging one sequence at a time:
the tokens must be equal. Printed are the blocks in use at the fullest moment, how much of them is empty, what
sharing saves, and how many shared blocks were copied because one of their holders wrote to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashtile.demo.corpus import python_library
from flashtile.demo.generation import (
    Decoder,
    DenseDecoder,
    PagedDecoder,
    Peak,
    beam_search,
    greedy,
    parallel_samples,
)
from flashtile.demo.huggingface import load_llama
from flashtile.demo.llama import Llama, LlamaConfig
from flashtile.demo.training import DTYPES, TrainingConfig, fit
from flashtile.hardware.machine import find_device
from flashtile.kv_cache import OutOfBlocksError, PagedKVCache

PROMPTS = [
    "class Reader:\n    def __init__(self, stream, errors='strict'):\n        ",
    "    if not isinstance(other, ",
    "import os\nimport sys\n\ndef main():\n    ",
]


class Text(Protocol):
    """Between text and tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """Tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Run(NamedTuple):
    """A strategy's tokens, by sequence, from both decoders, and the memory of the paged one."""

    paged: list[list[int]]
    unpaged: list[list[int]]
    peak: Peak


def main(
    model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder of a Hugging Face Llama.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Repeat it for several in one batch.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Parallel samples of each prompt.")] = 4,
    beams: Annotated[int, typer.Option(min=1, help="Beam width.")] = 4,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(help="Of the pool; default: enough without sharing.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the small model.")] = 300,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the small model is kept.")] = None,
    seed: Annotated[int, typer.Option(help="Of training and sampling.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of weights and cache: {', '.join(DTYPES)}.")] = "float32",
) -> None:
    """Generate from a paged cache, show what it costs, and compare with the unpaged computation."""
    console = Console(highlight=False)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not all(prompt or PROMPTS):
        raise typer.BadParameter("prompt must not be empty")
    try:
        place = find_device(device)
        if model is None:
            llama: Llama = small_llama(checkpoint, steps, seed, place, console)
            text: Text = Bytes()
        else:
            llama, text = pretrained(model, place)
    except (ValueError, OSError, NotImplementedError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    llama.to(DTYPES[dtype]).eval()
    prompts = [text.encode(p) for p in prompt or PROMPTS]
    strategies: dict[str, Callable[[Decoder], list[list[int]]]] = {
        "greedy": lambda decoder: greedy(decoder, prompts, length),
        f"{samples} samples": lambda decoder: [
            tokens
            for group in parallel_samples(decoder, prompts, length, samples, temperature=0.8, seed=seed)
            for tokens in group
        ],
        f"{beams} beams": lambda decoder: [
            beam.tokens for group in beam_search(decoder, prompts, length, beams) for beam in group
        ],
    }
    longest = max(len(tokens) for tokens in prompts) + length
    width = len(prompts) * max(samples, beams)
    enough = width * -(-longest // block_size)
    runs: dict[str, Run] = {}
    for name, strategy in strategies.items():
        cache = PagedKVCache(
            llama.config.layers,
            enough if num_blocks is None else num_blocks,
            block_size,
            llama.config.kv_heads,
            llama.config.head_dim,
            max_sequences=width,
            max_seqlen=longest,
            dtype=DTYPES[dtype],
            device=place,
        )
        decoder = PagedDecoder(llama, cache)
        try:
            paged = strategy(decoder)
        except OutOfBlocksError as error:
            raise typer.BadParameter(f"num_blocks is too small for {name}: {error}") from None
        runs[name] = Run(paged, strategy(DenseDecoder(llama)), decoder.peak)
        cache.check_integrity()
        console.rule(name)
        for i, tokens in enumerate(prompts):
            best = paged[i * len(paged) // len(prompts)]
            console.print(text.decode(tokens), style="dim", end="", markup=False)
            console.print(text.decode(best), markup=False)
    console.print(describe(runs, cache))
    different = [name for name, run in runs.items() if run.paged != run.unpaged]
    if different:
        console.print(f"the tokens differ from the unpaged computation's: {', '.join(different)}")
        raise typer.Exit(1)
    console.print("all tokens are equal to those of the unpaged computation")


def describe(runs: dict[str, Run], cache: PagedKVCache) -> Table:
    size = cache.block_size
    table = Table(title=f"Blocks of {size} tokens at the fullest moment")
    for column in ("", "sequences", "blocks used", "without sharing", "saved", "waste", "blocks copied"):
        table.add_column(column, justify="left" if not column else "right")
    for name, run in runs.items():
        usage = run.peak.usage
        table.add_row(
            name,
            str(len(run.paged)),
            str(usage.blocks),
            str(usage.blocks_unshared),
            f"{usage.saved:.1%}",
            f"{usage.waste:.1%}",
            str(run.peak.copied_blocks),
        )
    return table


def small_llama(
    checkpoint: Path | None, steps: int, seed: int, device: torch.device, console: Console
) -> Llama:
    """A byte-level model of 0.6 million weights, trained on the standard library or from ``checkpoint``."""
    if checkpoint is not None and checkpoint.exists():
        saved: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
        llama = Llama(LlamaConfig(**saved["config"])).to(device)
        llama.load_state_dict(saved["weights"])
        return llama
    torch.manual_seed(seed)
    llama = Llama(LlamaConfig()).to(device)
    config = replace(TrainingConfig(), steps=steps, batch=4, seqlen=128, device=str(device), seed=seed)

    def show(step: int, loss: float, share: float) -> None:
        if step == 1 or step % max(1, steps // 5) == 0:
            console.print(f"training step {step:4d}  loss {loss:.3f} nats a byte")

    fit(llama, config, python_library(), show)
    if checkpoint is not None:
        torch.save({"config": asdict(llama.config), "weights": llama.state_dict()}, checkpoint)
    return llama


def pretrained(folder: Path, device: torch.device) -> tuple[Llama, Text]:
    """A local checkpoint and its tokenizer."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--model needs transformers: pip install '.[hf]'") from None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return load_llama(folder, device), tokenizer


if __name__ == "__main__":
    typer.run(main)
