"""Films of recorded runs: the score matrix, tile by tile, as GIF or MP4.

Pillow, which matplotlib installs, writes GIFs. MP4 needs PyAV, the extra "film".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flashtile.learn.algorithms.trace import Event
from flashtile.learn.visualizer.recording import Recording

SUFFIXES = (".gif", ".mp4")
FRAMES_PER_SECOND = 10
SECONDS = 12

WIDTH, HEIGHT = 528, 608
LEFT, TOP, SIDE = 24, 56, 480
COLOURS = {
    "untouched": "#e9edf1", "skipped": "#ffffff", "computed": "#d3d5f3", "stored": "#7b7fd6",
    "weights": "#2a2c74", "ink": "#14181d", "track": "#e9edf0", "moved": "#0b5cad", "tile": "#4f51b5",
}  # fmt: skip
"""Colours of the page's light theme."""


def write_film(path: Path, recording: Recording, seconds: float = SECONDS) -> int:
    """Write the film of a run and return its number of frames.

    Args:
        path: file to write; its name ends in .gif or .mp4.
        recording: run of an algorithm that computes scores.
        seconds: duration of the film.

    Raises:
        ValueError: ``path`` has another ending, or the run has no scores.
        ModuleNotFoundError: PyAV, which MP4 needs, is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    count = max(round(seconds * FRAMES_PER_SECOND), 2)
    pictures = frames(recording, count)
    if path.suffix.lower() == ".mp4":
        _write_mp4(path, pictures)
    else:
        first, *rest = (picture.quantize(32, Image.Quantize.FASTOCTREE) for picture in pictures)
        first.save(path, save_all=True, append_images=rest, duration=1000 // FRAMES_PER_SECOND, loop=0)
    return count


def frames(recording: Recording, count: int) -> Iterator[Image.Image]:
    """Yield ``count`` pictures of a run from its first event to its last."""
    film = _Film(recording)
    events = recording.trace.events
    for number in range(count):
        yield film.at(round(number * len(events) / (count - 1)))


class _Film:
    """Picture of the score matrix after a given number of events.

    The numbers must ascend, because each picture adds to the one before.
    """

    def __init__(self, recording: Recording):
        self.recording, self.events = recording, recording.trace.events
        scores = [e for e in self.events if _is_tile(e)]
        if not scores:
            raise ValueError(f"algorithm must compute scores, got {recording.setting.algorithm!r}")
        self.rows = max(e.rows[1] for e in scores if e.rows)
        self.cols = max(e.cols[1] for e in scores if e.cols)
        self.high = max(min(SIDE, round(SIDE * self.rows / self.cols)), 24)
        self.moved = np.cumsum([e.bytes if e.kind in ("load", "store") else 0 for e in self.events])
        self.matrix = Image.new("RGB", (SIDE, self.high), COLOURS["untouched"])
        self.done = 0
        self.current: Event | None = None

    def at(self, position: int) -> Image.Image:
        painter = ImageDraw.Draw(self.matrix)
        for event in self.events[self.done : position]:
            if _is_tile(event):
                painter.rectangle(self._box(event), fill=COLOURS[_state(event)], outline="#ffffff")
                self.current = event
        self.done = position
        picture = Image.new("RGB", (WIDTH, HEIGHT), "#ffffff")
        picture.paste(self.matrix, (LEFT, TOP))
        self._draw_words(ImageDraw.Draw(picture), position)
        return picture

    def _box(self, event: Event) -> tuple[int, int, int, int]:
        assert event.rows is not None
        assert event.cols is not None
        left, right = (round(SIDE * max(col, 0) / self.cols) for col in event.cols)
        top, bottom = (round(self.high * row / self.rows) for row in event.rows)
        return left, top, max(right - 1, left), max(bottom - 1, top)

    def _draw_words(self, painter: ImageDraw.ImageDraw, position: int) -> None:
        setting, font = self.recording.setting, ImageFont.load_default(size=18)
        block = f", {setting.block}" if setting.block else ""
        title = f"{setting.algorithm}, N {setting.seqlen}, d {setting.head_dim}, {setting.mask}{block}"
        painter.text((LEFT, 20), title, fill=COLOURS["ink"], font=font)
        if self.current is not None and position < len(self.events):
            left, top, right, bottom = self._box(self.current)
            box = (left + LEFT, top + TOP, right + LEFT, bottom + TOP)
            painter.rectangle(box, outline=COLOURS["ink"], fill=COLOURS["tile"], width=2)
        moved, total = int(self.moved[position - 1]) if position else 0, int(self.moved[-1])
        below = TOP + self.high + 10
        painter.rectangle((LEFT, below, LEFT + SIDE, below + 8), fill=COLOURS["track"])
        painter.rectangle((LEFT, below, LEFT + SIDE * moved // total, below + 8), fill=COLOURS["moved"])
        painter.text((LEFT, below + 16), f"HBM: {moved} of {total} bytes", fill=COLOURS["ink"], font=font)


def _is_tile(event: Event) -> bool:
    name = event.name.split(".")[0]
    tile = event.kind in ("compute", "skip") and name == "S"
    return (tile or (event.kind == "store" and event.name in ("S", "P"))) and bool(event.rows and event.cols)


def _state(event: Event) -> str:
    if event.kind == "store":
        return "stored" if event.name == "S" else "weights"
    return "skipped" if event.kind == "skip" else "computed"


def _write_mp4(path: Path, pictures: Iterator[Image.Image]) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))
