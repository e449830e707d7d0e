"""FlashAttention-3's schedule in time: one after the other, in turns, as a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from flashtile.algorithms import Span
from flashtile.learn.algorithms.flash3_schedule import PRODUCER, SOFTMAX, TENSOR_CORE, TMA, busy, schedule
from pictures.canvas import BLUE, GREEN, INK, ORANGE, Say, box, heading, svg, text

BLOCKS, SHOWN = 32, 12
"""Blocks of keys of the schedule, and units of time that the picture has room for."""

UNIT, ROW, LEFT = 46, 24, 96
WORKERS = {PRODUCER: GREEN, "warpgroup 0": BLUE, "warpgroup 1": ORANGE}


def timeline(y: float, title: str, spans: list[Span], say: Say) -> Iterator[str]:
    """A row for each unit; what has begun within the time shown."""
    share = busy(spans, TENSOR_CORE)
    yield heading(16, y, title)
    use = say(f"tensor cores busy {share:.1%} of the time", f"Tensor Core 忙碌 {share:.1%} 的时间")
    yield text(LEFT + SHOWN * UNIT, y, use, anchor="end", size=11)
    units = {TMA: "TMA", TENSOR_CORE: say("tensor cores", "Tensor Core"), SOFTMAX: "softmax"}
    for row, (unit, name) in enumerate(units.items()):
        top = y + 10 + row * ROW
        yield text(LEFT - 8, top + 14, name, anchor="end", size=11)
        for span in spans:
            if span.unit == unit and span.end <= SHOWN:
                label = {"P V": "PV", "softmax": "P"}.get(span.label, span.label) + str(span.block)
                width = (span.end - span.start) * UNIT - 2
                yield box(LEFT + span.start * UNIT, top, width, ROW - 4, WORKERS[span.worker], label, size=10)


def picture(say: Say) -> str:
    plain = schedule(BLOCKS, warpgroups=1, pipelined=False)
    pingpong = schedule(BLOCKS, pipelined=False)
    pipeline = schedule(BLOCKS, warpgroups=1)
    parts = [
        *timeline(24, say("One after the other", "依次执行"), plain, say),
        *timeline(142, say("Ping-pong: two warpgroups in turns", "Ping-pong：两个消费者轮流"), pingpong, say),
        *timeline(260, say("Pipeline: the next S before P V", "流水线：先 S(j+1)，再 P V"), pipeline, say),
    ]
    names = (say("producer", "生产者"), say("first warpgroup", "第一个 warpgroup"), say("second", "第二个"))
    x = float(LEFT)
    for name, colour in zip(names, WORKERS.values(), strict=True):
        parts += [box(x, 358, 12, 12, colour), text(x + 18, 368, name, size=11)]
        x += 130
    parts.append(text(LEFT + SHOWN * UNIT, 368, say("time →", "时间 →"), anchor="end", size=11, fill=INK))
    title = say(
        "Loads, products and softmaxes of FlashAttention-3: turns or a pipeline keep tensor cores busy",
        "FlashAttention-3 的读入、乘法与 softmax 何时运行：轮流或流水线使 Tensor Core 保持忙碌",
    )
    return svg(LEFT + SHOWN * UNIT + 16, 382, title, parts)
