"""Draws docs/assets/speed.svg for the README: TFLOP/s of flashtile and its peers, from committed JSON.

    python docs/scripts/speed_picture.py

The SVG is written out directly, so that the same JSON gives the same bytes with any release of any plotting
library; a test holds the file to this. Its greys can be read on light and on dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from pictures.canvas import svg, text

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "assets" / "speed.svg"
RESULTS = ROOT / "benchmarks" / "results"

FORWARD = "2026-11-23-h200-paper-grid-forward.json"
BACKWARD = "2026-11-23-h200-paper-grid-backward.json"
PANELS = [
    (FORWARD, "forward", "paper-d128", "Forward, head_dim 128"),
    (FORWARD, "forward", "paper-d128-causal", "Forward, head_dim 128, causal"),
    (BACKWARD, "backward", "paper-d128", "Backward, head_dim 128"),
    (BACKWARD, "backward", "paper-d128-causal", "Backward, head_dim 128, causal"),
]
"""File, pass and series of each panel, and its title."""

CONTESTANTS = {
    "flashtile": ("flashtile", "#2f7fd6"),
    "sdpa-cudnn": ("cuDNN (through SDPA)", "#5f9e78"),
    "fa3": ("FlashAttention-3", "#b3a3d8"),
    "fa4": ("FlashAttention-4", "#8d96a2"),
}
"""Name and colour of each, in the order of the bars."""

GRID = "#8b949e"
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 900, 390, 170
LEFT, TOP, COLUMN, ROW = 44, 66, 450, 250
HIGHEST = 800.0
"""TFLOP/s at the top of a panel."""


def legend() -> Iterator[str]:
    x = float(LEFT)
    for name, colour in CONTESTANTS.values():
        yield f'<rect x="{x:g}" y="13" width="12" height="12" rx="2" fill="{colour}"/>'
        yield text(x + 18, 23, name)
        x += 46 + 6.6 * len(name)
    yield text(WIDTH - 16, 23, "TFLOP/s, higher is better", anchor="end")


def panel(x: float, y: float, heading: str, cells: list[dict[str, Any]]) -> Iterator[str]:
    """Groups of bars, one for each sequence length; only our own bars carry their numbers."""
    yield text(x, y - 14, heading, size=13, font_weight="600")
    for value in range(0, int(HIGHEST) + 1, 200):
        height = y + PANEL_HEIGHT * (1 - value / HIGHEST)
        yield (
            f'<line x1="{x}" x2="{x + PANEL_WIDTH}" y1="{height:g}" y2="{height:g}" stroke="{GRID}"'
            f' stroke-opacity="{0.7 if value == 0 else 0.25}"/>'
        )
        yield text(x - 6, height + 4, str(value), size=10, anchor="end")
    group = PANEL_WIDTH / len(cells)
    for place, cell in enumerate(cells):
        begin = x + place * group
        shown = [name for name in CONTESTANTS if cell["results"].get(name, {}).get("status") == "ok"]
        width = 0.84 * group / len(shown)
        for index, name in enumerate(shown):
            title, colour = CONTESTANTS[name]
            speed = cell["results"][name]["tflops"]
            height = PANEL_HEIGHT * speed / HIGHEST
            left, top = begin + 0.08 * group + index * width, y + PANEL_HEIGHT - height
            yield (
                f'<rect x="{left:.2f}" y="{top:.2f}" width="{width - 1.5:.2f}" height="{height:.2f}"'
                f' fill="{colour}"><title>{escape(title)} {speed:.0f}</title></rect>'
            )
            if name == "flashtile":
                yield text(
                    round(left + width - 1, 2), round(top - 4, 2), f"{speed:.0f}", size=10, anchor="end",
                    fill=colour, font_weight="600",
                )  # fmt: skip
        yield text(begin + group / 2, y + PANEL_HEIGHT + 15, str(cell["seqlen_k"]), size=10, anchor="middle")
    yield text(x + PANEL_WIDTH / 2, y + PANEL_HEIGHT + 31, "sequence length", size=10, anchor="middle")


def footer(documents: list[dict[str, Any]]) -> str:
    first = documents[0]
    torch_version = first["versions"]["torch"].split("+")[0]
    return (
        f"{first['device']['name']}, bf16, 16384 tokens, heads × head_dim = 2048; "
        f"PyTorch {torch_version}, Triton {first['versions']['triton']}; {first['date'][:10]}"
    )


def picture() -> str:
    """The whole file."""
    parts = list(legend())
    documents = []
    for index, (name, which, series, title) in enumerate(PANELS):
        document = json.loads((RESULTS / name).read_text())
        documents.append(document)
        cells = [cell for cell in document["cells"] if (cell["pass"], cell["series"]) == (which, series)]
        cells.sort(key=lambda cell: cell["seqlen_k"])
        parts += panel(LEFT + index % 2 * COLUMN, TOP + index // 2 * ROW, title, cells)
    height = TOP + ROW + PANEL_HEIGHT + 64
    parts.append(text(LEFT, height - 10, footer(documents), size=10))
    title = "Speed of flashtile, cuDNN, FlashAttention-3 and FlashAttention-4"
    return svg(WIDTH, height, title, parts)


if __name__ == "__main__":
    PICTURE.write_text(picture())
