"""Calls of products with a weight, their inputs in hard memory, and the oracle they are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashtile.linear import linear, linear_before_norm, linear_qkv
from flashtile.problems.linear import (
    E4M3,
    QKV,
    SWIGLU,
    BeforeNormOptions,
    BeforeNormTensors,
    LinearOptions,
    LinearProblem,
    LinearTensors,
    QkvOptions,
    QkvTensors,
)
from flashtile.reference.linear import before_norm, epilogue, product, rms_norm, slots_of, turn
from flashtile.testing import compare, poisoned_memory, random_tensor

PAGES, PAGE_SIZE, HEADS_KV = 12, 4, 2
POSITIONS = 10
"""With angles; the block table reaches further."""


@dataclass(frozen=True)
class Call:
    """A product by its sizes and options."""

    M: int
    N: int
    K: int
    epilogue: str = "plain"
    bias: bool = False
    norm: bool = False
    residual: bool = False
    x_scale: bool = False
    next_norm: bool = False
    scales: str = "none"
    head_dim: int = 16
    rotary_dim: int = 0
    interleaved: bool = False
    slots: bool = False
    head_norm: bool = False

    @property
    def name(self) -> str:
        flags = ("bias", "norm", "residual", "x_scale", "next_norm", "interleaved", "slots", "head_norm")
        words = [word for word in flags if getattr(self, word)]
        words += [self.scales] * (self.scales != "none") + [f"rotary{self.rotary_dim}"] * (
            self.rotary_dim > 0
        )
        return "-".join([f"{self.M}x{self.N}x{self.K}", self.epilogue, *words])


CALLS = (
    Call(1, 48, 64),
    Call(1, 33, 50, bias=True),
    Call(2, 40, 136, norm=True, residual=True),
    Call(3, 7, 9, norm=True),
    Call(5, 70, 72, "silu_and_mul", bias=True, norm=True, residual=True),
    Call(1, 26, 130, "silu_and_mul", norm=True),
    Call(17, 64, 64, residual=True),
    Call(70, 20, 24, bias=True),
    Call(1, 40, 260, scales="channel", bias=True),
    Call(9, 130, 260, scales="block", norm=True),
    Call(2, 130, 140, "silu_and_mul", scales="block"),
    Call(3, 40, 136, x_scale=True, residual=True, next_norm=True),
    Call(1, 300, 72, residual=True, next_norm=True),
    Call(70, 36, 24, bias=True, norm=True, next_norm=True),
    Call(18, 200, 40, residual=True, next_norm=True),
    Call(40, 40, 300, residual=True, next_norm=True),
    Call(18, 72, 40, "silu_and_mul", x_scale=True, scales="channel"),
    Call(65, 128, 40, "qkv", rotary_dim=16, x_scale=True, slots=True),
    Call(1, 128, 64, "qkv", norm=True, rotary_dim=16),
    Call(5, 128, 72, "qkv", bias=True, rotary_dim=8),
    Call(4, 128, 40, "qkv", rotary_dim=8, interleaved=True, slots=True),
    Call(3, 96, 40, "qkv", slots=True, scales="channel"),
    Call(70, 128, 40, "qkv", rotary_dim=16, norm=True, slots=True),
    Call(5, 144, 40, "qkv", rotary_dim=8, norm=True, head_norm=True),
    Call(
        18, 832, 260, "qkv", bias=True, x_scale=True, head_dim=64, rotary_dim=64, slots=True, head_norm=True
    ),
    Call(70, 128, 40, "qkv", rotary_dim=16, interleaved=True, x_scale=True, slots=True, head_norm=True),
)


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor
    given: dict[str, Any]
    caches: tuple[Tensor, ...]


def make_inputs(call: Call, dtype: torch.dtype, device: str, aligned: bool = False) -> Inputs:
    """x and the weight are parts of larger memory that is full of NaN, unless ``aligned``."""

    def matrix(rows: int, columns: int, seed: int) -> Tensor:
        layout = "contiguous" if aligned else "offset"
        return random_tensor((rows, 1, columns), dtype, device, seed=seed, layout=layout)[:, 0]

    def vector(size: int, seed: int) -> Tensor:
        return random_tensor((size,), dtype, device, seed=seed)

    M, N, K = call.M, call.N, call.K
    weight = matrix(N, K, 1)
    given: dict[str, Any] = {}
    if call.scales != "none":
        weight = (weight * 8).to(E4M3)
        shape = (N,) if call.scales == "channel" else (-(-N // 128), -(-K // 128))
        given["weight_scale"] = random_tensor(shape, torch.float32, device, seed=2).abs() + 0.1
    if call.bias:
        given["bias"] = vector(N, 3)
    if call.norm:
        given["norm_weight"] = vector(K, 4)
    if call.x_scale:
        given["x_scale"] = random_tensor((M,), torch.float32, device, seed=9)
    if call.next_norm:
        given["next_norm_weight"] = vector(N, 10)
    if call.residual:
        given["residual"] = matrix(M, N if call.epilogue == "plain" else N // 2, 5)
    caches: tuple[Tensor, ...] = ()
    if call.epilogue == QKV:
        storage = torch.full(
            (2, PAGES, PAGE_SIZE, HEADS_KV, call.head_dim + 8), 7.0, dtype=dtype, device=device
        )
        caches = tuple(storage[..., : call.head_dim])
        generator = torch.Generator().manual_seed(6)
        if call.slots:
            slots = torch.randperm(PAGES * PAGE_SIZE + 40, generator=generator)[:M] - 8
            given["slot_mapping"] = slots.to(device)  # some are negative, some behind the last page
        if not call.slots or call.rotary_dim:
            positions = torch.randint(-1, POSITIONS + 4, (M,), generator=generator).to(torch.int32)
            given["positions"] = positions.to(device)
        if not call.slots:
            table = torch.randperm(PAGES * 3, generator=generator)[: M * 3].view(M, 3) - 2
            given["block_table"] = table.to(torch.int32).to(device)
        if call.rotary_dim:
            for i, name in enumerate(("rotary_cos", "rotary_sin")):
                shape = (POSITIONS, call.rotary_dim // 2)
                given[name] = random_tensor(shape, torch.float32, device, seed=7 + i)
            given["rotary_interleaved"] = call.interleaved
        if call.head_norm:
            given["q_norm_weight"], given["k_norm_weight"] = (vector(call.head_dim, 11 + i) for i in range(2))
    return Inputs(matrix(M, K, 0), weight, given, caches)


def run(call: Call, inputs: Inputs, **options: Any) -> Any:
    if call.epilogue == QKV:
        return linear_qkv(inputs.x, inputs.weight, *inputs.caches, **inputs.given, **options)
    if call.next_norm:
        return linear_before_norm(inputs.x, inputs.weight, **inputs.given, **options)
    activation = SWIGLU if call.epilogue == SWIGLU else None
    return linear(inputs.x, inputs.weight, activation=activation, **inputs.given, **options)


def describe(call: Call, inputs: Inputs) -> LinearProblem:
    given = {k: v for k, v in inputs.given.items() if k != "rotary_interleaved"}
    if call.epilogue == QKV:
        options = QkvOptions(rotary_interleaved=call.interleaved)
        return LinearProblem.from_qkv(inputs.x, inputs.weight, *inputs.caches, QkvTensors(**given), options)
    if call.next_norm:
        tensors = BeforeNormTensors(**given)
        return LinearProblem.from_before_norm(inputs.x, inputs.weight, tensors, BeforeNormOptions())
    options = LinearOptions(None if call.epilogue == "plain" else call.epilogue)
    return LinearProblem.from_linear(inputs.x, inputs.weight, LinearTensors(**given), options)


def expected(call: Call, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The result and the caches, computed in ``dtype``."""
    problem = describe(call, inputs)
    given = inputs.given
    parts = (given.get(name) for name in ("bias", "weight_scale", "norm_weight", "x_scale"))
    y = product(problem, inputs.x, inputs.weight, *parts, dtype)
    if call.epilogue != QKV:
        return [epilogue(problem, y, given.get("residual"))]
    heads = problem.heads
    q, k, v = y.view(call.M, -1, call.head_dim).split([heads.num_heads_q, HEADS_KV, HEADS_KV], 1)
    q, k = (
        rms_norm(t, given.get(f"{name}_norm_weight"), problem.norm_eps) for t, name in ((q, "q"), (k, "k"))
    )
    angles = [given.get(name) for name in ("rotary_cos", "rotary_sin", "positions")]
    slots = slots_of(problem, given.get("positions"), given.get("slot_mapping"), given.get("block_table"))
    token = (slots >= 0).nonzero().squeeze(1)
    results = [turn(q, *angles, call.interleaved)]
    for cache, new in zip(inputs.caches, (turn(k, *angles, call.interleaved), v), strict=True):
        filled = torch.full_like(cache, 7.0, dtype=dtype)
        filled[slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE] = new[token]
        results.append(filled)
    return results


def check(call: Call, dtype: torch.dtype, device: str, aligned: bool = False, **options: Any) -> None:
    """Hold a call to the error rule; memory that it allocates is poisoned."""
    inputs = make_inputs(call, dtype, device, aligned)
    exact, plain = expected(call, inputs, torch.float64), expected(call, inputs, dtype)
    with poisoned_memory():
        y = run(call, inputs, **options)
    if call.next_norm:
        y, *following = y
        _, scaled, factor = before_norm(describe(call, inputs), y, inputs.given["next_norm_weight"])
        assert torch.equal(following[0], scaled)
        torch.testing.assert_close(following[1], factor, rtol=1e-6, atol=0)
    assert y.dtype == dtype
    for name, actual, right, torchs in zip(("y", "k", "v"), (y, *inputs.caches), exact, plain, strict=False):
        comparison = compare(name, actual, right, torchs.to(dtype))
        assert comparison.holds, str(comparison)


def shifted(call: Call, **changes: Any) -> Call:
    return replace(call, **changes)
