"""What the block manager costs, wastes and saves: operations a second, waste, parallel sampling, beam search.

    python benchmarks/kv_cache.py                    # a few minutes on one core; prints, and writes JSON
    python benchmarks/kv_cache.py --no-model         # without the beams of a trained model

Requests come from log-normal length mixes with the means that the vLLM paper reports for its traces (Kwon et
al. 2023, arXiv:2309.06180, figure 11; the spreads are ours) and are served by continuous batching over one
pool. What sharing saves is, as in its figure 15, the blocks saved over the blocks without sharing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from flashtile.hardware import machine
from flashtile.kv_cache import BlockManager, OutOfBlocksError
from flashtile.tools.demo.corpus import Corpus, python_library
from flashtile.tools.demo.llama import Llama, LlamaConfig
from flashtile.tools.demo.training import TrainingConfig, fit

BLOCK_SIZE = 16
POOLS = (10_000, 100_000, 1_000_000)
LONGEST = 2048
"""Tokens of a request, prompt and output."""

REPEATS = 30

SAMPLE_EVERY = 10
"""Steps between two looks at the memory."""

Ancestry = list[list[int]]
"""By step, for each beam the beam of the step before that it continues."""


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and outputs: log-normal, by their means and the deviations of their logarithms."""

    name: str
    prompt_mean: float
    output_mean: float
    prompt_sigma: float
    output_sigma: float

    def requests(self, count: int, generator: torch.Generator) -> list[tuple[int, int]]:
        """(prompt, output) tokens of each request: at most half of the longest each, of the stated means."""
        lengths = []
        for mean, sigma in (
            (self.prompt_mean, self.prompt_sigma),
            (self.output_mean, self.output_sigma),
        ):
            drawn = torch.exp(sigma * torch.randn(count, generator=generator, dtype=torch.float64))
            for _ in range(8):
                drawn = (drawn * (mean / drawn.mean())).clamp(1, LONGEST // 2)
            lengths.append(drawn.round().int().tolist())
        return list(zip(*lengths, strict=True))


SHAREGPT = Mix("ShareGPT-like", 161.31, 337.99, prompt_sigma=1.0, output_sigma=1.0)
ALPACA = Mix("Alpaca-like", 19.31, 58.45, prompt_sigma=0.6, output_sigma=0.85)
MIXES = (ALPACA, SHAREGPT)


@dataclass
class Group:
    """The sequences of one request."""

    sequences: list[int]
    output: int
    ancestry: Ancestry
    step: int = 0


@dataclass
class Totals:
    """Sums over all looks at the memory."""

    steps: int = 0
    preemptions: int = 0
    blocks: int = 0
    blocks_unshared: int = 0
    tokens: int = 0
    copied_blocks: int = 0
    lengths: list[tuple[int, int]] = field(default_factory=list)

    @property
    def waste(self) -> float:
        return 1 - self.tokens / (self.blocks * BLOCK_SIZE)

    @property
    def saved(self) -> float:
        return 1 - self.blocks / self.blocks_unshared


def serve(
    mix: Mix,
    *,
    requests: int,
    width: int = 1,
    ancestries: Sequence[Ancestry] = (),
    num_blocks: int = 4096,
    seed: int = 0,
) -> Totals:
    """Serve the requests by continuous batching until all are done.

    Args:
        width: sequences of a request, which share its prompt.
        ancestries: for beam search, one of them a request; without, the sequences are independent samples.
    """
    generator = torch.Generator().manual_seed(seed)
    manager = BlockManager(num_blocks, BLOCK_SIZE, max_sequences=num_blocks, max_seqlen=LONGEST + 1)
    totals = Totals(lengths=mix.requests(requests, generator))
    waiting = deque(enumerate(totals.lengths))
    running: list[tuple[int, Group]] = []
    while waiting or running:
        while waiting and admissible(manager, waiting[0][1][0], width, len(running)):
            number, (prompt, output) = waiting.popleft()
            ancestry = ancestries[number % len(ancestries)] if ancestries else []
            running.append((number, start(manager, prompt, output, width, ancestry)))
        try:
            totals.copied_blocks += advance(manager, [group for _, group in running])
        except OutOfBlocksError:  # recompute the latest request later
            number, group = running.pop()
            for sequence in group.sequences:
                manager.free(sequence)
            waiting.appendleft((number, totals.lengths[number]))
            totals.preemptions += 1
            continue
        if totals.steps % SAMPLE_EVERY == 0:
            usage = manager.usage()
            totals.blocks += usage.blocks
            totals.blocks_unshared += usage.blocks_unshared
            totals.tokens += usage.tokens
        totals.steps += 1
        for _, group in running:
            if group.step == group.output:
                for sequence in group.sequences:
                    manager.free(sequence)
        running = [(number, group) for number, group in running if group.step < group.output]
    manager.check_integrity()
    assert manager.usage().blocks == 0
    return totals


def admissible(manager: BlockManager, prompt: int, width: int, running: int) -> bool:
    """Whether the prompt fits and leaves every sequence that runs then a block to grow into."""
    needed = -(-prompt // BLOCK_SIZE) + width * (running + 1)
    return manager.pool.available >= needed


def start(manager: BlockManager, prompt: int, output: int, width: int, ancestry: Ancestry) -> Group:
    first = manager.create()
    manager.reserve(first, prompt)
    return Group([first, *(manager.fork(first) for _ in range(width - 1))], output, ancestry)


def advance(manager: BlockManager, groups: list[Group]) -> int:
    """One token for every sequence; returns the blocks that were copied."""
    batch = manager.batch([sequence for group in groups for sequence in group.sequences])
    copies = manager.reserve_batch(batch)
    for group in groups:
        if group.ancestry:
            group.sequences = manager.select(
                group.sequences, group.ancestry[group.step % len(group.ancestry)]
            )
        group.step += 1
    return len(copies)


def random_ancestries(
    width: int, count: int, steps: int, seed: int = 0, spread: float = 2.6
) -> list[Ancestry]:
    """Beam search over random distributions of 1000 tokens: normal logits with this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.zeros(count, width)
    parents = []
    for _ in range(steps):
        logits = spread * torch.randn(count, width, 1000, generator=generator)
        likeliest = torch.log_softmax(logits, -1).topk(width).values
        best = (scores[:, :, None] + likeliest).flatten(1).topk(width)
        scores = best.values
        parents.append(best.indices // width)
    return torch.stack(parents, 1).tolist()


def trained_model(steps: int, corpus: Corpus) -> Llama:
    """A small byte-level model."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig())
    fit(model, TrainingConfig(steps=steps, batch=4, seqlen=128), corpus)
    return model


def model_ancestries(model: Llama, corpus: Corpus, width: int, count: int, steps: int) -> list[Ancestry]:
    """The model's beams on texts that it has not seen."""
    starts = range(0, len(corpus.validation) - 64, len(corpus.validation) // count)
    prompts = [corpus.validation[i : i + 64].tolist() for i in starts][:count]
    tokens = torch.tensor(prompts)[:, None].repeat(1, width, 1)
    scores = torch.full((count, width), -torch.inf)
    scores[:, 0] = 0  # all beams are the prompt at first
    parents = []
    for _ in range(steps):
        with torch.no_grad():
            logits = model(tokens.flatten(0, 1))[:, -1].double().view(count, width, -1)
        best = (scores[:, :, None] + torch.log_softmax(logits, -1)).flatten(1).topk(width)
        scores, origins = best.values, best.indices // logits.shape[-1]
        kept = tokens.gather(1, origins[:, :, None].expand_as(tokens))
        tokens = torch.cat([kept, (best.indices % logits.shape[-1])[:, :, None]], -1)
        parents.append(origins)
    return torch.stack(parents[1:], 1).tolist()


def timed(function: Callable[[], int]) -> float:
    """Microseconds of this process's time an operation, of which ``function`` says how many it made."""
    began = time.process_time()
    operations = function()
    return (time.process_time() - began) / operations * 1e6


def operations(num_blocks: int, tokens: int = 512, count: int = 64) -> dict[str, float]:
    """Microseconds of each operation on sequences of ``tokens`` tokens: the least of many repeats.

    ``mixed`` is the life of a request: a prompt is allocated and forked, both grow over 8 boundaries (one of
    them out of a shared block, which is copied), both are freed.
    """
    manager = BlockManager(num_blocks, BLOCK_SIZE, max_sequences=4 * count, max_seqlen=LONGEST)
    sequences: list[int] = []

    def allocate() -> int:
        for _ in range(count):
            sequence = manager.create()
            manager.reserve(sequence)
            sequences.append(sequence)
        return 2 * count

    def cross() -> int:
        for _ in range(tokens // BLOCK_SIZE - 1):
            for sequence in sequences:
                manager.reserve(sequence, BLOCK_SIZE)
        return (tokens // BLOCK_SIZE - 1) * count

    def fork() -> int:
        sequences.extend([manager.fork(sequence) for sequence in sequences])
        return count

    def free() -> int:
        for sequence in sequences:
            manager.free(sequence)
        freed = len(sequences)
        sequences.clear()
        return freed

    def mixed() -> int:
        made = 0
        for _ in range(count):
            first = manager.create()
            manager.reserve(first, tokens - 5)
            second = manager.fork(first)
            for _ in range(8):
                manager.reserve(first, BLOCK_SIZE)
                manager.reserve(second, BLOCK_SIZE)
            manager.free(first)
            manager.free(second)
            made += 21
        return made

    programs = {"allocate": allocate, "append": cross, "fork": fork, "free": free, "mixed": mixed}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(REPEATS):
        for name, program in programs.items():
            times[name].append(timed(program))
    return {name: min(values) for name, values in times.items()}


def batch_steps(sequences: int) -> dict[str, float]:
    """Microseconds of a step of a whole batch: nobody at a block's boundary, one in sixteen, everybody."""
    manager = BlockManager(65536, BLOCK_SIZE, max_sequences=sequences, max_seqlen=LONGEST)
    batch = manager.batch([manager.create() for _ in range(sequences)])

    def steps(count: int) -> Iterator[float]:
        for _ in range(count):
            began = time.process_time()
            manager.reserve_batch(batch)
            yield (time.process_time() - began) * 1e6

    manager.reserve_batch(batch)
    together = list(steps(320))  # every sixteenth step, all cross
    result = {
        "inside": statistics.median(t for i, t in enumerate(together, 2) if i % BLOCK_SIZE != 1),
        "all_cross": statistics.median(t for i, t in enumerate(together, 2) if i % BLOCK_SIZE == 1),
    }
    manager.reserve_batch(batch, [i % BLOCK_SIZE for i in range(sequences)])
    result["one_in_16_crosses"] = statistics.median(steps(160))
    return result


def sharing(requests: int, model: bool, training_steps: int) -> Iterator[dict[str, Any]]:
    """What parallel sampling and beam search save, for the widths of the paper's figure 15."""
    corpus = python_library()
    llama = trained_model(training_steps, corpus) if model else None
    for width in (2, 4, 6):
        kinds: dict[str, Sequence[Ancestry]] = {
            "parallel sampling": (),
            "beam search, random distributions": random_ancestries(width, 32, 512),
        }
        if llama is not None:
            kinds["beam search, trained model"] = model_ancestries(llama, corpus, width, 12, 192)
        for mix in MIXES:
            for kind, ancestries in kinds.items():
                totals = serve(mix, requests=requests, width=width, ancestries=ancestries)
                yield {
                    "mix": mix.name,
                    "kind": kind,
                    "width": width,
                    "saved": totals.saved,
                    "waste": totals.waste,
                    "copied_blocks": totals.copied_blocks,
                    "preemptions": totals.preemptions,
                }


def means(totals: Totals) -> dict[str, float]:
    prompts, outputs = zip(*totals.lengths, strict=True)
    return {"prompt_mean": statistics.fmean(prompts), "output_mean": statistics.fmean(outputs)}


def main(
    requests: Annotated[int, typer.Option(min=1, help="Of each simulation.")] = 400,
    model: Annotated[bool, typer.Option(help="Simulate the beams of a trained model, too.")] = True,
    training_steps: Annotated[int, typer.Option(min=1, help="Of that model.")] = 400,
    out: Annotated[
        Path | None, typer.Option(help="Default: benchmarks/results/<date>-kv-cache.json.")
    ] = None,
) -> None:
    """Measure the block manager on one core, simulate its memory; print and write the numbers."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    document: dict[str, Any] = {
        "schema": 1,
        "kind": "kv_cache",
        "date": date.today().isoformat(),
        "versions": machine.versions(),
        "source": machine.source_commit(),
        "device": machine.describe_device(torch.device("cpu")),
        "block_size": BLOCK_SIZE,
        "operations_us": [],
        "batch_steps_us": [],
        "waste": [],
        "sharing": [],
    }
    for num_blocks in POOLS:
        row = {"num_blocks": num_blocks, **operations(num_blocks)}
        document["operations_us"].append(row)
        console.print(row, f"{1e6 / row['mixed']:,.0f} mixed operations a second")
    for sequences in (1, 64, 256, 1024):
        document["batch_steps_us"].append({"sequences": sequences, **batch_steps(sequences)})
        console.print(document["batch_steps_us"][-1])
    for mix in MIXES:
        totals = serve(mix, requests=requests)
        row = {"mix": asdict(mix), **means(totals), "waste": totals.waste, "preemptions": totals.preemptions}
        document["waste"].append(row)
        console.print(row)
    for row in sharing(requests, model, training_steps):
        document["sharing"].append(row)
        console.print(row)
    if out is None:
        out = Path(__file__).parent / "results" / f"{document['date']}-kv-cache.json"
    out.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
