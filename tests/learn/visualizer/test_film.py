"""A run as a film: what its frames show, and that what is written can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.learn.visualizer.film import COLOURS, LEFT, SIDE, TOP, WIDTH, frames, write_film
from flashtile.learn.visualizer.recording import record
from flashtile.learn.visualizer.settings import Setting

RUN = Setting("flash2", 32, 16, mask="causal", block="8x8")


def states(picture: Image.Image, blocks: int) -> list[list[str]]:
    """What colour the centre of each tile has, by its name."""
    names = {value: name for name, value in COLOURS.items()}
    centres = [int((i + 0.5) * SIDE / blocks) for i in range(blocks)]
    pixels = [[picture.getpixel((LEFT + x, TOP + y)) for x in centres] for y in centres]
    return [[names["#" + bytes(pixel).hex()] for pixel in row] for row in pixels]  # type: ignore[arg-type]


def test_frames_show_what_has_happened() -> None:
    first, *_, last = frames(record(RUN), 5)
    assert states(first, 4) == [["untouched"] * 4] * 4
    assert states(last, 4) == [["computed"] * (i + 1) + ["skipped"] * (3 - i) for i in range(4)]
    *_, last = frames(record(Setting("standard", 32, 16, sram_bytes=64 * 1024)), 2)
    assert states(last, 4) == [["weights"] * 4] * 4


def test_a_gif_and_an_mp4(tmp_path: Path) -> None:
    recording = record(RUN)
    assert write_film(tmp_path / "run.gif", recording, seconds=0.5) == 5
    with Image.open(tmp_path / "run.gif") as film:
        assert film.n_frames == 5
        assert (film.width, film.info["duration"]) == (WIDTH, 100)
    av = pytest.importorskip("av", reason="PyAV is not installed (extra: film)")
    write_film(tmp_path / "run.mp4", recording, seconds=0.5)
    with av.open(str(tmp_path / "run.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 5


def test_what_cannot_be_filmed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must end in \.gif or \.mp4"):
        write_film(tmp_path / "run.avi", record(RUN))
    result = CliRunner().invoke(application(), ["visualize", "--film", str(tmp_path / "run.avi")])
    assert result.exit_code == 2
