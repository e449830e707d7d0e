"""Twelve moments of the page as pictures, compared with those in ``frames/`` within a tolerance.

Pictures are drawn without text, whose fonts differ between machines, and compared after they were made small.
``KEY_FRAMES=write pytest tests/learn/visualizer/test_key_frames.py`` writes them anew.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from visits import Visit

FOLDER = Path(__file__).parent / "frames"
SIZE = (96, 64)
MAX_MEAN, MAX_OUTLIERS, OUTLIER = 2.5, 0.02, 40
"""Largest mean difference of a colour (of 255), and share of pixels that differ by more than OUTLIER."""

LARGE = "queries=all&head_dim=64&mask=full&sram=102400"
SMALL = "queries=all&head_dim=4&mask=full&sram=102400"
DECODING = "queries=one&seqlen=4096&head_dim=64&sram=102400"
FRAMES = {
    "scores_to_hbm": f"a=standard&seqlen=1024&{LARGE}&at=300",
    "weights_to_hbm": f"a=standard&seqlen=1024&{LARGE}&at=600",
    "tiles": f"a=flash2;block=64x64&seqlen=1024&{LARGE}&at=900",
    "tile_of_numbers": f"a=flash2;block=4x4&seqlen=8&{SMALL}&at=17",
    "first_loops": f"a=flash1;block=3x2&seqlen=12&{SMALL}&at=120",
    "second_loops": f"a=flash2;block=3x2&seqlen=12&{SMALL}&at=120",
    "race": f"a=flash2;block=64x64&b=standard&seqlen=1024&{LARGE}&sync=bytes&at=400",
    "causal": "a=flash2;block=64x64&seqlen=256&queries=all&head_dim=64&mask=causal&sram=102400&at=70",
    "warpgroups": f"a=flash3;block=32x32&seqlen=256&{LARGE}&at=90",
    "splits": f"a=flash_decoding;block=1x128;num_splits=8&{DECODING}&at=150",
    "softmax": "story=softmax&case=average&variant=article&at=15",
    "masks": "story=masks&case=lists&variant=document&at=300",
}
"""State of the page by the name of its picture."""

STORIES = {"softmax": ".weight-bars", "masks": ".cells svg"}
WITHOUT_TEXT = """(() => {
  CanvasRenderingContext2D.prototype.fillText = () => {};
  CanvasRenderingContext2D.prototype.measureText = (text) => ({ width: 7 * text.length });
})()"""
CANVAS = """([width, height]) => {
  const { scene } = flashtilePage.views.a;
  const frame = scene.canvas.parentElement;
  frame.style.cssText = `position: fixed; left: 0; top: 0; width: ${width}px; height: ${height}px`;
  scene.resize();
  flashtilePage.draw();
  return scene.canvas.toDataURL();
}"""
"""The stage at a fixed size, which leaves out the heights of texts around it."""


@pytest.fixture
def picture_of(chromium: Any, page_file: Path) -> Any:
    """picture_of(state): the picture of the stage, or of a story, as (height, width, 3) in 0 to 255."""
    context = chromium.new_context(
        viewport={"width": 1366, "height": 768}, reduced_motion="reduce", locale="en-US", color_scheme="light"
    )
    visit = Visit(context.new_page(), page_file.as_uri())
    visit.page.add_init_script(WITHOUT_TEXT)

    def draw(name: str) -> np.ndarray:
        visit.go(FRAMES[name])
        if name in STORIES:
            visit.page.add_style_tag(content="* { color: transparent !important; }")
            return small(visit.page.locator(STORIES[name]).screenshot())
        return small(base64.b64decode(visit.page.evaluate(CANVAS, [990, 560]).split(",")[1]))

    yield draw
    context.close()


def small(png: bytes) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    with image.open(io.BytesIO(png)) as picture:
        whole = picture.convert("RGBA")
    ground = image.new("RGBA", whole.size, "#ffffff")
    ground.alpha_composite(whole)
    return np.asarray(ground.convert("RGB").resize(SIZE, image.Resampling.BOX), dtype=np.float64)


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    difference = np.abs(one - other)
    outliers = (difference.max(-1) > OUTLIER).mean()
    return bool(difference.mean() > MAX_MEAN or outliers > MAX_OUTLIERS)


@pytest.mark.parametrize("name", FRAMES)
def test_key_frame(picture_of: Callable[[str], np.ndarray], name: str) -> None:
    image = pytest.importorskip("PIL.Image")
    drawn, path = picture_of(name), FOLDER / f"{name}.png"
    if os.environ.get("KEY_FRAMES") == "write":
        FOLDER.mkdir(exist_ok=True)
        image.fromarray(drawn.round().astype(np.uint8)).save(path, optimize=True)
    with image.open(path) as kept:
        assert not differs(drawn, np.asarray(kept.convert("RGB"), dtype=np.float64))


def test_the_tolerance_tells_frames_apart() -> None:
    image = pytest.importorskip("PIL.Image")
    kept = {
        name: np.asarray(image.open(FOLDER / f"{name}.png").convert("RGB"), dtype=np.float64)
        for name in FRAMES
    }
    for one, other in itertools.combinations(FRAMES, 2):
        assert differs(kept[one], kept[other]), (one, other)
