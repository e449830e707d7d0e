"""Small calls, dense and of variable length, and the results that tests compare."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from flashtile.rounding import finite, largest
from flashtile.testing import FLOAT64_UNITS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.3},
}


def needs_compiler(device="cpu"):
    """Skip a test of inductor, which compiles C++ for the CPU, where no compiler is installed."""
    if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        pytest.skip("inductor needs a C++ compiler on the CPU")


def dense(
    device="cpu", batch=2, seqlen_q=9, seqlen_k=12, heads=4, heads_kv=2, head_dim=16, grad=False, dtype=None
):
    generator = torch.Generator(device).manual_seed(0)
    sizes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    tensors = [
        torch.randn(batch, seqlen, h, head_dim, device=device, dtype=dtype, generator=generator)
        for seqlen, h in sizes
    ]
    return [tensor.requires_grad_(grad) for tensor in tensors]


def varlen(device="cpu", lengths_q=(3, 0, 6), lengths_k=(4, 2, 6), heads=4, heads_kv=2, grad=False):
    """Return ([q, k, v], keyword arguments with cu_seqlens and max_seqlen) of a packed batch."""
    q, _, _ = dense(device, 1, sum(lengths_q), 1, heads, heads_kv)
    _, k, v = dense(device, 1, 1, sum(lengths_k), heads, heads_kv)
    offsets = [
        torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    ]
    keywords = {
        "cu_seqlens_q": offsets[0],
        "cu_seqlens_k": offsets[1],
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return [t[0].detach().clone().requires_grad_(grad) for t in (q, k, v)], keywords


def slopes(device="cpu", *shape):
    return torch.rand(shape or (4,), device=device)


def results(function, tensors):
    """Return out, lse, and the gradients of a loss of both for all tensors that require one."""
    out, lse = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    loss = (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return out, lse, *torch.autograd.grad(loss, [t for t in tensors if t.requires_grad])


def results_with_backward(function, tensors):
    """Return out, lse and gradients by ``backward``, which reentrant checkpointing requires."""
    for tensor in tensors:
        tensor.grad = None
    out, lse = function(*tensors)
    (out.square().sum() + lse.sin().sum()).backward()
    return out, lse, *(t.grad for t in tensors)


def assert_same(actual, expected):
    """Check that results are equal except for rounding, which depends on a CPU's order of additions.

    The tolerance is FLOAT64_UNITS rounding units of the largest element, or of 1 if that is larger.
    """
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        size = max(largest(finite(e)), 1.0)
        torch.testing.assert_close(a, e, atol=FLOAT64_UNITS * torch.finfo(e.dtype).eps * size, rtol=0)
