"""Who uses a keyboard, a screen reader, or needs contrast: axe-core finds no violation."""

from __future__ import annotations

import pytest
from visits import Visit

RUN = "queries=all&seqlen=1024&head_dim=64&mask=full&sram=102400"
STATES = {
    "home": "",
    "stage": f"a=flash2;block=64x64&{RUN}&at=900",
    "compared": f"a=flash2;block=64x64&b=standard&{RUN}&at=300&sync=bytes",
    "drawer": f"a=flash2;block=64x64&{RUN}&at=900&drawer=open",
    "arithmetic": "a=flash2;block=2x2&seqlen=8&at=25&preset=eight&arithmetic=open&predict=tiles",
    "question": "a=flash1;block=3x2&seqlen=12&head_dim=4&tour=loops&scene=2&at=60",
    "pages": "a=paged;page_size=8&seqlen=64&queries=one&at=200",
    "warpgroups": "a=flash3;block=32x32&seqlen=256&queries=all&at=90",
    "sentence": "tour=slow&scene=1",
    "timeline": "story=turns&tour=turns&scene=3&case=pingpong&at=40",
    "backward": "story=backward&tour=gradients&scene=5&case=flash2&at=60",
    "rounding": "story=rounding&tour=eight&scene=1&case=plain&at=9",
    "story": "story=masks&variant=document&at=300",
    "softmax": "story=softmax&tour=softmax&scene=4&case=average&variant=article&at=15",
}
"""Views of the page."""

LOOKS = [
    {"color_scheme": "light", "locale": "en-US", "reduced_motion": "reduce"},
    {"color_scheme": "dark", "locale": "zh-CN", "reduced_motion": "reduce"},
    {"color_scheme": "light", "viewport": {"width": 360, "height": 640}, "reduced_motion": "reduce"},
]


@pytest.mark.parametrize("visit", LOOKS, indirect=True, ids=["light", "dark-zh", "phone"])
def test_axe_finds_no_violation(visit: Visit) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for name, state in STATES.items():
        visit.go(state)
        if name == "home":
            visit.page.click(".more summary")
        found = axe.run(visit.page)
        assert found.violations_count == 0, (name, found.generate_report())


def test_the_focus_goes_through_the_page_in_its_order(visit: Visit) -> None:
    """Header, explanation, player: as they are seen; the drawer takes the focus and gives it back."""
    visit.go(STATES["stage"])
    seen = []
    for _ in range(24):
        visit.page.keyboard.press("Tab")
        seen.append(visit.page.evaluate("document.activeElement.id"))
    order = [
        "home",
        "choose-a",
        "choose-b",
        "predict",
        "open-drawer",
        "language",
        "theme",
        "help",
        "start",
        "play",
    ]
    assert [name for name in seen if name in order][: len(order)] == order
    visit.press("d")
    assert visit.page.evaluate("document.activeElement.id") == "drawer"
    visit.press("Escape")
    assert visit.page.evaluate("document.activeElement.id") == "open-drawer"
    assert visit.page.is_hidden("#drawer")
