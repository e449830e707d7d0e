"""On Hopper, a call of few work tiles takes the configuration whose launch is estimated to be fastest."""

from __future__ import annotations

import heapq
import json
import math
import operator
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import flashtile
from benchmarks.suite.workload import Workload
from benchmarks.suite.workloads import select
from flashtile.backends import hopper
from flashtile.backends.common.device import Target
from flashtile.backends.common.launch import recording
from flashtile.backends.hopper import work_tiles
from flashtile.backends.hopper.backward.config import choose as choose_backward
from flashtile.backends.hopper.forward import rounds, schedule
from flashtile.backends.hopper.forward.config import (
    ForwardConfig,
    alternatives,
    choose,
    of_tables,
    tile_columns,
)
from flashtile.backends.hopper.forward.divided import DividedConfig, divided
from flashtile.backends.hopper.forward.launch import forward_variant, schedule_of
from flashtile.backends.hopper.forward.rounds import (
    COSTS,
    ENOUGH_ROUNDS,
    SINGLE_MISSES,
    LaunchWork,
    keys_are_few,
    measured_costs,
    microseconds,
    pack_of,
    plan_of,
    programs_overlap,
    work_of_launch,
)
from flashtile.io_model import CARDS
from flashtile.operators.attention import FORWARD
from flashtile.problems.attention import NO_EXTRAS, Options, Problem
from flashtile.problems.masking import Masking
from flashtile.tools.inspection.attention import GROUPED
from kernels_as_python import functions_of
from walk import walk

H200 = Target("H200", (9, 0), 132)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FULL, CAUSAL = -1, 0


def problem_of(
    batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, right: int = CAUSAL, **more: Any
) -> Problem:
    fields: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_k": seqlen} | more
    return replace(
        GROUPED, batch=batch, num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=head_dim,
        head_dim_v=head_dim, device=H200, window_right=right, **fields,
    )  # fmt: skip


def of_workload(workload: Workload) -> Problem:
    heads = workload.num_heads_q, workload.num_heads_kv
    right = CAUSAL if workload.causal or workload.window_left >= 0 else FULL
    return replace(
        problem_of(workload.batch, workload.seqlen_q, heads, workload.head_dim, right),
        seqlen_k=workload.seqlen_k, head_dim_v=workload.width_v, window_left=workload.window_left,
        softcap=workload.softcap, alibi=workload.alibi, sink=workload.sink,
    )  # fmt: skip


def work_of(problem: Problem, config: ForwardConfig) -> LaunchWork:
    costs = measured_costs(tile_columns(problem), config)
    assert costs is not None
    return work_of_launch(problem, plan_of(problem, config), costs)


def sweep() -> list[Problem]:
    """Calls of all head sizes, masks and lengths whose work tiles make few rounds, and of more."""
    heads = ((1, 4, 4), (1, 8, 8), (1, 16, 2), (1, 28, 4), (1, 32, 8), (2, 12, 12), (2, 32, 8), (4, 16, 16))
    lengths = (512, 1000, 1536, 2048, 3072, 4096, 6144, 8192)
    return [
        problem_of(batch, seqlen, (heads_q, heads_kv), head_dim, right)
        for head_dim in (32, 64, 128, 256)
        for right in (FULL, CAUSAL)
        for seqlen in lengths
        for batch, heads_q, heads_kv in heads
    ]


def busiest(problem: Problem, config: ForwardConfig) -> float:
    """The time of a launch's busiest program, if programs take tiles by the functions of the kernel."""
    functions = functions_of(work_tiles, schedule)
    plan = plan_of(problem, config)
    variant = forward_variant(problem, plan)
    k = SimpleNamespace(dim=lambda: 4, stride=lambda *_: 0, shape=(1,))
    launch = schedule_of(problem, plan, None, k)  # type: ignore[arg-type]
    programs = min(variant.PROGRAMS * H200.multiprocessors, launch.num_tiles)
    costs = COSTS[variant.BLOCK_D, variant.BLOCK_DV, config.warpgroups, config.BLOCK_N, config.PROGRAMS]

    def cost(tile_index: int) -> float:
        per_head = functions["tiles_of_head"](launch.num_blocks, variant.PAIRED)
        *_, place = functions["dense_tile"](tile_index, per_head, launch.num_heads, launch.swizzle)
        work = SimpleNamespace(seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k)
        total = 0.0
        for part in range(functions["num_parts"](launch.num_blocks, place, variant.PAIRED)):
            block = functions["block_of_part"](launch.num_blocks, place, part, variant.PAIRED)
            begin, end = functions["tile_blocks"](variant, work, block, launch.mask)
            total += costs.tile + costs.block * (end - begin)
        return total

    if variant.QUEUED:
        busy = [0.0] * programs
        for tile_index in range(launch.num_tiles):
            heapq.heapreplace(busy, busy[0] + cost(tile_index))
        return max(busy)
    own = (range(functions["num_own_tiles"](p, programs, launch.num_tiles)) for p in range(programs))
    order = functions["serpentine_order"]
    return max(sum(cost(order(t, p, programs)) for t in turns) for p, turns in enumerate(own))


@walk("seed", range(40))
def test_the_estimate_follows_the_schedule_of_the_kernel(seed: int) -> None:
    draw = random.Random(seed)
    group, heads_kv = draw.choice((1, 2, 8)), draw.randint(1, 6)
    problem = problem_of(
        draw.randint(1, 3), draw.randint(1, 3000), (group * heads_kv, heads_kv), draw.choice((64, 128, 256)),
        draw.choice((FULL, CAUSAL)),
    )  # fmt: skip
    problem = replace(problem, seqlen_k=draw.choice((problem.seqlen_q, draw.randint(1, 5000))))
    if draw.random() < 0.3:
        problem = replace(problem, window_left=draw.randint(0, 700))
    for config in alternatives(of_tables(problem)):
        estimated = microseconds(work_of(problem, config)) - rounds.LAUNCH
        assert estimated == pytest.approx(busiest(problem, config), rel=1e-9)


def has_few_tiles(problem: Problem) -> bool:
    """Whether a call has so few work tiles that its time is estimated."""
    work = work_of(problem, of_tables(problem))
    tiles = math.ceil(len(work.blocks) / 2) if work.paired else len(work.blocks)
    return tiles * work.heads < ENOUGH_ROUNDS * work.programs


def measured() -> list[tuple[Problem, float]]:
    """Plain calls at head_dim 64, 128 and 256 that were measured on an H200, in microseconds."""
    workloads = {workload.name: workload for workload in select(("paper", "shapes"))}
    found = []
    for path in sorted(RESULTS.glob("2026-11-23-h200-*-forward*.json")):
        for cell in json.loads(path.read_text())["cells"]:
            workload = workloads[cell["workload"]]
            assert workload.shape == cell["shape"]
            sizes = workload.head_dim, workload.width_v
            if sizes in ((64, 64), (128, 128), (256, 256)) and not workload.changes_scores:
                found.append((of_workload(workload), 1e3 * cell["results"]["flashtile"]["ms"]))
    return found


def order_of(problem: Problem, config: ForwardConfig) -> str:
    plan = plan_of(problem, config)
    return "pairs" if plan.paired else "queue" if plan.queued else "single"


def label_of(problem: Problem, config: ForwardConfig) -> str:
    """The name of a configuration in the record, such as ``128x64 pairs``."""
    shared = " shared" if config.warpgroups == 1 and config.PROGRAMS > 1 else ""
    return f"{config.BLOCK_M}x{config.BLOCK_N} {order_of(problem, config)}{shared}"


def measured_alternatives() -> list[tuple[Problem, dict[str, float]]]:
    """Calls with few work tiles, and microseconds of each alternative by its label; the table's first."""
    cells = json.loads((RESULTS / "2026-11-27-h200-rounds.json").read_text())["forward"]
    return [
        (
            problem_of(
                cell["batch"], cell["seqlen"], tuple(cell["heads"]), cell["head_dim"],
                CAUSAL if cell["causal"] else FULL,
            ),
            cell["us"],
        )
        for cell in cells
    ]  # fmt: skip


def assert_close(errors: list[float]) -> None:
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.05
    within = [abs(error) < 0.1 for error in errors]
    assert sum(within) > 0.95 * len(within)


@mock.patch.object(rounds, "FIRST_PARTIAL_SAVES", 1.0)  # the measured kernels had no partial first block
def test_estimates_are_close_to_measured_times() -> None:
    """Calls with more work tiles keep the table's configuration, so their time is never estimated."""
    few = [(problem, time) for problem, time in measured() if has_few_tiles(problem)]
    assert len(few) == 66
    assert_close([microseconds(work_of(problem, of_tables(problem))) / time - 1 for problem, time in few])


@mock.patch.object(rounds, "FIRST_PARTIAL_SAVES", 1.0)
def test_estimates_of_alternatives_are_close_to_measured_times() -> None:
    errors = []
    for problem, times in measured_alternatives():
        configs = {label_of(problem, config): config for config in alternatives(of_tables(problem))}
        assert next(iter(times)) == label_of(problem, of_tables(problem))
        errors += [microseconds(work_of(problem, configs[name])) / time - 1 for name, time in times.items()]
    assert len(errors) == 194
    assert_close(errors)


def test_the_choice_is_nearly_the_fastest_that_was_measured() -> None:
    ratios, others = [], []
    for problem, times in measured_alternatives():
        label = label_of(problem, choose(problem))
        if label not in times:
            others.append((problem.batch, problem.seqlen_q, label))
            continue
        time = times[label]
        assert time <= 1.02 * next(iter(times.values()))
        ratios.append(time / min(times.values()))
    assert others == [(2, 1536, "64x128 single shared")]  # measured later: 0.92 of the time of 192 rows
    assert len(ratios) == 62
    assert max(ratios) < 1.03
    assert math.prod(ratios) ** (1 / len(ratios)) < 1.003


@walk(
    ("problem", "before", "after"),
    [
        (problem_of(1, 4096, (16, 2), 64), (192, "pairs"), (128, "single")),
        (problem_of(1, 4096, (8, 8), 64), (192, "pairs"), (128, "single")),
        (problem_of(2, 1536, (12, 12), 64), (128, "pairs"), (64, "single")),
        (problem_of(2, 1536, (14, 14), 64), (128, "pairs"), (192, "single")),
        (problem_of(1, 3072, (16, 2), 64), (128, "pairs"), (192, "pairs")),
        (problem_of(1, 2048, (16, 16), 64, FULL), (192, "single"), (128, "single")),
        (problem_of(2, 1536, (12, 12), 128), (128, "pairs"), (128, "single")),
        (problem_of(1, 3072, (16, 2), 256), (128, "pairs"), (128, "single")),
        (problem_of(2, 3072, (12, 12), 256), (128, "pairs"), (128, "single")),
        (problem_of(4, 4096, (16, 16), 64), (192, "pairs"), (192, "single")),
        (problem_of(1, 2048, (28, 4), 128), (128, "pairs"), (128, "queue")),
        (problem_of(1, 1024, (8, 8), 128), (128, "single"), (64, "single")),
        (problem_of(1, 1024, (8, 8), 64), (128, "single"), (64, "single")),
        (problem_of(1, 1024, (8, 8), 256, FULL), (128, "single"), (64, "single")),
        (problem_of(1, 1024, (8, 8), 80, FULL), (128, "single"), (64, "single")),
        (problem_of(1, 1024, (8, 8), 96), (128, "single"), (64, "single")),
    ],
)
def test_few_work_tiles(problem: Problem, before: tuple[int, str], after: tuple[int, str]) -> None:
    for expected, config in ((before, of_tables(problem)), (after, choose(problem))):
        assert (config.BLOCK_M, order_of(problem, config)) == expected
    assert microseconds(work_of(problem, choose(problem))) < 0.97 * microseconds(
        work_of(problem, of_tables(problem))
    )


@walk(
    ("batch", "seqlen", "heads", "head_dim", "right", "shared"),
    [
        (6, 1480, 4, 64, CAUSAL, True),
        (3, 1024, 16, 64, CAUSAL, True),  # 768 tiles of 64 rows on 264 programs
        (4, 1024, 16, 64, CAUSAL, False),  # 1024 tiles fill the card at any size
        (2, 1024, 12, 64, CAUSAL, False),  # 384 tiles: most programs have one, so nothing overlaps
        (1, 3072, 12, 64, CAUSAL, False),  # 576 tiles, but each reads many keys
        (6, 1480, 4, 64, FULL, False),
        (6, 1480, 4, 128, CAUSAL, False),
    ],
)
def test_programs_of_64_rows_share_multiprocessors_if_each_has_two_or_three_tiles(
    batch: int, seqlen: int, heads: int, head_dim: int, right: int, shared: bool
) -> None:
    config = choose(problem_of(batch, seqlen, (heads, heads), head_dim, right))
    assert ((config.warpgroups, config.PROGRAMS) == (1, 2)) is shared


def test_the_choice_is_nearly_the_fastest_of_the_sweep() -> None:
    """Of all alternatives. Single tiles that replace pairs miss the cache if there are many keys."""
    changed = 0
    for problem in sweep():
        chosen, table = choose(problem), of_tables(problem)
        assert choose(problem) == chosen
        work = work_of(problem, table)
        if not has_few_tiles(problem):
            assert chosen == table
            continue
        changed += chosen != table
        works = {
            config: work_of(problem, config)
            for config in alternatives(table)
            if config.PROGRAMS == table.PROGRAMS or programs_overlap(problem, plan_of(problem, config))
        }
        misses = 1.0 if keys_are_few(problem) else SINGLE_MISSES
        times = {
            config: microseconds(other) * (misses if work.paired and not other.paired else 1.0)
            for config, other in works.items()
        }
        assert times[chosen] <= 1.05 * min(times.values())
        assert chosen == table or times[chosen] < times[table]
    assert changed > 50


def test_grids_that_fill_the_card_keep_their_configurations() -> None:
    """FlashAttention's grid keeps them all. Of the other shapes, those named have few work tiles."""
    changed = {
        workload.name
        for workload in select(("paper", "shapes"))
        if workload.kind == "attention" and choose(of_workload(workload)) != of_tables(of_workload(workload))
    }
    assert changed == {
        "sdxl-self-s4096-d64",
        "sdxl-self-s1024-d64",
        "whisper-cross-448x1500-d64",
        "whisper-decoder-s448",
        "one-s512",
        "one-s2048",
        "one-s4096",
        "openelm-s2048",
        "bloom-alibi-s2048",
    }


@walk(
    ("seqlen", "head_dim", "change", "partial"),
    [
        (4096, 64, {}, True),  # 21 blocks of 192 rows and 64 rows
        (4096, 32, {}, True),
        (4224, 64, {}, False),  # 22 blocks
        (4096, 64, {"window_right": 5}, True),
        (4096, 64, {"window_right": FULL}, False),
        (4096, 64, {"window_left": 700}, False),
        (4096, 64, {"bias": True}, False),
        (32704, 64, {}, False),  # saves less than FIRST_PARTIAL_SAVES
        (128, 64, {"seqlen_k": 16384}, False),
        (4097, 128, {}, False),  # blocks of two warpgroups
        (4096, 64, {"varlen": True}, True),
        (4224, 64, {"varlen": True}, True),  # the longest fills its blocks, others need not
        (4096, 64, {"varlen": True, "num_heads_kv": 4}, True),
        (4096, 64, {"varlen": True, "window_left": 700}, False),
        (2000, 64, {"varlen": True}, False),  # blocks of two warpgroups
    ],
)
def test_the_first_block_is_partial_where_this_saves_work(
    seqlen: int, head_dim: int, change: dict[str, Any], partial: bool
) -> None:
    problem = replace(problem_of(4, seqlen, (16, 16), head_dim), **change)
    assert plan_of(problem, choose(problem)).first_partial is partial
    for kernel in ("dq", "fp8"):
        assert not plan_of(problem, choose(problem), kernel).first_partial


@walk("seed", range(20))
def test_a_partial_first_block_never_costs_more(seed: int) -> None:
    draw = random.Random(seed)
    problem = problem_of(draw.randint(1, 9), draw.randint(1, 5000), (8, 8), draw.choice((64, 128, 256)))
    problem = replace(problem, seqlen_k=draw.choice((problem.seqlen_q, draw.randint(1, 9000))))
    for config in alternatives(of_tables(problem)):
        plan, costs = plan_of(problem, config), rounds.Costs(1.0, 1.0)
        works = (work_of_launch(problem, plan._replace(first_partial=one), costs) for one in (False, True))
        before, after = (work.blocks for work in works)
        assert len(after) == len(before)
        assert all(map(operator.le, after, before))


@walk(
    ("heads", "seqlen_q", "window", "pack"),
    [
        ((8, 2), 1, None, 4), ((4, 4), 1, None, 1), ((64, 1), 1, None, 64),
        ((6, 2), 1, None, 1), ((128, 1), 1, None, 64),  # 3 heads do not divide a tile, and 128 do not fit
        ((12, 2), 64, None, 2), ((12, 1), 32, None, 4), ((14, 1), 100, None, 1), ((24, 2), 2048, (15, 0), 4),
        ((8, 2), 96, None, 4), ((8, 2), 97, None, 1), ((8, 2), 1024, None, 1),  # 3 tiles instead of 4, or 4
        ((16, 2), 2048, (15, 0), 8), ((16, 2), 2048, (159, 0), 8), ((16, 2), 2048, (160, 0), 1),
        ((16, 2), 2048, (-1, 0), 1),
    ],
)  # fmt: skip
def test_heads_share_tiles_if_this_saves_a_quarter(
    heads: tuple[int, int], seqlen_q: int, window: tuple[int, int] | None, pack: int
) -> None:
    problem = problem_of(2, 2048, heads, 128, FULL, seqlen_q=seqlen_q)
    if window is not None:
        problem = replace(problem, window_left=window[0], window_right=window[1])
    assert pack_of(problem, 128) == pack
    plan = plan_of(problem, of_tables(problem))
    assert plan.heads == 2 * heads[0] // plan.pack
    if window is not None:  # kernels that do not visit fewer keys then
        assert pack_of(problem, 128, "fp8") == 1
    assert pack_of(replace(problem, bias=True), 128) == 1


@walk(
    ("heads", "longest", "rows", "shared"),
    [
        ((16, 16), 40, 64, 1), ((32, 8), 40, 64, 4), ((32, 8), 4000, 128, 4), ((64, 1), 128, 64, 64),
        # Other groups have unused rows, of which long sequences have more than single heads have.
        ((14, 2), 40, 64, 7), ((14, 2), 128, 64, 7), ((14, 2), 4000, 192, 1), ((24, 8), 40, 64, 3),
        ((12, 2), 40, 64, 6), ((12, 2), 128, 64, 2), ((40, 8), 128, 64, 1), ((71, 1), 40, 64, 1),
    ],
)  # fmt: skip
def test_heads_share_tiles_of_packed_sequences(
    heads: tuple[int, int], longest: int, rows: int, shared: int
) -> None:
    problem = replace(problem_of(8, longest, heads, 64, FULL), varlen=True)
    assert pack_of(problem, rows) == shared
    assert pack_of(problem, rows, "fp8") == pack_of(replace(problem, dropout_p=0.1), rows) == 1
    plan = plan_of(problem, replace(of_tables(problem), warpgroups=rows // 64))
    variant = forward_variant(problem, plan)
    assert (variant.PACKED_HEADS, plan.heads) == (shared, 8 * heads[0] // shared)
    assert shared <= variant.PACK < 2 * shared
    assert plan.blocks == math.ceil(longest * variant.PACK / rows)


@walk(
    ("head_dim", "longest", "window", "tile"),
    [
        (64, 40, -1, (1, 64, False, 3)), (80, 128, -1, (1, 64, True, 3)), (96, 129, -1, (2, 128, True, 1)),
        (128, 40, -1, (1, 64, True, 2)), (64, 2048, -1, (2, 128, False, 1)),
        (64, 3072, -1, (3, 128, False, 1)), (64, 3072, 1023, (2, 64, True, 2)),
        (64, 9000, 4095, (2, 64, True, 2)),
        (64, 9000, 4096, (3, 128, False, 1)), (128, 3072, -1, (2, 128, False, 1)),
        (128, 3072, 511, (2, 64, True, 1)), (128, 3072, 1022, (2, 64, True, 1)),
        (128, 3072, 1023, (2, 128, False, 1)), (96, 9000, 1023, (2, 128, False, 1)),
    ],
)  # fmt: skip
def test_tiles_of_packed_sequences(
    head_dim: int, longest: int, window: int, tile: tuple[int, int, bool, int]
) -> None:
    """Tiles are (warpgroups, keys of a block, whether rescaling is lazy, programs of a multiprocessor)."""
    config = choose(problem_of(8, longest, (16, 16), head_dim, varlen=True, window_left=window))
    assert (config.warpgroups, config.BLOCK_N, config.LAZY_RESCALE, config.PROGRAMS) == tile


@walk(
    ("keys", "tile"),
    [(320, (2, 64)), (512, (2, 64)), (513, (2, 128)), (1024, (2, 128)), (1025, (3, 128)), (8192, (3, 128))],
)
def test_tiles_of_small_heads_without_a_mask(keys: int, tile: tuple[int, int]) -> None:
    config = choose(problem_of(64, keys, (16, 16), 32, FULL))
    assert (config.warpgroups, config.BLOCK_N) == tile


SUMS = ("BLOCK_N", "LAZY_RESCALE", "Q_IN_REGISTERS")
"""Fields of a configuration that decide the order in which a row's keys are added up."""


def test_the_number_of_sequences_does_not_change_how_rows_are_added_up() -> None:
    """What the manual says of a sequence in a batch. Blocks of 64 keys, which calls with more sequences have
    at head_dim 128 below 1024 keys, are the exception that it names."""
    for problem in sweep():
        if (problem.head_dim, problem.seqlen_k < 1024, problem.window_right) == (128, True, CAUSAL):
            continue
        configs = [choose(replace(problem, batch=batch)) for batch in (1, 2, 5, 64)]
        assert len({tuple(getattr(config, name) for name in SUMS) for config in configs}) == 1


@walk("config", {of_tables(problem) for problem in sweep()})
def test_alternatives_differ_in_rows_and_order_only(config: ForwardConfig) -> None:
    first, *others = alternatives(config)
    assert first == config
    for other in others:
        assert [getattr(other, name) for name in SUMS] == [getattr(config, name) for name in SUMS]


@walk(("head_dim", "left"), [(64, -1), (64, 63), (128, -1), (128, 63)])
def test_short_packed_sequences_have_tiles_of_64_rows(head_dim: int, left: int) -> None:
    """Several programs with such tiles share a multiprocessor. Each row's keys are added up as before."""
    problem = replace(problem_of(64, 128, (16, 2), head_dim), varlen=True, window_left=left)
    config, table = choose(problem), of_tables(problem)
    assert config.BLOCK_M == 64 < table.BLOCK_M
    assert [getattr(config, name) for name in SUMS] == [getattr(table, name) for name in SUMS]
    for longer in ({"seqlen_q": 129}, {"seqlen_k": 129}):
        assert choose(replace(problem, **longer)) == table


@walk("change", [{"varlen": True}, {"seqused_k": True}, {"partial": True}, {"bias": True}])
def test_unknown_lengths_and_modifiers_have_the_configuration_of_the_tables(change: dict[str, bool]) -> None:
    problem = problem_of(1, 4096, (16, 2), 64)
    assert choose(problem) != of_tables(problem)
    problem = replace(problem, **change)  # type: ignore[arg-type]
    assert choose(problem) == of_tables(problem)


@walk(("batch", "seqlen", "heads", "gain", "single"), [(2, 2560, 20, 0.79, True), (3, 3500, 12, 0.97, False)])
def test_many_keys_must_gain_more_from_single_tiles(
    batch: int, seqlen: int, heads: int, gain: float, single: bool
) -> None:
    """Programs of single tiles read the keys of all heads at a time, which must gain more than it costs."""
    problem = problem_of(batch, seqlen, (heads, heads), 256)
    times = [microseconds(work_of(problem, config)) for config in alternatives(of_tables(problem))]
    assert not keys_are_few(problem)
    assert min(times) < gain * times[0]
    assert (order_of(problem, choose(problem)) == "single") is single


def test_estimates_are_kept_for_a_bounded_number_of_calls() -> None:
    assert microseconds.cache_info().maxsize == 1024


@walk(
    ("batch", "seqlen", "heads", "single"),
    [
        (1, 1024, 8, True), (1, 2048, 8, True), (1, 3072, 16, True), (2, 2048, 16, False),
        (8, 2048, 8, False), (2, 2560, 20, True),  # the last has 100 MiB of keys and values
    ],
)  # fmt: skip
def test_few_blocks_of_dq_are_not_paired(batch: int, seqlen: int, heads: int, single: bool) -> None:
    config = choose_backward(problem_of(batch, seqlen, (heads, heads), 256))
    assert (config.paired_below == 0) is single  # type: ignore[attr-defined]
    for change in ({"window_right": FULL}, {"varlen": True}):
        plain = choose_backward(replace(problem_of(batch, seqlen, (heads, heads), 256), **change))
        assert plain.paired_below == 8192  # type: ignore[attr-defined]


NEW_TOKENS = {
    "137 of 18,496": (137, 18496, (32, 8), 128),
    "470 of 11,410": (470, 11410, (8, 1), 128),
    "64 of 32,768": (64, 32768, (16, 16), 64),
}
"""New tokens of a prompt on keys that were computed before: fewer query tiles than multiprocessors."""


@pytest.mark.parametrize("name", NEW_TOKENS)
def test_few_queries_on_many_keys_divide_the_keys(name: str) -> None:
    new, keys, heads, head_dim = NEW_TOKENS[name]
    few = problem_of(1, keys, heads, head_dim, seqlen_q=new, total_q=new)
    assert isinstance(hopper.configure_forward(few), DividedConfig)
    others = {
        "batch": {"batch": 32}, "seqused_k": {"seqused_k": True}, "varlen": {"varlen": True},
        "statistics": {"max_logits": True}, "partial": {"partial": True}, "dropout": {"dropout_p": 0.1},
    }  # fmt: skip
    for other in others.values():
        assert isinstance(hopper.configure_forward(replace(few, **other)), ForwardConfig)


def test_calls_that_fill_the_gpu_do_not_divide_the_keys() -> None:
    """None of the papers' grid, and none of the shapes that the documentation measures."""
    for workload in select(["paper"]) + select(["shapes"]):
        if workload.mod is None and not workload.alibi and max(workload.head_dim, workload.width_v) <= 256:
            heads = workload.num_heads_q, workload.num_heads_kv
            sizes = {"seqlen_q": workload.seqlen_q, "head_dim_v": workload.width_v}
            right = CAUSAL if workload.causal else FULL
            problem = problem_of(workload.batch, workload.seqlen_k, heads, workload.head_dim, right)
            assert divided(replace(problem, **sizes), choose(replace(problem, **sizes))) is None


def test_explain_and_compilation_know_of_divided_keys() -> None:
    q = torch.empty(1, 100, 12, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 20001, 2, 128, dtype=torch.bfloat16, device="meta")
    explanation = flashtile.explain(q, k, k, causal=True, card=CARDS["h100"])
    assert "forward: hopper, keys divided among programs" in str(explanation)
    with recording() as recorded:
        FORWARD.launch_on_meta((q, k, k), NO_EXTRAS, Options(masking=Masking(window_right=0)), H200)
    names = [launch.kernel.fn.__name__ for launch, _ in recorded]
    assert names == ["attend_kernel", "combine_recorded_kernel"]
