"""Block tables and copy-on-write, as the library's own BlockManager decides them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.kv_cache import BlockManager
from pictures.canvas import BLUE, FAINT, INK, ORANGE, PURPLE, Say, box, heading, line, svg, text

NUM_BLOCKS, BLOCK_SIZE = 6, 4
TABLE, POOL = 64, 196
ROW = 34
PANEL = 244
SEQUENCES = {"A": BLUE, "B": ORANGE}


@dataclass(frozen=True)
class State:
    """The books at one moment."""

    tables: dict[str, list[int]]
    lengths: dict[str, int]
    refs: list[int]
    copied: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(manager: BlockManager, names: dict[str, int], copied: list[tuple[int, int]]) -> State:
        return State(
            {name: manager.blocks(number) for name, number in names.items()},
            {name: manager.length(number) for name, number in names.items()},
            list(manager.pool.refs),
            tuple(copied),
        )


def states() -> list[State]:
    """A prompt of six tokens; a fork of it; one more token for the fork."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, max_sequences=2, max_seqlen=16)
    names = {"A": manager.create()}
    found = [State.of(manager, names, manager.reserve(names["A"], 6))]
    names["B"] = manager.fork(names["A"])
    found.append(State.of(manager, names, []))
    copied = manager.reserve(names["B"])
    found.append(State.of(manager, names, copied))
    return found


def panel(x: float, title: str, below: str, state: State, say: Say) -> Iterator[str]:
    """Tables on the left, the pool on the right, an arrow for each entry."""
    yield heading(x, 24, title)
    pool_top = 62.0
    yield text(x + POOL, pool_top - 8, say("pool", "物理块"), size=11, anchor="middle")
    yield text(x, pool_top - 8, say("block tables", "块表"), size=11)
    filled = {}
    for name, table in state.tables.items():
        for column, block in enumerate(table):
            filled[block] = min(state.lengths[name] - column * BLOCK_SIZE, BLOCK_SIZE)
    for block in range(NUM_BLOCKS):
        y = pool_top + block * ROW
        users = [name for name, table in state.tables.items() if block in table]
        colour = PURPLE if len(users) > 1 else SEQUENCES[users[0]] if users else INK
        for slot in range(BLOCK_SIZE):
            used = slot < filled.get(block, 0)
            yield box(x + POOL - 30 + slot * 15, y, 14, 24, colour, opacity=0.85 if used else FAINT)
        refs = state.refs[block]
        yield text(x + POOL - 36, y + 16, str(block), size=10, anchor="end", opacity="0.8")
        if refs:
            yield text(x + POOL + 34, y + 16, f"×{refs}", size=11)
    y = float(pool_top)
    for name, table in state.tables.items():
        yield box(x, y, 22, 24 * len(table), SEQUENCES[name], name)
        for column, block in enumerate(table):
            yield box(x + 24, y + column * 24, 26, 23, SEQUENCES[name], str(block), opacity=FAINT)
            target = (x + POOL - 48, pool_top + block * ROW + 12)
            yield line([(x + 52, y + column * 24 + 12), target], SEQUENCES[name], width=1.2, tip=True)
        y += 24 * len(table) + 26
    bottom = pool_top + NUM_BLOCKS * ROW
    for source, copy in state.copied:
        edge = x + POOL + 52
        points = [(edge, pool_top + b * ROW + 12) for b in (source, copy)]
        bend = [(edge + 8, points[0][1]), (edge + 8, points[1][1])]
        yield line([points[0], *bend, points[1]], INK, tip=True)
        yield text(edge + 12, (points[0][1] + points[1][1]) / 2 + 4, say("copy", "复制"), size=11)
    yield text(x, bottom + 26, below, size=11)


def picture(say: Say) -> str:
    first, forked, written = states()
    panels = [
        (
            say("1. A has six tokens", "1. A 有 6 个 token"),
            say("two blocks of four, as it grows", "每块 4 个 token，按需分配"), first,
        ),
        (
            say("2. B is forked from A", "2. 从 A fork 出 B"),
            say("same entries, counted twice", "表项相同，引用计数为 2"), forked,
        ),
        (
            say("3. B writes: copy-on-write", "3. B 写入：写时复制"),
            say("the full block stays shared", "写满的块仍然共享"), written,
        ),
    ]  # fmt: skip
    parts = [
        part
        for number, (title, below, state) in enumerate(panels)
        for part in panel(16 + number * (PANEL + 20), title, below, state, say)
    ]
    title = say(
        "Block tables map sequences to blocks of a pool; a fork shares them, and the first write to a "
        "shared, unfinished block copies it",
        "块表把序列映射到物理块；fork 共享物理块，首次写入未写满的共享块时才复制",
    )
    return svg(16 + 3 * (PANEL + 20) + 30, 300, title, parts)
