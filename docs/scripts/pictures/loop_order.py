"""The order of the tiles of scores in FlashAttention and FlashAttention-2, and what each order moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from flashtile.algorithms import Memory, Trace, flash1, flash2
from pictures.canvas import (
    BLUE,
    COLOURS,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    Say,
    box,
    heading,
    line,
    svg,
    text,
)

ROWS, HEAD_DIM, BLOCK = 256, 64, 64
TILE = 50
PROGRAMS = (BLUE, ORANGE, PURPLE, GREEN)
PANEL = 360


def recorded(algorithm: ModuleType) -> tuple[Trace, Memory]:
    memory = Memory(trace=Trace())
    q, k, v = torch.zeros(3, ROWS, HEAD_DIM).unbind()
    algorithm.forward(q, k, v, memory, block_m=BLOCK, block_n=BLOCK)
    assert memory.trace is not None
    return memory.trace, memory


def panel(x: float, algorithm: ModuleType, title: str, below: str, parallel: bool, say: Say) -> Iterator[str]:
    """Tiles in their order along a line; each thread block has a line of its own."""
    trace, memory = recorded(algorithm)
    count, left, top = ROWS // BLOCK, x + 44, 84
    yield heading(x, 24, title)
    for n in range(count):
        yield box(left + n * TILE, top - 30, TILE - 4, 22, COLOURS["K"], f"K{n + 1}", opacity=FAINT)
        yield box(x, top + n * TILE, 36, TILE - 4, COLOURS["Q"], f"Q{n + 1}", opacity=FAINT)
    walks: dict[int, list[tuple[float, float]]] = {}
    for event in trace.events:
        if event.op == "S = Q K^T":
            assert event.rows is not None
            assert event.cols is not None
            i, j = event.rows[0] // BLOCK, event.cols[0] // BLOCK
            colour = PROGRAMS[event.program] if parallel else INK
            yield box(left + j * TILE, top + i * TILE, TILE - 4, TILE - 4, colour, opacity=FAINT)
            centre = (left + (j + 0.5) * TILE - 2, top + (i + 0.5) * TILE - 2)
            walks.setdefault(event.program if parallel else 0, []).append(centre)
    for program, points in walks.items():
        yield line(points, PROGRAMS[program] if parallel else INK, width=2, tip=True)
    y = top + count * TILE + 18
    yield text(x, y, below)
    yield text(x, y + 30, say("read, KiB", "读取，KiB"), size=11)
    yield text(x + 160, y + 30, say("written, KiB", "写入，KiB"), size=11)
    for name in ("Q", "K", "V", "O"):
        y += 20
        traffic = memory.traffic[name]
        for begin, moved in ((x + 22, traffic.read), (x + 160, traffic.written)):
            if moved:
                width = moved / 2048
                yield box(begin, y + 20, width, 11, COLOURS[name])
                yield text(begin + width + 5, y + 30, f"{moved // 1024}", size=11)
        yield text(x, y + 30, name)
    total = (memory.hbm_read + memory.hbm_written) / 1024
    yield text(
        x, y + 54, say(f"together, with m and l: {total:.0f} KiB", f"连同 m 和 l 共 {total:.0f} KiB"),
        font_weight="600",
    )  # fmt: skip


def picture(say: Say) -> str:
    parts = [
        *panel(
            16, flash1, say("FlashAttention: keys outside", "FlashAttention：K、V 在外层循环"),
            say("One thread block. O, m, l come and go.", "一个线程块；O、m、l 反复进出 HBM。"), False, say,
        ),
        *panel(
            16 + PANEL, flash2, say("FlashAttention-2: queries outside", "FlashAttention-2：Q 在外层循环"),
            say("Four thread blocks. O is written once.", "四个线程块并行；O 只写一次。"), True, say,
        ),
    ]  # fmt: skip
    title = say(
        "FlashAttention walks the scores column by column, FlashAttention-2 row by row",
        "FlashAttention 逐列遍历分数矩阵，FlashAttention-2 逐行遍历",
    )
    return svg(16 + 2 * PANEL, 444, title, parts)
