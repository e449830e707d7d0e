"""Direct launches on a GPU: without a C compiler, with hooks, and in threads that have not called CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashtile

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch, triton
from triton.runtime import build
import flashtile
from flashtile import testing
from flashtile.backends import libcuda
from flashtile.backends.common import direct_launch

def nothing(*arguments, **more):
    raise AssertionError("a C module is built, or Triton launches")

build._build = direct_launch.by_triton = nothing
load, loaded = libcuda.load, []
libcuda.load = lambda name, *more: loaded.append(name) or load(name, *more)

backends = ["portable"]
if torch.cuda.get_device_capability() == (9, 0):
    backends.append("hopper")
for backend in backends:
    tensors = (testing.random_tensor((2, 300, 4, 64), torch.bfloat16, "cuda", seed=i) for i in range(3))
    testing.check(*tensors, causal=True, backend=backend)
q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
k, v = torch.randn(2, 2, 512, 8, 64, device="cuda", dtype=torch.bfloat16)
used = torch.full((2,), 512, device="cuda", dtype=torch.int32)
assert flashtile.flash_attn_with_kvcache(q, k, v, cache_seqlens=used).isfinite().all()
assert triton.runtime.driver._default is None
print(len(loaded))
"""


def test_no_c_module_is_built(tmp_path: Path) -> None:
    """Also by the first launches of a process whose caches are empty."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6


OF_AUTOGRAD = """
import torch
import flashtile

tensors = [torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
out = flashtile.attention(*tensors, causal=True)
dout = torch.randn_like(out)
[torch.empty_like(dout) for _ in range(30)]  # memory that the backward pass gets without a call of CUDA
first, second = (torch.autograd.grad(out, tensors, dout, retain_graph=True) for _ in range(2))
torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)
assert all(gradient.isfinite().all() and gradient.any() for gradient in first)
"""


def test_the_first_call_of_cuda_in_autograds_thread() -> None:
    done = subprocess.run([sys.executable, "-c", OF_AUTOGRAD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 200, 4, 64, device="cuda", dtype=torch.bfloat16)
    return q, k, v


def test_launches_with_and_without_hooks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler's hooks are called by Triton's own launch of the same kernel."""
    from triton import knobs

    tensors = inputs()
    expected = flashtile.attention(*tensors, causal=True)
    called: list[str] = []
    hook = lambda metadata: called.append(metadata.get()["name"])  # noqa: E731
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [hook])
    torch.testing.assert_close(flashtile.attention(*tensors, causal=True), expected, rtol=0, atol=0)
    assert called == ["forward_kernel"]


def test_a_thread_that_has_not_called_cuda() -> None:
    tensors = inputs()
    expected = flashtile.attention(*tensors, causal=True)
    torch.cuda.synchronize()
    out = torch.full_like(expected, torch.nan)
    errors: list[BaseException] = []

    def attend() -> None:
        try:
            flashtile.attention(*tensors, causal=True, out=out)
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        out.fill_(torch.nan)
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
        assert errors == []
        torch.cuda.synchronize()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_many_threads_launch_the_same_kernel() -> None:
    """Each has its own memory for the parameters."""
    given = [inputs() for _ in range(8)]
    expected = [flashtile.attention(*tensors, causal=True) for tensors in given]
    found: list[list[Tensor]] = [[] for _ in given]

    def attend(i: int) -> None:
        for _ in range(200):
            found[i].append(flashtile.attention(*given[i], causal=True))

    threads = [threading.Thread(target=attend, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, right in zip(found, expected, strict=True):
        assert len(outs) == 200
        assert all(torch.equal(out, right) for out in outs)
