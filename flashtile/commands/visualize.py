"""``flashtile visualize``: the interactive page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flashtile.algorithms.memory import KIB, SramExceededError
from flashtile.commands.options import BadArgument, output_file, progress_bar
from flashtile.visualizer.film import SUFFIXES as FILMS
from flashtile.visualizer.film import write_film
from flashtile.visualizer.page import write_page
from flashtile.visualizer.recording import RUNNERS, record
from flashtile.visualizer.settings import MASKS, Setting, grid, own_runs

LONGEST, WIDEST, MOST_KIB = 16384, 4096, 2**20
"""Sizes of a run of one's own: each is computed, and each of its moves recorded."""


def visualize(
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=output_file(), help="The HTML file to write.")
    ] = Path("flashtile-visualize.html"),
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    algorithm: Annotated[
        str | None,
        typer.Option(help=f"For a run of your own: {', '.join(RUNNERS)}. Default: flash2."),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(min=1, max=LONGEST, help="Record a run of this length."),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=WIDEST, help="Default: 64.")] = None,
    block: Annotated[str | None, typer.Option(help='Queries x keys, like 64x64, or "auto".')] = None,
    sram_kib: Annotated[int | None, typer.Option(min=1, max=MOST_KIB, help="SRAM in KiB.")] = None,
    mask: Annotated[str | None, typer.Option(help=f"{', '.join(MASKS)}.")] = None,
    num_splits: Annotated[int | None, typer.Option(min=1, help="For decoding.")] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="For paged.")] = None,
    film: Annotated[
        Path | None,
        typer.Option(
            callback=output_file(*FILMS), help="Write the run as a film, too: .gif, or .mp4 (PyAV)."
        ),
    ] = None,
) -> None:
    """Write a page that plays the algorithms: what moves, what it costs, why.

    One HTML file that needs no network. --film writes a run as GIF or MP4 beside it. With --algorithm,
    --seqlen, --head-dim, --block, --sram-kib, --mask, --num-splits or --page-size it also holds a run
    with these settings, standard attention's beside it, and opens there.
    """
    given: dict[str, Any] = {
        "seqlen": seqlen, "head_dim": head_dim, "mask": mask, "block": block,
        "sram_bytes": None if sram_kib is None else sram_kib * KIB,
        "num_splits": num_splits, "page_size": page_size,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    out = Console()
    try:
        own = own_runs(algorithm or "flash2", **given) if algorithm or given or film else []
        recorded = [record(setting) for setting in own]
        if film:
            write_film(film, recorded[0])
    except (ValueError, SramExceededError) as error:
        raise BadArgument(str(error)) from None
    except ModuleNotFoundError:
        raise typer.BadParameter('--film with .mp4 needs PyAV: pip install "flashtile[film]"') from None
    settings = list(grid())
    with progress_bar(out) as progress:
        task = progress.add_task("recording", total=len(settings) + len(own))
        size = write_page(output, settings, own, start_of(own), lambda: progress.advance(task))
    out.print(
        f"Wrote {output} ({size / 2**20:.1f} MiB, {len(settings) + len(own)} recorded runs)", soft_wrap=True
    )
    if film:
        out.print(f"Wrote {film}", soft_wrap=True)
    if open_:
        webbrowser.open(output.resolve().as_uri())


def start_of(own: list[Setting]) -> dict[str, Any]:
    """The state in which the page opens: with the runs of one's own, if there are any."""
    if not own:
        return {}
    first = own[0]
    names = {"block": first.block, "num_splits": first.num_splits, "page_size": first.page_size}
    run = {"algorithm": first.algorithm} | {name: value for name, value in names.items() if value is not None}
    beside = {"algorithm": own[1].algorithm} if len(own) > 1 else None
    return {
        "a": run, "b": beside, "queries": first.queries, "seqlen": first.seqlen, "head_dim": first.head_dim,
        "mask": first.mask, "sram": first.sram_bytes, "at": 0,
    }  # fmt: skip
