"""The number of programs that share a block of keys in the Hopper backward, and the sum of their parts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import flashtile
from flashtile import testing
from flashtile.backends.common.device import Target
from flashtile.backends.hopper.backward import costs as splitting
from flashtile.backends.hopper.backward.config import choose
from flashtile.backends.hopper.backward.costs import Splits
from flashtile.backends.hopper.backward.sum_parts import SumParts
from flashtile.io_model import find_card
from flashtile.problems.attention import Problem
from flashtile.tools.inspection.attention import GROUPED
from walk import walk

H200 = Target("H200", (9, 0), 132)


def problem_of(
    batch: int, seqlen_q: int, heads: tuple[int, int], head_dim: int = 128, seqlen_k: int = 0, **more: Any
) -> Problem:
    """Causal, unless ``more`` says otherwise."""
    seqlen_k = seqlen_k or seqlen_q
    fields: dict[str, Any] = {"window_right": 0} | more
    return replace(
        GROUPED, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=batch * seqlen_q,
        total_k=batch * seqlen_k, num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=head_dim,
        head_dim_v=head_dim, device=H200, **fields,
    )  # fmt: skip


def splits_of(problem: Problem) -> Splits:
    config = choose(problem)
    return Splits(config.HEAD_SPLITS, config.ROW_SPLITS)


def tiles_of(problem: Problem) -> int:
    config = choose(problem)
    return problem.batch * problem.num_heads_kv * -(-problem.seqlen_k // config.BLOCK_N) * config.parts


@walk("lengths", [(100, 100), (70, 130), (130, 70)])
@walk("window", [(-1, -1), (-1, 0), (20, 0), (9, 30)])
def test_steps_are_blocks_of_rows_that_see_a_key(lengths: tuple[int, int], window: tuple[int, int]) -> None:
    (rows, keys), (left, right) = lengths, window
    problem = problem_of(1, rows, (1, 1), seqlen_k=keys, window_left=left, window_right=right)
    place = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    seen = ((left < 0) | (place >= -left)) & ((right < 0) | (place <= right))
    blocks = [seen[:, first : first + 32].any(1).nonzero().flatten() // 16 for first in range(0, keys, 32)]
    steps = tuple(rows.end - rows.begin for rows in splitting.rows_of_blocks(problem, 16, 32))
    assert steps == tuple(len(block.unique()) for block in blocks)


@walk("head_dim", [64, 128, 256])
@walk("causal", [False, True])
def test_work_tiles_that_fill_the_card_stay_whole(head_dim: int, causal: bool) -> None:
    """All of FlashAttention's grid: 16384 tokens, heads times head_dim 2048. And models on one card."""
    mask = {"window_right": 0 if causal else -1}
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
        heads = 2048 // head_dim
        problem = problem_of(16384 // seqlen, seqlen, (heads, heads), head_dim, **mask)
        assert splits_of(problem) == Splits()
        assert splits_of(replace(problem, deterministic=True)) == Splits()
    assert splits_of(problem_of(4, 4096, (32, 8), head_dim, **mask)) == Splits()


@walk("deterministic", [False, True])
@walk(
    ("batch", "seqlen", "heads"),
    [(1, 8192, (8, 1)), (1, 4096, (28, 4)), (2, 4096, (8, 1)), (1, 2048, (8, 2)), (1, 512, (16, 1))],
)
def test_few_key_heads_fill_the_card(
    batch: int, seqlen: int, heads: tuple[int, int], deterministic: bool
) -> None:
    """Where lengths differ, with more work tiles than multiprocessors, so that queues end together; where a
    call is short, with shares of few rows, or of a head."""
    problem = problem_of(batch, seqlen, heads, deterministic=deterministic)
    most = heads[0] // heads[1] if deterministic else splitting.MAX_PARTS
    assert 1.5 * 132 <= tiles_of(problem) <= 8 * 132 or splits_of(problem).parts == most


def test_few_keys_and_many_queries_fill_the_card() -> None:
    """Cross-attention to 77 tokens of text: one block of keys a head."""
    for deterministic in (False, True):
        problem = problem_of(2, 4096, (10, 10), 64, 77, window_right=-1, deterministic=deterministic)
        assert 80 <= tiles_of(problem) <= 320


def test_candidates_are_within_the_limits() -> None:
    cases = itertools.product((1, 2, 4), (1, 2, 6, 7, 16), (512, 8192), (False, True), (False, True))
    for heads, group, seqlen, causal, deterministic in cases:
        mask = {"window_right": 0 if causal else -1, "deterministic": deterministic}
        problem = problem_of(1, seqlen, (heads * group, heads), **mask)
        found = list(splitting.candidates(problem))
        assert found[0] == Splits()
        assert len(set(found)) == len(found)
        assert all(group % splits.heads == 0 and splits.parts <= 32 for splits in found)
        rows = 4 * problem.total_q * problem.num_heads_q * 128  # bytes of q and dO
        assert all(splits.parts * splitting.part_bytes(problem) <= max(2**27, rows) for splits in found[1:])
        assert (max(splits.rows for splits in found) == 1) == (causal and deterministic)


def test_deterministic_sums_under_a_mask_divide_heads_only() -> None:
    """Additions to dQ take turns; shares of rows would wait for whole work tiles."""
    assert splits_of(problem_of(1, 4096, (7, 1), deterministic=True)) == Splits(7, 1)
    alone = problem_of(1, 4096, (1, 1), deterministic=True)
    assert splits_of(alone) == Splits()
    assert splits_of(replace(alone, window_right=-1)).rows > 1
    assert splits_of(replace(alone, deterministic=False)).rows > 1


def test_packed_sequences_of_one_length_are_divided_like_dense_ones() -> None:
    dense = problem_of(4, 1024, (8, 1))
    packed = replace(dense, varlen=True)
    assert splits_of(packed).parts == splits_of(dense).parts == 8
    for problem in (packed, dense):
        assert splits_of(replace(problem, batch=0, total_q=0, total_k=0)) == Splits()
        assert splits_of(replace(problem, batch=0)) == Splits()  # all tokens unused


def test_explain_shows_the_splits() -> None:
    """Of a card that need not be here."""
    q, k = (torch.empty(1, 8192, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 1))
    backward = flashtile.explain(q, k, k, causal=True, card=find_card("h200"))["backward"]
    assert backward.backend == "hopper"
    assert "HEAD_SPLITS=2, ROW_SPLITS=2" in str(backward)
    assert "HEAD_SPLITS=1, ROW_SPLITS=1" in str(
        flashtile.explain(q, q, q, card=find_card("h200"))["backward"]
    )


@pytest.mark.interpreter
@walk(("sizes", "heads", "parts"), [((64, 64), 2, 2), ((72, 128), 1, 5), ((256, 40), 3, 8)])
@walk(("varlen", "used"), [(False, False), (True, False), (True, True)])
def test_parts_are_added_in_one_order(
    sizes: tuple[int, int], heads: int, parts: int, varlen: bool, used: bool
) -> None:
    """To the bit, over rows that fill no block."""
    batch, seqlen = 2, 13
    d, dv = sizes
    problem = replace(
        GROUPED, batch=batch, seqlen_k=seqlen, total_k=batch * seqlen, num_heads_kv=heads, head_dim=d,
        head_dim_v=dv, varlen=varlen, seqused_k=used,
    )  # fmt: skip
    rows = (batch * seqlen,) if varlen else (batch, seqlen)
    k, v = (torch.zeros(*rows, heads, size, dtype=torch.float16) for size in sizes)  # numpy has no bfloat16
    sum_parts = SumParts(problem, parts)
    with testing.poisoned_memory():
        written = sum_parts.allocate(k, v)
        results = torch.empty_like(k), torch.empty_like(v)
    for part, size in zip(written, sizes, strict=True):
        assert part.shape == (*rows, heads * parts, size)
        assert part.dtype == torch.float32
        assert bool((part == 0).all()) == used  # unused tokens are never written
        part.copy_(torch.randn(part.shape) * 10.0 ** torch.randint(-2, 3, part.shape))
    sum_parts(*written, *results)
    for part, result in zip(written, results, strict=True):
        expected = torch.zeros_like(result, dtype=torch.float32)
        for each in part.unflatten(-2, (heads, parts)).unbind(-2):
            expected = expected + each
        assert torch.equal(result, expected.to(torch.float16))
