"""Draws docs/assets/hopper-schedule.svg: which blocks some programs of the Hopper forward compute, and when.

    python -m scripts.docs.hopper_timeline

The order is the kernel's own (``backends/hopper/schedule.py``); time is counted in blocks of keys, and one
block more for the start and end of each block of queries.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from flashtile.backends.hopper.config import choose
from flashtile.backends.hopper.launch import section_of, variant_of
from flashtile.backends.hopper.schedule import block_of, blocks_of, dense_item, items_of
from flashtile.io_model.hopper import START_AND_END, dealt
from flashtile.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = 132
SHOWN = 24
TOKENS, HEADS, HEAD_DIM = 16384, 16, 128


def problem_of(seqlen: int) -> Problem:
    batch = TOKENS // seqlen
    return Problem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        total_q=TOKENS,
        total_k=TOKENS,
        num_heads_q=HEADS,
        num_heads_kv=HEADS,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        softmax_scale=HEAD_DIM**-0.5,
        window_right=0,
    )


def spans(problem: Problem) -> list[list[tuple[int, int, int]]]:
    """(begin, duration, block of queries) of all that each program computes."""
    variant = variant_of(problem, choose(problem))
    blocks = -(-problem.seqlen_q // variant.BLOCK_M)
    per_head = items_of.fn(blocks, variant.PAIRED)
    section = section_of(problem, variant)

    def blocks_of_item(item: int) -> list[tuple[int, int]]:
        """(block of queries, what it costs) of each of the item's."""
        _, _, place = dense_item.fn(item, per_head, HEADS, section)
        parts = range(blocks_of.fn(blocks, place, variant.PAIRED))
        found = [block_of.fn(blocks, place, part, variant.PAIRED) for part in parts]
        return [(m, START_AND_END - (-(m + 1) * variant.BLOCK_M // variant.BLOCK_N)) for m in found]

    def cost(item: int) -> int:
        return sum(keys for _, keys in blocks_of_item(item))

    programs = []
    for items in dealt(per_head * problem.batch * HEADS, PROGRAMS, cost if variant.QUEUED else None):
        found, now = [], 0
        for block, keys in (block for item in items for block in blocks_of_item(item)):
            found.append((now, keys, block))
            now += keys
        programs.append(found)
    return programs


def draw(path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "flashtile"  # the same file each time
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for axis, seqlen, title in (
        (axes[0], 2048, "S = 2048: pairs of a long and a short block"),
        (axes[1], 16384, "S = 16384: a queue, of eight heads the longest blocks first"),
    ):
        programs = spans(problem_of(seqlen))
        colours = plt.get_cmap("viridis")
        last = seqlen // 128 - 1
        for row in range(SHOWN):
            for begin, length, block in programs[row * PROGRAMS // SHOWN]:
                colour = colours(block / last)
                axis.barh(row, length, left=begin, color=colour, edgecolor="white", linewidth=0.4)
        axis.set(title=title, xlabel="blocks of keys", ylabel=f"{SHOWN} of {PROGRAMS} programs", yticks=[])
        axis.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "assets" / "hopper-schedule.svg")
