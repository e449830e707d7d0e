"""The Hopper backward takes the configuration whose launch is estimated to take the least time."""

from __future__ import annotations

import heapq
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from test_hopper_backward_splits import problem_of
from test_hopper_rounds import H200, RESULTS

from benchmarks.suite.workload import Workload
from benchmarks.suite.workloads import select
from flashtile import masks
from flashtile.backends.hopper import work_tiles
from flashtile.backends.hopper.backward import costs, schedule
from flashtile.backends.hopper.backward.config import BackwardConfig, alternatives, choose
from flashtile.backends.hopper.backward.costs import (
    COSTS,
    ENOUGH_ROUNDS,
    MAX_BYTES,
    as_scheduled,
    busiest,
    least_busiest,
    microseconds,
    rows_of_blocks,
    variants,
    work_of_launch,
)
from flashtile.backends.hopper.backward.launch import backward_variant
from flashtile.problems.attention import Problem
from flashtile.problems.masking import KernelMask
from flashtile.problems.masks import Mods
from flashtile.tools.inspection.cases import every_case
from kernels_as_python import functions_of
from walk import walk

FULL = {"window_right": -1}


def of_workload(workload: Workload) -> Problem:
    right = 0 if workload.causal or workload.window_left >= 0 else -1
    return replace(
        problem_of(
            workload.batch, workload.seqlen_q, (workload.num_heads_q, workload.num_heads_kv),
            workload.head_dim, workload.seqlen_k, window_right=right,
        ),
        head_dim_v=workload.width_v, window_left=workload.window_left, softcap=workload.softcap,
        alibi=workload.alibi, sink=workload.sink,
    )  # fmt: skip


def packed(batch: int, longest: int, heads: tuple[int, int], head_dim: int) -> Problem:
    """Packed documents of 32,768 tokens under a causal mask."""
    problem = problem_of(batch, longest, heads, head_dim)
    return replace(problem, varlen=True, total_q=32768, total_k=32768)


def named(config: BackwardConfig) -> str:
    """The name of a configuration in the record of 27 November."""
    return f"M{config.BLOCK_M} {config.HEAD_SPLITS}x{config.ROW_SPLITS}"


def label_of(problem: Problem) -> str:
    config = choose(problem)
    return named(config) + " all" * config.ALL_RESIDENT + " one" * config.ONE_BLOCK


def sweep() -> list[Problem]:
    """Calls of all masks and lengths whose work tiles make few rounds, and of more."""
    heads = ((1, 4, 4), (1, 8, 8), (1, 16, 2), (1, 28, 4), (1, 32, 8), (2, 12, 12), (4, 16, 16), (32, 32, 32))
    masks: tuple[dict[str, int], ...] = (
        FULL,
        {},
        {"window_left": 63},
        {"window_left": 64, "window_right": 64},
    )
    cross = [problem_of(2, 4096, (10, 10), size, keys, **FULL) for size in (64, 88) for keys in (16, 77, 256)]
    return cross + [
        problem_of(batch, seqlen, (heads_q, heads_kv), head_dim, **mask)
        for head_dim in (64, 128)
        for mask in masks
        for seqlen in (128, 512, 1000, 1536, 2048, 4096)
        for batch, heads_q, heads_kv in heads
    ]


def ends_by_the_kernel(problem: Problem, config: BackwardConfig) -> float:
    """The time of a launch's programs, if they take tiles by the functions of the kernel."""
    functions = functions_of(work_tiles, schedule)
    C = backward_variant(problem, config)
    work = work_of_launch(problem, config)
    scheduled = as_scheduled(problem, config.HEAD_SPLITS)
    numbers = schedule.BackwardSchedule(
        num_tiles=problem.batch * scheduled.num_heads_kv * len(work.rows), num_blocks=len(work.rows),
        num_heads=scheduled.num_heads_kv, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
        batch_rows_k=problem.seqlen_k, mask=KernelMask(problem.window_left, problem.window_right),
        alibi_stride=0, swizzle=work.last, group=scheduled.group_size, head_splits=config.HEAD_SPLITS,
        row_shift=config.ROW_SPLITS.bit_length() - 1,
    )  # fmt: skip
    own, convert = work.costs, costs.conversion(work)
    busy, ends = [0.0] * work.programs, [0.0] * work.heads
    for tile_index in range(functions["count_tiles"](C, None, numbers)):
        head, _ = functions["head_and_block"](
            C, tile_index, work.tiles // work.heads // config.ROW_SPLITS, numbers
        )
        tile = functions["find_work_tile"](C, tile_index, SimpleNamespace(), numbers)
        cut, steps, *_ = functions["step_order"](*functions["own_row_blocks"](C, tile_index, tile, numbers))
        before = head - work.resident
        zeroed = ends[before] + convert if before >= 0 else 0.0
        end = max(busy[0], zeroed - own.step) + own.tile
        end += scheduled.group_size * (
            own.step * steps + (own.cut * cut if C.HAS_LEFT or C.HAS_RIGHT else 0.0)
        )
        heapq.heapreplace(busy, end)
        ends[head] = max(ends[head], end)
    return max(busy) + convert


@walk("seed", range(40))
def test_the_estimate_follows_the_schedule_of_the_kernel(seed: int) -> None:
    draw = random.Random(seed)
    group, heads_kv, seqlen_q = draw.choice((1, 2, 4)), draw.randint(1, 6), draw.randint(1, 3000)
    problem = problem_of(
        draw.randint(1, 3), seqlen_q, (group * heads_kv, heads_kv), draw.choice((64, 128)),
        draw.choice((seqlen_q, draw.randint(1, 4000))), window_right=draw.choice((-1, 0)),
    )  # fmt: skip
    if draw.random() < 0.3:
        problem = replace(problem, window_left=draw.randint(0, 700))
    for config in list(variants(problem, alternatives(problem)))[:: draw.randint(1, 4)]:
        if work_of_launch(problem, config).tiles < ENOUGH_ROUNDS * 132:
            found = busiest(work_of_launch(problem, config))
            assert found == pytest.approx(ends_by_the_kernel(problem, config), rel=1e-9)


def ends_with_lists(problem: Problem, config: BackwardConfig, steps: list[int]) -> tuple[float, float]:
    """Return the times of the busiest and of the average program, if block n of the keys has steps[n] steps.

    Heads take tiles in the order of the kernel.
    """
    functions = functions_of(work_tiles, schedule)
    C, work = backward_variant(problem, config), work_of_launch(problem, config)
    numbers = SimpleNamespace(
        num_tiles=work.tiles, swizzle=work.last, row_shift=config.ROW_SPLITS.bit_length() - 1
    )
    ends, busy = [0.0] * work.heads, [0.0] * work.programs
    for tile_index in range(work.tiles):
        head, block = functions["head_and_block"](C, tile_index, len(steps), numbers)
        zeroed = ends[head - work.resident] if head >= work.resident else 0.0
        end = max(busy[0], zeroed) + work.costs.tile + work.group * work.costs.step * steps[block]
        heapq.heapreplace(busy, end)
        ends[head] = max(ends[head], end)
    total = work.costs.tile * len(steps) + work.group * work.costs.step * sum(steps)
    return max(busy), total * work.heads / work.programs


@walk("head_dim", [64, 128])
@walk("prompt", [1024, 4096])
@walk("heads_kv", [4, 8, 16])
def test_programs_end_together_although_all_rows_see_a_prompt(
    head_dim: int, prompt: int, heads_kv: int
) -> None:
    answers = (512, 1021, 2048, 641, 1530, 899, 763, 1290)
    offsets = torch.tensor([0, prompt, *answers]).cumsum(0)
    total = int(offsets[-1])
    parent = torch.tensor([-1] + [0] * len(answers))
    mask = masks.create_tree_mask(offsets, parent, total)
    problem = problem_of(1, total, (4 * heads_kv, heads_kv), head_dim, **FULL)
    problem = replace(problem, mods=Mods(block_size=(128, 128)))
    config = choose(problem)
    blocks = (mask.q_num_blocks + mask.full_q_num_blocks).flatten()
    busiest_one, mean = ends_with_lists(problem, config, (blocks * (128 // config.BLOCK_M)).tolist())
    assert busiest_one < 1.4 * mean


def table_row(problem: Problem) -> BackwardConfig:
    """The configuration of a head size, with the most rows in a step."""
    return max(alternatives(problem), key=lambda config: config.BLOCK_M)


def measured() -> list[tuple[Problem, float]]:
    """Plain calls at head_dim 64 and 128 whose choice has stayed since they were measured on an H200."""
    workloads = {workload.name: workload for workload in select(("paper", "shapes"))}
    found = []
    for path in sorted(RESULTS.glob("2026-11-23-h200-*-backward*.json")):
        for cell in json.loads(path.read_text())["cells"]:
            workload = workloads[cell["workload"]]
            assert workload.shape == cell["shape"]
            problem = of_workload(workload)
            sizes = workload.head_dim, workload.width_v
            if sizes in ((64, 64), (128, 128)) and not workload.changes_scores and workload.seqlen_q <= 4608:
                config = table_row(problem)
                if choose(problem) == replace(config, ONE_BLOCK=False):
                    found.append((problem, 1e3 * cell["results"]["flashtile"]["ms"]))
    return found


def measured_alternatives() -> list[tuple[Problem, dict[str, float]]]:
    """Calls with few work tiles, and microseconds of each configuration; the one of then first."""
    cells = json.loads((RESULTS / "2026-11-27-h200-rounds.json").read_text())["backward"]
    return [
        (
            problem_of(
                cell["batch"], cell["seqlen"], tuple(cell["heads"]), cell["head_dim"],
                window_right=0 if cell["causal"] else -1,
            ),
            cell["us"],
        )
        for cell in cells
        if cell["head_dim"] <= 128
    ]  # fmt: skip


def root_mean_square(errors: list[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def test_estimates_are_close_to_measured_times() -> None:
    errors = [microseconds(problem, table_row(problem)) / time - 1 for problem, time in measured()]
    assert len(errors) == 50
    assert root_mean_square(errors) < 0.06
    assert max(map(abs, errors)) < 0.15


def test_estimates_of_alternatives_are_close_to_measured_times() -> None:
    errors = []
    for problem, times in measured_alternatives():
        for name, time in times.items():
            rows, splits = name.removeprefix("M").split()
            heads_split, row_splits = map(int, splits.split("x"))
            config = next(c for c in alternatives(problem) if int(rows) == c.BLOCK_M)
            config = replace(config, HEAD_SPLITS=heads_split, ROW_SPLITS=row_splits)
            errors.append(microseconds(problem, config) / time - 1)
    assert len(errors) == 34
    assert root_mean_square(errors) < 0.06
    assert max(map(abs, errors)) < 0.15


def test_the_choice_is_nearly_the_fastest_that_was_measured() -> None:
    """Room in dq_accum for all heads was not measured: such a choice counts as that without."""
    ratios = []
    for problem, times in measured_alternatives():
        time = times.get(named(choose(problem)))
        if time is not None:
            ratios.append(time / min(times.values()))
    assert len(ratios) == 8
    assert max(ratios) < 1.01


@walk(
    ("problem", "expected"),
    [
        (problem_of(32, 512, (32, 32), 64), "M64 1x1"),
        (problem_of(16, 1024, (32, 32), 64), "M64 1x1"),
        (problem_of(16, 1024, (32, 8), 64), "M128 1x1"),
        (problem_of(12, 1280, (32, 32), 64), "M128 1x1"),
        (problem_of(16, 1024, (64, 64), 32), "M64 1x1"),
        (problem_of(4, 4096, (64, 8), 128), "M64 1x2"),
        (problem_of(4, 4096, (32, 8), 128), "M64 1x1"),
        (problem_of(4, 4096, (32, 4), 128), "M64 1x2"),
        (problem_of(8, 2048, (32, 4), 64), "M128 1x1 all"),
        (problem_of(1, 16384, (16, 2), 128), "M64 1x2"),
        (problem_of(1, 16384, (32, 8), 128), "M64 1x1"),
        (problem_of(4, 512, (8, 1), 128, 8192), "M64 1x1"),
        (problem_of(4, 512, (8, 8), 64), "M64 1x1"),
        (problem_of(1, 1024, (8, 8), 64), "M64 1x2"),
        (problem_of(1, 1024, (8, 8), 128), "M64 1x2"),
        (problem_of(1, 4096, (16, 2), 64), "M128 4x1"),
        (problem_of(4, 4096, (16, 16), 64, window_left=63), "M64 1x1"),
        (problem_of(2, 4096, (16, 16), 64, window_left=1023), "M128 1x1"),
        (problem_of(2, 4096, (10, 10), 64, 129, **FULL), "M64 1x16"),
        (problem_of(2, 4096, (10, 10), 64, 77, **FULL), "M128 1x4 one"),
        (problem_of(7, 3933, (8, 8), 64, 17, **FULL), "M128 1x2 one"),
        (problem_of(1, 2048, (8, 8), 128, 48, **FULL), "M64 1x16 one"),
        (problem_of(64, 128, (16, 16), 64), "M64 1x1 one"),
        (problem_of(2, 1536, (12, 12), 128), "M64 1x1 all"),
        (problem_of(1, 4096, (16, 16), 128), "M64 1x1"),
        (problem_of(7, 1718, (16, 16), 128, 234, **FULL), "M64 1x1"),
        (problem_of(1, 32760, (12, 12), 128, 512, **FULL), "M64 1x8"),
        (packed(36, 3213, (12, 2), 128), "M64 2x1"),
        (packed(42, 3194, (28, 4), 128), "M64 1x2"),
        (packed(8, 5820, (12, 2), 128), "M64 2x1"),
        (packed(8, 5693, (40, 8), 128), "M64 1x1"),
        (packed(35, 3927, (14, 2), 64), "M128 1x1"),
        (packed(35, 3715, (32, 32), 96), "M64 1x1"),
        (packed(600, 127, (28, 4), 128), "M64 1x1 one"),
    ],
)
def test_choices(problem: Problem, expected: str) -> None:
    assert label_of(problem) == expected


@walk(
    ("heads", "head_dim", "splits", "expected"),
    [
        ((32, 32), 96, (1, 1), True),
        ((24, 8), 128, (1, 1), True),
        ((32, 8), 128, (1, 1), False),
        ((32, 8), 64, (1, 1), True),
        ((64, 8), 64, (1, 1), False),
        ((12, 2), 128, (2, 1), True),
        ((28, 4), 128, (1, 2), False),  # programs divide rows, not heads
    ],
)
def test_tiles_come_by_cost_if_rows_stay_in_the_cache(
    heads: tuple[int, int], head_dim: int, splits: tuple[int, int], expected: bool
) -> None:
    problem = packed(40, 3000, heads, head_dim)
    config = replace(alternatives(problem)[0], HEAD_SPLITS=splits[0], ROW_SPLITS=splits[1])
    assert costs.sorted_by_cost(problem, config) is expected
    assert costs.sorted_by_cost(replace(problem, window_left=500), config)
    for change in ({"deterministic": True}, {"varlen": False}, {"window_right": -1}):
        assert not costs.sorted_by_cost(replace(problem, **change), config)


def test_packed_sequences_are_assumed_to_differ_as_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the programs is near that for the drawn lengths; for equal ones it is 0.6 of it."""
    ratios = []
    for workload in (one for seed in range(4) for one in select(["packed-tuning", "packed-long"], seed=seed)):
        assert workload.lengths is not None
        problem = replace(
            of_workload(workload), varlen=True, total_q=32768, total_k=sum(n for n, _ in workload.lengths)
        )
        config = alternatives(problem)[0]
        assumed = costs.assumed_lengths(problem)
        assert len(assumed) == len(workload.lengths)
        assert assumed == sorted(assumed, reverse=True)
        assert 0.85 < assumed[0][0] / workload.seqlen_q <= 1
        times = []
        for lengths in (assumed, sorted(workload.lengths, reverse=True)):
            with monkeypatch.context() as patched:
                patched.setattr(costs, "assumed_lengths", lambda _, lengths=lengths: lengths)
                for kept in (rows_of_blocks, work_of_launch):
                    kept.cache_clear()
                times.append(busiest(work_of_launch(problem, config)))
        ratios.append(times[0] / times[1])
    for kept in (rows_of_blocks, work_of_launch):
        kept.cache_clear()
    assert len(ratios) == 64
    assert 0.97 < math.exp(sum(map(math.log, ratios)) / 64) < 1.06
    assert 0.8 < min(ratios) < max(ratios) < 1.25


def test_an_upper_bound_of_the_lengths_is_no_length() -> None:
    problem = replace(packed(3, 100_000, (4, 4), 64), total_k=900)
    assert all(q <= 32768 and k <= 900 for q, k in costs.assumed_lengths(problem))


def test_the_choice_is_nearly_the_fastest_of_the_sweep() -> None:
    """Never slower than the table's configuration, and near to the best of all."""
    changed = 0
    for problem in sweep():
        chosen, first = choose(problem), alternatives(problem)[0]
        times = {config: microseconds(problem, config) for config in variants(problem, alternatives(problem))}
        assert chosen in times
        assert times[chosen] <= min(times.values()) / costs.WORTHWHILE
        assert chosen == first or times[chosen] <= times[first]
        accum = costs.accum_bytes(problem, work_of_launch(problem, chosen))
        assert not chosen.ALL_RESIDENT or accum <= MAX_BYTES
        changed += chosen != first
    assert changed > 100


def test_the_paper_grid_keeps_its_configurations() -> None:
    """But for short causal sequences at head_dim 64."""
    changed = {
        workload.name
        for workload in select(("paper",))
        if choose(problem := of_workload(workload)) != table_row(problem)
    }
    assert changed == {"paper-d64-causal-s512", "paper-d64-causal-s1024"}


def test_every_chosen_configuration_is_compiled() -> None:
    """Splits and room change few lines; rows of a step change tiles."""
    cases = {
        (C.BLOCK_D, C.BLOCK_DV, C.BLOCK_M, C.HAS_LEFT, C.HAS_RIGHT, C.ONE_BLOCK)
        for case in every_case("sm_90a")
        if case.kernel.fn.__name__ == "backward_kernel"
        and not (C := case.constants["C"]).HAS_DROPOUT
        and not C.HAS_MODS
    }
    for problem in sweep():
        C = backward_variant(problem, choose(problem))
        key = (C.BLOCK_D, C.BLOCK_DV, C.BLOCK_M, C.HAS_LEFT, C.HAS_RIGHT, C.ONE_BLOCK)
        assert key in cases


def test_only_plain_calls_of_short_sequences_have_other_rows() -> None:
    problem = problem_of(32, 512, (32, 32), 64)
    for varlen in (False, True):
        assert choose(replace(problem, varlen=varlen)).BLOCK_M == 64
    # As many tokens in sequences of which one is longer.
    assert choose(replace(problem, varlen=True, seqlen_q=513)).BLOCK_M == 128
    changes: tuple[dict[str, Any], ...] = (
        {"seqused_k": True}, {"deterministic": True}, {"bias": True},
    )  # fmt: skip
    for change in changes:
        changed = replace(problem, **change)
        assert choose(changed).BLOCK_M == 128
        assert not choose(changed).ALL_RESIDENT or not changed.deterministic


def test_costs_exist_for_every_configuration() -> None:
    for problem in sweep():
        for config in alternatives(problem):
            assert (*[64 if problem.head_dim <= 64 else 128] * 2, config.BLOCK_M) in COSTS
    assert H200.multiprocessors == 132


def test_few_estimates_are_kept() -> None:
    """Those of a long sequence are large."""
    for kept in (busiest, work_of_launch, costs.totals, rows_of_blocks):
        assert (kept.cache_info().maxsize or math.inf) <= 64


def test_the_bound_of_an_estimate_is_never_above_it() -> None:
    """Estimates that cannot be the least are left out by this bound."""
    for problem in sweep()[::7]:
        for config in variants(problem, alternatives(problem)):
            work = work_of_launch(problem, config)
            assert least_busiest(work) <= busiest(work) * (1 + 1e-9), (problem, config)
