"""How four warps share a tile: FlashAttention cuts the keys, FlashAttention-2 the rows; as counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashtile.algorithms import Memory, Trace, warp_split
from flashtile.learn.algorithms.warps import Warps
from pictures.canvas import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, Say, box, heading, line, svg, text

ROWS, KEYS, HEAD_DIM, BLOCK = 64, 256, 64, 64
WARPS = (BLUE, ORANGE, PURPLE, GREEN)
SIZE, THIN, TOP = 112, 34, 96
PANEL = 400
BYTES_PER_PIXEL = 3200

Slices = list[tuple[int, int]]


def slices(trace: Trace, kind: str, name: str, along: str = "rows") -> Slices:
    """Return each warp's part of the first tile, as a range of its rows or columns."""
    found: dict[str, tuple[int, int]] = {}
    for event in trace.events:
        if event.kind == kind and event.name.startswith(f"{name}."):
            found.setdefault(event.name, getattr(event, along))
    return list(found.values())


def cut(x: float, y: float, width: float, height: float, parts: Slices, *, down: bool) -> Iterator[str]:
    """A tile in its warps' colours, or grey where every warp takes all of it."""
    if len(set(parts)) == 1:
        yield box(x, y, width, height, INK, opacity=FAINT)
        return
    for colour, (first, end) in zip(WARPS, parts, strict=True):
        begin, size = first / BLOCK, (end - first) / BLOCK
        if down:
            yield box(x, y + begin * height, width, size * height - 2, colour)
        else:
            yield box(x + begin * width, y, size * width - 2, height, colour)


def panel(
    x: float, split: Callable[..., tuple[torch.Tensor, torch.Tensor, Warps]], title: str, below: str, say: Say
) -> Iterator[str]:
    trace = Trace()
    q, k, v = torch.zeros(ROWS, HEAD_DIM), torch.zeros(KEYS, HEAD_DIM), torch.zeros(KEYS, HEAD_DIM)
    *_, warps = split(q, k, v, Memory(trace=trace), num_warps=len(WARPS), block_m=BLOCK, block_n=BLOCK)
    yield heading(x, 24, title)
    left = x + THIN + 10
    yield from cut(x, TOP, THIN, SIZE, slices(trace, "shared_load", "Q"), down=True)
    yield from cut(left, TOP - THIN - 10, SIZE, THIN, slices(trace, "shared_load", "K"), down=False)
    columns = slices(trace, "register", "S", "cols")
    rows = slices(trace, "register", "S")
    whole = len(set(rows)) == 1
    yield from cut(left, TOP, SIZE, SIZE, columns if whole else rows, down=not whole)
    yield text(left + SIZE / 2, TOP + SIZE + 16, "S, P", anchor="middle", size=11)
    right = left + SIZE + 22
    yield from cut(right, TOP, THIN, SIZE, slices(trace, "shared_load", "V"), down=True)
    for name, place in (("Q", x), ("V", right)):
        yield text(place + THIN / 2, TOP + SIZE + 16, name, anchor="middle", size=11)
    yield text(left + SIZE + 6, TOP - THIN + 12, "K", size=11)
    right += THIN + 30
    outputs = slices(trace, "register", "O")
    if len(set(outputs)) > 1:
        yield line([(right - 24, TOP + SIZE / 2), (right - 4, TOP + SIZE / 2)], INK, tip=True)
        yield from cut(right, TOP, THIN, SIZE, outputs, down=True)
        yield text(right + THIN / 2, TOP + SIZE + 16, "O", anchor="middle", size=11)
    else:
        for number, colour in enumerate(WARPS):
            yield box(right + number * 9, TOP - 12 + number * 12, THIN, SIZE - 24, colour)
        yield line([(right - 24, TOP + SIZE / 2), (right - 4, TOP + SIZE / 2)], INK, tip=True)
        end = right + THIN + 27
        yield line([(end + 4, TOP + SIZE / 2), (end + 30, TOP + SIZE / 2)], INK, tip=True)
        yield text(end + 17, TOP + SIZE / 2 - 8, "+", anchor="middle", size=14)
        yield box(end + 34, TOP, THIN, SIZE, INK, opacity=FAINT)
        yield text(end + 34 + THIN / 2, TOP + SIZE + 16, "O", anchor="middle", size=11)
        partial = say("4 partial O", "4 份部分 O")
        yield text(right + 30, TOP + SIZE + 16, partial, anchor="middle", size=11)
    y = TOP + SIZE + 44
    yield text(x, y, below)
    for name, moved in (
        (say("read", "读取"), warps.read_bytes),
        (say("written", "写入"), warps.written_bytes),
    ):
        y += 22
        yield text(x, y, name, size=11)
        if moved:
            yield box(x + 62, y - 10, moved / BYTES_PER_PIXEL, 12, INK)
        yield text(x + 68 + moved / BYTES_PER_PIXEL, y, f"{moved // 1024} KiB", size=11)
    yield text(x, y + 22, say(f"{warps.barriers} barriers", f"{warps.barriers} 次 barrier 同步"), size=11)


def picture(say: Say) -> str:
    keys = say(f"Shared memory, for {KEYS} keys:", f"{KEYS} 个键的共享内存访问：")
    parts = [
        *panel(
            16,
            warp_split.split_k,
            say("FlashAttention: split K", "FlashAttention：切分 K（split-K）"),
            keys,
            say,
        ),
        *panel(
            16 + PANEL,
            warp_split.split_q,
            say("FlashAttention-2: split Q", "FlashAttention-2：切分 Q"),
            keys,
            say,
        ),
    ]
    parts.append(
        text(
            16,
            344,
            say("A colour is a warp; grey is shared by all.", "一种颜色是一个 warp；灰色为所有 warp 共用。"),
            size=11,
        )
    )
    title = say(
        "Split K: four warps each have a partial output of all rows, which they write, wait for and add. "
        "Split Q: each warp has its own rows",
        "切分 K：四个 warp 各有所有行的部分输出，需要写出、等待并相加；切分 Q：每个 warp 只有自己的行",
    )
    return svg(16 + 2 * PANEL - 60, 356, title, parts)
