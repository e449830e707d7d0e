"""``flashtile profile``: finds the fastest kernels of ``flashtile.linear`` on this GPU."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashtile.hardware.linear_table import Row, cache_file, merged, read_table, write_table
from flashtile.tools.commands.options import MODEL_NAMES, bad_parameters, output_file

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "llama-2-7b"
LARGEST = 2**20
MAX_ROWS = 128


def profile(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Model whose products to measure, repeatable: {', '.join(MODEL_NAMES)}. "
            f"Default: {DEFAULT_MODEL}."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Rows and columns of a weight as N,K, repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of x: bfloat16 or float16.")] = "bfloat16",
    weight_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the weights: that of x, or float8_e4m3fn. Default: that of x."),
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, max=MAX_ROWS, help="Rows of x, repeatable. Default: 1 to 128.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=output_file(".json"), help="File of the table. Default: the user's table."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=output_file(".svg", ".png"), help="Picture of the first shape's times: .svg or .png."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of processes that compile.")] = 4,
) -> None:
    """Measure GEMV, products for few rows and the vendor's library, and store the fastest by number of rows.

    This takes a minute or two for a model. ``flashtile.linear`` reads the table when it first needs it;
    nothing is measured at run time.
    """
    import torch

    from flashtile.learn.io_model import find_model

    shapes = [_shape(text) for text in shape or ()]
    x_dtype = _dtype("--dtype", dtype, ("bfloat16", "float16"))
    w_dtype = _dtype("--weight-dtype", weight_dtype or dtype, (dtype, "float8_e4m3fn"))
    with bad_parameters():
        models = [find_model(name) for name in model or (() if shapes else (DEFAULT_MODEL,))]
    path = out or cache_file()
    old: tuple[Row, ...] = ()
    if path.exists():
        with bad_parameters():
            old = read_table(path)  # raises for other files, so that they are not overwritten
    if not torch.cuda.is_available():
        raise typer.BadParameter("profile measures a GPU, and torch finds none")

    from flashtile.tools import linear_profile

    for one in models:
        shapes += one.products
    shapes = list(dict.fromkeys(shapes))
    numbers = tuple(sorted(set(rows or linear_profile.ROWS)))
    if jobs > 1:
        _compile(shapes, x_dtype, w_dtype, numbers, jobs)
    device = torch.device("cuda", torch.cuda.current_device())
    read_tbps = linear_profile.read_bandwidth(device)
    typer.echo(f"{torch.cuda.get_device_name(device)} reads {read_tbps:.2f} TB/s")
    found = []
    for N, K in shapes:
        row = linear_profile.measure_shape(N, K, x_dtype, w_dtype, device, numbers, read_tbps, typer.echo)
        found.append(row)
        typer.echo(f"{N} x {K}: GEMV below {row.gemv_below} rows, the library from {row.library_from}")
        torch.cuda.empty_cache()
    write_table(path, merged(old, tuple(found)))
    typer.echo(f"{len(found)} rows written to {path}")
    if plot is not None:
        linear_profile.draw_chart(found[0], plot)


def _compile(shapes: list, x_dtype: torch.dtype, w_dtype: torch.dtype, rows: tuple, jobs: int) -> None:
    from flashtile.tools.linear_profile import compile_share

    context = multiprocessing.get_context("spawn")
    shares = [
        context.Process(target=compile_share, args=(shapes, x_dtype, w_dtype, rows, part, jobs))
        for part in range(jobs)
    ]
    for share in shares:
        share.start()
    for share in shares:
        share.join()


def _shape(text: str) -> tuple[int, int]:
    try:
        N, K = (int(number) for number in text.split(","))
    except ValueError:
        N = K = 0
    if not (1 <= N <= LARGEST and 1 <= K <= LARGEST):
        raise typer.BadParameter(f"shape must be N,K, each from 1 to {LARGEST}, got {text!r}")
    return N, K


def _dtype(option: str, name: str, allowed: tuple[str, ...]) -> torch.dtype:
    import torch

    if name not in allowed:
        raise typer.BadParameter(f"{option} must be one of {', '.join(allowed)}, got {name!r}")
    return getattr(torch, name)
