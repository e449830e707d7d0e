"""``flashtile compile``: compiles kernels ahead of time, without a GPU, into a folder for other machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from flashtile.hardware.cards import CARDS, find_card
from flashtile.tools.commands.options import bad_models, console, phases

if TYPE_CHECKING:
    from flashtile.backends.common.device import Target
    from flashtile.compilation.calls import Call
    from flashtile.compilation.compiling import Source

ARCHITECTURES = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "l40s", "sm_90": "h200", "sm_100": "b200"}
"""The card for which kernels are compiled if only an architecture is given."""
PRESETS = ("training", "serving", "everything")


def compile(
    out: Annotated[Path, typer.Argument(file_okay=False, help="Folder for the kernels.")],
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Architectures (sm_90,sm_80) or cards (h100), by commas or repeated. Default: sm_90."
        ),
    ] = None,
    calls: Annotated[
        list[Path] | None, typer.Option(help="File of recorded calls, repeatable: see flashtile record.")
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of a Hugging Face model, its config.json, or its name in the hub cache; repeatable."
        ),
    ] = None,
    purpose: Annotated[
        str, typer.Option(help="What models are compiled for: training, serving, both.")
    ] = "both",
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="Head sizes 64 to 256. training: plain attention. serving: KV caches. everything: both, and "
            "masks, biases, dropout."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile. Default: the number of CPU cores.")
    ] = None,
) -> None:
    """Compile kernels ahead of time into a folder that other machines can use. Needs no GPU.

    Set FLASHTILE_KERNELS to the folder, or call flashtile.use_compiled, on any machine with the same versions
    of flashtile and Triton. Kernels in the folder are never compiled again; others are compiled as usual.
    Exits with 1 if kernels of some calls could not be compiled.
    """
    from flashtile.compilation.compiling import compile_calls

    names = [name.strip() for given in arch or ("sm_90",) for name in given.split(",")]
    targets = list(dict.fromkeys(map(_target, names)))
    with phases(Console(stderr=True)) as show:
        wanted = _calls(calls or [], model or [], purpose, preset or [], show)
        if not wanted:
            raise typer.BadParameter("give calls, models or presets: --calls, --model, --preset")
        out.mkdir(mode=0o755, parents=True, exist_ok=True)
        done = compile_calls(wanted, targets, out, workers, show)
    printed = console()
    for failure in done.failures:
        printed.print(f"{failure.operation} for {failure.target}: {failure.reason}", markup=False)
    size = sum(path.stat().st_size for path in out.iterdir()) / 2**20
    printed.print(f"{done.kernels} kernels of {len(wanted)} calls, {size:.1f} MiB: {out}", soft_wrap=True)
    if done.failures:
        raise typer.Exit(1)


def _target(name: str) -> Target:
    from flashtile.backends.common.device import Target

    try:
        return Target.of_card(find_card(ARCHITECTURES.get(name.removesuffix("a"), name)))
    except ValueError:
        _refuse("--arch", name, (*ARCHITECTURES, *CARDS))


def _refuse(option: str, value: str, allowed: tuple[str, ...]) -> NoReturn:
    raise typer.BadParameter(f"must be one of {', '.join(allowed)}, got {value!r}", param_hint=option)


def _calls(
    files: list[Path],
    models: list[Path],
    purpose: str,
    presets: list[str],
    show: Callable[[str, int, int], None] = lambda *counts: None,
) -> list[Source]:
    """Return the calls of all files, models and presets; equal calls once. ``show`` shows the progress."""
    from flashtile.compilation.calls import read_calls
    from flashtile.tools.workload_calls import (
        CACHE_HEADS,
        PURPOSES,
        TRAINING_HEADS,
        Heads,
        decoding_calls,
        documented,
        model_calls,
        read_model,
        training_calls,
    )

    if purpose not in PURPOSES:
        _refuse("--purpose", purpose, PURPOSES)
    found: list[Source] = []
    with bad_models():
        for path in files:
            found += read_calls(path)
        for path in models:
            found += model_calls(read_model(path), purpose)
    for name in presets:
        if name not in PRESETS:
            _refuse("--preset", name, PRESETS)
        layers: list[tuple[Callable[..., list[Call]], Heads]] = []
        if name != "serving":
            layers += [(training_calls, heads) for heads in documented(TRAINING_HEADS)]
        if name != "training":
            layers += [(decoding_calls, heads) for heads in documented(CACHE_HEADS)]
        for i, (calls_of_layers, heads) in enumerate(layers):
            show(f"recording the calls of layers for {name}", i, len(layers))
            found += calls_of_layers([heads], features=name == "everything")
    return list(dict.fromkeys(found))
