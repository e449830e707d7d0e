"""The same call many times on a card that is busy with something else: the same bits each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashtile
from cases import BF16, FP16, Case, Inputs
from targets import Target

pytestmark = pytest.mark.gpu

RUNS = 200
DENSE = Case(name="race", seqlen_q=701, seqlen_k=1033, heads_q=6, heads_kv=2, causal=True, dtype=FP16)
LENGTHS = ((513, 700), (1, 300), (0, 9), (700, 257), (64, 64))
CALLS = [
    DENSE,
    replace(DENSE, name="race-wide", head_dim=128, dtype=BF16, causal=False),
    replace(DENSE, name="race-varlen", lengths=LENGTHS, unused_tail=31),
    replace(DENSE, name="race-everything", softcap=10.0, alibi="batch", window_size=(200, 0)),
]


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
        differing += ~torch.stack([_same_bits(*pair) for pair in zip(results, expected, strict=True)])
    counts = dict(zip(("out", "lse", "dq", "dk", "dv"), differing.tolist(), strict=True))
    assert not any(counts.values()), f"of {RUNS} runs so many differed: {counts}"


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """A scalar on the device: reading it at each run would let the card come to rest."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(integers) == b.view(integers)).all()
