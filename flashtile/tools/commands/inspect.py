"""``flashtile inspect``: resources of every compiled kernel configuration, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from flashtile.tools.commands.options import bad_parameters, console, output_file, phases
from flashtile.tools.inspection.report import ARCHITECTURES, CompileReport, architecture, reports

_ARCH_HELP = f"Architecture, repeatable: {', '.join(ARCHITECTURES)}. Default: this GPU's, else sm_90a."


def inspect(
    arch: Annotated[list[str] | None, typer.Option(help=_ARCH_HELP)] = None,
    kernel: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=output_file(), help="File for all numbers.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cases compiled at a time. Default: the number of CPU cores.")
    ] = None,
) -> None:
    """Compile every kernel configuration ahead of time and tabulate the resources it uses. Needs no GPU.

    Exits with 1 if a configuration needs more shared memory than there is, or does not use tensor cores
    although it should.
    """
    from flashtile.tools.inspection.cases import every_case

    out = console()
    with bad_parameters():
        names = dict.fromkeys(architecture(name).name for name in arch or [_default_arch()])
    chosen = {name: [case for case in every_case(name) if kernel in case.name] for name in names}
    for name, cases in chosen.items():
        if not cases:
            raise typer.BadParameter(f"no case of {name} has {kernel!r} in its name", param_hint="--kernel")
    found: list[CompileReport] = []
    for name, cases in chosen.items():
        ready = reports(cases, name, None if jobs is None else min(jobs, len(cases)))
        done: list[CompileReport] = []
        errors = Console(stderr=True)
        try:
            with phases(errors) as show:
                for report in ready:
                    done.append(report)
                    show(f"compiling for {name}", len(done), len(cases))
        except RuntimeError as error:
            errors.print(error, style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        out.print(_table(name, done))
        found += done
    if json_file is not None:
        rows = [asdict(report) | {"violations": report.violations} for report in found]
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
    unsound = [report for report in found if report.violations]
    for report in unsound:
        out.print(f"[red]{report.arch} {report.name}: {'; '.join(report.violations)}[/]", soft_wrap=True)
    out.print(f"{len(found)} configurations, {len(unsound)} beyond their limits")
    if unsound:
        raise typer.Exit(1)


def _default_arch() -> str:
    import torch

    if torch.cuda.is_available() and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability()
        if any(known.capability == major * 10 + minor for known in ARCHITECTURES.values()):
            return f"sm_{major}{minor}"
    return "sm_90a"


def _table(arch: str, found: list[CompileReport]) -> Table:
    limit = ARCHITECTURES[arch].shared_limit
    counts = ("threads", "registers", "spill stores", "loads", "stack", "shared")
    table = Table(
        Column("kernel", overflow="fold", min_width=24),
        *(Column(count, justify="right", overflow="fold") for count in counts),
        "tensor core", Column("seconds", justify="right"),
        title=f"{arch}: {limit} bytes of shared memory a block", title_justify="left",
    )  # fmt: skip
    for r in found:
        numbers = (r.threads, r.registers, r.spill_stores, r.spill_loads, r.stack, r.shared)
        instructions = " ".join(f"{name} {count}" for name, count in r.tensor_core.items())
        style = "red" if r.violations else None
        table.add_row(r.name, *map(str, numbers), instructions, f"{r.seconds:.1f}", style=style)
    return table
