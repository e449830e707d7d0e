"""The parts of ``flashtile demo``: each measures or trains, prints, and returns what the report shows."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from flashtile.learn.io_model.tables import format_bytes
from flashtile.learn.visualizer.page import write_page
from flashtile.learn.visualizer.settings import grid
from flashtile.tools.commands.options import progress_bar
from flashtile.tools.demo import exactness, operations, scaling
from flashtile.tools.demo.corpus import Corpus
from flashtile.tools.demo.llama import Llama, save_llama, sized
from flashtile.tools.demo.report import (
    Results,
    Training,
    inspect_setting,
    natural_dtype,
    scaling_finding,
    write,
)
from flashtile.tools.demo.training import (
    TrainingConfig,
    TrainingResult,
    agreement,
    bits_per_byte,
    default_config,
    fastest_threads,
    generate,
    train,
    validate,
)

PAGE = "visualize.html"
MODEL = "model"
PROMPT = b"class Reader:\n    def __init__(self"
SAMPLE_BYTES = 600
SERVED_PROMPTS = (
    PROMPT.decode(),
    "class Reader:\n    def __init__(self, path):\n        ",
    "import os\nimport ",
)
"""Prompts for the engine. The second begins like the first, so the prefix cache has the blocks of its
beginning."""
MAX_TOKENS = 64
"""Largest number of tokens of an answer of the engine."""
QUICK = TrainingConfig(sized(layers=2, heads=2, embed=32), batch=4, seqlen=64, warm_up=10)
TWIN_SHARE = 0.4
MAX_TWIN_STEPS = 100
"""Maximum number of steps of the comparison run, which repeats the training with standard attention.

The comparison run also has at most TWIN_SHARE of the steps of the training. Rounding differences grow about
tenfold every fifty steps, so curves of a few hundred steps are not comparable.
"""


def run(out: Path, seconds: float, device: torch.device, quick: bool, corpus: Corpus) -> bool:
    """Measure and train on ``device``, write the report to ``out``, and return whether all checks passed.

    ``seconds`` is the time of the training.
    """
    console = Console()
    started, clock = datetime.now().astimezone(), time.perf_counter()
    dtype = natural_dtype(device)
    setting = inspect_setting(device, dtype)
    console.rule("machine", align="left")
    for line in setting.machine_lines() + setting.served_lines():
        console.print(line, markup=False)
    errors = measure_exactness(console, device, quick)
    workload = scaling.workload_for(device, dtype, quick)
    rows = measure_scaling(console, workload)
    apart = measure_operations(console, operations.workload_for(device, dtype, quick))
    config = replace(QUICK, device=str(device)) if quick else default_config(device)
    training = run_training(console, config, corpus, seconds, out)
    results = Results(
        started=started,
        seconds=time.perf_counter() - clock,
        quick=quick,
        setting=setting,
        exactness=errors,
        workload=workload,
        scaling=rows,
        operations=apart,
        training=training,
    )
    page = None if quick else write_visualization(console, out / PAGE)
    written = write(results, out, page) + ([out / page] if page else [])
    console.rule("checks", align="left")
    for check in results.checks():
        mark = "[green]✓[/]" if check.holds else "[bold red]✗ FAILED[/]"
        console.print(f"{mark} {escape(check.name)} [dim]({escape(check.detail)})[/]")
    files = ", ".join(str(path) for path in written)
    console.print(f"\n{results.seconds:.0f} seconds. Wrote {files}", soft_wrap=True)
    return all(check.holds for check in results.checks())


def write_visualization(console: Console, path: Path) -> str:
    """Write the interactive page next to the report and return its file name."""
    console.rule("interactive page", align="left")
    settings = list(grid())
    with progress_bar(console) as progress:
        task = progress.add_task("recording the algorithms", total=len(settings))
        size = write_page(path, settings, progress=lambda: progress.advance(task))
    console.print(f"{len(settings)} recorded runs, {format_bytes(size)}")
    return path.name


def measure_exactness(console: Console, device: torch.device, quick: bool) -> list[exactness.Exactness]:
    console.rule("exactness: largest error against float64 standard attention", align="left")
    cases = exactness.CASES[-1:] if quick else exactness.CASES
    total = len(cases) * len(exactness.DTYPES)
    with progress_bar(console) as progress:
        steps = exactness.measure(device, cases)
        measured = list(progress.track(steps, total=total, description="forward and backward"))
    console.print(exactness.table(measured))
    for one in measured:
        if not one.holds:
            console.print(escape(one.report), style="red")
    return measured


def measure_scaling(console: Console, workload: scaling.ScalingWorkload) -> list[scaling.ScalingRow]:
    console.rule("time and memory: causal, forward and backward", align="left")
    console.print(f"{workload.described}; memory beyond q, k and v")
    with progress_bar(console) as progress:
        steps, total = scaling.measure(workload), len(workload.seqlens)
        rows = list(progress.track(steps, total=total, description="sequence lengths"))
    console.print(scaling.table(rows))
    console.print(scaling_finding(rows), markup=False)
    for row in rows:
        if row.obstacle is not None:
            console.print(f"{row.seqlen}: standard attention {escape(row.obstacle)}")
    return rows


def measure_operations(console: Console, workload: scaling.ScalingWorkload) -> dict[str, Any]:
    console.rule("where the time of GPT-2's attention goes: standard attention by operation", align="left")
    cell = operations.measure(workload)
    if cell["operations"]["status"] == "ok":
        console.print(operations.table([cell], "flashtile"))
    else:
        console.print(f"left out: {cell['operations']['reason']}", markup=False)
    return cell


def run_engine(console: Console, model: Llama, config: TrainingConfig, folder: Path) -> None:
    """Save the trained model to ``folder`` for ``flashtile generate``, and print two answers to each prompt.

    Their time and memory follow.
    """
    console.rule("serving the model: continuous batching over paged keys and values", align="left")
    try:
        from flashtile.engine import LLM, SamplingParams

        save_llama(model, folder, config.seqlen)
    except ModuleNotFoundError as error:
        console.print(f"left out without {error.name} (pip install 'flashtile[engine]')", markup=False)
        return
    llm = LLM(folder, device=config.device, block_size=8, max_num_seqs=8, warmup=False)
    longest = max(1, config.seqlen // 2)
    prompts = [prompt[:longest] for prompt in SERVED_PROMPTS]
    max_tokens = min(MAX_TOKENS, config.seqlen - longest)
    params = SamplingParams(n=2, temperature=0.7, seed=1, max_tokens=max_tokens)
    llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=1))  # fills the prefix cache
    engine, manager = llm.engine, llm.engine.scheduler.manager
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    finished: dict[int, Any] = {}
    blocks, start = 0, time.perf_counter()
    while engine.has_unfinished:
        outputs = engine.step()
        blocks = max(blocks, manager.usage().blocks)
        finished |= {int(output.request_id): output for output in outputs if output.finished}
    seconds = time.perf_counter() - start
    answers = [(finished[i].prompt, answer) for i in range(len(prompts)) for answer in finished[i].outputs]
    for prompt, answer in answers:
        console.print(prompt or "", end="", markup=False, highlight=False, style="dim")
        console.print(answer.text, markup=False, highlight=False)
    tokens = sum(len(answer.token_ids) for _, answer in answers)
    metrics = [output.metrics for output in finished.values()]
    saved = 1 - sum(one.blocks for one in metrics) / sum(one.unshared_blocks for one in metrics)
    cached = sum(output.num_cached_tokens for output in finished.values())
    for line in (
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s), {len(answers)} answers to "
        f"{len(prompts)} prompts",
        f"at most {blocks} blocks of {manager.block_size} tokens; sharing saved {saved:.0%}, and {cached} "
        "tokens of prompts were found in the prefix cache",
    ):
        console.print(line, markup=False)
    console.print(f"to write more: flashtile generate {folder} 'def '", markup=False, soft_wrap=True)


def run_training(
    console: Console, config: TrainingConfig, corpus: Corpus, seconds: float, out: Path
) -> Training:
    console.rule("training a byte-level GPT on Python's standard library", align="left")
    with progress_bar(console) as progress, fastest_threads(config, corpus) as threads:

        def run(config: TrainingConfig) -> tuple[Llama, TrainingResult]:
            task = progress.add_task(f"{config.attention} attention", total=1.0)

            def show(step: int, loss: float, share: float) -> None:
                described = f"{config.attention} attention, step {step}, loss {loss:.2f}"
                progress.update(task, completed=share, description=described)

            return train(config, corpus, show)

        config = replace(config, seconds=seconds)
        model, result = run(config)
        validation_loss = validate(model, corpus, config)
        sample = generate(model, PROMPT, SAMPLE_BYTES, config)[len(PROMPT) :].decode(errors="replace")
        steps = len(result.losses)
        twin_steps = min(MAX_TWIN_STEPS, int(TWIN_SHARE * steps))
        _, twin = run(replace(config, attention="standard", seconds=None, steps=steps, stop=twin_steps))
    size, bits = f"{config.batch} x {config.seqlen}", bits_per_byte(validation_loss)
    console.print(
        f"{result.parameters:,} parameters, {len(result.losses)} steps of {size} bytes at "
        f"{result.tokens_per_second:,.0f} bytes/s; validation {bits:.2f} bits a byte"
    )
    console.print("[dim]sample:[/]")
    console.print(PROMPT.decode() + sample, markup=False, highlight=False)
    run_engine(console, model, config, out / MODEL)
    return Training(
        config=config,
        corpus=corpus.source,
        corpus_files=corpus.files,
        train_bytes=len(corpus.train),
        validation_bytes=len(corpus.validation),
        threads=threads,
        result=result,
        twin=twin,
        agreement=agreement(result.losses, twin.losses, config.dtype),
        validation_loss=validation_loss,
        prompt=PROMPT.decode(),
        sample=sample,
    )
