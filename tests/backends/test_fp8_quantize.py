"""Quantisation to e4m3: the same bits on every backend, errors within e4m3's, no NaN from finite numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import BF16, FP16
from flashtile import fp8
from flashtile.problems import fp8_layout as layout
from flashtile.problems.fp8_layout import E4M3, E4M3_MAX, KEY_BLOCK, METHODS, QUERY_BLOCK, ROLES
from targets import INTERPRETING, TARGETS, Target

CPU_ONLY = pytest.mark.skipif(INTERPRETING, reason="of the CPU's path alone")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = FP16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(positions: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    angles = torch.outer(torch.arange(positions), 100.0 ** -torch.arange(rotary_dim // 2))
    return {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}


def assert_same_bits(actual: fp8.Quantized, expected: fp8.Quantized, rows: int | None = None) -> None:
    """Scales and values; any NaN equals any other. ``rows``: those of some sequence, if not all."""
    assert torch.equal(actual.scales.cpu(), expected.scales)
    values = [x.values.cpu().view(torch.uint8)[:rows] for x in (actual, expected)]
    different = (values[0] != values[1]) & (values[0] & values[1] & 127 != 127)
    assert not different.any(), f"{different.sum()} of {different.numel()}"


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"hadamard": False},
    "transformed": {},
    "transformed-padded": {"head_dim": 40},
    "one-column": {"head_dim": 1},
    "wide": {"head_dim": 256},
    "odd": {"head_dim": 59, "hadamard": False},
    "between-powers-of-two": {"head_dim": 80, "hadamard": False},
    "halves": {"rotary_dim": 16, "head_dim": 24},
    "halves-of-all": {"rotary_dim": 64, "rotary_offset": 2},
    "neighbours": {
        "rotary_dim": 12, "head_dim": 24, "rotary_interleaved": True,
        "rotary_offset": torch.tensor([3, 29], dtype=torch.int32),
    },
    "neighbours-of-all": {"rotary_dim": 64, "rotary_interleaved": True, "hadamard": False},
    "bfloat16": {"dtype": BF16},
}  # fmt: skip


KERNELS = [
    pytest.param(target, id=target.name, marks=target.marks)
    for target in TARGETS
    if target.available and target.backend == "portable"
]
PADDED = ("transformed-padded", "halves", "one-column")
CALLS = [
    pytest.param(role, shape, method, varlen, id="-".join((role, shape, method, "varlen" * varlen)))
    for role in ROLES
    for shape, arguments in SHAPES.items()
    for method in METHODS
    for varlen in (False, True)
    # v is neither rotated nor transformed; k has q's code, but for the rows of a block.
    if not (role == "v" and {"rotary_dim", "rotary_interleaved"} & set(arguments))
    if role != "k" or shape in PADDED
    # Methods differ in what a scale is made from, sequences in where they lie.
    if method == "block" or shape == "plain"
    if not varlen or shape in (*PADDED, "plain")
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("role", "shape", "method", "varlen"), CALLS if KERNELS else [])
def test_bits_are_those_of_the_cpu(kernels: Target, role: str, shape: str, method: str, varlen: bool) -> None:
    arguments = {"head_dim": 64, "dtype": FP16, "rotary_dim": 0} | SHAPES[shape]
    head_dim, dtype, rotary_dim = (arguments.pop(name) for name in ("head_dim", "dtype", "rotary_dim"))
    if dtype not in kernels.dtypes:
        pytest.skip(f"{kernels.name} does not take {dtype}")
    if varlen:
        x = random(160, 2, head_dim, dtype=dtype)
        arguments["cu_seqlens"] = torch.tensor([0, 5, 5, 140, 150], dtype=torch.int32)
        arguments["max_seqlen"] = 137
        rows = 150 if role != "v" else None
    else:
        x = random(2, 131, 2, head_dim, dtype=dtype)
        arguments["seqused"] = torch.tensor([131, 37], dtype=torch.int32)
        rows = None
    x.view(-1)[::101] *= 30
    x.view(-1)[7 % x.shape[-1] :: 4001] = torch.inf
    x.view(-1)[9::5003] = torch.nan
    x.view(-1)[-64 * head_dim * 2 : -head_dim] *= 1e-5
    if rotary_dim:
        arguments |= tables(170, rotary_dim)
    expected = fp8.quantize(x, role, method=method, seed=5, backend="cpu", **arguments)
    there = {name: a.to(kernels.device) if isinstance(a, Tensor) else a for name, a in arguments.items()}
    actual = fp8.quantize(x.to(kernels.device), role, method=method, seed=5, backend=kernels.backend, **there)
    assert_same_bits(actual, expected, rows)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    """x with hard magnitudes, and how its sequences lie."""
    heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 16, 24, 64, 100, 128, 256)))
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    varlen = draw(st.booleans())
    dtype = draw(st.sampled_from((FP16, BF16)))
    seed = draw(st.integers(0, 99))
    arguments: dict[str, Any] = {}
    if varlen:
        x = random(sum(lengths) + draw(st.integers(0, 5)), heads, head_dim, seed=seed, dtype=dtype)
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        arguments = {"cu_seqlens": offsets, "max_seqlen": max(lengths) + draw(st.integers(0, 99))}
    else:
        x = random(len(lengths), lengths[0], heads, head_dim, seed=seed, dtype=dtype)
    scale = draw(st.sampled_from((1.0, 0.0, 2.0**-14, 2.0**-24, 1e3)))
    every = draw(st.integers(1, 50))
    if x.numel():
        x.view(-1)[::every] *= scale
        x.view(-1)[:: 7 * every] = torch.finfo(dtype).max
    return x, arguments


@CPU_ONLY
@settings(max_examples=60)
@given(tensors(), st.sampled_from(ROLES), st.sampled_from(METHODS))
def test_numbers_come_back_within_half_a_unit(given: tuple[Tensor, dict], role: str, method: str) -> None:
    """Of e4m3: a 16th of a number, or of its scale's smallest normal number; rows of no sequence are 0."""
    x, arguments = given
    quantized = fp8.quantize(x, role, method=method, hadamard=False, **arguments)
    assert quantized.scales.isfinite().all()
    end = int(arguments["cu_seqlens"][-1]) if arguments else None
    if method == "block":
        assert (quantized.scales >= 0).all()
    else:
        assert (quantized.scales > 0).all()
    back = quantized.dequantize(torch.float64)
    assert back.shape == x.shape
    if end is not None:
        assert not back[end:].any()
        back, x = back[:end], x[:end]
    # The largest scale there can be bounds each block's.
    smallest_normal = quantized.scales.max().item() * 2.0**-6 if quantized.scales.numel() else 0.0
    allowed = (x.double().abs() * (1 + 1e-6)).clamp_min(smallest_normal) / 16
    assert ((back - x.double()).abs() <= allowed).all()


@CPU_ONLY
@settings(max_examples=40)
@given(tensors(), st.sampled_from(("q", "k")), st.sampled_from(METHODS))
def test_no_nan_from_finite_numbers(given: tuple[Tensor, dict], role: str, method: str) -> None:
    """However large: sums of the transform stay finite."""
    x, arguments = given
    quantized = fp8.quantize(x, role, method=method, **arguments)
    rows = int(arguments["cu_seqlens"][-1]) if arguments else None
    assert quantized.values.float()[:rows].isfinite().all()
    assert quantized.scales.isfinite().all()
    assert quantized.dequantize(torch.float64)[:rows].isfinite().all()


@CPU_ONLY
@pytest.mark.parametrize("role", ROLES)
def test_scales_by_block_see_their_block_alone(role: str) -> None:
    rows = layout.rows_of(role)
    assert rows == {"q": QUERY_BLOCK, "k": KEY_BLOCK, "v": KEY_BLOCK}[role]
    x = torch.zeros(1, 3 * rows - 1, 2, 16, dtype=FP16)
    x[0, rows - 1, 0, 3] = -448.0
    x[0, 3 * rows - 2, 1, 5] = 224.0
    scales = fp8.quantize(x, role, hadamard=False).scales
    assert scales[0, 0, 0] == 1.0
    assert scales[0, 1, 2] == 0.5
    assert (scales > 0).sum() == 6
    assert scales[0, 0, 1:].max() < 1e-30


@CPU_ONLY
def test_methods_share_scales_as_they_say() -> None:
    x = random(2, 200, 3, 32)
    x[1, :, 2] *= 4
    by_head = fp8.quantize(x, "k", method="head", hadamard=False)
    assert torch.equal(by_head.scales, x.abs().amax((1, 3)).float() / E4M3_MAX)
    by_tensor = fp8.quantize(x, "k", method="tensor", hadamard=False)
    assert torch.equal(by_tensor.scales, (x.abs().max().float() / E4M3_MAX)[None, None])
    by_block = fp8.quantize(x, "k", hadamard=False)
    assert by_block.scales.shape == (2, 3, 2)
    assert torch.equal(by_block.scales.amax(-1), by_head.scales)


@CPU_ONLY
def test_infinities_become_nan_and_count_for_no_scale() -> None:
    x = random(1, 70, 1, 16)
    clean = fp8.quantize(x, "q", hadamard=False)
    loud = x.clone()
    quiet = (x.abs() < x.abs().amax() / 2).nonzero()[0]
    loud[tuple(quiet)] = torch.inf
    marked = fp8.quantize(loud, "q", hadamard=False)
    assert torch.equal(marked.scales, clean.scales)
    assert marked.values.float().isnan().nonzero().tolist() == [quiet.tolist()]
    assert (fp8.quantize(torch.full_like(x, torch.nan), "q").scales > 0).all()


@CPU_ONLY
@pytest.mark.parametrize("columns", [1, 2, 16, 64, 256])
def test_the_transform_is_orthogonal_and_seeded(columns: int) -> None:
    matrix = layout.hadamard_transform(
        torch.eye(columns, dtype=torch.float64), 7
    ) * layout.hadamard_normalizer(columns)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(columns, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, columns**-0.5))
    if columns > 16:
        other = layout.hadamard_signs(columns, 8, "cpu")
        assert not torch.equal(layout.hadamard_signs(columns, 7, "cpu"), other)
        assert abs(other.sum()) < columns / 2


@CPU_ONLY
def test_signs_are_the_same_in_every_release() -> None:
    """Caches that were quantised by an earlier one stay readable."""
    bits = "".join("-" if sign < 0 else "+" for sign in layout.hadamard_signs(48, 1, "cpu"))
    assert bits == "---+--+-+++-+-+++---++-+-+++-+-+-++--+---+----++"


@CPU_ONLY
def test_products_survive_the_transform() -> None:
    q, k = random(1, 90, 2, 48), random(1, 200, 2, 48, seed=1)
    plain = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    for seed in (0, 1):
        stored = [fp8.quantize(x, role, seed=seed) for x, role in ((q, "q"), (k, "k"))]
        ours = torch.einsum(
            "bqhd,bkhd->bhqk", *(x.dequantize(torch.float64, transformed=True) for x in stored)
        )
        assert (ours - plain).square().mean() < 2e-3 * plain.square().mean()
        # Undone, columns are those that came.
        back = stored[0].dequantize()
        assert (back - q).square().mean() < 2e-3


@CPU_ONLY
@given(st.lists(st.integers(0, 400), min_size=1, max_size=9), st.sampled_from((QUERY_BLOCK, KEY_BLOCK)))
def test_blocks_of_sequences_never_overlap(lengths: list[int], rows: int) -> None:
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    numbers = [
        layout.first_block(start, b, rows) + i
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for i in range(layout.num_blocks(length, rows))
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(n < layout.num_blocks_varlen(sum(lengths), len(lengths), rows) for n in numbers)


@CPU_ONLY
def test_key_order_is_that_of_registers() -> None:
    order = layout.key_order(64, "cpu")
    assert sorted(order.tolist()) == list(range(64))
    assert order[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    assert torch.equal(order[32:], order[:32] + 32)


@CPU_ONLY
def test_v_lies_transposed_in_key_order() -> None:
    v = random(2, 100, 3, 8)
    quantized = fp8.quantize(v, "v", method="tensor")
    assert quantized.values.shape == (2, 3, 8, KEY_BLOCK)
    keys = layout.key_order(KEY_BLOCK, "cpu")
    in_order = torch.zeros(2, KEY_BLOCK, 3, 8)
    in_order[:, :100] = v
    expected = in_order[:, keys].permute(0, 2, 3, 1) / quantized.scales.item()
    half_a_step = 1.001 / 16  # of e4m3's three bits, and float32's own rounding
    torch.testing.assert_close(quantized.values.float(), expected, rtol=half_a_step, atol=2.0**-6 / 16)


@CPU_ONLY
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_comes_before_the_transform(interleaved: bool) -> None:
    x = random(1, 20, 2, 32)
    table = tables(30, 16)
    cos, sin = (t[4:24, None] for t in table.values())
    pairs = x[0, ..., :16].float()
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    expected = torch.cat([turned, x[0, ..., 16:].float()], -1)
    for transform in (False, True):
        back = fp8.quantize(
            x, "q", hadamard=transform, rotary_offset=4, rotary_interleaved=interleaved, **table
        ).dequantize()
        assert (back[0] - expected).square().mean() < 2e-3
    per_sequence = fp8.quantize(
        x, "q", rotary_offset=torch.tensor([4], dtype=torch.int32), rotary_interleaved=interleaved, **table
    )
    assert torch.equal(per_sequence.dequantize(), back)


@CPU_ONLY
def test_a_container_is_what_it_says() -> None:
    x = random(1, 129, 2, 40)
    quantized = fp8.quantize(x, "k", seed=9)
    assert (quantized.role, quantized.method, quantized.seed) == ("k", "block", 9)
    assert (quantized.shape, quantized.dtype, quantized.device.type) == (x.shape, FP16, "cpu")
    assert quantized.values.dtype == E4M3
    assert quantized.values.shape == (1, 129, 2, 64)
    assert quantized.nbytes == 129 * 2 * 64 + 4 * 2 * 2
    assert quantized.to("cpu").scales.equal(quantized.scales)
    assert fp8.quantize(x, "v").seed is None


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("role", ["k", "v"])
def test_a_given_scale_is_used_and_larger_numbers_saturate(target: Target, role: str, varlen: bool) -> None:
    """Infinities and NaNs are NaN as ever; the scales of an earlier result give it again."""
    x = random(1, 70, 2, 16).to(target.device)
    lengths: dict[str, Any] = {}
    if varlen:
        cu_seqlens = torch.tensor([0, 70], dtype=torch.int32, device=target.device)
        x, lengths = x[0], {"cu_seqlens": cu_seqlens, "max_seqlen": 70}
    call = {"method": "head", "backend": target.backend if target.backend != "hopper" else None, **lengths}
    first = fp8.quantize(x, role, **call)
    again = fp8.quantize(x, role, scale=first.scales, **call)
    torch.testing.assert_close(again.scales, first.scales, rtol=2**-22, atol=0)
    assert (again.dequantize() - first.dequantize()).abs().max() <= 2**-3 * x.abs().max()
    small = torch.full((1, 1), 2.0**-10, device=target.device)  # 448 times it is 0.4375
    plain = fp8.quantize(x, role, hadamard=False, scale=small, **call)
    assert torch.equal(plain.scales, small.expand(1, 2))
    clamped = x.float().clamp(-0.4375, 0.4375)
    assert ((plain.dequantize() - clamped).abs() <= 2**-4 * clamped.abs() + 2**-20).all()
    x[..., 3, :, 5], x[..., 4, :, 5] = torch.inf, torch.nan
    odd = fp8.quantize(x, role, hadamard=False, scale=small, **call).dequantize()
    assert odd[..., 3:5, :, 5].isnan().all()
    assert odd.isnan().sum() == 4
