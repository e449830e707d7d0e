"""CUDA graphs, other streams, no host synchronisation, other devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashtile
from cases import FP16, Case, Inputs
from targets import Target

pytestmark = pytest.mark.gpu

DENSE = Case(name="stream", seqlen_q=200, seqlen_k=333, causal=True, dtype=FP16)
VARLEN = replace(DENSE, name="stream-varlen", lengths=((100, 150), (64, 64), (3, 200)), slack=60)
both_layouts = pytest.mark.parametrize("call", [DENSE, VARLEN], ids=["dense", "varlen"])


def leaves_of(inputs: Inputs) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in inputs.qkv]


def forward_and_backward(
    target: Target, leaves: list[Tensor], inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, lse = flashtile.attention(
        *leaves, return_lse=True, deterministic=True, backend=target.backend, **inputs.arguments
    )
    return out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))


def assert_same_bits(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@both_layouts
def test_graph_replays_with_new_data(gpu_target: Target, call: Case) -> None:
    inputs = call.inputs("cuda")
    leaves = leaves_of(inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(gpu_target, leaves, inputs)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(gpu_target, leaves, inputs)

    lengths = None if call.lengths is None else ((10, 30), (150, 184), (7, 200))
    other = replace(call, name="other data", lengths=lengths).inputs("cuda")
    static = (*leaves, inputs.dout, inputs.dlse)
    with torch.no_grad():
        for tensor, new in zip(static, (*other.qkv, other.dout, other.dlse), strict=True):
            tensor.copy_(new)
        for name, value in other.arguments.items():  # the lengths of the sequences are data, too
            if isinstance(value, Tensor):
                inputs.arguments[name].copy_(value)
    graph.replay()
    other = other._replace(arguments=inputs.arguments)  # the same bounds of the lengths
    assert_same_bits(captured, forward_and_backward(gpu_target, leaves_of(other), other))


def test_graph_of_a_decoding_step(gpu_target: Target) -> None:
    """Forward alone, without autograd, replayed for a growing sequence."""
    inputs = replace(DENSE, name="decode", lengths=((1, 300), (1, 40))).inputs("cuda")
    arguments = {**inputs.arguments, "return_lse": True, "backend": gpu_target.backend}

    def attend() -> tuple[Tensor, Tensor]:
        return flashtile.attention(*inputs.qkv, **arguments)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for first in (1, 150, 299):
        lengths = torch.tensor([0, first, 340], dtype=torch.int32, device="cuda").clamp(max=first + 300)
        arguments["cu_seqlens_k"].copy_(lengths)
        graph.replay()
        assert_same_bits(captured, attend())


@both_layouts
def test_a_second_stream(gpu_target: Target, call: Case) -> None:
    """Work queued on a stream waits for what that stream waits for, and for no other."""
    inputs = call.inputs("cuda")
    expected = forward_and_backward(gpu_target, leaves_of(inputs), inputs)
    late = [torch.zeros_like(t) for t in inputs.qkv]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for tensor, value in zip(late, inputs.qkv, strict=True):
            tensor.copy_(value)
        results = forward_and_backward(gpu_target, [t.requires_grad_() for t in late], inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(results, expected)


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both_layouts
def test_the_host_never_waits(gpu_target: Target, call: Case) -> None:
    """Neither a first call of a signature nor a repeated one."""
    inputs = replace(call, name="no wait", head_dim=72).inputs("cuda")
    with synchronisation_forbidden():
        for _ in range(2):
            forward_and_backward(gpu_target, leaves_of(inputs), inputs)
        with pytest.raises(RuntimeError, match="synchroniz"):
            inputs.q.sum().item()


@both_layouts
def test_the_host_runs_ahead(gpu_target: Target, call: Case) -> None:
    """A call returns while the card is still busy with what was queued before it."""
    inputs = call.inputs("cuda")
    leaves = leaves_of(inputs)
    forward_and_backward(gpu_target, leaves, inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    forward_and_backward(gpu_target, leaves, inputs)
    assert not busy.query(), "the call waited for the card"
    torch.cuda.synchronize()


def test_a_device_that_is_not_current(gpu_target: Target) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    inputs = DENSE.inputs("cuda:1")
    inputs.check(backend=gpu_target.backend)
    assert torch.cuda.current_device() == 0
