"""The kernel, the tile and the number of programs of attention over a cache on Hopper."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from flashtile.backends.common.device import Target
from flashtile.backends.hopper import decode
from flashtile.backends.hopper.decode.config import choose
from flashtile.backends.hopper.decode.launch import (
    FEW_SPLITS,
    FEW_SPLITS_TILE,
    balanced_programs,
    divides,
    is_stream_k,
    recorded_tile,
)
from flashtile.backends.hopper.forward import config as forward
from flashtile.problems.common import UNLIMITED
from flashtile.problems.decode import FP8, DecodeProblem
from flashtile.tools.inspection.attention import GROUPED
from walk import walk

PAGED = DecodeProblem(
    batch=8, seqlen_q=8, total_q=64, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
    capacity=8192, page_size=16, num_blocks=8192, seqlen_new=0, dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
    device=Target("H200", (9, 0), 132),  # type: ignore[arg-type]
    softmax_scale=1.0, window_right=0, lengths=True,
)  # fmt: skip


def of(batch: int, seqlen_q: int, **more: Any) -> DecodeProblem:
    return replace(PAGED, batch=batch, seqlen_q=seqlen_q, total_q=batch * seqlen_q, **more)


def mixed(batch: int, seqlen_q: int, total_q: int, **more: Any) -> DecodeProblem:
    return replace(of(batch, seqlen_q, varlen=True, **more), total_q=total_q)


@walk(
    ("problem", "programs_per_sm", "programs"),
    [
        (of(1, 8), 2, 264),
        (of(8, 16), 2, 256),
        (of(14, 8), 2, 264),
        (of(15, 8), 1, None),
        (of(16, 8), 1, None),
        (of(12, 8), 2, 264),  # 96 work tiles: one program each would leave 36 multiprocessors idle
        (of(20, 8), 2, 264),
        (of(32, 8), 2, None),
        (of(8, 16, num_splits=2), 2, None),
        (of(8, 16, split_size=512), 2, None),
        (of(8, 16, cache_dtype=FP8), 2, 256),
        (of(8, 16, head_dim=64, head_dim_v=64), 2, 256),
        (of(1, 256), 1, 128),
        (of(8, 64), 1, None),
        (of(2, 128, varlen=True), 1, 128),
        (mixed(23, 605, 627, num_heads_q=24), 2, None),  # in the mean 82 rows of a key head
        (mixed(23, 605, 627, num_heads_q=40), 1, None),  # 136
        (mixed(85, 255, 404, num_heads_q=12, num_heads_kv=2), 2, None),
        (mixed(93, 295, 387, num_heads_q=14, num_heads_kv=1, head_dim=64, head_dim_v=64), 2, None),
        (mixed(85, 255, 404, head_dim=256, head_dim_v=256), 1, None),  # no row of two programs
        (mixed(85, 255, 404, page_size=8), 1, None),  # keys are copied one by one
        (mixed(85, 255, 404, num_splits=2), 1, None),  # would depend on the other sequences
        (mixed(2, 256, 257), 1, 128),  # one chunk and one token
        (mixed(8, 16, 23), 2, 256),  # sequences have one query tile each
    ],
)
def test_programs(problem: DecodeProblem, programs_per_sm: int, programs: int | None) -> None:
    """``programs`` is None where work tiles are in the queue."""
    config = choose(problem)
    assert config.programs_per_sm == programs_per_sm
    assert (balanced_programs(problem, config) if is_stream_k(problem, config) else None) == programs


@walk(
    ("problem", "divided"),
    [
        (of(32, 64), True),
        (of(32, 1024), False),
        (of(32, 1024, varlen=True), False),  # 32 m_blocks of 8 heads
        (of(32, 256, varlen=True), True),  # 8 of 8
        (of(32, 1024, varlen=True, num_heads_q=12, num_heads_kv=2), True),  # 48 of 2
        (of(32, 256, varlen=True, num_splits=2), False),
        (of(1, 256, varlen=True), False),  # equal shares
        (mixed(32, 1024, 1055), True),  # 32 of 8, and 64 of 8 in the batch
        (mixed(96, 1024, 1119), False),  # 64 of 8, and 165 of 8 in the batch, for twice the programs
    ],
)
def test_which_work_tiles_the_queue_divides(problem, divided) -> None:
    assert divides(problem, choose(problem)) == divided


@walk(
    ("problem", "serves"),
    [
        (of(32, 4), True),
        (of(16, 4), True),
        (of(32, 16, num_heads_q=8), True),
        (of(8, 4), False),  # divided by this kernel
        (of(32, 2), False),
        (of(32, 1, num_heads_q=128), False),  # one token
        (of(32, 4, capacity=1024), False),
        (of(32, 4, capacity=1040), True),
        (of(32, 4, window_left=300), False),
        (of(32, 4, cache_dtype=FP8), False),
        (of(32, 4, page_size=8), False),
        (of(32, 4, page_size=0), False),
        (of(32, 4, leftpad=True), False),
        (of(32, 4, num_splits=1), False),
        (of(32, 4, split_size=512), False),
        (of(32, 5, num_splits=1), True),
    ],
)
def test_few_rows(problem: DecodeProblem, serves: bool) -> None:
    reason = decode.reason_against(problem, explicit=False)
    assert (reason is None) == serves
    assert serves or "fit the portable kernel's tile of 16" in str(reason)
    assert decode.reason_against(problem, explicit=True) is None


@walk("head_dim", [32, 64, 96, 128])
def test_invariant_calls_have_one_order_of_sums(head_dim: int) -> None:
    """Single tokens, chunks, and prompts by the forward kernel, windowed or not."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "invariant": True}
    for tokens in (1, 8, 64, 4096):
        config = choose(replace(of(4, tokens, num_splits=1), **sizes))
        assert (config.tile.BLOCK_N, config.LAZY_RESCALE) == (128, False), tokens
    device = of(1, 1).device
    for length, left in itertools.product((100, 1000, 5000, 40000), (UNLIMITED, 1023)):
        prompts = replace(GROUPED, window_right=0, window_left=left, varlen=True, device=device, **sizes)
        own = forward.choose(replace(prompts, seqlen_q=length, seqlen_k=length))
        assert (own.BLOCK_N, own.LAZY_RESCALE, own.Q_IN_REGISTERS) == (128, False, 0), (length, left)


@walk("width", [64, 128, 256])
@walk("least", [1, 4])
def test_combining_tiles(width: int, least: int) -> None:
    """Few parts of a work tile are loaded at a time, and a combining program loads few elements."""
    for programs in (108, 128, 132, 264):
        for work_tiles in range(1, programs + 1):
            for rows in (32, 64, 128):
                tile = recorded_tile(programs, work_tiles, rows, width, least)
                parts = -(-programs // work_tiles) + (programs % work_tiles > 0)
                assert tile.one_by_one == (max(parts, least) <= FEW_SPLITS)
                assert rows % tile.rows == 0
                if not tile.one_by_one:
                    continue
                assert parts <= tile.splits < 2 * max(parts, least)
                assert tile.rows * tile.splits * width <= FEW_SPLITS_TILE
                if least == 1 and programs % work_tiles == 0:  # less than half of what is loaded is left out
                    assert 2 * parts > tile.splits
