"""The tours: each scene on three screens in two languages, and that what they say is what Python counts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from visits import KIB, Visit

import flashtile.learn.visualizer
from flashtile.algorithms import Memory, Trace, flash1, flash2, flash3_schedule, standard
from flashtile.learn.visualizer import stories
from flashtile.learn.visualizer.page import small_inputs
from flashtile.learn.visualizer.recording import Recording
from flashtile.learn.visualizer.settings import Setting

Recorded = Callable[[Setting], Recording]
TOURS = {
    "slow": 6, "tiles": 7, "softmax": 7, "loops": 6, "gradients": 7, "turns": 6, "eight": 7, "split": 6,
    "pages": 6,
}  # fmt: skip
"""Scenes of each tour, in the order of the landing view."""

SIZES = {"laptop": (1366, 768), "desktop": (1920, 1080), "phone": (360, 640)}
SCREENS = [
    pytest.param(
        {
            "viewport": {"width": width, "height": height},
            "reduced_motion": "reduce",
            "locale": locale,
            **({"is_mobile": True, "has_touch": True} if name == "phone" else {}),
        },
        id=f"{name}-{locale}",
    )
    for name, (width, height) in SIZES.items()
    for locale in ("en-US", "zh-CN")
]
MEASURES = """() => {
  const shown = (selector) => [...document.querySelectorAll(selector)].filter((e) => e.offsetParent !== null);
  const box = (e) => e.getBoundingClientRect();
  const empty = () => { // the larger part of a story's stage that has nothing, above or below its cases
    const cases = shown(".case").map(box);
    if (!cases.length) return 0;
    const { top, height } = box(document.querySelector(".story"));
    const above = Math.min(...cases.map((one) => one.top)) - top;
    return Math.max(above, top + height - Math.max(...cases.map((one) => one.bottom))) / height;
  };
  const area = (e) => box(e).width * box(e).height;
  const [guide, next] = [".guide.tour", "#tour-next"].map((name) => box(document.querySelector(name)));
  const canvases = shown("article canvas").map((canvas) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let i = 0; i < data.length; i += 404) colours.add(data.slice(i, i + 3).join());
    return colours.size;
  });
  return {
    wide: document.documentElement.scrollWidth, high: document.documentElement.scrollHeight,
    stage: shown(".stage, .story").reduce((sum, e) => sum + area(e), 0) / (innerWidth * innerHeight),
    canvases, empty: empty(), guide: guide.top >= 0 && guide.left >= 0,
    next: next.top >= 0 && next.bottom <= innerHeight && next.right <= innerWidth,
  };
}"""


@pytest.mark.slow
@pytest.mark.parametrize("visit", SCREENS, indirect=True)
def test_every_scene_renders(visit: Visit) -> None:
    """No scrolling sideways; half of a large window is the stage; on a phone the button is in reach."""
    width, height = (visit.page.viewport_size[key] for key in ("width", "height"))
    visit.page.click("[data-tour=slow]")
    sentences = set()
    for tour, scenes in TOURS.items():
        for number in range(1, scenes + 1):
            visit.settle()
            assert (visit.state["tour"], visit.state["scene"]) == (tour, str(number))
            text = visit.text(".guide.tour")
            assert len(text) > 12
            assert not re.search(r"NaN|undefined|null|\{", text), text
            sentences.add(visit.page.text_content(".guide.tour .sentence"))
            check_measures(visit, width, height)
            visit.page.click("#tour-next")
    visit.settle()
    assert len(sentences) == sum(TOURS.values())
    assert visit.page.get_attribute("body", "data-view") == "home"


def check_measures(visit: Visit, width: int, height: int) -> None:
    found = visit.page.evaluate(MEASURES)
    assert found["wide"] <= width, visit.state
    assert all(colours >= 4 for colours in found["canvases"]), visit.state
    assert found["guide"], visit.state
    assert found["next"], visit.state
    if width > 900:
        assert found["high"] <= height, visit.state
        assert found["stage"] > 0.5, visit.state
        assert found["empty"] < 0.3, visit.state


def test_cards_lead_to_the_tours(visit: Visit) -> None:
    assert visit.each(".cards button", "e.dataset.tour") == list(TOURS)
    assert visit.each(".cards svg", "e.childElementCount > 5") == [True] * len(TOURS)
    assert visit.state_text == ""
    visit.page.click("[data-tour=tiles]")
    visit.settle()
    visit.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert visit.state["scene"] == "2"
    visit.press("h")
    assert visit.page.is_visible(".cards")
    assert visit.page.is_hidden(".player")
    assert visit.page.is_hidden(".guide.tour")
    assert "touring" not in (visit.page.get_attribute("body", "class") or "")


def test_a_scene_plays_by_itself_and_stops(visit: Visit) -> None:
    visit.page.click("[data-tour=tiles]")
    visit.page.wait_for_selector("#play[aria-label=Pause]")
    visit.page.wait_for_selector("#play[aria-label=Play]")
    loaded = next(at for at, e in enumerate(small_trace(flash2, 8, (4, 4)).events, 1) if e.kind == "load")
    assert visit.state["at"] == str(loaded)


@pytest.mark.parametrize(
    "visit", [{"viewport": {"width": 360, "height": 640}, "has_touch": True, "reduced_motion": "reduce"}],
    indirect=True,
)  # fmt: skip
def test_swipes_turn_scenes(visit: Visit) -> None:
    visit.page.click("[data-tour=slow]")
    visit.settle()
    swipe = """([from, to]) => {
      const main = document.querySelector("main");
      const touch = (x) => new Touch({ identifier: 1, target: main, clientX: x, clientY: 200 });
      main.dispatchEvent(new TouchEvent("touchstart", { touches: [touch(from)], bubbles: true }));
      main.dispatchEvent(new TouchEvent("touchend", { changedTouches: [touch(to)], bubbles: true }));
    }"""
    for start, end, scene in ((300, 100, "2"), (300, 100, "3"), (100, 300, "2"), (100, 120, "2")):
        visit.page.evaluate(swipe, [start, end])
        visit.page.wait_for_function("(scene) => flashtilePage.state.scene === Number(scene)", arg=scene)
        visit.settle()


def small_trace(module: Any, seqlen: int, block: tuple[int, int]) -> Trace:
    inputs = [torch.tensor(small_inputs()[name][:seqlen], dtype=torch.float64) for name in "qkv"]
    trace = Trace()
    options = {} if module is standard else {"block_m": block[0], "block_n": block[1]}
    module.forward(*inputs, Memory(100 * KIB, trace=trace), **options)
    return trace


@pytest.fixture
def answers(visit: Visit) -> Callable[[str, int], str]:
    """answers(tour, scene): the text of the right answer, after a wrong one was tried."""

    def ask(tour: str, scene: int) -> str:
        visit.press("h")
        visit.page.click(f"[data-tour={tour}]")
        visit.settle()
        for _ in range(scene - 1):
            visit.press("ArrowRight")
        assert visit.page.is_hidden(".guide.tour .sentence")
        right = visit.page.evaluate(
            "([tour, scene]) => flashtilePage.tour.tour.scenes[scene - 1].right", [tour, scene]
        )
        visit.page.click(f".guide.tour .choices [data-choice='{(right + 1) % 3}']")
        assert visit.text(".verdict") == "Not quite."
        assert visit.page.is_visible(".guide.tour .sentence")
        marked = visit.each(".guide.tour .choices [data-right]", "e.textContent")
        visit.page.click(f".guide.tour .choices [data-choice='{right}']")
        assert visit.text(".verdict") == "Right."
        assert len(marked) == 1
        return str(marked[0])

    return ask


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True)
def test_right_answers_are_those_of_python(
    visit: Visit, answers: Callable[[str, int], str], recorded: Recorded
) -> None:
    run = recorded(Setting("standard", 1024, 64, sram_bytes=100 * KIB))
    moved = run.totals["hbm_read"] + run.totals["hbm_written"]
    share = sum(sum(run.traffic[name]) for name in "SP") / moved
    assert answers("slow", 5) == f"about {round(100 * share)}\xa0%"

    tiles = [
        e.rows[1] - e.rows[0] for e in small_trace(flash2, 8, (4, 4)).events if e.op == "S = Q K^T" and e.rows
    ]
    assert answers("tiles", 5) == str(max(tiles) ** 2)

    events = small_trace(flash1, 12, (3, 2)).events
    stores = [e for e in events if e.kind == "store" and e.name == "O" and e.rows and e.rows[0] == 0]
    assert answers("loops", 2) == f"{len(stores)} times"

    one = recorded(Setting("flash2", 4096, 64, queries="one", block="1x128"))
    assert answers("split", 2) == str(len({e.program for e in one.trace.events}))
    assert visit.state["a"].startswith("flash2")  # the question is about it

    paged = recorded(Setting("paged", 64, 64, queries="one", page_size=8)).trace.events
    fork = next(at for at, e in enumerate(paged) if e.data and e.data["op"] == "fork")
    assert paged[fork].kind not in ("load", "store")
    assert paged[fork].bytes == 0
    assert answers("pages", 2) == "no key and no value"

    (run,) = stories.recorded("backward")
    writes = [e for e in run.trace.events if e.kind == "store" and e.name == "dQ" and e.rows == (0, 2)]
    assert answers("gradients", 6) == f"{len(writes)} times"
    spans = stories.recorded("turns")[0].trace.spans
    working = flash3_schedule.busy(spans, flash3_schedule.TENSOR_CORE)
    assert answers("turns", 2) == f"{round(100 * working)}\xa0%"

    assert answers("softmax", 4) == "Multiply it by exp(2\xa0−\xa04)"
    sums = [
        e.values[0]
        for case in stories.recorded("softmax")
        if (case.name, case.variant) == ("average", "article")
        for e in case.trace.events
        if e.name == "l" and e.op and e.values
    ]
    new = sum(torch.tensor([3.0 - 4, 4.0 - 4]).exp().tolist())
    assert sums[1] == pytest.approx(sums[0] * torch.tensor(2.0 - 4).exp().item() + new)
    assert visit.text(".weight-bars em").endswith("= 0.1353")


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True)
def test_sentences_have_the_bytes_of_the_runs(visit: Visit, recorded: Recorded) -> None:
    flash, plain = (
        recorded(Setting("flash2", 1024, 64, block="64x64")),
        recorded(Setting("standard", 1024, 64, sram_bytes=100 * KIB)),
    )
    visit.page.click("[data-tour=tiles]")
    visit.settle()
    visit.press(*["ArrowRight"] * 6)
    moved = [run.totals["hbm_read"] + run.totals["hbm_written"] for run in (flash, plain)]
    mib = [f"{math.floor(100 * count / KIB**2 + 0.5) / 100:.2f}\u202fMiB" for count in moved]
    sentence = visit.text(".guide.tour .sentence")
    assert all(text in sentence for text in mib), (mib, sentence)
    assert visit.text("#tour-next") == "Next: Online softmax"
    visit.press("ArrowRight")
    assert (visit.state["tour"], visit.state["scene"]) == ("softmax", "1")


def test_texts_are_in_both_languages() -> None:
    folder = Path(flashtile.learn.visualizer.__path__[0]) / "assets" / "texts"
    tours = json.loads((folder / "tours.json").read_text("utf-8"))
    main = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("en", "zh")}
    for texts in (tours, main):
        assert texts["en"].keys() == texts["zh"].keys()
        for key, text in texts["en"].items():
            places = [sorted(re.findall(r"\{\w+\}", one)) for one in (text, texts["zh"][key])]
            assert places[0] == places[1], key


@pytest.fixture
def slide(chromium: Any, page_file: Path) -> Iterator[Visit]:
    """The page as a slide or a notebook embeds it."""
    context = chromium.new_context(viewport={"width": 960, "height": 540})
    visit = Visit(context.new_page(), f"{page_file.as_uri()}?embed=1")
    yield visit
    context.close()


def test_embedded_the_page_is_the_stage_and_its_player(slide: Visit) -> None:
    slide.go("a=flash2;block=64x64&seqlen=1024&at=900")
    assert slide.page.is_hidden("header.top")
    assert slide.page.is_visible("article.a canvas")
    slide.press("ArrowRight")
    assert slide.counter("position") == "901"
    assert slide.page.is_visible("#play")
    slide.go("tour=tiles&scene=3")
    assert (slide.state["a"], slide.state["scene"]) == ("flash2;block=4x4", "3")
    assert slide.page.is_visible(".guide.tour .sentence")
