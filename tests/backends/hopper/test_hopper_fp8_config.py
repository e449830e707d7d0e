"""The Hopper FP8 kernel's table: every row fits the card and the blocks that share a scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import tile_bytes

from flashtile.backends.hopper import fp8 as hopper_fp8
from flashtile.backends.hopper.fp8.config import choose, every_row
from flashtile.backends.hopper.fp8.launch import scale_strides
from flashtile.problems.fp8 import Scales
from flashtile.problems.fp8_layout import KEY_BLOCK
from flashtile.tools.inspection.fp8 import GROUPED, hopper_cases
from flashtile.tools.inspection.report import ARCHITECTURES, HOPPER, KIB, report
from walk import walk

BARRIERS = KIB
PROBLEM = replace(GROUPED, head_dim=128, head_dim_v=128)


def test_every_row_fits_shared_memory() -> None:
    for block_d, block_dv, _, v_transposed, config in every_row():
        tiles = tile_bytes.of_fp8(config, block_d, block_dv, v_transposed)
        assert tiles + BARRIERS <= ARCHITECTURES[HOPPER].shared_limit, config


@pytest.mark.compile
@pytest.mark.thorough
def test_shared_memory_is_what_the_kernel_allocates() -> None:
    cases = {case.name: case for case in hopper_cases()}
    for v_transposed, name in ((True, "full q in registers"), (False, "full v row by row")):
        config = choose(replace(PROBLEM, v_transposed=v_transposed))
        expected = tile_bytes.of_fp8(config, 128, 128, v_transposed)
        found = report(cases[f"hopper fp8 forward head_dim 128/128 128x128 {name}"], HOPPER).shared
        assert expected <= found <= expected + BARRIERS


@walk("varlen", [False, True])
@walk("block_scales", [False, True])
def test_each_scale_has_its_own_strides(varlen: bool, block_scales: bool) -> None:
    problem = replace(PROBLEM, varlen=varlen, block_scales=block_scales)
    every = ("batch", "head", "block")
    dims = every[:2] if not block_scales else every[1:] if varlen else every
    last = range(7, 6 + len(dims))
    scales = Scales(*(torch.empty_strided([2] * len(dims), [first, *last]) for first in (30, 40, 50)))
    strides = scale_strides(problem, scales)._asdict()
    for name, scale in scales._asdict().items():
        own = dict(zip(dims, scale.stride(), strict=True))
        assert {dim: strides[f"{name}_scale_{dim}"] for dim in every} == {
            dim: own.get(dim, 0) for dim in every
        }


def test_every_row_reads_one_scale_a_block() -> None:
    for *_, config in every_row():
        assert KEY_BLOCK % config.BLOCK_N == 0
        assert config.STAGES >= 2


@walk("v_transposed", [False, True])
@walk("head_dim", [16, 64, 80, 128, 144, 256])
@walk("head_dim_v", [8, 64, 72, 128, 200, 256])
@walk("right", [-1, 0, 100])
def test_every_problem_has_a_row(head_dim: int, head_dim_v: int, right: int, v_transposed: bool) -> None:
    problem = replace(
        PROBLEM, head_dim=head_dim, head_dim_v=head_dim_v, window_right=right, v_transposed=v_transposed
    )
    rows = [config for *_, config in every_row()]
    assert choose(problem) in rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alibi": "head"}, "alibi_slopes"),
        ({"sink": True}, "sink"),
        ({"seqused_k": True}, "row by row"),
        ({"head_dim": 40}, "multiple of 16"),
        ({"head_dim_v": 20}, "multiple of 8"),
    ],
)
def test_says_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch, change: dict, reason: str) -> None:
    monkeypatch.setattr(hopper_fp8.hopper, "reason_of_device", lambda problem: None)
    assert hopper_fp8.reason_against(PROBLEM, False) is None
    said = hopper_fp8.reason_against(replace(PROBLEM, **change), False)
    assert said is not None
    assert reason in said
