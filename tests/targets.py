"""The backends under test, each on a device, and which of them are available on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from cases import BF16, FP16, FP32, FP64, Case

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def own_gpu_first(visible: str | None, count: int, worker: str) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` for a worker of pytest-xdist such as "gw3".

    It has all GPUs; worker number n gets GPU n (modulo their number) as the first one.
    """
    devices = visible.split(",") if visible else [str(i) for i in range(count)]
    if not worker.startswith("gw") or len(devices) < 2:
        return visible
    first = int(worker.removeprefix("gw")) % len(devices)
    return ",".join(devices[first:] + devices[:first])


_visible = own_gpu_first(
    os.environ.get("CUDA_VISIBLE_DEVICES"),
    torch.cuda.device_count(),
    os.environ.get("PYTEST_XDIST_WORKER", ""),
)
if _visible is not None:  # before anything asks for a device, which would fix the order
    os.environ["CUDA_VISIBLE_DEVICES"] = _visible


@dataclass(frozen=True)
class Target:
    """A backend on a device, and the extent of its tests."""

    name: str
    backend: str | None
    device: str
    sizes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    longest: int
    """Tokens of the longest sequence in property and generated tests."""
    head_dims: tuple[int, ...]
    """Head sizes of generated calls; few on a GPU, where each is another compilation."""
    examples: int
    """Generated calls per dtype and layout."""
    marks: tuple[pytest.MarkDecorator, ...] = ()
    available: bool = True

    def takes(self, case: Case) -> bool:
        return case.size in self.sizes and case.dtype in self.dtypes


def hopper_serves(case: Case) -> bool:
    """Whether Hopper's kernels serve a case in memory that TMA addresses (``tests/gpu/test_hopper.py``)."""
    sizes = (case.head_dim, case.head_dim_v or case.head_dim)
    rows = [case.batch, case.seqlen_q, case.seqlen_k]
    if case.lengths is not None:
        rows = [len(case.lengths), *(max(row) for row in zip(*case.lengths, strict=True))]
    needs_general_mask = case.mask, case.padding, case.attention_chunk, case.unused_rows
    most = 128 if case.dropout_p or case.bias is not None else 512
    tiles = case.dtype in (FP16, BF16) and not any(size % 8 or size > most for size in sizes)
    if case.bias is not None:
        own, of_rows = case.bias.endswith("-own"), "q" in case.bias.removesuffix("-own") and rows[1] > 1
        tiles &= own and of_rows and rows[2] % 8 == 0 and case.alibi is None and not case.dropout_p
    return tiles and all(rows) and not any(needs_general_mask)


CUDA = torch.cuda.is_available() and not INTERPRETING
TARGETS = (
    Target(
        name="cpu",
        backend="cpu",
        device="cpu",
        sizes=("tiny", "medium"),
        dtypes=(FP16, BF16, FP32, FP64),
        longest=130,
        head_dims=(*range(1, 257), 512, 576),
        examples=25,
    ),
    Target(
        name="interpreter",
        backend="portable",
        device="cpu",
        sizes=("tiny",),
        dtypes=(FP16, FP32),  # numpy has no bfloat16: Triton's interpreter multiplies its bits as integers
        longest=40,
        head_dims=tuple(range(1, 81)),
        examples=8,
        marks=(pytest.mark.interpreter,),
        available=INTERPRETING,
    ),
    Target(
        name="portable",
        backend="portable",
        device="cuda",
        sizes=("tiny", "medium", "large"),
        dtypes=(FP16, BF16, FP32),
        longest=700,
        head_dims=(40, 64, 128),
        examples=16,
        marks=(pytest.mark.gpu,),
        available=CUDA,
    ),
    Target(
        name="hopper",
        backend=None,  # as users call it; tests/gpu/test_hopper.py tests which calls the backend accepts
        device="cuda",
        sizes=("tiny", "medium", "large"),
        dtypes=(FP16, BF16),
        longest=700,
        head_dims=(40, 64, 128),
        examples=16,
        marks=(pytest.mark.gpu,),
        available=CUDA and torch.cuda.get_device_capability() == (9, 0),
    ),
)
