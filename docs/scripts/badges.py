"""Draws the README's badges into docs/assets/badges, from pyproject.toml:

    python docs/scripts/badges.py

They are files of the repository, so they need no service and show the same wherever the README is read.
"""

from __future__ import annotations

import re
from pathlib import Path

from pictures.canvas import text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "assets" / "badges"
GREY, BLUE = "#4b5563", "#0b5cad"
LETTER = 6.6
"""Width of a letter in pixels, more than any font's mean at this size."""


def badges() -> dict[str, str]:
    """Return each badge's SVG by the name of its file."""
    declared = (ROOT / "pyproject.toml").read_text()

    def of(pattern: str) -> str:
        found = re.search(pattern, declared, re.MULTILINE)
        assert found is not None, pattern
        return found[1]

    newest = int(of(r'"triton>=[\d.]+,<3\.(\d+);')) - 1
    words = {
        "python": ("Python", of('requires-python = ">=(.+)"') + " or newer"),
        "torch": ("PyTorch", of('"torch>=([0-9.]+)"') + " or newer"),
        "triton": ("Triton", of('"triton>=([0-9.]+),') + f" to 3.{newest}"),
        "license": ("license", of('^license = "(.+)"')),
        "ci": ("CI", ".ci/run"),
        "docs": ("docs", "start here"),
    }
    return {f"{name}.svg": badge(*pair) for name, pair in words.items()}


def badge(label: str, value: str) -> str:
    """Return a badge with a grey left part and a blue right one."""
    left, right = (round(LETTER * len(words) + 12) for words in (label, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img"'
        f' aria-label="{label}: {value}" font-family="Verdana, DejaVu Sans, sans-serif">'
        f'<rect width="{left + right}" height="20" rx="4" fill="{GREY}"/>'
        f'<path d="M{left} 0h{right - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1-4 4h-{right - 4}z" fill="{BLUE}"/>'
        + text(left / 2, 14, label, size=11, anchor="middle", fill="#ffffff")
        + text(left + right / 2, 14, value, size=11, anchor="middle", fill="#ffffff")
        + "</svg>\n"
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in badges().items():
        (FOLDER / name).write_text(svg)
