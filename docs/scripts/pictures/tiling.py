"""One step of FlashAttention-2's trace: which tiles are in SRAM, and which scores are there at all."""

from __future__ import annotations

import torch

from flashtile.algorithms import Event, Memory, Trace, flash2
from pictures.canvas import COLOURS, FAINT, INK, Say, box, heading, line, svg, text

ROWS, HEAD_DIM, BLOCK = 256, 64, 64
STEP = 6
"""Tiles of scores that are finished when the picture is taken."""

TILE, GAP = 56, 6
LEFT, TOP = 66, 96


def recorded() -> tuple[Trace, int]:
    """The trace, and the number of events until the next tile of scores is multiplied with V."""
    trace = Trace()
    q, k, v = torch.zeros(3, ROWS, HEAD_DIM).unbind()
    flash2.forward(q, k, v, Memory(trace=trace), block_m=BLOCK, block_n=BLOCK)
    ends = [n for n, event in enumerate(trace.events) if event.op.startswith("P = ")]
    return trace, ends[STEP] + 1


def in_sram(events: list[Event]) -> dict[str, Event]:
    """Return the tiles in SRAM after these events, by name."""
    held: dict[str, Event] = {}
    for event in events:
        if event.kind in ("load", "compute"):
            held[event.name] = event
        elif event.kind == "free":
            del held[event.name]
    return held


def block_of(span: tuple[int, int] | None) -> int:
    assert span is not None
    return span[0] // BLOCK


def picture(say: Say) -> str:
    trace, end = recorded()
    held = in_sram(trace.events[:end])
    order = [
        (block_of(event.rows), block_of(event.cols)) for event in trace.events if event.op == "S = Q K^T"
    ]
    count, step = ROWS // BLOCK, TILE + GAP
    right = LEFT + count * step + 34
    parts = []
    for name, y in (("V", TOP - 84), ("K", TOP - 50)):
        for j in range(count):
            here = j == block_of(held[name].rows)
            label = f"{name}{j + 1}"
            parts.append(
                box(LEFT + j * step, y, TILE, 26, COLOURS[name], label, opacity=1 if here else FAINT)
            )
    for name, x in (("Q", LEFT - 50), ("O", right)):
        for i in range(count):
            here = i == block_of(held[name].rows)
            label = f"{name}{i + 1}"
            parts.append(box(x, TOP + i * step, 36, TILE, COLOURS[name], label, opacity=1 if here else FAINT))
    for number, (i, j) in enumerate(order):
        x, y = LEFT + j * step, TOP + i * step
        if number < STEP:
            parts.append(box(x, y, TILE, TILE, INK, str(number + 1), opacity=FAINT))
        elif number == STEP:
            parts.append(box(x, y, TILE, TILE, INK, f"S{i + 1}{j + 1}"))
        else:
            parts.append(
                f'<rect x="{x}" y="{y}" width="{TILE}" height="{TILE}" rx="2" fill="none" stroke="{INK}"'
                ' stroke-opacity="0.5" stroke-dasharray="3 4"/>'
            )
    i, j = order[STEP]
    middle = TOP + i * step + TILE / 2
    parts.append(line([(LEFT + j * step + TILE + 3, middle), (right - 4, middle)], COLOURS["O"], tip=True))

    x, y = right + 84, TOP - 62
    parts.append(heading(x, y, say(f"In SRAM at step {STEP + 1}", f"第 {STEP + 1} 步时的 SRAM")))
    for name in ("Q", "K", "V", "S", "O"):
        y += 30
        rows = held[name].rows
        assert rows is not None
        label = "S, P" if name == "S" else f"{name}{block_of(rows) + 1}"
        parts.append(box(x, y - 16, 44, 22, COLOURS[name], label))
        parts.append(text(x + 54, y, f"{held[name].bytes / 1024:g} KiB"))
    y += 28
    rest = sum(held[name].bytes for name in ("m", "l"))
    parts.append(text(x, y, say(f"m, l: {rest} bytes", f"m、l：{rest} 字节")))
    y += 38
    one, whole = held["S"].bytes / 1024, ROWS * ROWS * 2 // 1024
    parts.append(heading(x, y, say("Scores that exist", "存在的分数")))
    parts.append(text(x, y + 22, say(f"one tile: {one:g} KiB", f"一个 tile：{one:g} KiB")))
    parts.append(text(x, y + 42, say(f"all of S: {whole} KiB", f"整个 S：{whole} KiB")))
    parts.append(text(x, y + 62, say("grey: gone again", "灰色：已释放"), size=11))
    parts.append(text(x, y + 80, say("dashed: not yet there", "虚线：尚未计算"), size=11))
    title = say(
        f"FlashAttention-2 holds one tile of Q, K, V and O and one of {len(order)} tiles of scores in SRAM",
        f"FlashAttention-2 在 SRAM 中只保留 Q、K、V、O 各一个 tile，以及 {len(order)} 个分数 tile 中的一个",
    )
    return svg(590, TOP + count * step + 14, title, parts)
