"""Writes the page: one HTML file with its style, script, texts and recordings."""

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

from flashtile.files import DESIGN
from flashtile.hardware.cards import CARDS
from flashtile.learn.visualizer import prebuilt, stories
from flashtile.learn.visualizer.packing import as_json, compressed
from flashtile.learn.visualizer.recording import record
from flashtile.learn.visualizer.settings import SRAM_SIZES, Setting

SCRIPTS = (
    "elements", "format", "language", "address", "trace", "machine", "algorithms", "made", "grid", "catalog",
    "scene", "memories", "statistics", "programs", "pages", "timeline", "merge", "charts", "readouts",
    "lines", "pseudocode", "formula", "arithmetic", "run", "player", "phases", "moments", "questions", "tour",
    "articles", "predict", "picture", "controls", "stories", "race", "home", "cells",
    *(f"stories/{name}" for name in stories.STORIES), "main",
)  # fmt: skip
"""The page's scripts, each after those that it uses; they share one scope."""

STYLES = ("style.css", "stories.css")
LANGUAGES = ("en", "zh")
DTYPE = "float16"
FEW = 16
"""With at least this many recordings, one process per core makes them. Otherwise this process does."""

MAX_WORKERS = 8

SMALL_SEQLEN, SMALL_HEAD_DIM = 64, 4
"""Sizes of the runs that the page computes itself."""


def write_page(
    path: Path,
    settings: Iterable[Setting],
    own: Iterable[Setting] = (),
    start: dict[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None,
    workers: int | None = None,
) -> int:
    """Write the page with recordings of the settings and return its size in bytes.

    Args:
        path: HTML file to write; missing folders are created.
        settings: runs that the page offers. Those of :func:`flashtile.learn.visualizer.settings.grid` are
            kept in the package and need no recording.
        own: further settings. Their SRAM sizes are added to those that the page offers.
        start: initial state of the page, unless the page's address contains a state.
        progress: called for each recording.
        workers: processes that record; by default as many as there are cores, at most 8. They are spawned: a
            script that calls this function needs ``if __name__ == "__main__":``.

    Raises:
        ValueError, SramExceededError: see :func:`flashtile.learn.visualizer.recording.record`.
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
    """Yield a recording of each setting's run, in the order of ``settings``.

    Recordings that the package contains are reused. The other settings are run and recorded now.
    """
    kept = prebuilt.load()
    new = [setting for setting in settings if setting not in kept]
    made = record_all(new, workers)
    for setting in settings:
        yield kept[setting] if setting in kept else next(made)
        progress()


def record_all(settings: list[Setting], workers: int | None = None) -> Iterator[prebuilt.Recorded]:
    """Run the algorithm of each setting, and yield a recording of each run in the order of ``settings``."""
    if workers is None:
        workers = min(os.cpu_count() or 1, MAX_WORKERS) if len(settings) >= FEW else 1
    if workers == 1:
        yield from map(_record, settings)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(_record, settings, chunksize=4)


def _record(setting: Setting) -> prebuilt.Recorded:
    recording = record(setting)
    return recording.as_record(), recording.packed()


def catalogue(recorded: Iterable[prebuilt.Recorded], sram_sizes: list[int]) -> dict[str, Any]:
    """Return the data of the page, with compressed recordings. Equal events are stored only once."""
    packed: dict[str, str] = {}
    entries = []
    for entry, events in recorded:
        key = hashlib.sha256(events.encode()).hexdigest()[:12]
        packed[key] = events
        entries.append({**entry, "packed": key})
    return {
        "recordings": compressed(entries), "packed": packed, "sram_sizes": sram_sizes, "cards": cards(),
        "small_inputs": small_inputs(), "stories": stories.catalogue(),
    }  # fmt: skip


def small_inputs() -> dict[str, list[list[float]]]:
    """Return q, k and v, each (64, 4), for the runs that the page computes itself, in JavaScript.

    The numbers have one decimal, so that readers can follow the runs by hand.
    """
    numbers = torch.randn(
        3, SMALL_SEQLEN, SMALL_HEAD_DIM, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    rounded = [[[round(x, 1) for x in row] for row in one] for one in numbers.tolist()]
    return dict(zip("qkv", rounded, strict=True))


def cards() -> list[dict[str, Any]]:
    """Return the GPUs of the page's roofline, beginning with the A100 of the papers.

    ``flops`` is the peak of fp16 matrix products per second, ``bandwidth`` is in bytes per second.
    """
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
    """Texts of the page by language and key; the keys of a story start with its name."""
    folder = files("flashtile.learn.visualizer") / "assets" / "texts"
    every = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in LANGUAGES}
    tours = json.loads((folder / "tours.json").read_text("utf-8"))
    for language, own in every.items():
        own |= tours[language]
    for story in stories.STORIES:
        told = json.loads((folder / "stories" / f"{story}.json").read_text("utf-8"))
        for language, own in every.items():
            own |= {f"{story}.{key}": text for key, text in told[language].items()}
    return every


def render(catalog: dict[str, Any], start: dict[str, Any]) -> str:
    """Return the whole HTML file."""
    assets = files("flashtile.learn.visualizer") / "assets"
    scripts = [(assets / "js" / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    environment = Environment(
        loader=PackageLoader("flashtile.learn.visualizer", "assets"),
        autoescape=False,  # all inserted text is our own; _embed escapes "<" in JSON
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(
        style="\n".join(path.read_text("utf-8") for path in (DESIGN, *(assets / name for name in STYLES))),
        script='"use strict";\n' + "\n".join(scripts),
        texts=_embed(texts()),
        start=_embed(start),
        catalog=_embed(catalog),
    )


def _embed(value: Any) -> str:
    """Return ``value`` as JSON that is safe inside an HTML element."""
    return as_json(value).replace("<", "\\u003c")
