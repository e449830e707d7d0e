"""Backends and configurations for GPUs that this machine does not have, chosen without asking a device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashtile.backends import hopper, portable
from flashtile.backends.common.device import Target, capability, is_nvidia, multiprocessors
from flashtile.backends.hopper import fp8 as hopper_fp8
from flashtile.backends.portable import decode as portable_decode
from flashtile.backends.portable import fp8 as portable_fp8
from flashtile.op.selection import select
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import Problem
from flashtile.problems.fp8 import Fp8Problem
from flashtile.problems.masks import Mods
from walk import walk

H100 = Target("H100", (9, 0), 132)
A100 = Target("A100", (8, 0), 108)
T4 = Target("T4", (7, 5), 40)
MI300X = Target("MI300X", (9, 4), 304, hip=True)
PROBLEM = Problem(
    batch=2,
    seqlen_q=512,
    seqlen_k=512,
    total_q=1024,
    total_k=1024,
    num_heads_q=8,
    num_heads_kv=8,
    head_dim=128,
    head_dim_v=128,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
)
FP8_PROBLEM = Fp8Problem(
    **vars(PROBLEM) | {"dtype": torch.float8_e4m3fn}, v_transposed=True, block_scales=True
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("a device was asked")

    for name in ("get_device_capability", "get_device_properties", "current_device", "is_available"):
        monkeypatch.setattr(torch.cuda, name, touched)


def test_what_is_asked_of_a_device() -> None:
    cpu = torch.device("cpu")
    assert [capability(d) for d in (H100, T4, MI300X, cpu)] == [(9, 0), (7, 5), (0, 0), (0, 0)]
    assert [is_nvidia(d) for d in (H100, MI300X, cpu)] == [True, False, False]
    assert [multiprocessors(d) for d in (H100, MI300X, cpu)] == [132, 304, 2]
    assert [str(d) for d in (H100, T4, MI300X)] == ["an H100 (sm_90)", "a T4 (sm_75)", "an MI300X"]


@pytest.mark.parametrize(
    ("card", "reason"),
    [(H100, None), (A100, "an A100 (sm_80) has 8.0"), (MI300X, "not on an MI300X")],
)
def test_hopper_on_a_named_card(card: Target, reason: str | None) -> None:
    pytest.importorskip("triton")
    for backend, problem in ((hopper, PROBLEM), (hopper_fp8, FP8_PROBLEM)):
        said = backend.reason_against(replace(problem, device=card), False)
        assert said is None if reason is None else reason in str(said)


def test_hopper_configurations_of_a_named_card() -> None:
    pytest.importorskip("triton")
    problem = replace(PROBLEM, device=H100)
    assert hopper.configure_forward(problem).BLOCK_M == 64  # 64 tiles of 128 rows would fill half of the card
    assert hopper.configure_backward(problem).BLOCK_M == 64
    assert hopper_fp8.configure_fp8_attend(replace(FP8_PROBLEM, device=H100)).BLOCK_M == 128


@walk("head_dim", [8, 16, 24, 32])
@walk("change", [{}, {"window_right": 0}, {"varlen": True}, {"bias": True, "seqlen_q": 1024}])
def test_backend_of_small_heads(head_dim: int, change: dict) -> None:
    pytest.importorskip("triton")
    small = replace(PROBLEM, device=H100, head_dim=head_dim, head_dim_v=head_dim)
    for operation in (FORWARD, BACKWARD):
        assert select(operation, replace(small, **change)).backend == "hopper"
        assert select(operation, replace(small, mask=True)).backend == "portable"
        assert select(operation, replace(small, device=A100)).backend == "portable"


def test_portable_on_a_named_card() -> None:
    pytest.importorskip("triton")
    from flashtile.backends.portable.config import family

    assert [family(target) for target in (H100, A100, T4, MI300X)] == ["hopper", "ampere", "other", "other"]
    assert [portable_fp8.is_native(target) for target in (H100, A100, MI300X)] == [True, False, False]
    for target in (H100, A100, MI300X):
        assert portable.reason_against(replace(PROBLEM, device=target), False) is None
        assert portable_decode.reason_against(replace(PROBLEM, device=target), False) is None
    said = portable.reason_against(replace(PROBLEM, device=T4), False)
    assert said == "bfloat16 needs compute capability 8.0, a T4 (sm_75) has 7.5"


def test_backward_tiles_of_compute_capability_10() -> None:
    """Hopper's tiles for wide heads of 16 bits exceed the shared memory of a block there."""
    pytest.importorskip("triton")
    from flashtile.backends.portable.config import row, row_for

    for element_bytes, width, windowed in itertools.product((2, 4), (64, 128, 256, 512), (False, True)):
        found = row_for((10, 0), element_bytes, width, windowed)
        hopper_row, ampere_row = (row(name, element_bytes, width, windowed) for name in ("hopper", "ampere"))
        smaller = ampere_row if (element_bytes, width) in ((2, 256), (2, 512)) else hopper_row
        assert found == replace(hopper_row, dkdv=smaller.dkdv, dq=smaller.dq)


def test_only_16_bit_inputs_on_hopper_have_tiles_of_their_own_with_functions() -> None:
    """Others get those of windows, with at most two stages: tiles of another family may not fit."""
    pytest.importorskip("triton")
    from flashtile.backends.portable.config import choose, family, row

    for device, dtype in itertools.product((H100, A100, T4), (torch.bfloat16, torch.float32)):
        problem = replace(PROBLEM, device=device, dtype=dtype, head_dim=128, head_dim_v=128)
        plain = row(family(device), dtype.itemsize, 128, windowed=True)
        found = choose(replace(problem, mods=Mods()))
        for name in ("forward", "dkdv", "dq"):
            tile, of_windows = getattr(found, name), getattr(plain, name)
            alike = tile == replace(of_windows, num_stages=min(of_windows.num_stages, 2))
            assert alike or (device, dtype) == (H100, torch.bfloat16)


def test_tiles_of_decoding_are_powers_of_two() -> None:
    pytest.importorskip("triton")
    from flashtile.backends.portable.decode.config import HEAD_DIMS, row, row_blocks

    for name, element_bytes, width in itertools.product(("hopper", "ampere", "other"), (1, 2, 4), HEAD_DIMS):
        blocks = row_blocks(name, element_bytes, width)
        assert blocks
        for block in blocks:
            tile = row(name, element_bytes, block, width).tile
            assert block == tile.BLOCK_M
            assert all(size >= 16 and size.bit_count() == 1 for size in (tile.BLOCK_M, tile.BLOCK_N))


@pytest.mark.parametrize("card", [Target("B200", (10, 0), 148), H100, A100, T4], ids=str)
def test_tiles_of_the_portable_kernels_are_powers_of_two(card: Target) -> None:
    """Triton's ranges must be, and its products take no fewer than 16."""
    pytest.importorskip("triton")
    from flashtile.backends.portable.config import choose, dbias_tile

    calls = {}, {"window_right": 0}, {"mask": True}, {"mods": Mods()}, {"mods": Mods(block_size=(48, 80))}
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float32), (16, 32, 64, 128, 256, 512)):
        plain = replace(PROBLEM, device=card, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
        for call in calls:
            config = choose(replace(plain, **call))
            for tile in (config.forward, config.dkdv, config.dq, dbias_tile(config)):
                sizes = tile.BLOCK_M, tile.BLOCK_N
                assert all(size >= 16 and size.bit_count() == 1 for size in sizes), (call, tile)
