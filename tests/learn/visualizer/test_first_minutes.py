"""What a visitor meets first: the tour, questions that begin where they tell something, captions, a phone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from visits import Visit, address

from flashtile.learn.visualizer.recording import Recording
from flashtile.learn.visualizer.settings import Setting

Recorded = Callable[[Setting], Recording]
TILED = Setting("flash2", 8, 4, block="4x4")


def test_questions_begin_at_their_moment_and_play(visit: Visit, recorded: Recorded) -> None:
    events = recorded(Setting("standard", 4096, 64, sram_bytes=100 * 1024)).trace.events
    stored = next(at for at, e in enumerate(events, 1) if e.kind == "store" and e.name == "S")
    for number in range(1, 6):
        visit.press(str(number))
        assert visit.page.get_attribute("#play", "aria-label") == "Pause"
        visit.press(" ")
        at, end = int(visit.state["at"]), int(visit.page.get_attribute("#position", "max"))
        assert 0 < at < end
        assert number != 1 or stored <= at < stored + 0.2 * end


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True)
def test_nothing_moves_for_who_wants_no_motion(visit: Visit) -> None:
    visit.press("2")
    assert visit.page.get_attribute("#play", "aria-label") == "Play"
    assert int(visit.state["at"]) > 0


def test_arrows_step_with_a_select_focused(visit: Visit) -> None:
    visit.go(address(TILED, 3, drawer="open"))
    visit.page.focus("#choose-mask")
    visit.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert (visit.state["at"], visit.state["mask"]) == ("4", "full")


def test_captions_name_the_line_and_words_are_explained(visit: Visit, recorded: Recorded) -> None:
    """Line 8 of FlashAttention-2's algorithm 1 is S = Q K^T; loading K before it is line 7."""
    events = recorded(TILED).trace.events
    scores = next(at for at, e in enumerate(events, 1) if e.op == "S = Q K^T")
    keys = next(at for at, e in enumerate(events, 1) if e.kind == "load" and e.name == "K")
    for at, line in ((scores, 8), (keys, 7)):
        visit.go(address(TILED, at))
        assert visit.text("[data-run=a] .line") == f"· FlashAttention-2, algorithm 1, line {line}"
    assert "High-bandwidth memory" in visit.page.get_attribute("[data-run=a] .hbm h4", "title")


@pytest.mark.parametrize(
    "visit",
    [{"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}],
    indirect=True,
)
def test_on_a_phone_the_picture_is_on_the_first_screen(visit: Visit) -> None:
    visit.go(address(TILED, 12))
    picture = visit.page.locator("article.a canvas").bounding_box()
    player = visit.page.locator(".player").bounding_box()
    assert picture["y"] + picture["height"] < player["y"]
    assert player["y"] + player["height"] <= 844
    for select in ("#choose-mask", "[data-run=a] .settings"):
        assert visit.page.is_hidden(select)
