"""The pictures in docs/assets/pictures are what the library's schedules, traces and tables give today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))
pictures = pytest.importorskip("pictures")
sys.path.pop(0)


@pytest.mark.parametrize("name", pictures.NAMES)
def test_a_picture_is_what_the_code_draws(name, monkeypatch):
    """If this fails after a change of what it shows: python scripts/docs/draw_pictures.py"""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    drawn = pictures.files(name)
    assert {file: (pictures.FOLDER / file).read_text() for file in drawn} == drawn
    english, chinese = (ElementTree.fromstring(content) for content in drawn.values())
    assert len(list(english.iter())) == len(list(chinese.iter()))  # one drawing, two languages
    assert re.search("[一-鿿]", "".join(english.itertext())) is None


def test_every_picture_is_shown_with_words_for_those_who_do_not_see_it():
    shown = {}
    for page in (ROOT / "docs").rglob("*.md"):
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]*assets/pictures/[^)]*)\)", page.read_text()):
            assert len(words) > 15, (page, target)
            assert page.name.endswith(".zh-CN.md") == target.endswith(".zh-CN.svg"), (page, target)
            shown[Path(target).name] = words
    assert set(shown) == {path.name for path in pictures.FOLDER.iterdir()}
    assert {name.split(".")[0] for name in shown} == set(pictures.NAMES)
