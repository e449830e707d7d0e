"""Labels of every scene on three screens, in two languages and themes: whole, apart, readable, translated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_tours import SCREENS, TOURS
from visits import Visit

NAMES = re.compile(
    r"flashtile|English|softmax|Flash-?(Attention|Decoding)(-[123])?|(PagedA|A)ttention|warpgroup|Hadamard|FLOP"
)
"""Words that Chinese texts keep."""

FOUND = (Path(__file__).parent / "labels.js").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("visit", SCREENS, indirect=True)
def test_labels_are_whole_apart_readable_and_translated(visit: Visit) -> None:
    found = {"home": visit.page.evaluate(FOUND)}
    for tour, scenes in TOURS.items():
        for number in range(1, scenes + 1):
            visit.go(f"tour={tour}&scene={number}")
            found[f"{tour} {number}"] = visit.page.evaluate(FOUND)
    chinese = visit.page.evaluate("flashtilePage.language.name") == "zh"
    for scene, (wrong, texts) in found.items():
        assert not wrong, scene
        foreign = [text for text in texts if re.search("[A-Za-z]{4,}", NAMES.sub("", text))]
        assert not (chinese and [text for text in foreign if not re.search("[\u4e00-\u9fff]", text)]), scene


def test_a_label_that_is_cut_covered_or_pale_is_found(visit: Visit) -> None:
    visit.go("tour=tiles&scene=5")  # which stands still until it is answered
    assert visit.page.evaluate(FOUND)[0] == []
    visit.page.evaluate(
        """() => {
          const { scene } = flashtilePage.views.a;
          scene.labels -= 4 * scene.labels; // the names of arrays in HBM leave the canvas
          const { left, top } = document.querySelector(".ask p").getBoundingClientRect();
          const place = `position: fixed; left: ${left}px; top: ${top}px`;
          document.querySelector("#tour-next").style.cssText = place;
          flashtilePage.colours = { ...flashtilePage.colours, onTile: "#101010", S: "#3a2a10", soft: "#777" };
        }"""
    )
    wrong = visit.page.evaluate(FOUND)[0]
    assert "cut: Q" in wrong
    assert any(one.startswith("pale: ") for one in wrong)  # black on brown
    assert any(one.endswith("on Next") for one in wrong)
