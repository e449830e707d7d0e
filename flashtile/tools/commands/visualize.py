"""``flashtile visualize``: the interactive page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flashtile.hardware.cards import KIB
from flashtile.tools.commands.options import BadArgument, output_file, progress_bar

if TYPE_CHECKING:
    from flashtile.learn.visualizer.settings import Setting

ALGORITHMS = (
    "standard", "flash1", "flash2", "flash3", "flash_decoding", "unified_max", "paged", "standard_backward",
    "flash1_backward", "flash2_backward",
)  # fmt: skip
MASKS = ("full", "causal", "window")
FILMS = (".gif", ".mp4")
"""Names that :mod:`flashtile.learn.visualizer` knows, for help texts, which import no torch."""
LONGEST, WIDEST, MAX_KIB = 16384, 4096, 2**20
"""Largest seqlen, head_dim and SRAM size (KiB) of a user's run. Every data movement of a run is recorded."""


def visualize(
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=output_file(), help="HTML file to write.")
    ] = Path("flashtile-visualize.html"),
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    algorithm: Annotated[
        str | None,
        typer.Option(help=f"Algorithm of your run: {', '.join(ALGORITHMS)}. Default: flash2."),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(min=1, max=LONGEST, help="Tokens of your run. Default: 1024."),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=WIDEST, help="Head size. Default: 64.")] = None,
    block: Annotated[str | None, typer.Option(help='Blocks: queries x keys, like 64x64, or "auto".')] = None,
    sram_kib: Annotated[
        int | None, typer.Option(min=1, max=MAX_KIB, help="Size of SRAM in KiB. Default: 100.")
    ] = None,
    mask: Annotated[str | None, typer.Option(help=f"Mask of your run: {', '.join(MASKS)}.")] = None,
    num_splits: Annotated[int | None, typer.Option(min=1, help="Splits of the keys in decoding.")] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a page (paged).")] = None,
    film: Annotated[
        Path | None,
        typer.Option(
            callback=output_file(*FILMS), help="Also write the run as a film: .gif, or .mp4 (needs PyAV)."
        ),
    ] = None,
) -> None:
    """Write a page that plays the algorithms: which data moves, what it costs, and why.

    The page is one HTML file that needs no network. --film also writes a run as GIF or MP4. With --algorithm,
    --seqlen, --head-dim, --block, --sram-kib, --mask, --num-splits or --page-size the page also has a run
    with these settings, which it shows first, and standard attention's run for comparison.
    """
    from flashtile.learn.algorithms.memory import SramExceededError
    from flashtile.learn.visualizer.film import write_film
    from flashtile.learn.visualizer.page import write_page
    from flashtile.learn.visualizer.recording import record
    from flashtile.learn.visualizer.settings import grid, own_runs

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
    """Return the initial state of the page, which shows the user's own runs. Without these it is empty."""
    if not own:
        return {}
    first = own[0]
    names = {"block": first.block, "num_splits": first.num_splits, "page_size": first.page_size}
    run = {"algorithm": first.algorithm} | {name: value for name, value in names.items() if value is not None}
    compared = {"algorithm": own[1].algorithm} if len(own) > 1 else None
    return {
        "a": run, "b": compared, "queries": first.queries, "seqlen": first.seqlen, "head_dim": first.head_dim,
        "mask": first.mask, "sram": first.sram_bytes, "at": 0,
    }  # fmt: skip
