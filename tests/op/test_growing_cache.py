"""Steps over a dense cache that grows: a launch made from the last is the one that would be prepared, and
Transformers' layers find it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashtile import flash_attn_with_kvcache, torch_private
from flashtile.backends import portable
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.portable.decode import config, launch
from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES
from flashtile.operators.decode import DECODE

FIRST = object()
LENGTHS = [*range(1, 20), 63, 64, 65, 127, 128, 129, 512, 1023, 1025, 4096, 4100, 9000]


@pytest.fixture
def kernels(monkeypatch, fresh_launches):
    """Launches as on an H200, of kernels that nothing compiles; a list of (kernel, arguments, whether it was
    compiled for that, addresses of its first tensors) that were run."""
    run: list[tuple] = []

    def launches(kernel, fixed):
        def launcher(stream, tensors):
            places = [t.data_ptr() for t in tensors[:4] if isinstance(t, torch.Tensor)]
            run.append((kernel, fixed, stream is FIRST, places))

        launcher.with_fixed = lambda fixed: launches(kernel, fixed)
        return launcher

    def compile_kernel(self, device, tensors):
        self._index = None  # of the CPU
        self._run = launches((self.kernel.__name__, self.programs), self._fixed)
        self._run(FIRST, tensors)

    monkeypatch.setattr(CachedLaunch, "_compile", compile_kernel)
    monkeypatch.setattr(torch_private, "cuda_device", lambda: None)
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: 0)
    monkeypatch.setattr(portable, "reason_of_device", lambda *arguments: None)
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(config, "family", lambda device: "hopper")
    return run


@pytest.mark.parametrize("static", [False, True], ids=["concatenated", "static"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rows", "arguments", "reused"),
    [
        ((32, 8), 64, 1, {}, True),
        ((32, 8), 64, 1, {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, True),
        ((8, 2), 128, 2, {"window_size": (100, 0), "softcap": 20.0}, True),
        ((8, 2), 128, 2, {"attention_chunk": 100, "causal": True}, True),
        ((6, 3), 40, 1, {"sink": torch.zeros(6)}, None),  # strides of 16 or not, by length
        ((8, 2), 64, 1, {"split_size": 128}, False),
        ((8, 2), 64, 1, {"num_splits": 3}, True),
    ],
)
def test_a_launch_for_another_length(kernels, heads, head_dim, rows, arguments, reused, static):
    whole = torch.zeros(2, heads[1], max(LENGTHS), head_dim, dtype=torch.bfloat16)
    q = torch.zeros(2, rows, heads[0], head_dim, dtype=torch.bfloat16)
    prepared = []

    def run(anew: bool) -> list[tuple]:
        kernels.clear()
        for length in LENGTHS:
            if anew:
                DECODE.launches.clear()
                DECODE._grown.clear()
            cache = whole[:, :, :length] if static else whole[:, :, :length].contiguous()
            flash_attn_with_kvcache(
                q, cache.transpose(1, 2), cache.transpose(1, 2), backend="portable", **arguments
            )
        prepared.append(sum(1 for name, _, first, _ in kernels if first and "decode" in name[0]))
        return [found[:2] for found in kernels]

    assert run(anew=False) == run(anew=True)
    assert prepared[1] == len(LENGTHS)
    assert reused is None or (prepared[0] < prepared[1] / 2) == reused


def test_a_launch_for_a_length_that_needs_addresses_of_64_bits(kernels, tmp_path):
    """A static cache whose last tokens are 2**31 elements after its first: kernels for that are others."""
    heads, head_dim, elements = 8, 64, 2**31
    capacity = (elements // head_dim - 2048) // (2 * heads - 1)
    with (tmp_path / "cache").open("wb") as file:
        file.truncate(2 * 2 * heads * capacity * head_dim)  # a sparse file: no memory, no disk
    memory = torch.from_file(
        str(tmp_path / "cache"), shared=True, size=2 * heads * capacity * head_dim, dtype=torch.bfloat16
    )
    q = torch.zeros(2, 1, heads, head_dim, dtype=torch.bfloat16)
    whole, prepared = memory.view(2, heads, capacity, head_dim), []
    for length in (100, 101, 4000, 4001, 102):
        kernels.clear()
        cache = whole[:, :, :length].transpose(1, 2)
        flash_attn_with_kvcache(q, cache, cache, backend="portable", num_splits=2)
        prepared.append(any(first for name, _, first, _ in kernels if "decode" in name[0]))
    assert prepared == [True, False, True, False, True]


@pytest.fixture
def steps(monkeypatch):
    """Transformers' attention, with no steps known."""
    pytest.importorskip("transformers")
    from flashtile.integrations import transformers_attention
    from flashtile.integrations.transformers_attention import serving

    monkeypatch.setattr(transformers_attention, "_launches", BoundedCache(CACHE_BYTES))
    monkeypatch.setattr("flashtile.op.selection.PREFERENCE", ("portable",))
    return transformers_attention, serving(None)


@torch.no_grad()
def test_the_layers_of_a_step_share_a_launch(kernels, steps):
    """Each with its own tensors, whatever came before: the same kernels as by the usual way."""
    known, serve = steps
    module = SimpleNamespace(is_causal=True)
    query = torch.zeros(3, 2, 8, 1, 64, dtype=torch.bfloat16)

    def run(usual: bool) -> list[tuple]:
        kernels.clear()
        for length in (2, 64, 3, 129, 64, 4096):
            caches = torch.zeros(3, 2, 2, 2, length, 64, dtype=torch.bfloat16)
            for layer in range(3):
                if usual:
                    known._launches.clear()
                out, _ = serve(module, query[layer], *caches[layer], None, scaling=0.125)
                assert (out.shape, out.is_contiguous()) == ((2, 1, 8, 64), True)
                tensors = [query[layer], *caches[layer], out]
                attend = [found for found in kernels if "decode" in found[0][0]]
                assert attend[-1][3] == [t.data_ptr() for t in tensors]
        return [found[:2] for found in kernels]

    found = run(usual=False)
    assert len(known._launches) == 5
    assert found == run(usual=True)


@pytest.mark.parametrize(
    "other",
    [
        {"output_attentions": True},
        {"s_aux": torch.ones(8)},
        {"dropout": 0.1},
        {"position_ids": torch.tensor([[0, 1]])},
        {"attention_mask": torch.ones(2, 1, 1, 50, dtype=torch.bool)},
        {"cu_seq_lens_q": torch.tensor([0, 1, 2])},
        {"scaling": None},
        "gradients",
        "autocast",
    ],
    ids=str,
)
def test_what_else_a_layer_has_goes_the_usual_way(kernels, steps, other, monkeypatch):
    known, serve = steps
    query = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 2, 2, 50, 64, dtype=torch.bfloat16)
    named: dict[str, Any] = {"attention_mask": None, "scaling": 0.125}

    def step(**other: Any) -> None:
        serve(SimpleNamespace(is_causal=True), query, *cache, **named | other)

    with torch.no_grad():
        step()
        found = []
        monkeypatch.setattr(known._launches, "get", found.append, raising=False)
        step()
    assert len(found) == 1
    attention = "flashtile.integrations.transformers_attention"
    for usual, result in (("_dense", query), ("_packed", query), ("_with_scores", (query, None))):
        monkeypatch.setattr(f"{attention}.{usual}", lambda *_, result=result: result)
    if other == "gradients":
        step()
    elif other == "autocast":
        with torch.no_grad(), torch.autocast("cpu"):
            step()
    else:
        with torch.no_grad():
            step(**other)
    assert len(found) == 1
