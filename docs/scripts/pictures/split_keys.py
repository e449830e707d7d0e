"""Who attends to which keys in decoding: one program a sequence, and the equal shares of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

from flashtile.backends.portable.decode.schedule import share_start
from pictures.canvas import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, Say, box, heading, line, svg, text

N_BLOCKS = {"A": 13, "B": 3, "C": 6, "D": 2}
"""Blocks of keys of each sequence, for one key/value head."""

PROGRAMS = 6
SEQUENCES = {"A": BLUE, "B": ORANGE, "C": PURPLE, "D": GREEN}
UNIT, ROW = 34, 26
LEFT = 120


def shares() -> list[list[tuple[str, int]]]:
    """For each program the runs (sequence, blocks of keys) that the kernel gives it."""
    blocks = [name for name, count in N_BLOCKS.items() for _ in range(count)]
    programs = []
    for program in range(PROGRAMS):
        first, end = (share_start.fn(p, PROGRAMS, len(blocks)) for p in (program, program + 1))
        runs: dict[str, int] = {}
        for name in blocks[first:end]:
            runs[name] = runs.get(name, 0) + 1
        programs.append(list(runs.items()))
    return programs


def timeline(y: float, title: str, programs: list[list[tuple[str, int]]], say: Say) -> Iterator[str]:
    """A row for each program, time to the right; a faint row is one that has nothing to do."""
    longest = max(sum(count for _, count in runs) for runs in programs)
    yield heading(16, y, title)
    for number, runs in enumerate(programs):
        top, x = y + 12 + number * ROW, float(LEFT)
        yield text(LEFT - 10, top + 15, say(f"program {number}", f"程序 {number}"), anchor="end", size=11)
        for name, count in runs:
            yield box(x, top, count * UNIT - 2, ROW - 5, SEQUENCES[name], f"{name} · {count}", size=11)
            x += count * UNIT
        if not runs:
            yield box(
                LEFT, top, longest * UNIT - 2, ROW - 5, INK, say("idle", "空闲"), opacity=FAINT, size=11
            )
    end = LEFT + longest * UNIT + 4
    bottom = y + 12 + len(programs) * ROW
    yield line([(end, y + 8), (end, bottom)], INK)
    yield text(end + 6, bottom - 8, say(f"{longest} steps", f"{longest} 步"), size=11)


def picture(say: Say) -> str:
    alone: list[list[tuple[str, int]]] = [[run] for run in N_BLOCKS.items()]
    alone += [[] for _ in range(PROGRAMS - len(alone))]
    shared = shares()
    y = 206.0
    parts = [
        *timeline(24, say("One program a sequence", "每个序列一个程序"), alone, say),
        *timeline(y + 20, say("Equal shares of all keys", "所有键均分"), shared, say),
    ]
    x, top = LEFT + 6 * UNIT + 52, y + 26
    parts.append(
        text(x, top, say("combine: weights exp(lse_t - lse)", "合并：权重 exp(lse_t − lse)"), size=11)
    )
    for name, colour in SEQUENCES.items():
        pieces = sum(name in dict(runs) for runs in shared)
        top += 28
        words = say(f"{pieces} partial results", f"{pieces} 个部分结果")
        if pieces == 1:
            words = say("one result, nothing to combine", "只有一个结果，无需合并")
        parts.append(box(x, top - 15, 36, 21, colour, name))
        parts.append(text(x + 46, top, words, size=11))
    title = say(
        f"{len(N_BLOCKS)} sequences of different lengths: one program each takes as long as the longest, "
        f"{PROGRAMS} equal shares finish together",
        f"{len(N_BLOCKS)} 个长度不同的序列：每个序列一个程序时要等最长的序列，均分成 {PROGRAMS} 份则同时完成",
    )
    return svg(640, 400, title, parts)
