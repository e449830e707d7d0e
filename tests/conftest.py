"""One suite for every backend: which targets exist here, and which cases each is held to."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings

from cases import BF16, CASES, FP16, FP32, FP64, Case

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

settings.register_profile(
    "flashtile",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("flashtile")


@dataclass(frozen=True)
class Target:
    """A backend on a device, and how much it is asked."""

    name: str
    backend: str
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


CUDA = torch.cuda.is_available() and not INTERPRETING
INTERPRETER = (pytest.mark.interpreter,)
GPU = (pytest.mark.gpu,)
ANY_DIM = tuple(range(1, 257))
SMALL_DIM = tuple(range(1, 81))
GPU_DIM = (40, 64, 72, 128)
TINY, ALL_SIZES = ("tiny",), ("tiny", "medium", "large")
TARGETS = (
    Target("cpu", "cpu", "cpu", ("tiny", "medium"), (FP16, BF16, FP32, FP64), 130, ANY_DIM, 30),
    # No bfloat16: numpy has none, and Triton's interpreter multiplies its bits as integers.
    Target("interpreter", "portable", "cpu", TINY, (FP16, FP32), 40, SMALL_DIM, 10, INTERPRETER, INTERPRETING),
    Target("portable", "portable", "cuda", ALL_SIZES, (FP16, BF16, FP32), 700, GPU_DIM, 25, GPU, CUDA),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``target`` runs on every target here; with ``case`` too, on every case of each."""
    targets = [target for target in TARGETS if target.available]
    if "target" in metafunc.fixturenames and "case" in metafunc.fixturenames:
        pairs = [
            pytest.param(target, case, id=f"{target.name}-{case.name}", marks=target.marks)
            for target in targets
            for case in CASES
            if target.takes(case)
        ]
        metafunc.parametrize(("target", "case"), pairs)
    elif "target" in metafunc.fixturenames:
        metafunc.parametrize("target", [pytest.param(t, id=t.name, marks=t.marks) for t in targets])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``gpu`` is skipped where there is none."""
    if CUDA:
        return
    skip = pytest.mark.skip(reason="no CUDA device (or TRITON_INTERPRET=1)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _exact_matmuls() -> None:
    """The yardstick must not use TF32, whatever another test left behind."""
    torch.backends.cuda.matmul.allow_tf32 = False
