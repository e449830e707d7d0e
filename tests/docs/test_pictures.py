"""The pictures in docs/assets/pictures are what the library's schedules, traces and tables give today."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "scripts"
NAMES = sorted({path.stem for path in (SCRIPTS / "pictures").glob("*.py")} - {"__init__", "canvas"})


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import pictures

    return pictures


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_what_the_code_draws(pictures, name):
    """If what it shows has changed: python docs/scripts/draw_pictures.py"""
    drawn = pictures.files(name)
    assert {file: (pictures.FOLDER / file).read_text() for file in drawn} == drawn
    english, chinese = (ElementTree.fromstring(content) for content in drawn.values())
    assert len(list(english.iter())) == len(list(chinese.iter()))  # one drawing, two languages
    assert re.search("[一-鿿]", "".join(english.itertext())) is None


def test_every_picture_is_shown_with_words_for_those_who_do_not_see_it(pictures):
    shown = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]*assets/pictures/[^)]*)\)", page.read_text()):
            assert len(words) > 15, (page, target)
            assert page.name.endswith(".zh-CN.md") is target.endswith(".zh-CN.svg"), (page, target)
            shown.add(Path(target).name)
    assert shown == {path.name for path in pictures.FOLDER.iterdir()}
    assert {name.split(".")[0] for name in shown} == set(NAMES)
