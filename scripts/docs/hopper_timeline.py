"""Draws docs/assets/hopper-schedule.svg: which blocks some programs of the Hopper forward compute, and when.

    python -m scripts.docs.hopper_timeline

The order is the kernel's own (``backends/hopper/schedule.py``); time is counted in blocks of keys, and one
block more for the start and end of each block of queries.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from flashtile.backends.hopper.config import choose
from flashtile.backends.hopper.launch import section_of, variant_of
from flashtile.backends.hopper.schedule import block_of, blocks_of, dense_item, items_of, turns_of, work_item
from flashtile.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = 132
SHOWN = 24
TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
START_AND_END = 1


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


def spans(problem: Problem, paired_below: int, program: int) -> list[tuple[int, int, int]]:
    """(begin, duration, block of queries) of all that a program computes."""
    config = replace(choose(problem), paired_below=paired_below)
    variant = variant_of(problem, config)
    blocks = -(-problem.seqlen_q // variant.BLOCK_M)
    per_head = items_of.fn(blocks, variant.PAIRED)
    section = section_of(problem, variant)
    found, now = [], 0
    for turn in range(turns_of.fn(program, PROGRAMS, per_head * problem.batch * HEADS)):
        item = work_item.fn(turn, program, PROGRAMS)
        _, _, place = dense_item.fn(item, per_head, HEADS, section)
        for part in range(blocks_of.fn(blocks, place, variant.PAIRED)):
            block = block_of.fn(blocks, place, part, variant.PAIRED)
            keys = -(-(block + 1) * variant.BLOCK_M // variant.BLOCK_N) + START_AND_END
            found.append((now, keys, block))
            now += keys
    return found


def draw(path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "flashtile"  # the same file each time
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for axis, seqlen, paired_below, title in (
        (axes[0], 2048, 2**31, "S = 2048: pairs of a long and a short block"),
        (axes[1], 16384, 0, "S = 16384: the longest blocks of all heads first"),
    ):
        problem = problem_of(seqlen)
        colours = plt.get_cmap("viridis")
        last = seqlen // 128 - 1
        for row in range(SHOWN):
            program = row * PROGRAMS // SHOWN
            for begin, length, block in spans(problem, paired_below, program):
                colour = colours(block / last)
                axis.barh(row, length, left=begin, color=colour, edgecolor="white", linewidth=0.4)
        axis.set(title=title, xlabel="blocks of keys", ylabel=f"{SHOWN} of {PROGRAMS} programs", yticks=[])
        axis.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "assets" / "hopper-schedule.svg")
