"""Weights that several threads read are those that safetensors finds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from flashtile.engine import upload
from flashtile.engine.parallel import Ranks
from flashtile.engine.upload import ByteRange, Upload
from flashtile.engine.weights import Parameter, byte_ranges

CPU = torch.device("cpu")
EXPECTED = {
    "embedding": Parameter((50, 24)), "rows": Parameter((6, 7), 0), "columns": Parameter((3, 8), 1),
    "bias": Parameter((4,), 0),
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """(path, tensors), to be read in parts that are no multiple of a tensor or a number."""
    monkeypatch.setattr(upload, "PART_BYTES", 101)
    path, tensors = tmp_path / "model.safetensors", {}
    kinds = torch.float32, torch.bfloat16, torch.float16, torch.float32
    for (name, one), kind in zip(EXPECTED.items(), kinds, strict=True):
        tensors[name] = torch.randn(one.shape).to(kind)
    save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("ahead", [1, 10**6])
@pytest.mark.parametrize("rank", [0, 1])
def test_they_arrive_in_any_order(checkpoint, monkeypatch, rank, ahead):
    monkeypatch.setattr(upload, "AHEAD_BYTES", ahead)
    path, tensors = checkpoint
    ranks = Ranks(rank, 2)
    sent = Upload(byte_ranges(dict.fromkeys(EXPECTED, path), EXPECTED, ranks), CPU)
    for name in ("bias", "embedding", "columns", "rows"):
        right = tensors[name]
        if EXPECTED[name].split == 0:  # columns are taken on the device
            right = right[ranks.slice(len(right))]
        found = sent(name)
        assert found.dtype == right.dtype
        assert torch.equal(found, right)
    assert not sent._sent  # no tensor is sent twice, which would stay in the device's memory


def test_a_file_that_has_become_shorter_is_an_error(checkpoint):
    path, _ = checkpoint
    size = path.stat().st_size
    sent = Upload({"lost": ByteRange(path, size - 40, 80, torch.float32, (20,))}, CPU)
    with pytest.raises(OSError, match="shorter"):
        sent("lost")
