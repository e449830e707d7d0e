"""Shapes of SVG, written out directly: the same drawing gives the same bytes with any plotting library.

Greys and colours can be read on light and on dark pages. Coordinates are pixels, y downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from xml.sax.saxutils import escape

Say = Callable[[str, str], str]
"""Chooses the language: say(English, Chinese)."""

FONTS = (
    "system-ui, -apple-system, Segoe UI, Helvetica, Arial, PingFang SC, Microsoft YaHei, Noto Sans CJK SC, "
    "sans-serif"
)
INK = "#7d858f"
BLUE, ORANGE, PURPLE, GREEN = "#2f74c0", "#c8500c", "#7c58bd", "#4b8020"
COLOURS = {"Q": BLUE, "K": ORANGE, "V": PURPLE, "O": GREEN, "S": INK}
"""Colours of matrices, equal in all pictures and dark enough for white letters."""

FAINT = 0.14
"""Opacity of what is there but not in use."""


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", **more: str) -> str:
    """``words`` with their baseline at y; ``more`` are attributes, with _ for -."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    fill = "" if "fill" in more else f' fill="{INK}"'
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}{fill}{rest}>{escape(words)}</text>"


def heading(x: float, y: float, words: str) -> str:
    return text(x, y, words, size=13, font_weight="600")


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str = INK,
    words: str = "",
    *,
    opacity: float = 1.0,
    size: int = 12,
) -> str:
    """Return a rectangle with words in its middle, white if it is opaque; a faint one has an outline."""
    outline = "" if opacity == 1 else f' stroke="{colour}" stroke-opacity="0.7"'
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{colour}"'
        f' fill-opacity="{opacity:g}"{outline}/>'
    )
    if not words:
        return shape
    fill = "#ffffff" if opacity == 1 else INK
    return shape + text(
        round(x + width / 2, 2), round(y + height / 2 + size * 0.35, 2), words, size=size, anchor="middle",
        fill=fill,
    )  # fmt: skip


def line(
    points: Sequence[tuple[float, float]], colour: str = INK, *, width: float = 1.5, tip: bool = False
) -> str:
    """Through all points, with an arrow's tip at the last."""
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    end = f' marker-end="url(#{_marker(colour)})"' if tip else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{end}/>'


def _marker(colour: str) -> str:
    return f"tip-{colour.removeprefix('#')}"


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """The whole file; ``title`` says in a sentence what is to be seen."""
    body = list(parts)
    markers = [
        f'<marker id="{_marker(colour)}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5"'
        f' orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for colour in (INK, BLUE, ORANGE, PURPLE, GREEN)
        if any(f"url(#{_marker(colour)})" in part for part in body)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" font-family="{FONTS}" role="img">',
            f"<title>{escape(title)}</title>",
            *([f"<defs>{''.join(markers)}</defs>"] if markers else []),
            *body,
            "</svg>\n",
        ]
    )
