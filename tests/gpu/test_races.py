"""The same call many times on a card that is busy with something else: the same bits each time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from cases import BF16, FP16, Case, Inputs
from decode_cases import paged
from differences import describe, same_bits
from flashtile import masks
from flashtile.testing import decode as testing
from targets import Target

pytestmark = pytest.mark.gpu

RUNS = 200
DECODING_RUNS = 1000
DENSE = Case(name="race", seqlen_q=701, seqlen_k=1033, heads_q=6, heads_kv=2, causal=True, dtype=FP16)
LENGTHS = ((513, 700), (1, 300), (0, 9), (700, 257), (64, 64))
CALLS = [
    DENSE,
    replace(DENSE, name="race-wide", head_dim=128, dtype=BF16, causal=False),
    replace(DENSE, name="race-varlen", lengths=LENGTHS, unused_tail=31),
    replace(DENSE, name="race-everything", softcap=10.0, alibi="batch", window_size=(200, 0)),
]

CONTEXTS = [5000, 1, 0, 777, 4096, 300]
OVER_PAGES: dict[str, dict[str, Any]] = {
    "one-token": {},
    "guesses": {"seqlen_q": 8},
    "guesses-page-1": {"seqlen_q": 8, "page_size": 1},
    "guesses-fp8": {"seqlen_q": 8, "cache_dtype": torch.float8_e4m3fn},
    "chunks": {"seqlen_q": 200},
    "mixed": {"seqlen_q": (1, 1, 0, 300, 64, 8)},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.1, "causal": True},
    "mask_mod": {"mask_mod": masks.window(150, 30)},
    "bias": {"causal": True},
}


SHARED = Case(
    name="shared", batch=1, seqlen_q=1500, seqlen_k=1600, heads_q=8, heads_kv=1, head_dim=512, dtype=BF16,
    causal=True,
)  # fmt: skip
"""Few key heads, so that several programs of Hopper's backward share a block of keys."""


class Adversary:
    """Two other streams that compete for the card's multiprocessors and memory."""

    def __init__(self) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._operand = torch.randn(1536, 1536, device="cuda", dtype=FP16)
        self._buffer = torch.zeros(2**26, device="cuda", dtype=torch.uint8)
        torch.cuda.synchronize()

    def disturb(self, i: int) -> None:
        """Queue work of a size that changes with ``i``."""
        with torch.cuda.stream(self._streams[0]):
            for size in (128 * (1 + i % 12), 128 * (1 + i % 5)):
                torch.mm(self._operand[:size], self._operand)
        with torch.cuda.stream(self._streams[1]):
            self._buffer[: 2**26 >> (i % 8)].add_(1)


def forward_and_backward(target: Target, inputs: Inputs) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs.qkv]
    out, lse = flashtile.attention(
        *leaves, return_lse=True, deterministic=True, backend=target.backend, **inputs.arguments
    )
    gradients = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    return out.detach(), lse.detach(), *gradients


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_same_bits_on_a_busy_card(gpu_target: Target, call: Case) -> None:
    inputs = call.inputs("cuda")
    expected = forward_and_backward(gpu_target, inputs)
    inputs.check(backend=gpu_target.backend, deterministic=True)
    differing = torch.zeros(len(expected), dtype=torch.int64, device="cuda")
    adversary = Adversary()
    for i in range(RUNS):
        adversary.disturb(i)
        results = forward_and_backward(gpu_target, inputs)
        differing += ~torch.stack([same_bits(*pair) for pair in zip(results, expected, strict=True)])
    counts = dict(zip(("out", "lse", "dq", "dk", "dv"), differing.tolist(), strict=True))
    assert not any(counts.values()), f"of {RUNS} runs so many differed: {counts}"


@pytest.mark.parametrize("head_dim", [192, 256, 320, 512])
def test_shared_blocks_of_keys_on_a_busy_card(head_dim: int) -> None:
    """Only the backward, of wide heads. A gradient that differs is kept, so that a failure says where."""
    inputs = replace(SHARED, head_dim=head_dim).inputs("cuda")
    leaves = [t.detach().requires_grad_() for t in inputs.qkv]
    results = flashtile.attention(*leaves, return_lse=True, deterministic=True, **inputs.arguments)
    backward = partial(torch.autograd.grad, results, leaves, (inputs.dout, inputs.dlse), retain_graph=True)
    expected = backward()
    kept = [t.clone() for t in expected]
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    adversary = Adversary()
    for i in range(RUNS):
        adversary.disturb(i)
        found = backward()
        differs = ~torch.stack([same_bits(*pair) for pair in zip(found, expected, strict=True)])
        differing += differs
        kept = [torch.where(differs[n], *pair) for n, pair in enumerate(zip(found, kept, strict=True))]
    assert not differing.any(), (
        f"of {RUNS} runs so many differed in dq, dk, dv: {differing.tolist()}; the last ones: "
        f"{[describe(*pair) for pair in zip(kept, expected, strict=True)]}"
    )


@pytest.mark.parametrize("name", OVER_PAGES)
def test_decoding_same_bits_on_a_busy_card(name: str) -> None:
    tensors, arguments = paged(CONTEXTS, **OVER_PAGES[name])
    testing.check(*tensors, causal=True, **arguments)
    arguments |= {"causal": True, "return_softmax_lse": True}
    expected = flashtile.flash_attn_with_kvcache(*tensors, **arguments)
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    adversary = Adversary()
    for i in range(DECODING_RUNS):
        adversary.disturb(i)
        results = flashtile.flash_attn_with_kvcache(*tensors, **arguments)
        differing += ~torch.stack([same_bits(*pair) for pair in zip(results, expected, strict=True)])
    assert not differing.any(), f"of {DECODING_RUNS} runs so many differed in out, lse: {differing.tolist()}"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_functions_same_bits_on_a_busy_card(name: str, head_dim: int) -> None:
    """Of a call with dropout, a mask or a bias and its gradient; each run draws the same dropout."""
    torch.manual_seed(0)
    arguments = dict(FUNCTIONS[name])
    q, k, v = (
        torch.randn(2, n, heads, head_dim, device="cuda", dtype=BF16).requires_grad_()
        for n, heads in ((700, 6), (1033, 2), (1033, 2))
    )
    leaves = [q, k, v]
    if name == "bias":
        arguments["bias"] = torch.randn(1, 6, 700, 1033, device="cuda", dtype=BF16).requires_grad_()
        leaves.append(arguments["bias"])

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        out = flashtile.attention(q, k, v, deterministic=True, **arguments)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    expected = results()
    differing = torch.zeros(len(expected), dtype=torch.int64, device="cuda")
    adversary = Adversary()
    for i in range(RUNS):
        adversary.disturb(i)
        differing += ~torch.stack([same_bits(*pair) for pair in zip(results(), expected, strict=True)])
    assert not differing.any(), f"of {RUNS} runs so many differed: {differing.tolist()}"
