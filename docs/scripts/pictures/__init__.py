"""The pictures of the docs, each drawn from what the library does.

A picture is a module with a function ``picture(say)`` that returns an SVG. ``say(English, Chinese)`` chooses
its words.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "assets" / "pictures"

NAMES = sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__", "canvas"})


def files(name: str) -> dict[str, str]:
    """The files of a picture by their names, one for each language."""
    picture = import_module(f"pictures.{name}").picture
    return {
        f"{name}.svg": picture(lambda english, chinese: english),
        f"{name}.zh-CN.svg": picture(lambda english, chinese: chinese),
    }
