"""The memories of a GPU, from the named cards' data: the nearer, the faster."""

from __future__ import annotations

from flashtile.io_model import Card, find_card
from flashtile.learn.io_model.tables import format_bytes
from pictures.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, Say, heading, line, svg, text

CARDS = ("a100-40gb", "h100")
MIDDLE, TOP, HEIGHT, SLOPE = 206, 50, 66, 38
"""The pyramid's axis and tip, the height of a level, and what a level is wider on each side than the last."""
COLUMN = 150


def levels(card: Card) -> list[tuple[str, str]]:
    """(size, bandwidth) from the top: registers and SRAM of all multiprocessors, second-level cache, HBM."""
    registers = f"{card.sm_count} × {card.register_bytes // 1024} KiB"
    sram = f"{card.sm_count} × {card.shared_bytes // 1024} KiB"
    return [
        (registers, ""),
        (sram, speed(card.sram_gbps)),
        (format_bytes(card.l2_bytes), ""),
        (format_bytes(card.memory_bytes), speed(card.bandwidth_gbps)),
    ]


def speed(gbps: float) -> str:
    return f"{gbps / 1000:.3g} TB/s"


def picture(say: Say) -> str:
    names = (
        ("", say("registers", "寄存器")),
        ("SRAM", say("shared memory", "共享内存")),
        ("L2", say("cache", "缓存")),
        ("HBM", say("memory", "显存")),
    )
    parts = []
    for level, ((name, what), colour) in enumerate(zip(names, (PURPLE, ORANGE, GREEN, BLUE), strict=True)):
        y = TOP + level * HEIGHT
        upper, lower = 34 + level * SLOPE, 34 + (level + 1) * SLOPE - 4
        corners = [(-upper, 0), (upper, 0), (lower, HEIGHT - 5), (-lower, HEIGHT - 5)]
        points = " ".join(f"{MIDDLE + dx},{y + dy}" for dx, dy in corners)
        parts.append(f'<polygon points="{points}" fill="{colour}"/>')
        if name:
            parts.append(
                text(MIDDLE, y + 28, name, size=15, anchor="middle", fill="#ffffff", font_weight="600")
            )
        parts.append(text(MIDDLE, y + (46 if name else 36), what, size=11, anchor="middle", fill="#ffffff"))
    bottom = TOP + len(names) * HEIGHT
    parts.append(line([(8, bottom - 8), (8, TOP)], INK, tip=True))
    parts.append(text(18, TOP + 10, say("faster", "更快")))
    for number, key in enumerate(CARDS):
        card = find_card(key)
        x = MIDDLE + 34 + len(names) * SLOPE + 26 + number * COLUMN
        parts.append(heading(x, TOP - 22, card.name.rsplit(" ", 1)[0]))
        for level, (size, bandwidth) in enumerate(levels(card)):
            y = TOP + level * HEIGHT + 31
            parts.append(text(x, y, size))
            parts.append(text(x, y + 19, bandwidth, font_weight="600"))
    title = say(
        "Registers, SRAM, second-level cache and HBM of two GPUs, with sizes and bandwidths",
        "两种 GPU 的寄存器、SRAM、L2 缓存与 HBM：容量与带宽",
    )
    width = MIDDLE + 34 + len(names) * SLOPE + 26 + len(CARDS) * COLUMN
    return svg(width, bottom + 10, title, parts)
