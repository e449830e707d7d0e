"""Calls that nothing observes take the plain path."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import flashtile
from flashtile.caches import BoundedCache
from flashtile.op.operation import Operation, signatures
from flashtile.operators.attention import FORWARD
from flashtile.problems.attention import Options

pytestmark = pytest.mark.quick


def rand(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def caches():
    return {"k_cache": rand(2, 20, 2, 16), "v_cache": rand(2, 20, 2, 16), "cache_seqlens": 5}


def pages():
    table = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    lengths = torch.tensor([12, 11], dtype=torch.int32)
    return {"k_cache": rand(9, 4, 2, 16), "v_cache": rand(9, 4, 2, 16), "block_table": table,
            "cache_seqlens": lengths, "prefix_seqlens": 8}  # fmt: skip


Q, K, V, SINK = rand(2, 3, 4, 16), rand(2, 3, 2, 16), rand(2, 3, 2, 16), rand(4)
CALLS = {
    "attention": (flashtile.attention, {"q": Q, "k": K, "v": V, "sink": SINK}, dict),
    "decode": (flashtile.flash_attn_with_kvcache, {"q": Q, "sink": SINK}, caches),
    "append": (flashtile.flash_attn_with_kvcache, {"q": Q, "k": K, "v": V, "sink": SINK}, caches),
    "prefix": (flashtile.flash_attn_with_shared_prefix, {"q": Q, "sink": SINK}, pages),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("call", "name"), [(c, n) for c, (_, given, _) in CALLS.items() for n in given])
def test_a_parameter_takes_the_plain_path(call, name, grad, monkeypatch):
    def traced(*arguments):
        raise AssertionError("this call went through the dispatcher")

    function, arguments, memory = CALLS[call]
    expected = function(**arguments, **memory())
    monkeypatch.setattr(Operation, "traced", traced)
    with torch.set_grad_enabled(grad):
        out = function(**arguments | {name: Parameter(arguments[name])}, **memory())
    assert torch.equal(out, expected)
    assert out.requires_grad == grad
    if grad and call == "attention":
        out.sum().backward()


def test_a_call_without_further_tensors_is_found_by_its_first_ones(monkeypatch):
    """What it does not have is neither looked at nor part of its signature."""
    flashtile.attention(Q, K, V)
    monkeypatch.setattr(Operation, "check_values", None)
    monkeypatch.setattr(FORWARD, "launches", BoundedCache(2**20))
    for _ in range(2):
        flashtile.attention(Q, K, V)
    (key,) = FORWARD.launches
    assert key == (Options(), *signatures((Q, K, V)))
