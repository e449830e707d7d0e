"""What one can press, drag, link to and look at it with."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable

import pytest
from visits import Visit, address

from flashtile.learn.visualizer.recording import Recording
from flashtile.learn.visualizer.settings import Setting

Recorded = Callable[[Setting], Recording]


def test_the_address_holds_the_state(visit: Visit) -> None:
    """What one sees is what who opens the link sees."""
    visit.press("3", "ArrowLeft", "Shift+ArrowLeft", "ArrowLeft", "d")
    visit.page.select_option("#choose-card", "h100")
    visit.page.select_option("[data-run=b] select[name=block]", "64x64")
    visit.press("d")
    visit.page.click("article.a canvas", position=place_of_row(visit, 0.6))
    visit.settle()
    state, numbers = visit.state, visible_numbers(visit)
    assert state["card"] == "h100"
    assert state["question"] == "loops"
    visit.go("&".join(f"{key}={value}" for key, value in state.items()))
    assert visit.state == state
    assert visible_numbers(visit) == numbers


def place_of_row(visit: Visit, share: float) -> dict[str, float]:
    """Where on its canvas run A has the row at a share of the score matrix's height."""
    return visit.page.evaluate(
        """(share) => {
             const { left, top, height } = flashtilePage.views.a.scene.area;
             return { x: left + 10, y: top + share * height };
           }""",
        share,
    )


def visible_numbers(visit: Visit) -> list[str]:
    return visit.each("[data-run] [data-value]", "`${e.dataset.value} ${e.textContent}`")


@pytest.mark.parametrize(
    "state",
    [
        "a=nonsense",
        "a=flash2;block=7x7&b=flash9&seqlen=3&mask=odd&sram=1&at=-5&card=x",
        "lang=xx&theme=y&row=999999&sync=z&question=none",
        "at=1e99&seqlen=NaN&head_dim=",
        "%%%&a=%E0%A4%A&=&&",
        "a=paged;page_size=abc&b=standard",
        "a=standard&queries=one&seqlen=256",
    ],
)
def test_any_address_shows_something(visit: Visit, state: str) -> None:
    visit.go(state)
    assert int(visit.counter("position")) >= 0
    assert visit.page.is_visible("article.a")


def test_the_keyboard(visit: Visit, recorded: Recorded) -> None:
    setting = Setting("flash2", 256, 64, block="64x64")
    events = recorded(setting).trace.events
    tiles = [at for at, e in enumerate(events, 1) if e.name == "S" and e.op.startswith("S =")]
    visit.go(address(setting, 0))
    visit.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert visit.state["at"] == "1"
    visit.press("Shift+ArrowRight", "Shift+ArrowRight")
    assert visit.state["at"] == str(tiles[1])
    visit.press("Shift+ArrowLeft")
    assert visit.state["at"] == str(tiles[0])
    visit.press("End")
    assert visit.state["at"] == str(len(events))
    visit.press("Home")
    assert visit.state["at"] == "0"
    visit.press("t")
    assert visit.page.get_attribute("html", "data-theme") == "light"
    visit.press("?")
    assert visit.page.is_visible("dialog#keys")
    visit.page.keyboard.press("Escape")
    assert visit.page.is_hidden("dialog#keys")


def test_play_and_pause(visit: Visit) -> None:
    visit.go(address(Setting("flash2", 256, 64, block="32x32"), 0))
    visit.press(" ")
    visit.page.wait_for_selector("[data-run=a] [data-counter=position]:not([data-value='0'])")
    assert visit.page.get_attribute("#play", "aria-label") == "Pause"
    visit.press(" ")
    at = visit.counter("position")
    visit.draw_frames(3)
    assert visit.counter("position") == at == visit.state["at"]
    visit.page.select_option("#speed", "16")
    visit.page.click("#play")
    visit.page.wait_for_selector("#play[aria-label=Play]")
    assert visit.state["at"] == visit.page.get_attribute("#position", "max")


def test_dragging_the_progress_bar(visit: Visit) -> None:
    setting = Setting("flash2", 256, 64, block="32x32")
    visit.go(address(setting, 0))
    box = visit.page.locator("#position").bounding_box()
    visit.page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    visit.page.mouse.up()
    end = int(visit.page.get_attribute("#position", "max"))
    assert int(visit.counter("position")) == pytest.approx(end / 2, abs=0.05 * end)


def test_sram_limits_the_blocks(visit: Visit, recorded: Recorded) -> None:
    """128 x 128 at head size 128 needs more than 100 KiB: it is offered, but not to be chosen."""
    setting = Setting("flash2", 256, 128, block="128x128")
    needs = recorded(setting).totals["sram_peak"]
    assert 100 * 1024 < needs <= 228 * 1024
    visit.go(address(setting, 0, sram=100 * 1024))
    options = visit.each("#choose-head_dim option", "[e.value, e.disabled, e.textContent]")
    assert [(value, disabled) for value, disabled, _ in options] == [("64", False), ("128", True)]
    assert re.findall(r"needs (\d+)", options[1][2]) == [str(math.floor(needs / 1024 + 0.5))]
    assert visit.state["head_dim"] == "64"
    visit.go(address(setting, 0, sram=228 * 1024))
    assert visit.state["head_dim"] == "128"


def test_blocks_follow_sram(visit: Visit) -> None:
    sizes = {}
    for sram in (64 * 1024, 100 * 1024):
        visit.go(address(Setting("flash1", 256, 64, block="auto", sram_bytes=sram), 0))
        sizes[sram] = visit.text("[data-run=a] select[name=block]")
    assert len(set(sizes.values())) == 2


PHONE = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}


@pytest.mark.parametrize(
    "visit", [PHONE, {**PHONE, "locale": "zh-CN", "color_scheme": "dark"}], indirect=True
)
def test_a_phone(visit: Visit) -> None:
    """Nothing wider than the screen, the player at hand, a tap on the matrix chooses a row."""
    states = (
        "",
        address(Setting("flash2", 256, 64, mask="causal", block="64x64"), 40, b="standard"),
        address(Setting("paged", 64, 64, queries="one", page_size=8), 200),
        address(Setting("flash3", 256, 64, block="32x32"), 50),
    )
    for state in states:
        visit.go(state)
        width = visit.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, state
    assert visit.page.is_visible("#play")
    before = int(visit.counter("position"))
    visit.page.tap("#forward")
    visit.settle()
    assert int(visit.counter("position")) == before + 1
    visit.page.tap("article.a canvas", position=place_of_row(visit, 0.6))
    visit.settle()
    assert int(visit.state["row"]) > 100


SYSTEMS = [{"color_scheme": "light", "locale": "en-US"}, {"color_scheme": "dark", "locale": "zh-CN"}]


@pytest.mark.parametrize("visit", SYSTEMS, indirect=True)
def test_themes_and_languages(visit: Visit) -> None:
    """What the reader's system asks for, until another is chosen."""
    dark = visit.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    background = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 384) == dark
    assert visit.page.get_attribute("html", "lang") == ("zh-CN" if dark else "en")
    visit.press("t")
    if not dark:
        visit.press("t")
    chosen = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert chosen != background
    assert len(base64.b64encode(visit.page.screenshot())) > 20_000


def test_every_choice_of_the_selects_is_recorded(visit: Visit) -> None:
    """Whatever is chosen, what is shown is what the selects say."""
    visit.go("drawer=open")
    for name in ("#choose-a", "#choose-mask", "#choose-sram", "#choose-seqlen", "#choose-queries"):
        for value in visit.each(f"{name} option:not([disabled])", "e.value"):
            visit.page.select_option(name, value)
            visit.settle()
            assert visit.page.input_value(name) == value, name
            assert visit.page.is_visible("article.a")
            key = name.removeprefix("#choose-")
            assert visit.state[key].split(";")[0] == value
