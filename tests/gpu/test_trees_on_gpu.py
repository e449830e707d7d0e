"""Trees of packed segments on the card: both kinds of kernels, no waiting for the device, graphs."""

from __future__ import annotations

import pytest
import torch
from graphs import captured

import flashtile
from flashtile import masks, testing
from flashtile.backends.common import launch

pytestmark = pytest.mark.gpu

TREES = {
    "answers": ([1500, 300, 513, 77, 0, 640], [-1, 0, 0, 0, 0, 0]),
    "turns": ([700, 400, 129, 1, 260, 333], [-1, 0, 1, 1, -1, 4]),
    "shuffled": ([300, 129, 640, 257, 500], [2, 4, -1, 0, 2]),
}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def segments(name: str, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, int]:
    lengths, parent = TREES[name]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return cu_seqlens.to(device), torch.tensor(parent, dtype=torch.int32, device=device), sum(lengths)


def inputs(total: int, head_dim: int, batch: tuple[int, ...] = ()) -> list[torch.Tensor]:
    shapes = [(*batch, total, heads, head_dim) for heads in (4, 2, 2, 4)]
    return [testing.random_tensor(shape, torch.bfloat16, "cuda", seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", TREES)
def test_tree(name: str, head_dim: int, backend: str) -> None:
    """By the error rule, with memory full of NaN; the portable kernels with smaller blocks as well."""
    if backend == "hopper" and not HOPPER:
        pytest.skip("no Hopper kernel")
    cu_seqlens, parent, total = segments(name)
    q, k, v, dout = inputs(total, head_dim, (1,))
    for size in (128,) if backend == "hopper" else (128, 32):
        mask = masks.create_tree_mask(cu_seqlens, parent, total, BLOCK_SIZE=size)
        ordered = backend != "hopper" or head_dim > 128
        if not ordered:  # gradients are not deterministic, so poisoned memory is for the forward
            testing.check(q, k, v, backend=backend, gradients=False, block_mask=mask)
        testing.check(q, k, v, dout=dout, backend=backend, block_mask=mask, poison=ordered)


@pytest.mark.parametrize("name", TREES)
def test_segments_on_any_device_and_nobody_waits(name: str) -> None:
    _, _, total = segments(name)
    q, k, v, _ = inputs(total, 64)
    results = []
    for devices in (("cuda", "cuda"), ("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda")):
        cu_seqlens, parent = segments(name, devices[0])[0], segments(name, devices[1])[1]
        flashtile.tree_attention(q, k, v, cu_seqlens, parent)  # compiled before
        torch.cuda.set_sync_debug_mode("error")
        try:
            results.append(flashtile.tree_attention(q, k, v, cu_seqlens, parent))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_graph_is_replayed_with_another_tree_of_as_many_segments() -> None:
    cu_seqlens, parent, total = segments("answers")
    q, k, v, dout = inputs(total, 64)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))

    def step():
        out = flashtile.tree_attention(q, k, v, cu_seqlens, parent)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, results = captured(step)
    cu_seqlens.copy_(torch.tensor([0, 100, 900, 1413, 2000, 2010, total], dtype=torch.int32))
    parent.copy_(torch.tensor([-1, 0, 1, 0, -1, 4], dtype=torch.int32))
    graph.replay()
    for found, expected in zip(results, step(), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_another_tree_compiles_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of which none is a multiple of a block, so that the kernels' assumptions hold for both."""
    kernels: dict[object, int] = {}
    compile_of_launch = launch.CachedLaunch._compile

    def counted(self, device, tensors):
        compile_of_launch(self, device, tensors)
        kernels[self.kernel] = sum(len(cache[0]) for cache in self.kernel.device_caches.values())

    monkeypatch.setattr(launch.CachedLaunch, "_compile", counted)
    counts = []
    for lengths, parent in (([2000, 190, 67], [-1, 0, 0]), ([900, 710, 61, 580], [-1, 0, 1, -1])):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        q, k, v, _ = (tensor.requires_grad_() for tensor in inputs(sum(lengths), 64))
        flashtile.tree_attention(q, k, v, cu_seqlens, torch.tensor(parent)).sum().backward()
        counts.append(dict(kernels))
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) >= 3
