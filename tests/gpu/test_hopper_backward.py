"""The Hopper backward where the common suite does not reach: many work tiles, groups, order of additions,
streams."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from cases import BF16, FP16, Case, Inputs
from differences import describe
from flashtile import testing
from flashtile.tools.demo.corpus import python_library
from flashtile.tools.demo.llama import PRESETS, Llama
from flashtile.tools.demo.training import TrainingConfig, fit
from targets import CUDA

HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")]

SMALL = Case(
    name="small", batch=2, seqlen_q=300, seqlen_k=420, heads_q=4, heads_kv=4, head_dim=128, dtype=BF16
)
CAUSAL = replace(SMALL, causal=True)
EVERYTHING = replace(
    SMALL, softcap=3.0, alibi="batch", window_size=(150, 70), sink="float32", unused_keys=90, dtype=FP16
)
EMPTY = ((300, 420), (0, 90), (129, 0), (0, 0), (64, 128), (1, 300), (130, 65))
# More blocks of keys than multiprocessors, so that programs take several.
MANY_TILES = replace(
    CAUSAL, name="many tiles", batch=1, seqlen_q=2300, seqlen_k=2100, heads_q=12, heads_kv=12
)

GRADIENT_CASES = {
    "group-8": replace(CAUSAL, heads_q=16, heads_kv=2),
    "group-8-everything": replace(EVERYTHING, heads_q=8, heads_kv=1, head_dim=64),
    "group-8-wide": replace(CAUSAL, heads_q=8, heads_kv=1, head_dim=256),
    "group-8-varlen-empty": replace(
        CAUSAL, heads_q=8, heads_kv=1, head_dim=64, lengths=EMPTY, unused_tail=70, slack=200
    ),
    "d72-128": replace(CAUSAL, head_dim=72, head_dim_v=128),
    "d40-96": replace(CAUSAL, head_dim=40, head_dim_v=96),
    "d96-40": replace(CAUSAL, head_dim=96, head_dim_v=40, dtype=FP16),
    "d128-72-left": replace(SMALL, head_dim_v=72, window_size=(100, -1)),
    "d96-right": replace(SMALL, head_dim=96, window_size=(-1, 50), dtype=FP16),
    "d40-136": replace(CAUSAL, head_dim=40, head_dim_v=136),
    "d200-64": replace(CAUSAL, head_dim=200, head_dim_v=64),
    "wide-everything": replace(EVERYTHING, head_dim=256, heads_kv=2),
    "wide-varlen-empty": replace(CAUSAL, head_dim=256, lengths=EMPTY, unused_tail=70, slack=200),
    "softcap-alibi": replace(CAUSAL, softcap=2.0, alibi="head", dtype=FP16),
    "packed-sum": replace(SMALL, layout="packed", upstream="sum", heads_kv=2),
    "transposed": replace(SMALL, layout="transposed", upstream="transposed", heads_kv=2),
    "many-tiles": replace(MANY_TILES, head_dim=64),
    "many-tiles-gqa": replace(MANY_TILES, seqlen_q=1100, heads_q=24),
    "many-tiles-wide": replace(MANY_TILES, seqlen_q=2100, heads_q=8, heads_kv=8, head_dim=256),
    "d512": replace(SMALL, head_dim=512),
    "d320": replace(CAUSAL, head_dim=320, dtype=FP16),
    "d264-96": replace(CAUSAL, head_dim=264, head_dim_v=96, heads_kv=1),
    "d64-512": replace(SMALL, head_dim=64, head_dim_v=512, window_size=(100, -1)),
    "widest-everything": replace(EVERYTHING, head_dim=512, heads_kv=2),
    "widest-varlen-empty": replace(CAUSAL, head_dim=512, lengths=EMPTY, unused_tail=70, slack=200),
    "many-tiles-widest": replace(MANY_TILES, seqlen_q=2100, heads_q=6, heads_kv=6, head_dim=512),
}


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients(name: str) -> None:
    """In memory full of NaN, as every check."""
    replace(GRADIENT_CASES[name], name=name).inputs("cuda").check(backend="hopper")


DETERMINISTIC_CASES = ("group-8-varlen-empty", "many-tiles", "many-tiles-gqa", "many-tiles-wide", "d512")


@pytest.mark.parametrize("name", DETERMINISTIC_CASES)
def test_deterministic_gradients(name: str) -> None:
    """Held to the same rule as those added up in any order."""
    case = replace(GRADIENT_CASES[name], name=name)
    case.inputs("cuda").check(backend="hopper", deterministic=True)


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_a_gradient_that_is_not_aligned(head_dim: int) -> None:
    """TMA loads from multiples of 16 bytes only; autograd may hand over a part of another tensor."""
    inputs = replace(CAUSAL, name="unaligned", head_dim=head_dim).inputs("cuda")
    assert inputs.dout is not None
    storage = inputs.dout.new_full((inputs.dout.numel() + 1,), torch.nan)
    dout = storage[1:].view(inputs.dout.shape).copy_(inputs.dout)
    assert dout.data_ptr() % 16
    inputs._replace(dout=dout).check(backend="hopper")


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_rows_without_keys_and_keys_without_rows(head_dim: int) -> None:
    """More queries than keys under a causal mask: the first rows see nothing. A window: so do the keys."""
    case = replace(CAUSAL, name="unseen", seqlen_q=600, seqlen_k=250, head_dim=head_dim)
    inputs = case.inputs("cuda")
    dq, *_ = gradients(inputs, deterministic=False)
    assert not dq[:, :350].any()
    assert dq[:, 350:].any()
    inputs = replace(case, seqlen_q=100, seqlen_k=900, window_size=(50, 0)).inputs("cuda")
    for gradient in gradients(inputs, deterministic=False)[1:]:
        assert not gradient[:, : 900 - 150].any()
        assert gradient[:, 900 - 100 :].any()


ALONE = replace(CAUSAL, name="shared", batch=1, seqlen_q=1500, seqlen_k=1600, heads_q=8, heads_kv=1)
SHARED = {
    "one-key-head": ALONE,
    "d64": replace(ALONE, head_dim=64, softcap=3.0, sink="own"),
    "group-7": replace(ALONE, heads_q=14, heads_kv=2, dtype=FP16),
    "window": replace(ALONE, causal=False, window_size=(700, 300), alibi="batch"),
    "unused-keys": replace(ALONE, batch=2, unused_keys=90),
    "varlen": replace(
        ALONE, lengths=((1000, 1300), (0, 90), (700, 700), (1, 300)), unused_tail=70, slack=200
    ),
    "few-keys": replace(SMALL, seqlen_q=4096, seqlen_k=77, head_dim=64),
    "wide": replace(ALONE, head_dim=256),
    "widest": replace(ALONE, head_dim=512),
    "wide-varlen": replace(ALONE, head_dim=192, head_dim_v=128, lengths=((900, 900), (300, 700)), slack=100),
}
"""Few key heads, so that programs share blocks of keys."""


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_shared_blocks_of_keys(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory full of NaN; dK and dV are equal bit by bit in all runs, dQ if deterministic or wide."""
    case = replace(SHARED[name], name=name)
    inputs = case.inputs("cuda")
    explained = flashtile.explain(
        *inputs.qkv, backend="hopper", deterministic=deterministic, **inputs.arguments
    )
    assert explained["backward"].config.parts > 1
    # What poisons memory is torch's deterministic mode, in which every call is deterministic.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    inputs.check(backend="hopper", deterministic=deterministic)
    expected = gradients(inputs, deterministic)
    in_order = deterministic or case.head_dim > 128
    for run in range(20):
        pairs = list(zip(gradients(inputs, deterministic), expected, strict=True))
        same = [torch.equal(*pair) for pair in pairs]
        assert all(same[0 if in_order else 1 :]), (
            f"dq, dk, dv of run {run}: {[describe(*pair) for pair in pairs]}"
        )


def leaves_of(inputs: Inputs) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in inputs.qkv]


def forward_and_backward(inputs: Inputs, leaves: list[Tensor], deterministic: bool) -> tuple[Tensor, ...]:
    results = flashtile.attention(
        *leaves, return_lse=True, deterministic=deterministic, backend="hopper", **inputs.arguments
    )
    return torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse))


def gradients(inputs: Inputs, deterministic: bool) -> tuple[Tensor, ...]:
    with testing.poisoned_memory():
        return forward_and_backward(inputs, leaves_of(inputs), deterministic)


def repeated(heads: int, length: int, head_dim: int, causal: bool, **more: int) -> Case:
    return replace(
        SMALL, name="repeated", batch=1, seqlen_q=length, seqlen_k=length, heads_q=heads, heads_kv=heads,
        head_dim=head_dim, causal=causal, **more,
    )  # fmt: skip


REPEATED = {
    "d64-causal": (1000, repeated(24, 1024, 64, True)),
    "d64-full": (1000, repeated(24, 1024, 64, False)),
    "d128-causal": (1000, repeated(24, 1024, 128, True)),
    "d128-full": (1000, repeated(24, 1024, 128, False)),
    "d128-whole-heads": (1000, repeated(132, 512, 128, True)),
    "d256-causal": (100, repeated(12, 1024, 256, True)),
}


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize("name", REPEATED)
def test_repetitions_give_the_same_bits(name: str, busy: bool) -> None:
    """With more work tiles than programs, and beside another stream that takes multiprocessors away."""
    runs, case = REPEATED[name]
    inputs = case.inputs("cuda")
    leaves = leaves_of(inputs)
    results = flashtile.attention(
        *leaves, return_lse=True, deterministic=True, backend="hopper", **inputs.arguments
    )
    backward = partial(torch.autograd.grad, results, leaves, (inputs.dout, inputs.dlse), retain_graph=True)
    expected = backward()
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    other, operand = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    for i in range(runs):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(operand[: 128 * (1 + i % 8)], operand)
        again = backward()
        differing += torch.stack([(a != b).any() for a, b in zip(again, expected, strict=True)])
    assert differing.tolist() == [0, 0, 0]


def test_two_streams_at_once() -> None:
    """Programs that wait for the order of additions must not keep away those that they wait for."""
    calls = [
        replace(MANY_TILES, name=f"stream {i}", head_dim=head_dim).inputs("cuda")
        for i, head_dim in enumerate((64, 128))
    ]
    expected = [gradients(inputs, deterministic=True) for inputs in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for inputs, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(gradients(inputs, deterministic=True))
    done = [torch.cuda.Event() for _ in streams]
    for event, stream in zip(done, streams, strict=True):
        event.record(stream)
    deadline = time.monotonic() + 20
    while not all(event.query() for event in done):
        assert time.monotonic() < deadline, "the programs wait for each other"
        time.sleep(0.01)
    for i, each in enumerate(found):
        torch.testing.assert_close(each, expected[i % 2], rtol=0, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph_of_forward_and_backward(head_dim: int) -> None:
    """Replayed with other data: counters and dq_accum start anew each time."""
    inputs = repeated(24, 1024, head_dim, True).inputs("cuda")
    leaves = leaves_of(inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(inputs, leaves, deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(inputs, leaves, deterministic=True)
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        graph.replay()
        expected = forward_and_backward(inputs, leaves, deterministic=True)
        torch.testing.assert_close(captured, expected, rtol=0, atol=0)


class Block(nn.Module):
    """Packed projection, attention, projection: gradients arrive and leave as parts of other tensors."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.shape = (3, heads, head_dim)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, self.shape).unbind(2)
        out = flashtile.attention(q, k, v, causal=True, deterministic=True, backend="hopper")
        return x + self.out(out.flatten(2))


def test_a_compiled_training_step() -> None:
    torch.manual_seed(0)
    block = Block(heads=4, head_dim=64).to("cuda", BF16)
    x = torch.randn(2, 384, 256, device="cuda", dtype=BF16)

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x).float(), x.float().roll(1, 1))

    def step(model: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(loss(model), list(block.parameters())))

    expected = step(block)
    found = step(torch.compile(block, fullgraph=True))
    for ours, eager in zip(found, expected, strict=True):
        difference = (ours.float() - eager.float()).norm()
        assert difference <= 5e-2 * eager.float().norm()


def losses(backend: str, seed: int, config: TrainingConfig) -> Tensor:
    """Of each step of a training; ``seed`` is that of the weights, the batches are always the same."""
    torch.manual_seed(seed)
    model = Llama(config.model, partial(flashtile.attention, causal=True, backend=backend))
    return torch.tensor(fit(model.to(config.device), config, python_library()).losses)


@pytest.mark.parametrize(("head_dim", "launches"), [(128, 3), (256, 4)])
def test_a_profiler_sees_the_launches_of_repeated_calls(
    head_dim: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then Triton itself makes the descriptors, of memory that is no tensor, too."""
    runtime = pytest.importorskip("triton").knobs.runtime
    case = replace(CAUSAL, head_dim=head_dim)
    inputs = case.inputs("cuda")
    q, k, v = (t.detach().requires_grad_() for t in inputs.qkv)
    upstream = torch.randn_like(inputs.qkv[0])

    def gradients() -> tuple[Tensor, ...]:
        out = flashtile.attention(q, k, v, deterministic=True, **inputs.arguments)
        return torch.autograd.grad(out, (q, k, v), upstream)

    gradients()
    expected = gradients()
    seen: list[object] = []
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [seen.append])
    found = gradients()
    assert len(seen) == launches
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_training_takes_the_same_course() -> None:
    """As near to the portable kernels' as other initial weights are to each other."""
    config = TrainingConfig(
        PRESETS["small"], steps=300, batch=8, seqlen=512, learning_rate=6e-4, device="cuda", dtype="bfloat16"
    )
    ours, portable, other = (
        losses(backend, seed, config) for backend, seed in (("hopper", 0), ("portable", 0), ("hopper", 1))
    )
    assert ours[-20:].mean() < 0.6 * ours[0]
    smooth = partial(F.avg_pool1d, kernel_size=10)
    noise = (smooth(ours[None]) - smooth(other[None])).square().mean().sqrt()
    assert (smooth(ours[None]) - smooth(portable[None])).square().mean().sqrt() <= noise


@pytest.mark.parametrize("deterministic", [False, True])
def test_lengths_that_lie(deterministic: bool) -> None:
    """Offsets beyond the tensors, and sequences longer than was said: no fault, and nobody waits forever."""
    q, k, v = (
        torch.randn(600, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)
    )
    for last, longest in ((2**30, 600), (600, 100)):
        offsets = torch.tensor([0, 300, last], dtype=torch.int32, device="cuda")
        out = flashtile.attention(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
            deterministic=deterministic,
        )  # fmt: skip
        torch.autograd.grad(out.sum(), (q, k, v))
        torch.cuda.synchronize()
