"""On a GPU, a torch or Triton that the kernels do not take is refused by name before a kernel is imported."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
import triton

from flashtile.backends import hopper, portable
from flashtile.backends.common.releases import PAIRS
from flashtile.torch_private import OLDEST_TORCH

GPU = torch.device("cuda", 0)


def reasons(monkeypatch, torch_version: str, triton_version: str) -> set[str | None]:
    """What the GPU backends have against a call under these releases."""
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(hopper, "is_nvidia", lambda device: False)  # the next condition, which asks a GPU
    return {
        portable.reason_of_device(GPU, {torch.float16}, False),
        hopper.reason_of_device(types.SimpleNamespace(device=GPU)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize(
    ("torch_version", "triton_version"), [("2.8.0+cu128", "3.4.0"), ("2.10.0", "3.6.0"), ("2.16.0", "3.10.0")]
)
def test_other_releases_are_refused_by_name(monkeypatch, torch_version, triton_version):
    (reason,) = reasons(monkeypatch, torch_version, triton_version)
    assert reason is not None
    assert all(
        words in reason for words in ("torch 2.11", "Triton 3.6 to 3.9", torch_version, triton_version)
    )


def test_pairs_are_taken(monkeypatch):
    """Also a torch from NVIDIA's containers, and one that is newer than the table."""
    versions = [(f"{ours}.0a0+nv26.1", f"{its}.1") for ours, its in PAIRS.items()]
    for torch_version, triton_version in (*versions, ("2.16.0", "3.9.0")):
        assert None in reasons(monkeypatch, torch_version, triton_version)


def test_compiling_for_a_gpu_takes_any_triton(monkeypatch):
    """``make test-newest-triton`` finds out whether a new release works."""
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    target = portable.Target("H100", (9, 0), 132)
    assert portable.reason_of_device(target, {torch.float16}, False) is None


def test_an_older_torch_is_refused_when_flashtile_is_imported():
    """It lacks private names that flashtile uses, whose absence would be a riddle."""
    assert next(iter(PAIRS)) == ".".join(map(str, OLDEST_TORCH))
    code = (
        "import torch\n"
        "torch.__version__ = torch.torch_version.TorchVersion('2.8.0+cu128')\n"
        "import flashtile\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: flashtile needs torch 2.11 or newer, this is torch 2.8.0+cu128" in done.stderr
