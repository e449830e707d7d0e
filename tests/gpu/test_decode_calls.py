"""Decoding calls on the card: the host's time, checks of data on the device, graphs, compiled steps."""

from __future__ import annotations

import pytest
import torch

import flashtile
from cases import BF16

pytestmark = pytest.mark.gpu

BATCH, HEADS, HEADS_KV, HEAD_DIM, PAGE = 4, 8, 2, 128, 16


def call(append=False, rotary=False):
    """Arguments of a step over four sequences in pages."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        arguments = {
            "q": torch.randn(BATCH, 1, HEADS, HEAD_DIM, dtype=BF16),
            "k_cache": torch.randn(40, PAGE, HEADS_KV, HEAD_DIM, dtype=BF16),
            "v_cache": torch.randn(40, PAGE, HEADS_KV, HEAD_DIM, dtype=BF16),
            "cache_seqlens": torch.tensor([5, 70, 0, 130], dtype=torch.int32),
            "block_table": torch.randperm(40).view(BATCH, 10).int(),
            "causal": True,
        }
        if append:
            arguments |= {name: torch.randn(BATCH, 1, HEADS_KV, HEAD_DIM, dtype=BF16) for name in "kv"}
        if rotary:
            angles = torch.rand(160, HEAD_DIM // 2) * 6
            arguments |= {"rotary_cos": angles.cos().to(BF16), "rotary_sin": angles.sin().to(BF16)}
    return arguments


BAD = {
    "length": ({"cache_seqlens": [5, 70, 0, 161]}, "cache_seqlens .* got 161 at entry 3"),
    "negative length": ({"cache_seqlens": [5, -1, 0, 130]}, "cache_seqlens .* got -1 at entry 1"),
    "append past the last page": ({"cache_seqlens": [5, 70, 0, 160]}, "tokens to append .* got 161"),
    "block": (
        {"block_table": (1, 2, 40)},
        r"block_table must name blocks from 0 to 39 .* got 40 at \[1, 2\]",
    ),
}


def spoilt(name):
    arguments = call(append=name.startswith("append"))
    ((argument, value),) = BAD[name][0].items()
    if argument == "block_table":
        row, column, block = value
        arguments[argument][row, column] = block
    else:
        arguments[argument] = torch.tensor(value, dtype=torch.int32, device="cuda")
    return arguments


@pytest.mark.parametrize("name", BAD)
def test_data_on_the_device_is_checked_when_asked(name):
    with pytest.raises(ValueError, match=BAD[name][1]):
        flashtile.flash_attn_with_kvcache(**spoilt(name), debug_checks=True)


def test_data_on_the_device_is_checked_under_the_environments_variable(monkeypatch):
    monkeypatch.setenv("FLASHTILE_DEBUG", "1")
    with pytest.raises(ValueError, match="block_table"):
        flashtile.flash_attn_with_kvcache(**spoilt("block"))


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_no_fault(name):
    """Unchecked, the result is undefined; but what follows on the device is not."""
    flashtile.flash_attn_with_kvcache(**spoilt(name))
    torch.cuda.synchronize()


def test_two_writers_of_one_page_are_found():
    arguments = call(append=True)
    arguments["block_table"][1, 4] = arguments["block_table"][0, 0]
    arguments["cache_seqlens"][1] = 4 * PAGE + 5
    with pytest.raises(ValueError, match="two tokens at offset 5 of block"):
        flashtile.flash_attn_with_kvcache(**arguments, debug_checks=True)


def generate(arguments, steps):
    """A few steps: each appends and attends; lengths grow on the device."""
    outs = []
    for _ in range(steps):
        outs.append(flashtile.flash_attn_with_kvcache(**arguments))
        arguments["cache_seqlens"].add_(1)
    return outs


@pytest.mark.usefixtures("either_work")
def test_one_graph_is_replayed_as_sequences_grow():
    expected_from, replayed = call(append=True, rotary=True), call(append=True, rotary=True)
    expected = generate(expected_from, 20)
    warm = {n: a.clone() if isinstance(a, torch.Tensor) else a for n, a in replayed.items()}
    generate(warm, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = generate(replayed, 1)
    for step in expected:
        graph.replay()
        torch.testing.assert_close(out, step, rtol=1e-2, atol=1e-2)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(replayed[name], expected_from[name])


@pytest.mark.usefixtures("either_work")
def test_a_shared_prefix_is_captured_too():
    arguments = call()
    arguments["block_table"][:, :4] = arguments["block_table"][0, :4]
    arguments["cache_seqlens"].clamp_(min=70)
    prefix = dict(arguments, prefix_seqlens=64)
    expected = flashtile.flash_attn_with_kvcache(**arguments)
    flashtile.flash_attn_with_shared_prefix(**prefix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.flash_attn_with_shared_prefix(**prefix)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def test_a_compiled_step_equals_the_eager_one():
    eager, compiled = call(append=True, rotary=True), call(append=True, rotary=True)
    out = flashtile.flash_attn_with_kvcache(**eager)
    got = torch.compile(flashtile.flash_attn_with_kvcache, fullgraph=True)(**compiled)
    torch.testing.assert_close(got, out, rtol=0, atol=0)
    assert torch.equal(eager["k_cache"], compiled["k_cache"])


@pytest.mark.parametrize("append", [False, True])
def test_one_graph_writes_into_static_buffers(append):
    """Nothing is allocated for results, nor copied: ``num_splits=1`` leaves no parts either."""
    arguments = call(append) | {"num_splits": 1, "return_softmax_lse": True}
    expected = flashtile.flash_attn_with_kvcache(**arguments)
    buffers = {"out": torch.empty_like(expected[0]), "lse": torch.empty_like(expected[1])}
    flashtile.flash_attn_with_kvcache(**arguments, **buffers)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    flashtile.flash_attn_with_kvcache(**arguments, **buffers)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashtile.flash_attn_with_kvcache(**arguments, **buffers)
    for buffer in buffers.values():
        buffer.fill_(float("nan"))
    graph.replay()
    for buffer, result in zip(buffers.values(), expected, strict=True):
        assert torch.equal(buffer, result)
