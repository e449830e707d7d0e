"""Steps over a dense cache that grows: a launch made from the last is the one that would be prepared."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashtile import flash_attn_with_kvcache
from flashtile.backends import compat, portable
from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.portable.decode import config, launch
from flashtile.caches import BoundedCache
from flashtile.decode.operators import DECODE
from flashtile.op.operation import CACHE_BYTES

FIRST = object()
LENGTHS = [*range(1, 20), 63, 64, 65, 127, 128, 129, 512, 1023, 1025, 4096, 4100, 9000]


@pytest.fixture
def kernels(monkeypatch):
    """Launches as on an H200, of kernels that nothing compiles; a list of (kernel, arguments,
    whether it was compiled for that) that were run."""
    run: list[tuple] = []

    def launches(kernel, fixed):
        def launcher(stream, tensors):
            run.append((kernel, fixed, stream is FIRST))

        launcher.with_fixed = lambda fixed: launches(kernel, fixed)
        return launcher

    def compile_kernel(self, device, tensors):
        self._index = None  # of the CPU
        self._run = launches((self._kernel.__name__, self.programs), self._fixed)
        self._run(FIRST, tensors)

    monkeypatch.setattr(KeptKernel, "_compile", compile_kernel)
    monkeypatch.setattr(compat, "cuda_device", lambda: None)
    monkeypatch.setattr(compat, "cuda_stream", lambda index: 0)
    monkeypatch.setattr(portable, "reason_of_device", lambda *arguments: None)
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(config, "family", lambda device: "hopper")
    for kept in ("launches", "_grown"):
        monkeypatch.setattr(DECODE, kept, BoundedCache(CACHE_BYTES))
    return run


@pytest.mark.parametrize("static", [False, True], ids=["concatenated", "static"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rows", "arguments", "reused"),
    [
        ((32, 8), 64, 1, {}, True),
        ((32, 8), 64, 1, {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, True),
        ((8, 2), 128, 2, {"window_size": (100, 0), "softcap": 20.0}, True),
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
        prepared.append(sum(1 for name, _, first in kernels if first and "decode" in name[0]))
        return [found[:2] for found in kernels]

    assert run(anew=False) == run(anew=True)
    assert prepared[1] == len(LENGTHS)
    assert reused is None or (prepared[0] < prepared[1] / 2) == reused
