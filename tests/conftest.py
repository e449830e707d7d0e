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
TARGETS = (
    Target(
        name="cpu",
        backend="cpu",
        device="cpu",
        sizes=("tiny", "medium"),
        dtypes=(FP16, BF16, FP32, FP64),
        longest=130,
        head_dims=tuple(range(1, 257)),
        examples=30,
    ),
    Target(
        name="interpreter",
        backend="portable",
        device="cpu",
        sizes=("tiny",),
        dtypes=(FP16, FP32),  # numpy has no bfloat16: Triton's interpreter multiplies its bits as integers
        longest=40,
        head_dims=tuple(range(1, 81)),
        examples=10,
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
        head_dims=(40, 64, 72, 128),
        examples=25,
        marks=(pytest.mark.gpu,),
        available=CUDA,
    ),
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
