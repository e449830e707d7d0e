"""The tile scheduler of the Hopper backward, run as Python: it visits each pair of blocks once, in order."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import tile_bytes

from flashtile.backends.common.preprocess import ROW_PAD, num_padded_rows
from flashtile.backends.hopper import work_tiles
from flashtile.backends.hopper.backward import dq_accum
from flashtile.backends.hopper.backward import kernel as backward_kernel
from flashtile.backends.hopper.backward import schedule as backward_schedule
from flashtile.backends.hopper.backward import wide_dkv as backward_wide_dkv
from flashtile.backends.hopper.backward.config import (
    BackwardConfig,
    WideBackwardConfig,
    choose,
)
from flashtile.backends.hopper.backward.costs import l2_swizzle, last_heads, resident_heads
from flashtile.backends.hopper.backward.launch import backward_variant
from flashtile.backends.hopper.config import tile_widths
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.problems.masking import KernelMask
from flashtile.problems.masks import Mods
from flashtile.tools.inspection.attention import GROUPED, hopper_backward_cases
from flashtile.tools.inspection.report import ARCHITECTURES, report
from kernels_as_python import functions_of, make_work_tile
from walk import walk

KIB = 1024
BARRIERS = KIB
"""More than barriers, and what partitions are handed at the start, take of shared memory."""
PROBLEM = replace(GROUPED, seqlen_q=512, seqlen_k=512, head_dim=128, head_dim_v=128)


class Memory:
    """A pointer to integers."""

    def __init__(self, values: list[int], offset: int = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, more: int) -> Memory:
        return Memory(self.values, self.offset + more)

    def load(self) -> int:
        return self.values[self.offset]

    def add(self, value: int) -> int:
        before = self.load()
        self.values[self.offset] += value
        return before


PYTHON_GL = SimpleNamespace(
    load=Memory.load,
    atomic_add=Memory.add,
    minimum=min,
    maximum=max,
    convert_layout=lambda x, layout: x,
)


def as_python(module: ModuleType, name: str) -> Callable:
    return functions_of(work_tiles, module, gl=PYTHON_GL, WorkTile=make_work_tile)[name]


find_work_tile = as_python(backward_schedule, "find_work_tile")
row_blocks = as_python(backward_schedule, "row_blocks")
step_order = as_python(backward_schedule, "step_order")
block_of_step = as_python(backward_schedule, "block_of_step")
dq_order = as_python(backward_schedule, "dq_order")
padded_row = as_python(backward_schedule, "padded_row")
count_tiles = as_python(backward_schedule, "count_tiles")
own_row_blocks = as_python(backward_schedule, "own_row_blocks")
own_part = as_python(backward_schedule, "own_part")
gradient_head = as_python(backward_schedule, "gradient_head")

WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (20, 5), (-1, 9), (7, -1), (0, -1), (16, 16), (100, 100)]
LENGTHS = [(1, 1), (17, 40), (40, 17), (32, 64), (64, 32), (33, 65), (64, 8), (1, 70), (70, 5), (48, 48)]
BLOCKS = [(8, 16), (16, 16), (16, 8)]
every_mask = walk("window", WINDOWS)
every_length = walk(("seqlen_q", "seqlen_k"), LENGTHS)


def variant(block_m: int, block_n: int, window: tuple[int, int] = (-1, -1), **more: Any) -> SimpleNamespace:
    left, right = window
    fields = {"VARLEN": False, "SEQUSED": False, "DETERMINISTIC": False, "GROUPED": False, "SHARED": False}
    fields |= {"COLUMN_SPLITS": 1, "SEQUENCES_FIRST": False, "LISTED": False, "ONE_BLOCK": False}
    fields |= more
    return SimpleNamespace(
        BLOCK_M=block_m, BLOCK_N=block_n, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_CUTS=False, **fields
    )


def sees(row: int, key: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> bool:
    """By the definition of the window."""
    left, right = window
    distance = row + seqlen_k - seqlen_q - key
    return (left < 0 or distance <= left) and (right < 0 or -distance <= right)


def work_of(place: int, seqlen_q: int, seqlen_k: int) -> SimpleNamespace:
    return make_work_tile(0, 0, 0, place, 0, 0, seqlen_q, seqlen_k)


def steps_of(C: SimpleNamespace, work: SimpleNamespace, window: tuple[int, int]) -> tuple[list[int], int]:
    """(blocks of rows in the order of the steps, how many of the first are cut)."""
    begin, end, full_begin, full_end = row_blocks(C, work, KernelMask(*window))
    cut, count, before, full = step_order(begin, end, full_begin, full_end)
    return [block_of_step(j, begin, end, cut, before, full) for j in range(count)], cut


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@every_mask
@every_length
@pytest.mark.parametrize(("block_m", "block_n"), BLOCKS)
def test_every_pair_of_blocks_is_met_once(
    window: tuple[int, int], seqlen_q: int, seqlen_k: int, block_m: int, block_n: int
) -> None:
    """And the mask is applied to those, and only those, that are not wholly visible, which come first."""
    C = variant(block_m, block_n, window)
    for place in range(ceil_div(seqlen_k, block_n) + 1):  # one more: unused keys may make whole blocks
        steps, cut = steps_of(C, work_of(place, seqlen_q, seqlen_k), window)
        needed, whole = [], []
        keys = range(place * block_n, (place + 1) * block_n)
        for m in range(ceil_div(seqlen_q, block_m)):
            rows = range(m * block_m, min((m + 1) * block_m, seqlen_q))
            counts = [
                key < seqlen_k and sees(row, key, seqlen_q, seqlen_k, window) for row in rows for key in keys
            ]
            needed += [m] * any(counts)
            whole += [m] * all(counts)
        assert sorted(steps) == needed
        assert steps[cut:] == whole
        assert steps[:cut] == [m for m in needed if m not in whole]


@walk(("block_m", "block_n"), BLOCKS)
def test_without_a_mask_nothing_is_cut(block_m: int, block_n: int) -> None:
    """The kernel for calls that need no mask has none: not of the last rows either."""
    for seqlen_q, blocks in itertools.product((1, 7, 16, 33), (1, 3)):
        for place in range(blocks):
            work = work_of(place, seqlen_q, blocks * block_n)
            steps, cut = steps_of(variant(block_m, block_n), work, (-1, -1))
            assert (cut, steps) == (0, list(range(ceil_div(seqlen_q, block_m))))


@walk("change", [{}, {"seqlen_k": 500}, {"window_right": 0}, {"window_left": 5}])
@walk("head_dim", [64, 128, 256])
def test_variants_are_masked_where_something_is_cut(change: dict[str, int], head_dim: int) -> None:
    problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim, **change)
    C = backward_variant(problem, choose(problem))
    window = (problem.window_left, problem.window_right)
    some = False
    for place in range(ceil_div(problem.seqlen_k, C.BLOCK_N)):
        _, cut = steps_of(C, work_of(place, problem.seqlen_q, problem.seqlen_k), window)
        some |= cut > 0
    assert some == C.MASKED == bool(change)


@every_mask
@every_length
@pytest.mark.parametrize(("block_m", "block_n"), BLOCKS)
def test_the_order_of_additions_has_no_gap(
    window: tuple[int, int], seqlen_q: int, seqlen_k: int, block_m: int, block_n: int
) -> None:
    """A gap would be waited for forever; and what a block of keys waits for is an earlier work tile."""
    C = variant(block_m, block_n, window, DETERMINISTIC=True)
    left, right = window
    blocks = ceil_div(seqlen_k, block_n)
    schedule = make_schedule(blocks, 1, seqlen_q, seqlen_k, left, right)
    orders: dict[int, list[int]] = {}
    for tile_index in range(blocks):
        work = find_work_tile(C, tile_index, SimpleNamespace(), schedule)
        for m in steps_of(C, work, window)[0]:
            orders.setdefault(m, []).append(dq_order(C, work, m, schedule))
    assert bool(orders) == any(
        sees(row, key, seqlen_q, seqlen_k, window) for row in range(seqlen_q) for key in range(seqlen_k)
    )
    for order in orders.values():
        assert order == list(range(len(order)))


def make_schedule(
    blocks: int, heads: int, seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, **more: int
) -> backward_schedule.BackwardSchedule:
    fields = {"num_tiles": 0, "batch_rows_k": seqlen_k, "alibi_stride": 0, "swizzle": 1} | more
    fields["row_shift"] = fields.pop("row_splits", 1).bit_length() - 1
    return backward_schedule.BackwardSchedule(
        num_blocks=blocks,
        num_heads=heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        mask=KernelMask(left, right),
        **fields,
    )


@walk(("batch", "heads", "blocks"), [(1, 1, 1), (2, 3, 5), (3, 1, 8)])
def test_every_work_tile_of_equal_lengths(batch: int, heads: int, blocks: int) -> None:
    schedule = make_schedule(blocks, heads, 40, 16 * blocks - 3, swizzle=2)  # which is not looked at
    tile_indices = range(batch * heads * blocks)
    found = [
        find_work_tile(variant(8, 16), tile_index, SimpleNamespace(), schedule) for tile_index in tile_indices
    ]
    assert [(w.sequence, w.head, w.tile_in_head) for w in found] == list(
        itertools.product(range(batch), range(heads), range(blocks))
    )
    assert all(w.start_k == w.sequence * (16 * blocks - 3) for w in found)


def test_sequences_may_come_before_heads() -> None:
    schedule = make_schedule(5, 3, 40, 77, swizzle=2)._replace(num_tiles=2 * 3 * 5)
    C = variant(8, 16, SEQUENCES_FIRST=True)
    found = [find_work_tile(C, tile_index, SimpleNamespace(), schedule) for tile_index in range(30)]
    assert [(w.head, w.sequence, w.tile_in_head) for w in found] == list(
        itertools.product(range(3), range(2), range(5))
    )


@walk(("batch", "heads", "blocks"), [(1, 1, 1), (2, 3, 5), (3, 2, 8)])
@walk("last", [1, 2, 6])
@walk("row_splits", [1, 2])
@walk("listed", [False, True])
def test_every_work_tile_under_a_causal_mask_or_a_block_mask(
    batch: int, heads: int, blocks: int, last: int, row_splits: int, listed: bool
) -> None:
    """Heads follow one another; of the last, all first blocks come first."""
    last = min(last, batch * heads)
    C = variant(8, 16, (-1, -1 if listed else 0), SHARED=row_splits > 1, LISTED=listed)
    all_blocks = batch * heads * blocks
    schedule = make_schedule(
        blocks, heads, 40, 16 * blocks, right=0, swizzle=last, num_tiles=all_blocks, row_splits=row_splits
    )
    count = count_tiles(C, SimpleNamespace(), schedule)
    found = [find_work_tile(C, tile_index, SimpleNamespace(), schedule) for tile_index in range(count)]
    first = batch * heads - last
    expected = [*itertools.product(range(first), range(blocks))]
    expected += [(first + i, place) for place in range(blocks) for i in range(last)]
    assert [(w.sequence * heads + w.head, w.tile_in_head) for w in found[::row_splits]] == expected
    assert len(found) == row_splits * len(expected)


@walk(("batch", "heads", "blocks", "swizzle"), [(1, 1, 1, 1), (2, 3, 5, 2), (3, 4, 3, 1), (3, 2, 8, 6)])
def test_every_work_tile_when_deterministic(batch: int, heads: int, blocks: int, swizzle: int) -> None:
    """Last blocks first; so many heads are interleaved."""
    C = variant(8, 16, DETERMINISTIC=True)
    schedule = make_schedule(blocks, heads, 40, 16 * blocks, swizzle=swizzle)
    tile_indices = range(batch * heads * blocks)
    found = [find_work_tile(C, tile_index, SimpleNamespace(), schedule) for tile_index in tile_indices]
    firsts = range(0, batch * heads, swizzle)
    assert [(w.sequence * heads + w.head, w.tile_in_head) for w in found] == [
        (first + i, place) for first in firsts for place in reversed(range(blocks)) for i in range(swizzle)
    ]


@walk(("deterministic", "swizzle"), [(False, 1), (True, 1), (True, 2), (True, 4)])
@walk("seqused_k", [False, True])
def test_every_work_tile_of_variable_lengths(deterministic: bool, swizzle: int, seqused_k: bool) -> None:
    lengths, heads, block_n = [(7, 33), (0, 5), (20, 16), (9, 48)], 4, 16
    C = variant(8, block_n, DETERMINISTIC=deterministic, VARLEN=True, SEQUSED=seqused_k)
    rows: list[list[int]] = []
    start_q = start_k = 0
    for sequence, (seqlen_q, seqlen_k) in enumerate(lengths):
        for place in range(ceil_div(seqlen_k, block_n)):
            rows.append([sequence, place, start_k, start_q, seqlen_k, seqlen_q])
        start_q, start_k = start_q + seqlen_q, start_k + seqlen_k
    width = TABLE_WIDTH.value
    padding = [0] * (width - 6)
    table = [len(rows), *[0] * (width - 1), *itertools.chain(*(row + padding for row in rows))]
    used = [20, -4, 100, 48]
    pointers = SimpleNamespace(table=Memory(table), seqused_k=Memory(used))
    schedule = make_schedule(3, heads, 20, 48, swizzle=swizzle)
    tile_indices = count_tiles(C, pointers, schedule)
    assert tile_indices == len(rows) * heads
    found = [find_work_tile(C, tile_index, pointers, schedule) for tile_index in range(tile_indices)]
    expected = [
        (row[0], first + i, row[1])
        for first in range(0, heads, swizzle)
        for row in rows
        for i in range(swizzle)
    ]
    assert sorted((w.sequence, w.head, w.tile_in_head) for w in found) == sorted(expected)
    assert [(w.sequence, w.head) for w in found] == [(sequence, head) for sequence, head, _ in expected]
    for w in found:
        seqlen_q, seqlen_k = lengths[w.sequence]
        assert w.seqlen_q == seqlen_q
        assert w.seqlen_k == (min(max(used[w.sequence], 0), seqlen_k) if seqused_k else seqlen_k)
    for head, sequence in itertools.product(range(heads), range(len(lengths))):
        places = [w.tile_in_head for w in found if (w.head, w.sequence) == (head, sequence)]
        assert places == sorted(places, reverse=deterministic)


@every_mask
@walk(("seqlen_q", "seqlen_k"), LENGTHS)
@walk(("row_splits", "column_splits"), [(2, 1), (4, 2), (8, 1)])
def test_shares_of_rows_are_whole(
    window: tuple[int, int], seqlen_q: int, seqlen_k: int, row_splits: int, column_splits: int
) -> None:
    """Programs that share a block of keys meet each of its row blocks once, masked as if they were one. They
    write parts of their own, each half of the columns like the other."""
    blocks, heads, batch = ceil_div(seqlen_k, 16), 2, 2
    C = variant(8, 16, window, SHARED=True, COLUMN_SPLITS=column_splits)
    alone = variant(8, 16, window)
    tiles = batch * heads * blocks
    schedule = make_schedule(
        blocks, heads, seqlen_q, seqlen_k, *window, num_tiles=tiles, row_splits=row_splits
    )
    found: dict[tuple[int, int, int, int], list] = {}
    written: Counter[tuple[int, int, int, int]] = Counter()
    for tile_index in range(count_tiles(C, SimpleNamespace(), schedule)):
        work = find_work_tile(C, tile_index, SimpleNamespace(), schedule)
        begin, end, full_begin, full_end = own_row_blocks(C, tile_index, work, schedule)
        assert begin <= end
        cut, count, before, full = step_order(begin, end, full_begin, full_end)
        steps = [(block_of_step(j, begin, end, cut, before, full), j < cut) for j in range(count)]
        columns = own_part(C, tile_index)
        found.setdefault((work.sequence, work.head, work.tile_in_head, columns), []).append(steps)
        written[work.sequence, gradient_head(C, tile_index, work, schedule), work.tile_in_head, columns] += 1
    assert len(found) == batch * heads * blocks * column_splits
    for (_, _, place, _), shares in found.items():
        steps, cut = steps_of(alone, work_of(place, seqlen_q, seqlen_k), window)
        assert sorted(itertools.chain(*shares)) == sorted((m, j < cut) for j, m in enumerate(steps))
        sizes = [len(share) for share in shares]
        assert len(sizes) == row_splits
        assert max(sizes) - min(sizes) <= 1
    parts = itertools.product(range(batch), range(heads * row_splits), range(blocks), range(column_splits))
    assert written == Counter(parts)


def test_shares_of_heads_have_the_keys_of_their_group() -> None:
    """Each key head of the schedule loads K and V of the one that it is a share of, and has its own part."""
    loaded: list[list] = []
    load_keys = functions_of(
        backward_kernel,
        gl=PYTHON_GL,
        async_load=lambda desc, at, barrier, tile: loaded.append(at),
    )["load_key_block"]
    splits, heads_q, heads_kv = 3, 12, 2
    C = variant(8, 16, GROUPED=True, SHARED=True)
    group = heads_q // heads_kv // splits
    schedule = make_schedule(1, heads_kv * splits, 40, 16, group=group, head_splits=splits)
    head_of_batch = as_python(backward_schedule, "head_of_batch")
    for tile_index in range(2 * heads_kv * splits):
        work = find_work_tile(C, tile_index, SimpleNamespace(), schedule)
        load_keys(C, None, work, None, None)
        sequence, row, head, _ = loaded[-1]
        assert (sequence, row) == (work.sequence, 0)
        assert head == gradient_head(C, tile_index, work, schedule) // splits
        for g in range(group):
            head_q = head_of_batch(C, work, g, schedule) - sequence * heads_q
            assert head_q // (heads_q // heads_kv) == head
    assert len(loaded) == 12


@walk("programs", [1, 3, 7, 40])
@walk(("swizzle", "row_splits"), [(1, 1), (2, 1), (6, 1), (1, 2), (3, 4)])
@walk("window", [(-1, -1), (-1, 0), (20, -1), (12, 5)])
def test_the_order_of_additions_is_free_of_deadlocks(
    programs: int, swizzle: int, row_splits: int, window: tuple[int, int]
) -> None:
    """Programs as the kernel's: each takes the next work tile, and adds to a row block in order."""
    batch, heads, blocks, block_m, block_n = 2, 3, 4, 8, 16
    left, right = window
    C = variant(block_m, block_n, window, DETERMINISTIC=True, SHARED=row_splits > 1)
    schedule = make_schedule(
        blocks, heads, 50, block_n * blocks - 3, left, right, swizzle=swizzle, row_splits=row_splits
    )
    queue = iter(range(batch * heads * blocks * row_splits))
    semaphores: Counter[tuple[int, int, int]] = Counter()
    finished: list[int] = []

    def program() -> Iterator[bool]:
        """Whether it went on."""
        for tile_index in queue:
            work = find_work_tile(C, tile_index, SimpleNamespace(), schedule)
            begin, end, full_begin, full_end = own_row_blocks(C, tile_index, work, schedule)
            cut, count, before, full = step_order(begin, end, full_begin, full_end)
            for j in range(count):
                m = block_of_step(j, begin, end, cut, before, full)
                rows = work.sequence, work.head, m
                while semaphores[rows] != dq_order(C, work, m, schedule):
                    yield False
                semaphores[rows] += 1
                yield True
            finished.append(tile_index)

    running = [program() for _ in range(programs)]
    while running:
        went_on = [next(each, None) for each in running]
        running = [each for each, state in zip(running, went_on, strict=True) if state is not None]
        assert not running or any(state is not False for state in went_on)
    assert sorted(finished) == list(range(batch * heads * blocks * row_splits))


def test_interleaved_heads_leave_room_in_the_l2_cache() -> None:
    """1 KB a row at head_dim 128: q and dO in 16 bits, dq_accum in 32."""
    problem = replace(PROBLEM, batch=4, num_heads_q=16, num_heads_kv=16, deterministic=True)

    def swizzle(**changes: Any) -> int:
        return l2_swizzle(replace(problem, **changes))

    assert swizzle(seqlen_q=512) == 32  # of 64 heads, and room for 40
    assert swizzle(seqlen_q=4096) == 4
    assert swizzle(seqlen_q=4096, num_heads_kv=4) == 1  # four query heads each
    assert swizzle(seqlen_q=2**20) == 1
    assert swizzle(seqlen_q=64) == 64
    assert swizzle(seqlen_q=64, varlen=True) == 16
    assert swizzle(seqlen_q=1024, batch=7, num_heads_q=1, num_heads_kv=1) == 7
    assert swizzle(seqlen_q=4096, window_right=0) == 2  # a causal mask: 12 MB instead of 20
    assert swizzle(seqlen_q=4096, window_left=64, window_right=64) == 4


@walk("seqlen", [64, 512, 4096, 2**20])
@walk("causal", [False, True])
@walk("deterministic", [False, True])
def test_resident_heads(seqlen: int, causal: bool, deterministic: bool) -> None:
    """Those at work have room twice, and interleaved heads do not wait for one another."""
    problem = replace(PROBLEM, batch=64, seqlen_q=seqlen, seqlen_k=seqlen, deterministic=deterministic)
    problem = replace(problem, total_q=64 * seqlen, total_k=64 * seqlen, window_right=0 if causal else -1)
    heads, swizzle = 64 * problem.num_heads_kv, l2_swizzle(problem)
    config = BackwardConfig(64)
    resident = resident_heads(problem, config, swizzle, 132)
    assert resident >= last_heads(problem, 128, 132)
    packed = replace(problem, varlen=True)
    assert resident_heads(packed, config, l2_swizzle(packed), 132) >= last_heads(packed, 128, 132)
    assert resident <= heads
    assert resident == heads or resident * ceil_div(seqlen, 128) >= 2 * 132
    if deterministic:
        assert resident >= swizzle
    if seqlen == 512 and not deterministic:
        assert resident == 67
        assert resident_heads(problem, replace(config, ROW_SPLITS=4), swizzle, 132) == 18
    everywhere = replace(config, ALL_RESIDENT=True)
    assert resident_heads(problem, everywhere, swizzle, 132) == heads


@walk(
    ("head_dim", "block_m", "change", "room"),
    [
        (64, 64, {}, 51),
        (16, 128, {}, 34),
        (32, 64, {}, 34),
        (64, 128, {}, 34),
        (128, 64, {}, 34),
        (64, 64, {"window_right": -1}, 34),
        (64, 64, {"window_left": 99}, 34),
        (64, 64, {"num_heads_kv": 2}, 34),
        (64, 64, {"varlen": True}, 2),
    ],
)
def test_short_steps_under_a_causal_mask_have_more_room(
    head_dim: int, block_m: int, change: dict[str, Any], room: int
) -> None:
    """With 8 blocks of keys a head: three rounds of 132 programs and one head, or two."""
    own: dict[str, Any] = {"num_heads_q": 4, "num_heads_kv": 4, "head_dim": head_dim, "head_dim_v": head_dim}
    problem = replace(PROBLEM, batch=64, seqlen_q=1024, seqlen_k=1024, window_right=0, **own)
    problem = replace(problem, total_q=2**16, total_k=2**16, **change)
    assert resident_heads(problem, BackwardConfig(block_m), 1, 132) == room


@walk("seqlen", [64, 512, 4096, 2**20])
def test_heads_of_a_block_mask_do_not_wait_for_one_another(seqlen: int) -> None:
    """Interleaved heads end together, so a head that waited for another one of them might wait for ever."""
    problem = replace(PROBLEM, batch=8, seqlen_q=seqlen, seqlen_k=seqlen, mods=Mods(block_size=(128, 128)))
    problem = replace(problem, total_q=8 * seqlen, total_k=8 * seqlen)
    last = last_heads(problem, 128, 132)
    assert last <= resident_heads(problem, BackwardConfig(64), 1, 132) <= 8 * problem.num_heads_kv
    assert last == 8 * problem.num_heads_kv or last * ceil_div(seqlen, 128) >= 8 * 132


@walk("block_m", [64, 128])
def test_padded_rows_of_sequences_never_meet(block_m: int) -> None:
    """A block of rows of one sequence adds to no row of another."""
    assert ROW_PAD % block_m == 0
    lengths = [0, 1, 127, 128, 129, 0, 64, 500, 3]
    C = variant(block_m, 128, VARLEN=True)
    start = 0
    blocks: list[int] = []
    for sequence, length in enumerate(lengths):
        work = make_work_tile(sequence, 0, 0, 0, start, 0, length, 1)
        for m in range(ceil_div(length, block_m)):
            row = padded_row(C, work, m * block_m)
            assert row % block_m == 0
            blocks.append(row // block_m)
        start += length
    assert len(set(blocks)) == len(blocks)
    assert max(blocks) < num_padded_rows(max(lengths), start, len(lengths), True) // block_m


@walk("columns", [32, 64, 128])
def test_sums_are_stored_in_the_order_of_the_accumulator(columns: int) -> None:
    """Register i of lane l in warp w of wgmma's D has row 16 w + 8 (i / 2 % 2) + l / 4 and column
    8 (i / 4) + 2 (l % 4) + i % 2 (PTX, "wgmma.mma_async", figure of matrix D)."""
    threads, registers = 128, columns // 2
    tile = torch.arange(64 * columns).reshape(64, columns)
    stored = as_python(dq_accum, "in_register_order")(tile).flatten()
    for thread, i in itertools.product(range(threads), range(registers)):
        warp, lane = divmod(thread, 32)
        row, column = 16 * warp + 8 * (i // 2 % 2) + lane // 4, 8 * (i // 4) + 2 * (lane % 4) + i % 2
        assert stored[(i // 2) * 2 * threads + 2 * thread + i % 2] == tile[row, column]


@walk("columns", [32, 64])
def test_chunks_give_back_what_they_were_given(columns: int) -> None:
    tile = torch.arange(64 * columns).reshape(64, columns)
    chunks = as_python(backward_wide_dkv, "in_chunks")(tile)
    assert torch.equal(as_python(backward_wide_dkv, "from_chunks")(chunks, None), tile)
    # 16 bytes are eight elements of one thread: two columns of rows r and r + 8, at two places.
    eight = chunks[0, :8]
    assert sorted((int(x) // columns, int(x) % columns) for x in eight) == [
        (row, column) for row in (0, 8) for column in (0, 1, 8, 9)
    ]


HEAD_SIZES = (*range(8, 257, 8), 264, 320, 512)


def test_every_head_size_has_a_configuration_that_fits() -> None:
    limit = ARCHITECTURES["sm_90a"].shared_limit - BARRIERS
    for head_dim, head_dim_v in itertools.product(HEAD_SIZES, HEAD_SIZES):
        problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim_v)
        config, sizes = choose(problem), tile_widths(problem)
        if isinstance(config, WideBackwardConfig):
            assert max(head_dim, head_dim_v) > 128
            assert max(tile_bytes.of_wide_backward(config, *sizes)) <= limit
        else:
            assert max(head_dim, head_dim_v) <= 128
            assert tile_bytes.of_backward(config, *sizes) <= limit
        assert ROW_PAD % config.BLOCK_M == 0


@walk(
    ("sizes", "change", "columns"),
    [
        ((8, 8), {}, (32, 32)),
        ((16, 32), {"window_right": 0, "softcap": 3.0}, (32, 32)),
        ((32, 32), {"bias": True}, (64, 64)),
        ((16, 16), {"dropout_p": 0.1}, (64, 64)),
        ((32, 40), {}, (64, 64)),
        ((24, 128), {}, (64, 128)),
    ],
)
def test_columns_of_tiles(sizes: tuple[int, int], change: dict, columns: tuple[int, int]) -> None:
    problem = replace(PROBLEM, head_dim=sizes[0], head_dim_v=sizes[1], **change)
    variant = backward_variant(problem, choose(problem))
    assert columns == (variant.BLOCK_D, variant.BLOCK_DV)


@walk(
    ("sizes", "extra"),
    [((192, 128), 1), ((136, 64), 1), ((192, 192), 0), ((200, 128), 0), ((128, 192), 0), ((264, 128), 1)],
)
def test_queries_get_a_further_tile_where_memory_suffices(sizes: tuple[int, int], extra: int) -> None:
    problem = replace(PROBLEM, head_dim=sizes[0], head_dim_v=sizes[1])
    assert extra == choose(problem).EXTRA_Q


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
@walk("sizes", [(64, 128), (192, 128), (256, 128), (512, 512)])
def test_memory_is_what_the_compiler_says(sizes: tuple[int, int]) -> None:
    """Tiles as the table has them, barriers beside. Parts in float32 leave through as much as 16 bits do."""
    config = choose(replace(PROBLEM, head_dim=sizes[0], head_dim_v=sizes[1]))
    padded = tile_widths(replace(PROBLEM, head_dim=sizes[0], head_dim_v=sizes[1]))
    cases = [case for case in hopper_backward_cases() if f"head_dim {sizes[0]}/{sizes[1]} " in case.name]
    if isinstance(config, WideBackwardConfig):
        of_dkv, of_dq = tile_bytes.of_wide_backward(config, *padded)
        tiles = [of_dkv if " dkv " in case.name else of_dq for case in cases]
    else:
        tiles = [tile_bytes.of_backward(replace(config, ONE_BLOCK=one), *padded) for one in (False, True)]
    for ours, case in zip(tiles, cases, strict=True):
        assert ours < report(case, "sm_90a").shared < ours + BARRIERS


def test_larger_tiles_would_not_fit() -> None:
    """The memory is what decides between the configurations: of larger ones there is too little."""
    limit = ARCHITECTURES["sm_90a"].shared_limit
    assert tile_bytes.of_backward(BackwardConfig(128), 128, 128) > limit
    assert tile_bytes.of_backward(BackwardConfig(64), 256, 256) > limit
    assert tile_bytes.of_backward(BackwardConfig(128, STAGES=3), 64, 64) > limit
