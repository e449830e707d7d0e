"""The schedule of the Hopper kernels, run as Python: every block once, and the key blocks of each mask."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import tile_bytes

from flashtile.backends.common.device import INTERPRETER_MULTIPROCESSORS
from flashtile.backends.hopper import work_tiles
from flashtile.backends.hopper.config import padded_columns
from flashtile.backends.hopper.decode import kernel as decode_kernel
from flashtile.backends.hopper.forward import schedule
from flashtile.backends.hopper.forward.config import (
    accumulators,
    choose,
    every_row,
    of_tables,
    tile_columns,
)
from flashtile.backends.hopper.forward.launch import forward_variant
from flashtile.backends.hopper.forward.rounds import plan_of
from flashtile.problems.attention import Problem
from flashtile.problems.masking import KernelMask
from flashtile.tools.inspection.attention import GROUPED
from flashtile.tools.inspection.report import ARCHITECTURES
from kernels_as_python import functions_of
from walk import walk

KIB = 1024


def as_python(function: Any) -> Callable:
    return functions_of(work_tiles, schedule)[function.fn.__name__]


@walk("num_tiles", [0, 1, 5, 131, 132, 133, 1000, 2048])
@walk("programs", [1, 7, 132])
def test_every_work_tile_is_computed_once(num_tiles: int, programs: int) -> None:
    serpentine_order, num_own_tiles = as_python(schedule.serpentine_order), as_python(schedule.num_own_tiles)
    taken = [
        serpentine_order(t, program, programs)
        for program in range(programs)
        for t in range(num_own_tiles(program, programs, num_tiles))
    ]
    assert sorted(taken) == list(range(num_tiles))


def test_serpentine_order() -> None:
    serpentine_order = as_python(schedule.serpentine_order)
    assert [[serpentine_order(t, program, 3) for t in range(3)] for program in range(3)] == [
        [0, 5, 6],
        [1, 4, 7],
        [2, 3, 8],
    ]


@walk("num_tiles", [0, 1, 131, 132, 133, 1000])
def test_every_work_tile_is_taken_from_the_queue_once(num_tiles: int) -> None:
    """Programs that come free in any order; the last one leaves the counter as it found it."""
    row = [0, 0]

    def atomic_add(place: int, value: int) -> int:
        row[place] += value
        return row[place] - value

    memory = SimpleNamespace(atomic_add=atomic_add, store=row.__setitem__)
    functions = functions_of(work_tiles, schedule, gl=memory)
    next_tile, leave_queue = functions["next_tile"], functions["leave_queue"]
    pointers, programs = SimpleNamespace(table=0), 132
    taken: list[int] = []
    holding = list(range(min(programs, num_tiles)))  # as launched: no more programs than work tiles
    order = random.Random(0)
    while holding:
        taken.append(holding.pop(order.randrange(len(holding))))
        following = next_tile(pointers, min(programs, num_tiles))
        if following < num_tiles:
            holding.append(following)
        else:
            leave_queue(pointers, following, num_tiles, min(programs, num_tiles))
    assert sorted(taken) == list(range(num_tiles))
    assert row == [0, 0]  # the first is the number of rows of a table


@walk(("num_tiles", "programs"), [(1, 1), (3, 3), (10, 3), (2, 5)])
def test_the_producer_leaves_the_queue_as_it_found_it(num_tiles: int, programs: int) -> None:
    """With modifiers. Otherwise each launch has a new counter."""
    for has_mods in (True, False):
        row, taken = [0, 0], []

        def atomic_add(place: int, value: int, row: list[int] = row) -> int:
            row[place] += value
            return row[place] - value

        def walk(C: Any, load: Any, tile: int, i: int, j: int, *others: Any, taken: list[int] = taken) -> Any:
            taken.append(tile)
            return i + 2, j + 1

        for program in range(min(programs, num_tiles)):
            put: list[tuple] = []
            card = SimpleNamespace(
                program_id=lambda axis, program=program: program, atomic_add=atomic_add,
                num_programs=lambda axis: min(programs, num_tiles), store=row.__setitem__,
            )  # fmt: skip
            produce = functions_of(
                work_tiles, schedule, gl=card, walk_work_tile=walk,
                num_work_tiles=lambda C, pointers, schedule: num_tiles,
                pipeline=SimpleNamespace(put=lambda queue, t, tile, warps, put=put: put.append((t, tile))),
            )["produce"]  # fmt: skip
            variant = SimpleNamespace(QUEUED=True, HAS_MODS=has_mods, PRODUCER_WARPS=1)
            before = len(taken)
            call = SimpleNamespace(pointers=SimpleNamespace(table=0), schedule=None)
            loaded = produce(variant, None, None, None, call)
            assert loaded == 2 * (len(taken) - before)
            assert [t for t, _ in put] == list(range(len(put)))  # each tile, and one past the end
            assert [tile for _, tile in put[:-1]] == taken[before:]
            assert put[-1][1] >= num_tiles
        assert sorted(taken) == list(range(num_tiles))
        assert row == [0, 0 if has_mods else num_tiles]


@walk("kind", ["causal", "window", "leftpad", "tree", "all"])
def test_blocks_of_the_cache_without_a_mask(kind: str) -> None:
    """A warpgroup masks exactly the last block of keys and those that one of its rows does not see whole."""
    draw = random.Random(kind)
    blocks_of = functions_of(
        schedule, decode_kernel, sequence_of=lambda m_block, lengths, C: (0, m_block), WARPGROUP_ROWS=64
    )["blocks_of_warpgroup"]
    unmasked = 0
    for _ in range(300):
        pack, block_n, len_k = draw.choice((1, 4)), draw.choice((16, 64)), draw.randint(1, 700)
        len_q = draw.randint(1, min(len_k, 40 if pack == 4 else 160))
        left, right = draw.randint(0, 90), draw.choice((0, 5)) if kind == "window" else 0
        leftpad = draw.randint(0, len_k - 1) if kind == "leftpad" else 0
        variant = SimpleNamespace(
            BLOCK_M=128, PACK=pack, BLOCK_N=block_n, HAS_LEFT=kind == "window", HAS_TREE=kind == "tree",
            HAS_RIGHT=kind in ("causal", "window"), HAS_CHUNK=False, HAS_LEFTPAD=kind == "leftpad",
        )  # fmt: skip
        lengths = SimpleNamespace(mask=KernelMask(left, right))
        sequence = SimpleNamespace(len_q=len_q, len_k=len_k, leftpad=leftpad)
        blocks, offset = -(-len_k // block_n), len_k - len_q
        for m_block, warpgroup in itertools.product(range(-(-len_q * pack // 128)), (0, 1)):
            num_rows = min(len_q * pack - m_block * 128, 128)
            work = SimpleNamespace(m_block=m_block, num_rows=num_rows, sequence=sequence)
            begin, end, *full = blocks_of(variant, warpgroup, work, 0, blocks, lengths)
            first = m_block * 128 + warpgroup * 64
            tokens = {row // pack for row in range(first, min(first + 64, m_block * 128 + num_rows))}
            low, high = [leftpad] * len(tokens), [len_k] * len(tokens)
            if variant.HAS_LEFT:
                low = [max(token + offset - left, 0) for token in tokens]
            if variant.HAS_RIGHT:
                high = [min(token + offset + right + 1, len_k) for token in tokens]
            assert 0 <= begin < end <= blocks
            if tokens:
                assert begin * block_n <= min(low)
                assert max(high) <= end * block_n
            if kind == "tree":
                high = [offset]
            whole = [
                n for n in range(begin, end - 1)
                if tokens and max(low) <= n * block_n and (n + 1) * block_n <= min(high)
            ]  # fmt: skip
            assert list(range(*full)) == whole
            unmasked += len(whole)
    assert unmasked > 200


@walk("causal", [False, True])
@walk("varlen", [False, True])
@walk("seqlen", [512, 4096, 16384])
@walk("head_dim", [64, 128, 256])
def test_pairs_and_queues(head_dim: int, seqlen: int, varlen: bool, causal: bool) -> None:
    problem = replace(
        GROUPED,
        head_dim=head_dim,
        head_dim_v=head_dim,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        varlen=varlen,
        window_right=0 if causal else -1,
    )
    config = choose(problem)
    variant = forward_variant(problem, plan_of(problem, config))
    assert not (variant.QUEUED and variant.PAIRED)  # a queue comes out even without pairs
    if varlen or not causal:
        assert variant.QUEUED is varlen
    else:
        assert variant.PAIRED is (seqlen < config.paired_below)
        assert variant.QUEUED is (config.QUEUED and not variant.PAIRED)
    both_edges = replace(problem, window_left=100, window_right=0)
    assert forward_variant(both_edges, plan_of(both_edges, config)).QUEUED is varlen
    without = forward_variant(problem, plan_of(problem, config, "dq"))
    assert not without.QUEUED
    assert without.PAIRED is (causal and (varlen or seqlen < config.paired_below))


@walk("paired", [False, True])
@walk(("blocks", "heads", "batch", "swizzle"), [(1, 3, 2, 1), (5, 4, 2, 8), (8, 6, 1, 2)])
def test_every_block_is_computed_once(
    paired: bool, blocks: int, heads: int, batch: int, swizzle: int
) -> None:
    tiles = as_python(schedule.tiles_of_head)(blocks, paired)
    found: Counter[tuple[int, int, int]] = Counter()
    for tile_index in range(tiles * heads * batch):
        sequence, head, place = as_python(schedule.dense_tile)(tile_index, tiles, heads, swizzle)
        for part in range(as_python(schedule.num_parts)(blocks, place, paired)):
            found[sequence, head, as_python(schedule.block_of_part)(blocks, place, part, paired)] += 1
    assert found == Counter(itertools.product(range(batch), range(heads), range(blocks)))


@walk("blocks", [1, 2, 7, 8, 128])
def test_pairs_cost_the_same(blocks: int) -> None:
    """Under a causal mask of a square, block m costs m + 1; the middle of an odd number stays alone."""
    costs = []
    for place in range(as_python(schedule.tiles_of_head)(blocks, True)):
        parts = range(as_python(schedule.num_parts)(blocks, place, True))
        costs.append(sum(as_python(schedule.block_of_part)(blocks, place, part, True) + 1 for part in parts))
    assert sum(costs) == blocks * (blocks + 1) // 2
    assert {cost for cost in costs if cost != (blocks + 1) // 2} <= {blocks + 1}


@walk("warpgroups", [2, 3])
@walk("pack", [1, 2, 8])
def test_a_partial_first_block_has_the_rows_that_the_last_one_would_lack(warpgroups: int, pack: int) -> None:
    """Each warpgroup has the rows that one has without a partial first block, and visits the same keys."""
    draw, mask = random.Random(warpgroups * pack), KernelMask(-1, 0)
    first_token, own_range = as_python(schedule.first_token), as_python(schedule.own_range)
    variant = SimpleNamespace(
        BLOCK_M=64 * warpgroups, PACK=pack, BLOCK_N=128, FIRST_BLOCK_PARTIAL=True, **mask.constants
    )
    without = SimpleNamespace(**{**vars(variant), "FIRST_BLOCK_PARTIAL": False})
    for length in [1, 63, 64, 65, 191, 193, *(draw.randint(1, 900) for _ in range(20))]:
        work = SimpleNamespace(seqlen_q=length, seqlen_k=length + draw.choice((0, 100, -length // 2)))
        places = list(itertools.product(range(-(-length * pack // variant.BLOCK_M)), range(warpgroups)))
        found, offset, launch = [], work.seqlen_k - length, SimpleNamespace(mask=mask)
        for constants in (variant, without):
            rows = {place: first_token(constants, place[1], work, place[0]) for place in places}
            full = [place for place in places if rows[place] < length]
            assert full == (places[-len(full) :] if constants is variant else places[: len(full)])
            assert [rows[place] for place in full] == list(range(0, length, 64 // pack))
            ranges = [own_range(constants, place[1], work, place[0], launch) for place in full]
            # Which block the others mask as a whole depends on their tile.
            found.append([(first, own) for first, last, _, _, own in ranges if last + offset >= 0])
        assert found[0] == found[1]


WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (20, 5), (-1, 9), (7, -1)]


@walk("window", WINDOWS)
@walk(("seqlen_q", "seqlen_k"), [(1, 1), (17, 40), (40, 17), (33, 64), (64, 8), (5, 0)])
def test_key_blocks_are_those_of_the_mask(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> None:
    left, right = window
    mask, rows_of_block, block_n = KernelMask(left, right), 16, 8
    two_heads = SimpleNamespace(
        BLOCK_M=2 * rows_of_block, PACK=2, BLOCK_N=block_n, FIRST_BLOCK_PARTIAL=False, **mask.constants
    )
    for first in range(0, seqlen_q, rows_of_block):
        last = min(first + rows_of_block, seqlen_q) - 1
        begin, end = as_python(schedule.key_blocks)(two_heads, first, last, seqlen_q, seqlen_k, mask)
        work = SimpleNamespace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        of_tile = as_python(schedule.tile_blocks)(two_heads, work, first // rows_of_block, mask)
        assert of_tile == (begin, end)
        seen = [keys_of(row, seqlen_q, seqlen_k, left, right) for row in range(first, last + 1)]
        needed = {key // block_n for keys in seen for key in keys}
        if not needed:
            assert (begin, end) == (-(-seqlen_k // block_n), -(-seqlen_k // block_n) + 1)
        else:
            assert (begin, end) == (min(needed), max(needed) + 1)
        for part in range(first, last + 1, 4):
            part_last = min(part + 3, last)
            own = as_python(schedule.own_blocks)(
                two_heads, part, part_last, begin, end, seqlen_q, seqlen_k, mask
            )
            my_begin, my_end, full_begin, full_end = own
            mine = seen[part - first : part_last - first + 1]
            assert begin <= my_begin < my_end <= end
            assert {key // block_n for keys in mine for key in keys} <= set(range(my_begin, my_end))
            assert my_begin <= full_begin <= full_end < my_end
            for block in range(full_begin, full_end):
                whole = set(range(block * block_n, (block + 1) * block_n))
                assert all(whole <= keys for keys in mine)


def keys_of(row: int, seqlen_q: int, seqlen_k: int, left: int, right: int) -> set[int]:
    """What a row sees, by the definition of the window."""
    position = row + seqlen_k - seqlen_q
    return {
        key
        for key in range(seqlen_k)
        if (left < 0 or key >= position - left) and (right < 0 or key <= position + right)
    }


def test_tiles_fit_shared_memory() -> None:
    limit = ARCHITECTURES["sm_90a"].shared_limit - KIB  # for barriers
    for block_d, block_dv, _, _, config in every_row():
        assert tile_bytes.of_forward(config, block_d, block_dv) <= limit


@walk("head_dim", [64, 128, 256])
def test_windows_are_served_as_sequences_of_as_many_keys(head_dim: int) -> None:
    """A tile's work is what its rows see, whatever lies outside of their window."""
    problem = Problem(
        batch=1,
        seqlen_q=2**17,
        seqlen_k=2**17,
        total_q=2**17,
        total_k=2**17,
        num_heads_q=4,
        num_heads_kv=4,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        softmax_scale=1.0,
        window_right=0,
    )
    for keys in (512, 1024, 4096, 2**16):
        short = choose(replace(problem, seqlen_q=keys, seqlen_k=keys))
        window = choose(replace(problem, window_left=keys - 1))
        if (head_dim, keys) == (128, 1024):  # lazy rescaling loses 11 to 26 % with both edges
            assert (window.LAZY_RESCALE, short.LAZY_RESCALE) == (False, True)
        else:
            assert window == short
    assert choose(replace(problem, window_left=511)) != choose(problem)


def test_whole_blocks_of_keys_are_not_taken_for_granted_where_few_are_used() -> None:
    problem = replace(GROUPED, seqlen_k=1024)
    config = choose(problem)
    assert forward_variant(problem, plan_of(problem, config, "dq")).EVEN_N
    for change in ({"seqused_k": True}, {"varlen": True}, {"seqlen_k": 1023}):
        assert not forward_variant(
            replace(problem, **change), plan_of(replace(problem, **change), config, "dq")
        ).EVEN_N


@walk("window", [{"window_right": 0}, {"window_left": 99}, {"window_left": 99, "window_right": 9}])
@walk("kernel", ["forward", "fp8", "dq"])
def test_windowed_calls_share_a_kernel_whether_or_not_their_last_block_is_whole(window, kernel) -> None:
    lengths = [replace(GROUPED, seqlen_q=length, seqlen_k=length, **window) for length in (1024, 1023)]
    whole, partial = (
        forward_variant(problem, plan_of(problem, choose(problem), kernel)) for problem in lengths
    )
    assert whole == partial
    assert not whole.EVEN_N


@walk(
    ("keys", "right", "columns"),
    [
        (4095, -1, 128),
        (4096, -1, 96),
        (2**20, -1, 96),
        (2, 0, 96),
        (4095, 0, 96),
        (4096, 0, 128),
    ],
)
def test_columns_of_tiles_up_to_96_depend_on_the_keys(keys: int, right: int, columns: int) -> None:
    sizes: Any = {"head_dim": 80, "head_dim_v": 80, "seqlen_q": keys, "seqlen_k": keys, "window_right": right}
    assert tile_columns(replace(GROUPED, **sizes)) == (columns, columns)


@walk(
    ("change", "pack"),
    [
        ({"window_left": 127}, 8),
        ({"window_left": 127, "num_heads_kv": 4}, 1),  # groups of 2 see nearly as many keys apart
        ({"window_left": 1023}, 1),
        ({"window_left": 127, "varlen": True}, 8),
        ({}, 1),
    ],
)
def test_groups_share_tiles_of_short_windows(change: dict, pack: int) -> None:
    problem = replace(GROUPED, window_right=0, **{"num_heads_kv": 1} | change)
    variant = forward_variant(problem, plan_of(problem, choose(problem)))
    assert pack == variant.PACK
    assert plan_of(problem, choose(problem), "fp8").pack == 1


@walk(
    ("sizes", "tiles"),
    [
        ((8, 8), (32, 32, 1, 1)),
        ((16, 32), (32, 32, 1, 1)),
        ((32, 40), (64, 64, 1, 1)),
        ((192, 128), (192, 128, 3, 1)),
        ((136, 72), (192, 128, 3, 1)),
        ((200, 128), (256, 128, 1, 1)),
        ((192, 192), (192, 192, 3, 3)),
        ((136, 168), (192, 192, 3, 3)),
        ((128, 136), (128, 256, 1, 1)),
        ((192, 200), (256, 256, 1, 1)),
        ((96, 96), (96, 96, 3, 3)),
        ((104, 96), (128, 128, 1, 1)),
    ],
)
def test_columns_of_tiles(sizes: tuple[int, int], tiles: tuple[int, int, int, int]) -> None:
    problem = replace(GROUPED, head_dim=sizes[0], head_dim_v=sizes[1])
    assert tile_columns(problem) == tiles[:2]
    variant = forward_variant(problem, plan_of(problem, choose(problem)))
    assert tiles == (variant.BLOCK_D, variant.BLOCK_DV, variant.D_PARTS, variant.DV_PARTS)
    others = forward_variant(problem, plan_of(problem, choose(problem), "dq"))
    assert (padded_columns(sizes[0]), 1, padded_columns(sizes[0])) == (
        others.BLOCK_D,
        others.D_PARTS,
        others.QK_COLUMNS,
    )
    for change in ({"partial": True}, {"bias": True}):
        assert tile_columns(replace(problem, **change))[1] == padded_columns(sizes[1])


@walk("head_dim_v", [*range(72, 97, 8), *range(136, 193, 8)])
def test_columns_of_two_accumulators(head_dim_v: int) -> None:
    wide, columns = accumulators(96 if head_dim_v <= 96 else 192, head_dim_v)
    assert (wide, columns) in itertools.product((64, 128), (16, 32, 64))
    assert head_dim_v <= wide + columns
    assert columns == 16 or head_dim_v > wide + columns // 2


def test_no_pairs_where_every_block_has_a_multiprocessor() -> None:
    problem = replace(GROUPED, window_right=0, batch=1, num_heads_q=1, num_heads_kv=1)
    for blocks, paired in ((INTERPRETER_MULTIPROCESSORS, False), (INTERPRETER_MULTIPROCESSORS + 1, True)):
        problem = replace(problem, seqlen_q=128 * blocks, seqlen_k=128 * blocks)
        assert forward_variant(problem, plan_of(problem, of_tables(problem))).PAIRED is paired
