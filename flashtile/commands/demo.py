"""``flashtile demo``: exactness, speed, memory and a training run on this machine, kept as a report."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashtile.demo import exactness, scaling
from flashtile.demo.corpus import python_library
from flashtile.demo.model import GPTConfig
from flashtile.demo.plots import format_bytes
from flashtile.demo.results import Results, Training, by_case, write
from flashtile.demo.setting import Setting, choose_device, inspect_setting, natural_dtype
from flashtile.demo.training import TrainingConfig, agreement, default_config, generate, steps_within, train

PROMPT = b"def "
TWIN_STEPS = 150
SLACK = 1.5
"""Training stops after this many times its budget, should the machine slow down after the trial."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for results.json, the plots and report.html.")] = Path(
        "flashtile-demo"
    ),
    seconds: Annotated[float, typer.Option(min=0.1, help="Time to train with flashtile's attention.")] = 35.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU if there is one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, for a look at what it does.")] = False,
) -> None:
    """See exactness, speed, memory and a small training run on this machine; writes a report.

    The exit code is 1 if any check fails.
    """
    console = Console()
    started, clock = datetime.now().astimezone(), time.perf_counter()
    try:
        chosen = choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    dtype = natural_dtype(chosen)

    setting = inspect_setting(chosen, dtype)
    show_setting(console, setting)
    errors = measure_exactness(console, chosen, quick)
    workload = scaling.workload_for(chosen, dtype, quick)
    rows = measure_scaling(console, workload)
    training = run_training(console, training_config(chosen, quick), seconds)

    results = Results(started, time.perf_counter() - clock, quick, setting, errors, workload, rows, training)
    written = write(results, out)
    console.rule("checks", align="left")
    for check in results.checks():
        mark = "[green]✓[/]" if check.holds else "[bold red]✗ FAILED[/]"
        console.print(f"{mark} {escape(check.name)} [dim]({escape(check.detail)})[/]")
    files = ", ".join(str(path) for path in written)
    console.print(f"\n{results.seconds:.0f} seconds. Wrote {files}", soft_wrap=True)
    if not all(check.holds for check in results.checks()):
        raise typer.Exit(1)


def training_config(device: torch.device, quick: bool) -> TrainingConfig:
    if quick:
        return TrainingConfig(GPTConfig(layers=2, heads=2, embed=32), batch=4, seqlen=64, device=str(device))
    return default_config(device)


def show_setting(console: Console, setting: Setting) -> None:
    console.rule("machine", align="left")
    for device in setting.devices:
        size = f"{device['cores']} cores" if "cores" in device else f"{device['sm_count']} SMs"
        memory = "" if device["memory_bytes"] is None else f", {format_bytes(device['memory_bytes'])}"
        console.print(f"{device['device']}: {escape(device['name'])}, {device['capability']}, {size}{memory}")
    found = [f"{name} {version}" for name, version in setting.versions.items() if version]
    console.print(f"[dim]{escape(', '.join(found))}[/]")
    for call in setting.served:
        console.print(
            f"{setting.dtype} on {setting.device}, {call.call}: "
            f"served by [bold]{call.backend}[/], {escape(call.config)}"
        )
    reasons = {f"not {name}: {why}" for call in setting.served for name, why in call.reasons_against.items()}
    for reason in sorted(reasons):
        console.print(f"[dim]{escape(reason)}[/]")


def measure_exactness(console: Console, device: torch.device, quick: bool) -> list[exactness.Exactness]:
    console.rule("exactness: largest error against float64 standard attention", align="left")
    cases = exactness.CASES[-1:] if quick else exactness.CASES
    measured = []
    with _progress(console) as progress:
        task = progress.add_task("forward and backward", total=len(cases) * len(exactness.DTYPES))
        for one in exactness.measure(device, cases):
            measured.append(one)
            progress.advance(task)
    table = Table(caption="flashtile / plain PyTorch in the same dtype; of gradients the worst")
    table.add_column("call")
    dtypes = list(dict.fromkeys(one.dtype for one in measured))
    for dtype in dtypes:
        table.add_column(f"{dtype}\noutput", justify="right")
        table.add_column("\ngradients", justify="right")
    for case, by_dtype in by_case(measured).items():
        cells = []
        for dtype in dtypes:
            one = by_dtype[dtype]
            for error in (one.errors["out"], one.largest(exactness.GRADIENTS)):
                cell = f"{error.largest:.1e} / {error.plain:.1e}"
                cells.append(cell if one.holds else f"[bold red]{cell}[/]")
        table.add_row(case, *cells)
    console.print(table)
    for one in measured:
        if not one.holds:
            console.print(escape(one.report), style="red")
    return measured


def measure_scaling(console: Console, workload: scaling.Workload) -> list[scaling.Row]:
    console.rule("time and memory: causal, forward and backward", align="left")
    console.print(
        f"{workload.dtype}, batch {workload.batch}, {workload.heads} heads of {workload.head_dim}; "
        "memory beyond q, k and v"
    )
    rows = []
    with _progress(console) as progress:
        task = progress.add_task("sequence lengths", total=len(workload.seqlens))
        for row in scaling.measure(workload):
            rows.append(row)
            progress.advance(task)
    table = Table()
    for heading in ("sequence length", "flashtile", "standard", "speed-up", "memory", "standard", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        theirs = row.standard
        table.add_row(
            str(row.seqlen),
            _milliseconds(row.flashtile),
            "" if theirs is None else _milliseconds(theirs),
            "" if row.speed_up is None else f"{row.speed_up:.2f}x",
            _memory(row.flashtile),
            "-" if theirs is None else _memory(theirs),
            "" if row.memory_ratio is None else f"{row.memory_ratio:.1f}x",
        )
    console.print(table)
    for row in rows:
        if row.obstacle is not None:
            console.print(f"{row.seqlen}: standard attention {escape(row.obstacle)}")
    return rows


def run_training(console: Console, config: TrainingConfig, seconds: float) -> Training:
    console.rule("training a byte-level GPT on Python's standard library", align="left")
    corpus = python_library()
    config = replace(config, steps=steps_within(seconds, config, corpus))
    twin_config = replace(config, attention="standard", stop=max(20, min(TWIN_STEPS, 2 * config.steps // 5)))
    with _progress(console) as progress:

        def run(config: TrainingConfig):
            task = progress.add_task(f"{config.attention} attention", total=config.last_step)

            def show(step: int, loss: float) -> None:
                described = f"{config.attention} attention, loss {loss:.2f}"
                progress.update(task, completed=step, description=described)

            return train(config, corpus, show, SLACK * seconds)

        model, result = run(config)
        _, twin = run(twin_config)
    agreed = agreement(result.losses, twin.losses, config.dtype)
    sample = generate(model, PROMPT, 100 if config.seqlen < 256 else 500, config).decode(errors="replace")
    size = f"{config.batch} x {config.seqlen}"
    console.print(
        f"{result.parameters:,} parameters, {len(result.losses)} steps of {size} bytes "
        f"at {result.tokens_per_second:,.0f} bytes/s; validation {result.bits_per_byte:.2f} bits a byte"
    )
    console.print("[dim]sample:[/]")
    console.print(sample, markup=False, highlight=False)
    return Training(
        config,
        corpus.source,
        corpus.files,
        len(corpus.train),
        len(corpus.validation),
        result,
        twin,
        agreed,
        sample,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _milliseconds(cost: scaling.Cost) -> str:
    return f"{cost.milliseconds:,.0f} ms" if cost.milliseconds >= 100 else f"{cost.milliseconds:.3g} ms"


def _memory(cost: scaling.Cost) -> str:
    return "-" if cost.peak_bytes is None else format_bytes(cost.peak_bytes)
