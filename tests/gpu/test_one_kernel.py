"""Decoding in one kernel on the card: attention programs append, and combine their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import captured
from torch import Tensor

import flashtile
from cases import BF16, FP16
from decode_cases import CASES, build, paged
from flashtile.backends.portable.decode import config
from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES
from flashtile.operators import decode as operators
from flashtile.testing import decode as testing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_kernel")]

BY_NAME = {case.name: case for case in CASES}
REPLAYS = 100


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch, balanced_work: None) -> None:
    for name in ("COMBINES", "APPENDS"):
        monkeypatch.setattr(config, name, True)


def attend(call: tuple[tuple[Tensor, ...], dict[str, Any]]) -> tuple[Tensor, Tensor]:
    tensors, arguments = call
    return flashtile.flash_attn_with_kvcache(
        *tensors, return_softmax_lse=True, backend="portable", **arguments
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_feature(name: str, dtype: torch.dtype) -> None:
    tensors, arguments = build(BY_NAME[name], dtype, "cuda")
    testing.check(*tensors, backend="portable", **arguments)


@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("splits", [{}, {"num_splits": 40}, {"split_size": 128}], ids=str)
@pytest.mark.parametrize("sequences", [1, 64, 300])
def test_sequences_and_splits(sequences: int, splits: dict[str, int], heads: tuple[int, int]) -> None:
    longest = 20000 if sequences == 1 else 1500
    lengths = torch.randint(longest // 2, (sequences,), generator=torch.Generator().manual_seed(0))
    lengths[0] = longest
    tensors, arguments = paged(lengths.tolist(), heads, 64)
    testing.check(*tensors, backend="portable", **arguments, **splits)


@pytest.mark.parametrize("contexts", [[20000], [5000, 1, 0, 777] * 16, [300] * 300], ids=len)
def test_replays_are_bitwise_equal(contexts: list[int]) -> None:
    """Several layers in one graph: counters are 0 again, whichever program was the last."""
    calls = [paged(contexts, seed=seed) for seed in range(4)]
    expected = [attend(call) for call in calls]
    graph, results = captured(lambda: [attend(call) for call in calls])
    for _ in range(REPLAYS):
        for tensor in sum(results, ()):
            tensor.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_graphs_on_two_streams_do_not_share_counters() -> None:
    calls = [paged([9000 - 100 * i], seed=i) for i in range(2)]
    expected = [attend(call) for call in calls]
    graphs = [captured(lambda call=call: [attend(call) for _ in range(8)]) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, results), wanted in zip(graphs, expected, strict=True):
        for result in results:
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("sequences", [1, 64, 300])
def test_steps_in_a_graph_append(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has the bits, and results have the values, that separate kernels give."""
    steps, heads, head_dim = 30, (32, 8), 128
    first = [1000 + 7 * b % 50 for b in range(sequences)]
    generator = torch.Generator("cuda").manual_seed(1)
    cos, sin = torch.rand(2, 2000, head_dim // 2, device="cuda", dtype=BF16, generator=generator).unbind()
    new = torch.randn(steps, 3, sequences, 1, 32, head_dim, device="cuda", dtype=BF16, generator=generator)
    lengths = torch.tensor(first, dtype=torch.int32, device="cuda")

    def run(one_kernel: bool) -> tuple[list[Tensor], list[Tensor]]:
        for name in ("COMBINES", "APPENDS"):
            monkeypatch.setattr(config, name, one_kernel)
        (_, *caches), arguments = paged([length + steps for length in first], heads, head_dim)
        arguments["cache_seqlens"] = lengths.clone()
        q, k, v = (x.clone() for x in new[0])

        def step() -> Tensor:
            out = flashtile.flash_attn_with_kvcache(
                q, *caches, k[..., : heads[1], :], v[..., : heads[1], :], cos, sin, causal=True,
                rotary_interleaved=False, backend="portable", **arguments,
            )  # fmt: skip
            arguments["cache_seqlens"] += 1
            return out

        graph, out = captured(step)
        arguments["cache_seqlens"].copy_(lengths)
        outs = []
        for given in new:
            for tensor, value in zip((q, k, v), given, strict=True):
                tensor.copy_(value)
            graph.replay()
            outs.append(out.clone())
        return outs, caches

    outs, caches = run(True)
    for owner, name in ((operators.DECODE, "launches"), (operators, "_append_and_decode")):
        monkeypatch.setattr(owner, name, BoundedCache(CACHE_BYTES))
    expected, their_caches = run(False)
    for cache, other in zip(caches, their_caches, strict=True):
        assert torch.equal(cache.view(torch.int16), other.view(torch.int16))
    torch.testing.assert_close(outs, expected, rtol=2**-7, atol=2**-8)
