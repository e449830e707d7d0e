"""What a call costs besides time: memory."""

from __future__ import annotations

import pytest
import torch

import flashtile
from cases import BF16, Case
from targets import Target

pytestmark = pytest.mark.gpu


def peak_over_tensors(target: Target, call: Case, backward: bool) -> float:
    """Peak memory of a call over the bytes of its inputs, outputs, gradients and lse.

    Where the Hopper kernels add up dQ, or parts of dK and dV, in memory, these float32 count as tensors, too.
    """
    inputs = call.inputs("cuda")
    leaves = [t.detach().requires_grad_(backward) for t in inputs.qkv]
    dout = inputs.dout if backward else None
    del inputs
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flashtile.attention(*leaves, causal=True, return_lse=True, backend=target.backend)
    given = [*leaves] if dout is None else [*leaves, dout]
    made = [out, lse]
    if dout is not None:
        made += torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    sums = 0
    if backward and target.name == "hopper":
        config = flashtile.explain(*leaves, causal=True)["backward"].config
        parts = config.parts if config.parts > 1 else 0
        sums = 4 * (leaves[0].numel() + parts * (leaves[1].numel() + leaves[2].numel()))
    return (grown + size_of(given)) / (size_of(given + made) + sums)


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("seqlen", [4096, 16384])
@pytest.mark.parametrize("heads_kv", [16, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_memory_is_that_of_the_tensors(
    gpu_target: Target, seqlen: int, heads_kv: int, backward: bool
) -> None:
    """Linear in the sequence length, and hardly more than what goes in and comes out."""
    shape = {"batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": 16, "head_dim": 128}
    call = Case(name="memory", heads_kv=heads_kv, dtype=BF16, **shape)
    peak_over_tensors(gpu_target, call, backward)  # compiles
    assert peak_over_tensors(gpu_target, call, backward) < 1.1
