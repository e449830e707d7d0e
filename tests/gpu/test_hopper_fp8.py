"""FP8 attention on Hopper: masks, lengths, head sizes, scales far apart, and the same bits each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashtile
from cases import BF16, FP16, Case
from flashtile import fp8
from flashtile.problems.fp8_layout import E4M3, KEY_BLOCK
from flashtile.testing import fp8 as testing
from targets import CUDA

HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")]

CALL = Case(
    name="fp8", batch=2, seqlen_q=1000, seqlen_k=1500, heads_q=4, heads_kv=2, head_dim=128, dtype=BF16
)
LENGTHS = ((70, 130), (1, 700), (0, 50), (260, 5), (128, 128), (33, 0), (400, 390))
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 20)},
    "left": {"window_size": (200, -1)},
    "softcap": {"causal": True, "softcap": 5.0},
}
each_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])
each_mask = pytest.mark.parametrize("mask", MASKS)


def check(case: Case, **options: object) -> None:
    inputs = case.inputs("cuda")
    testing.check(*inputs.qkv, backend="hopper", **inputs.arguments, **options)


def check_rows(case: Case) -> None:
    """e4m3 as it is, v row by row, with a scale for each sequence and head."""
    inputs = case.inputs("cuda")
    q, k, v = (t.to(E4M3) for t in inputs.qkv)
    generator = torch.Generator().manual_seed(3)
    batch = case.batch if case.lengths is None else len(case.lengths)
    shape = (batch, case.heads_kv)
    scales = {f"{x}_descale": 0.5 + torch.rand(shape, generator=generator).to("cuda") for x in "qkv"}
    testing.check(q, k, v, backend="hopper", **inputs.arguments, **scales)


@each_head_dim
@each_mask
def test_masks(head_dim: int, mask: str) -> None:
    case = replace(CALL, head_dim=head_dim, **MASKS[mask])
    check(case)
    check_rows(case)


@each_head_dim
@each_mask
def test_variable_length(head_dim: int, mask: str) -> None:
    case = replace(CALL, head_dim=head_dim, lengths=LENGTHS, **MASKS[mask])
    check(case)
    check_rows(case)


@each_head_dim
@pytest.mark.parametrize("blocks", range(7))
def test_any_number_of_blocks(head_dim: int, blocks: int) -> None:
    """The pipeline begins and ends with each of them, whole and with one key behind."""
    for seqlen_k in (blocks * KEY_BLOCK, blocks * KEY_BLOCK + 1):
        if seqlen_k:
            check(replace(CALL, head_dim=head_dim, seqlen_q=150, seqlen_k=seqlen_k))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 8), (80, 48), (96, 96), (192, 128), (64, 256), (256, 64), (72, 200)]
)
def test_other_head_sizes(head_dim: int, head_dim_v: int) -> None:
    check(replace(CALL, head_dim=head_dim, head_dim_v=head_dim_v, causal=True))


@pytest.mark.parametrize("heads_q", [8, 16, 64])
@pytest.mark.parametrize("seqlen_q", [1, 3, 17, 64])
def test_groups_in_one_tile(heads_q: int, seqlen_q: int) -> None:
    """Few queries for each head: query heads of a key head share a tile, and not their scales."""
    case = replace(CALL, heads_q=heads_q, heads_kv=1, seqlen_q=seqlen_q, causal=True)
    check(case)
    check_rows(case)


@pytest.mark.parametrize("method", ["head", "tensor"])
def test_one_scale_for_many_blocks(method: str) -> None:
    check(replace(CALL, causal=True), method=method, hadamard=False)


def test_float16() -> None:
    check(replace(CALL, dtype=FP16))


@pytest.mark.parametrize("factor", [0.0, 2.0**20, 2.0**-40])
def test_values_of_blocks_far_apart(factor: float) -> None:
    """The value scale is part of the exponent: whatever a block has, no NaN is made and no other is lost."""
    q, k, v = CALL.inputs("cuda").qkv
    v = v.clone()
    v[:, KEY_BLOCK : 3 * KEY_BLOCK] *= factor
    testing.check(q, k, v, backend="hopper")


def test_rows_in_use_behind_which_keys_are_nan() -> None:
    q, k, v = (t.to(E4M3) for t in CALL.inputs("cuda").qkv)
    used = torch.tensor([1500, 130], dtype=torch.int32, device="cuda")
    for t in (k, v):
        t[1, 130:].view(torch.uint8).fill_(0x7F)
    out = flashtile.attention(q, k, v, seqused_k=used, backend="hopper")
    assert out.isfinite().all()
    alone = flashtile.attention(q[1:], k[1:, :130], v[1:, :130], backend="hopper")
    torch.testing.assert_close(out[1:], alone, rtol=2**-7, atol=2**-9)


@each_head_dim
def test_long_sequences(head_dim: int) -> None:
    """More blocks than any ring has stages, more tiles than the card has multiprocessors."""
    case = replace(CALL, batch=1, heads_q=2, heads_kv=1, seqlen_q=9000, seqlen_k=9000, head_dim=head_dim)
    check(case)
    check(replace(case, causal=True))


@each_head_dim
@pytest.mark.parametrize("causal", [False, True])
def test_five_hundred_runs_give_the_same_bits(head_dim: int, causal: bool) -> None:
    case = replace(CALL, heads_q=16, heads_kv=16, head_dim=head_dim, causal=causal)
    quantised = [fp8.quantize(x, role) for x, role in zip(case.inputs("cuda").qkv, "qkv", strict=True)]
    rows = [x.to(E4M3) for x in case.inputs("cuda").qkv]
    for attend in (
        lambda: fp8.attention(*quantised, causal=causal, return_lse=True, backend="hopper"),
        lambda: flashtile.attention(*rows, causal=causal, return_lse=True, backend="hopper"),
    ):
        out, lse = attend()
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(500):
            again, lse_again = attend()
            differing += ~((out == again).all() & (lse == lse_again).all())
        assert not differing.item()


def test_dispatch_prefers_it() -> None:
    q, k, v = CALL.inputs("cuda").qkv
    assert flashtile.explain(fp8.attention, q, k, v).backend == "hopper"
