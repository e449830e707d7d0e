"""Writes the page: one HTML file with its style, its program, its texts and its recordings."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from flashtile.hardware.cards import CARDS
from flashtile.visualizer import prebuilt, stories
from flashtile.visualizer.recording import record
from flashtile.visualizer.settings import SRAM_SIZES, Setting

SCRIPTS = (
    "elements", "format", "language", "address", "trace", "machine", "algorithms", "made", "grid", "catalog",
    "matrix", "memories", "statistics", "programs", "pages", "timeline", "merge", "charts", "readouts",
    "lines", "pseudocode", "formula", "arithmetic", "run", "player", "moments", "questions", "tour",
    "articles", "predict", "picture", "controls", "stories", "cells",
    *(f"stories/{name}" for name in stories.STORIES), "main",
)  # fmt: skip
"""The page's program in the order in which its parts use each other; they share one scope."""

STYLES = ("style.css", "stories.css")
LANGUAGES = ("en", "zh")
DTYPE = "float16"
FEW = 16
"""Fewer recordings than this are made here; more, by a process for each core."""

MOST_WORKERS = 8

SMALL_SEQLEN, SMALL_HEAD_DIM = 64, 4
"""Of the runs that the page makes itself."""


def write_page(
    path: Path,
    settings: Iterable[Setting],
    own: Iterable[Setting] = (),
    start: dict[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None,
    workers: int | None = None,
) -> int:
    """Write the page with recordings of the settings; returns its bytes.

    Args:
        path: of the HTML file; folders that it needs are made.
        settings: what the page offers; those of :func:`flashtile.visualizer.settings.grid` are kept in the
            package and need no recording.
        own: further settings.
        start: the state in which the page opens where its address says nothing else.
        progress: called for each recording.
        workers: processes that record; by default as many as there are cores, at most 8. Python starts them
            anew: a script that calls this needs ``if __name__ == "__main__":``.

    Raises:
        ValueError, SramExceededError: see :func:`flashtile.visualizer.recording.record`.
    """
    own = list(own)
    every = list(dict.fromkeys([*settings, *own]))
    sizes = sorted({*SRAM_SIZES, *(setting.sram_bytes for setting in own if setting.sram_bytes)})
    html = render(catalogue(recordings(every, progress, workers), sizes), start or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(html.encode())


def recordings(
    settings: list[Setting], progress: Callable[[], None] = lambda: None, workers: int | None = None
) -> Iterator[prebuilt.Recorded]:
    """(what the catalogue says, packed events) of each setting, in order: kept ones, the others recorded."""
    kept = prebuilt.load()
    new = [setting for setting in settings if setting not in kept]
    made = record_all(new, workers)
    for setting in settings:
        yield kept[setting] if setting in kept else next(made)
        progress()


def record_all(settings: list[Setting], workers: int | None = None) -> Iterator[prebuilt.Recorded]:
    """The same, every one of them recorded."""
    if workers is None:
        workers = min(os.cpu_count() or 1, MOST_WORKERS) if len(settings) >= FEW else 1
    if workers == 1:
        yield from map(_record, settings)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _one_thread) as pool:
        yield from pool.map(_record, settings, chunksize=4)


def _record(setting: Setting) -> prebuilt.Recorded:
    recording = record(setting)
    return recording.as_record(), recording.packed()


def _one_thread() -> None:
    torch.set_num_threads(1)


def catalogue(recorded: Iterable[prebuilt.Recorded], sram_sizes: list[int]) -> dict[str, Any]:
    """Everything that the page plays. Runs with the same events share them."""
    packed: dict[str, str] = {}
    entries = []
    for entry, events in recorded:
        key = hashlib.sha256(events.encode()).hexdigest()[:12]
        packed[key] = events
        entries.append({**entry, "packed": key})
    return {
        "recordings": entries, "packed": packed, "sram_sizes": sram_sizes, "cards": cards(),
        "small_inputs": small_inputs(), "stories": stories.catalogue(),
    }  # fmt: skip


def small_inputs() -> dict[str, list[list[float]]]:
    """q, k and v of the runs that the page makes itself, (64, 4) each: few digits, to be followed by hand."""
    numbers = torch.randn(3, SMALL_SEQLEN, SMALL_HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rounded = [[[round(x, 1) for x in row] for row in one] for one in numbers.tolist()]
    return dict(zip("qkv", rounded, strict=True))


def cards() -> list[dict[str, Any]]:
    """The GPUs of the roofline: FLOP/s of fp16 products, bytes a second. The papers' A100 comes first."""
    order = sorted(CARDS.items(), key=lambda item: item[0] != "a100")
    return [
        {
            "key": key,
            "name": card.name,
            "flops": card.peak_tflops(DTYPE) * 1e12,
            "bandwidth": card.bandwidth_gbps * 1e9,
            "sm_count": card.sm_count,
        }
        for key, card in order
    ]


def texts() -> dict[str, dict[str, str]]:
    """The page's texts by language and key; those of a story have its name before them."""
    folder = files("flashtile.visualizer") / "assets" / "texts"
    every = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in LANGUAGES}
    for story in stories.STORIES:
        told = json.loads((folder / "stories" / f"{story}.json").read_text("utf-8"))
        for language, own in every.items():
            own |= {f"{story}.{key}": text for key, text in told[language].items()}
    return every


def render(catalog: dict[str, Any], start: dict[str, Any]) -> str:
    """The whole file."""
    assets = files("flashtile.visualizer") / "assets"
    scripts = [(assets / "js" / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    environment = Environment(
        loader=PackageLoader("flashtile.visualizer", "assets"),
        autoescape=False,  # style, script and JSON are ours; _embed keeps JSON from ending its element
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(
        style="\n".join((assets / name).read_text("utf-8") for name in STYLES),
        script='"use strict";\n' + "\n".join(scripts),
        texts=_embed(texts()),
        start=_embed(start),
        catalog=_embed(catalog),
    )


def _embed(value: Any) -> str:
    """JSON that cannot be taken for markup."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")
