"""Decoding steps whose attention kernel also appends, on a GPU for which this is the default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import captured
from torch import Tensor

import flashtile
from cases import BF16, FP16
from decode_cases import build, case, paged
from flashtile.backends.portable.config import family
from flashtile.backends.portable.decode import launch
from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES
from flashtile.operators import decode as operators
from flashtile.testing import decode as testing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("either_work", "fresh_launches")]

SERVED = (
    case("plain", new=1, page_size=4, causal=True),
    case("to-capacity", new=1, page_size=48, lengths=(47, 46, 0)),
    case("rotary", new=1, page_size=16, rotary_dim=16, rotary_interleaved=False, lengths=(0, 7, 40)),
    case("rotary-window", new=1, page_size=1, rotary_dim=6, rotary_seqlens=(5, 1, 30), window_size=(7, 0)),
    case("splits", new=1, page_size=4, rotary_dim=8, num_splits=3, softcap=20.0),
    case("split-size", new=1, page_size=16, split_size=16, alibi="batch"),
    case("sink", new=1, page_size=5, num_splits=1, sink="own", heads=(6, 2)),
    case("head-dim-128", new=1, page_size=16, head_dim=128, rotary_dim=128, heads=(16, 1), capacity=2048,
         lengths=(2047, 1500, 63)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", SERVED, ids=lambda given: given.name)
def test_features(given: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if family(torch.device("cuda")) == "hopper":
        monkeypatch.setattr(launch, "append_kernel", None)
    tensors, arguments = build(given, dtype, "cuda")
    testing.check(*tensors, backend="portable", **arguments)


@pytest.mark.parametrize("room", [1056, 8192])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"split_size": 128}], ids=str)
@pytest.mark.parametrize("sequences", [1, 64, 300])
def test_steps_in_a_graph(
    sequences: int, splits: dict[str, int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches and the results have the bits that a separate append gives, while sequences grow."""
    steps, heads, head_dim = 20, (32, 8), 128
    first = [1000 + 7 * b % 28 for b in range(sequences)]
    generator = torch.Generator("cuda").manual_seed(1)
    cos, sin = torch.rand(2, room, head_dim // 2, device="cuda", dtype=BF16, generator=generator).unbind()
    new = torch.randn(steps, 3, sequences, 1, 32, head_dim, device="cuda", dtype=BF16, generator=generator)
    lengths = torch.tensor(first, dtype=torch.int32, device="cuda")

    def run() -> tuple[list[Tensor], list[Tensor]]:
        monkeypatch.setattr(operators, "_append_and_decode", BoundedCache(CACHE_BYTES))
        (_, *caches), arguments = paged([length + steps for length in first], heads, head_dim)
        unused = room // 16 - arguments["block_table"].shape[1]
        table = torch.nn.functional.pad(arguments["block_table"], (0, unused), value=2**31 - 1)
        arguments |= {"cache_seqlens": lengths.clone(), "block_table": table}
        q, k, v = (x.clone() for x in new[0])

        def step() -> Tensor:
            out = flashtile.flash_attn_with_kvcache(
                q, *caches, k[..., : heads[1], :], v[..., : heads[1], :], cos, sin, causal=True,
                rotary_interleaved=False, backend="portable", **arguments, **splits,
            )  # fmt: skip
            arguments["cache_seqlens"] += 1
            return out

        torch.cuda.synchronize()
        graph, out = captured(step)
        arguments["cache_seqlens"].copy_(lengths)
        outs = []
        for given in new:
            for tensor, value in zip((q, k, v), given, strict=True):
                tensor.copy_(value)
            graph.replay()
            outs.append(out.clone())
        return outs, caches

    outs, caches = run()
    monkeypatch.setattr(launch, "appends", lambda *_: False)
    expected, their_caches = run()
    for cache, other in zip(caches, their_caches, strict=True):
        assert torch.equal(cache.view(torch.int16), other.view(torch.int16))
    torch.testing.assert_close(outs, expected, rtol=0, atol=0)
