"""Draws docs/assets/hopper-schedule.svg: which blocks some programs of the Hopper forward compute, and when.

    python docs/scripts/hopper_timeline.py

The order is the kernel's own (``backends/hopper/forward/schedule.py``); time is counted in blocks of keys, as
``flashtile.learn.io_model.hopper`` does.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from flashtile.hardware.calls import Call
from flashtile.hardware.cards import find_card
from flashtile.learn.io_model.hopper import WorkTiles, cost_of

ROOT = Path(__file__).resolve().parents[2]
CARD = find_card("h100")
PROGRAMS = CARD.sm_count
SHOWN = 24
TOKENS, HEADS, HEAD_DIM = 16384, 16, 128


def spans(seqlen: int) -> list[list[tuple[int, int, int]]]:
    """(begin, duration, blocks of keys) of all blocks of queries that each program computes."""
    call = Call(TOKENS // seqlen, seqlen, seqlen, HEADS, HEADS, HEAD_DIM, window_right=0)
    work = WorkTiles.of(call, CARD)
    programs = []
    for tiles in work.by_program(PROGRAMS):
        found, now = [], 0
        for walk in (walk for index in tiles for walk in work.tile(index)[2]):
            found.append((now, cost_of(walk), len(walk)))
            now += cost_of(walk)
        programs.append(found)
    return programs


def draw(path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "flashtile"  # the same file each time
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for axis, seqlen, title in (
        (axes[0], 2048, "S = 2048: pairs of a long and a short block"),
        (axes[1], 16384, "S = 16384: a queue, of eight heads the longest blocks first"),
    ):
        programs = spans(seqlen)
        colours = plt.get_cmap("viridis")
        most = max(keys for program in programs for _, _, keys in program)
        for row in range(SHOWN):
            for begin, length, keys in programs[row * PROGRAMS // SHOWN]:
                colour = colours((keys - 1) / (most - 1))
                axis.barh(row, length, left=begin, color=colour, edgecolor="white", linewidth=0.4)
        axis.set(title=title, xlabel="blocks of keys", ylabel=f"{SHOWN} of {PROGRAMS} programs", yticks=[])
        axis.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "assets" / "hopper-schedule.svg")
