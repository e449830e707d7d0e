"""With a block mask, the Hopper kernels visit each listed block once, partial blocks first."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from flashtile import masks
from flashtile.backends.hopper import modifiers
from flashtile.backends.hopper.refusals import reason_against_mods, reason_against_mods_backward
from flashtile.problems.attention import Problem
from flashtile.problems.masks import Mods
from flashtile.tools.inspection.attention import GROUPED as PLAIN
from kernels_as_python import functions_of
from walk import walk

HEADS = 2


class Pointer:
    """Into a tensor's elements."""

    def __init__(self, tensor: Tensor, place: Any = 0) -> None:
        self.elements, self.place = tensor.reshape(-1), place

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.elements, self.place + places)


def load(pointer: Pointer, mask: Tensor | None = None, other: int = 0) -> Any:
    if mask is None:
        return int(pointer.elements[pointer.place])
    return torch.where(mask, pointer.elements[torch.where(mask, pointer.place, 0)], other)


GL = SimpleNamespace(
    load=load,
    where=torch.where,
    int64=torch.int64,
    arange=lambda start, end, layout: torch.arange(start, end),
    max=lambda x, axis: int(x.max()),
    maximum=max,
    BlockedLayout=lambda *parts: None,
)
AS_PYTHON = functions_of(modifiers, gl=GL)


def visited(plan: Any, variant: Any) -> list[tuple[int, bool]]:
    """(block, whether it is full) in the order of visits."""
    return [AS_PYTHON["visited_block"](variant, plan, i) for i in range(plan.count)]


def lists_of(block_mask: masks.BlockMask, names: tuple[str, ...]) -> Any:
    num_blocks, indices, full_num_blocks, full_indices = (getattr(block_mask, name) for name in names)
    return SimpleNamespace(
        num_blocks=Pointer(num_blocks),
        indices=Pointer(indices),
        full_num_blocks=Pointer(full_num_blocks),
        full_indices=Pointer(full_indices),
        batch=num_blocks.shape[0],
        heads=num_blocks.shape[1],
    )


def some_mask(seed: int, entries: int) -> Any:
    """Blocks of 16 by 16 that are empty, partial or full at random, by heads."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (HEADS, entries, entries), generator=generator)
    kinds[:, : entries // 3] *= torch.randint(0, 2, (HEADS, entries // 3, 1), generator=generator)

    def mask(batch, head, q_idx, kv_idx):
        kind = kinds[head, q_idx // 16, kv_idx // 16]
        return (kind == 2) | ((kind == 1) & ((q_idx + kv_idx) % 3 == 0))

    return mask


@walk("seed", range(8))
def test_every_listed_block_is_visited_once(seed: int) -> None:
    draw = random.Random(seed)
    parts_q, parts_k = draw.choice([1, 2]), draw.choice([1, 2])
    seqlen_q, seqlen_k = draw.randrange(17, 200), draw.choice([128, draw.randrange(17, 200)])
    size_q, size_kv = 16 * parts_q, 16 * parts_k
    mask = some_mask(seed, 14)
    block_mask = masks.create_block_mask(mask, None, HEADS, seqlen_q, seqlen_k, None, (size_q, size_kv))
    kinds = {
        (h, m, n): block_kind(mask, h, m, n, seqlen_q, seqlen_k, size_q, size_kv)
        for h in range(HEADS)
        for m in range(-(-seqlen_q // 16))
        for n in range(-(-seqlen_k // 16))
    }
    forward = SimpleNamespace(
        BLOCK_M=16,
        BLOCK_N=16,
        MASK_BLOCK=size_q,
        TILES_PER_MASK_BLOCK=parts_k,
        EVEN_N=seqlen_k % size_kv == 0,
    )
    key_lists = lists_of(block_mask, ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"))
    row_lists = lists_of(block_mask, ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"))
    for h in range(HEADS):
        work = SimpleNamespace(
            sequence=torch.tensor(1), head=torch.tensor(h), seqlen_q=seqlen_q, seqlen_k=seqlen_k
        )
        for m in range(-(-seqlen_q // 16)):
            plan = AS_PYTHON["listed_keys"](forward, 4, work, m, key_lists)
            found = visited(plan, forward)
            downwards = [AS_PYTHON["key_block"](forward, plan, n) for n in range(plan.count - 1, -1, -1)]
            assert downwards == found
            wanted = {n: kind for (head, row, n), kind in kinds.items() if (head, row) == (h, m) and kind}
            if not wanted:
                assert (plan.count, found[0][0] * 16 >= seqlen_k) == (1, True)
                continue
            check_visits(
                found,
                plan.masked_count,
                wanted,
                -(-seqlen_k // 16),
                lambda block: (block * 16 // size_kv + 1) * size_kv > seqlen_k,
            )
    backward = SimpleNamespace(
        BLOCK_M=16,
        BLOCK_N=16,
        MASK_BLOCK=size_kv,
        TILES_PER_MASK_BLOCK=parts_q,
        EVEN_N=seqlen_k % 16 == 0,
    )
    for h in range(HEADS):
        for n in range(-(-seqlen_k // 16)):
            work = SimpleNamespace(
                sequence=torch.tensor(1),
                head=torch.tensor(h),
                tile_in_head=n,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
            )
            plan = AS_PYTHON["listed_rows"](backward, work, work.head, row_lists)
            found = visited(plan, backward)
            wanted = {m: kind for (head, m, key), kind in kinds.items() if (head, key) == (h, n) and kind}
            ends = (n + 1) * 16 > seqlen_k
            check_visits(found, plan.masked_count, wanted, -(-seqlen_q // 16), lambda block, ends=ends: ends)


def block_kind(
    mask: Any, h: int, m: int, n: int, seqlen_q: int, seqlen_k: int, size_q: int, size_kv: int
) -> int:
    """0 empty, 1 partial, 2 full: of the block mask's block that holds block (m, n) of 16 by 16."""
    first_q, first_k = m * 16 // size_q * size_q, n * 16 // size_kv * size_kv
    rows = torch.arange(first_q, min(first_q + size_q, seqlen_q))[:, None]
    keys = torch.arange(first_k, min(first_k + size_kv, seqlen_k))
    seen = mask(torch.tensor(0), torch.tensor(h), rows, keys)
    return 2 if seen.all() else int(seen.any())


def check_visits(
    found: list[tuple[int, bool]],
    cut: int,
    wanted: dict[int, int],
    blocks: int,
    ends_in: Callable[[int], bool],
) -> None:
    """``ends_in``: whether a full block takes a mask all the same, for the sequence's end."""
    assert len({block for block, _ in found}) == len(found)
    assert {block: 1 + is_full for block, is_full in found if block < blocks} == wanted
    uncut = {block for block, _ in found[cut:]}
    assert uncut == {block for block, kind in wanted.items() if kind == 2 and not ends_in(block)}


def with_mods(problem: Problem = PLAIN, **mods: Any) -> Problem:
    return replace(problem, mods=Mods(**mods))


CAUSAL = "t0: bool = le kv q\nreturn t0"
SCORE = "t0: float = mul score 2.0\nreturn t0"
SERVED = {
    "mask": with_mods(mask_mod=CAUSAL),
    "both": with_mods(score_mod=SCORE, mask_mod=CAUSAL, block_size=(128, 256)),
    "causal": with_mods(replace(PLAIN, sink=True, window_right=0), score_mod=SCORE),
    "softcap": with_mods(replace(PLAIN, softcap=2.0, alibi=True), mask_mod=CAUSAL),
    "wide": with_mods(
        replace(PLAIN, head_dim=256, head_dim_v=256, deterministic=True),
        mask_mod=CAUSAL,
        block_size=(128, 64),
    ),
}
REFUSED = {
    "small": (with_mods(mask_mod=CAUSAL, block_size=(64, 128)), "multiples of 128 queries and 128 keys"),
    "wide": (with_mods(replace(PLAIN, head_dim_v=264), mask_mod=CAUSAL), "head sizes up to 256"),
    "small-wide": (
        with_mods(replace(PLAIN, head_dim=192), mask_mod=CAUSAL, block_size=(128, 96)),
        "multiples of 128 queries and 64 keys",
    ),
    "slopes": (with_mods(replace(PLAIN, alibi=True), score_mod=SCORE), "alibi_slopes with score_mod"),
    "softcap": (with_mods(replace(PLAIN, softcap=1.0), score_mod=SCORE), "softcap with score_mod"),
    "window": (
        with_mods(replace(PLAIN, window_right=0), mask_mod=CAUSAL, block_size=(128, 128)), "causal or window"
    ),
}  # fmt: skip
REFUSED_BACKWARD = {
    "learned": (with_mods(score_mod=SCORE, learned=(0,)), "gradients of captured tensors"),
    "deterministic": (
        with_mods(replace(PLAIN, deterministic=True), mask_mod=CAUSAL, block_size=(128, 128)), "deterministic"
    ),
    "heads": (
        with_mods(mask_mod=CAUSAL, block_size=(128, 128), list_heads=8), "query heads of one key head"
    ),
    "ragged": (
        with_mods(replace(PLAIN, seqlen_q=4000), mask_mod=CAUSAL, block_size=(256, 128)), "256 queries"
    ),
}  # fmt: skip


@walk("name", SERVED)
def test_served(name: str) -> None:
    assert reason_against_mods(SERVED[name]) is None
    assert reason_against_mods_backward(SERVED[name]) is None


@walk("name", REFUSED)
def test_refused(name: str) -> None:
    problem, reason = REFUSED[name]
    assert reason in str(reason_against_mods(problem))


@walk("name", REFUSED_BACKWARD)
def test_refused_backward(name: str) -> None:
    problem, reason = REFUSED_BACKWARD[name]
    assert reason_against_mods(problem) is None
    assert reason in str(reason_against_mods_backward(problem))
