"""One suite for every backend: a test with the fixture ``target`` runs on all available targets."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from cases import CASES
from targets import CUDA, INTERPRETING, TARGETS, hopper_serves

settings.register_profile(
    "flashtile",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("flashtile")

if INTERPRETING:
    import triton_interpreter

    triton_interpreter.spare()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``target``, ``gpu_target`` (targets on a GPU) and ``case`` (the cases of a target)."""
    targets = [target for target in TARGETS if target.available]
    if "gpu_target" in metafunc.fixturenames:
        on_gpu = [pytest.param(t, id=t.name, marks=t.marks) for t in targets if t.device == "cuda"]
        metafunc.parametrize("gpu_target", on_gpu)
    if "target" in metafunc.fixturenames and "case" in metafunc.fixturenames:
        pairs = [
            pytest.param(target, case, id=f"{target.name}-{case.name}", marks=target.marks)
            for target in targets
            for case in CASES
            # Of other cases, the tests of "portable" launch the same kernels with the same numbers.
            if target.takes(case) and (target.name != "hopper" or hopper_serves(case))
        ]
        metafunc.parametrize(("target", "case"), pairs)
    elif "target" in metafunc.fixturenames:
        rare = ["interpreter"] if metafunc.definition.get_closest_marker("relation") else []
        metafunc.parametrize("target", [
            pytest.param(t, id=t.name, marks=(*t.marks, *[pytest.mark.thorough] * (t.name in rare)))
            for t in targets
        ])  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a CUDA device, and ``interpreter`` without TRITON_INTERPRET=1."""
    skips = {}
    if not CUDA:
        skips["gpu"] = pytest.mark.skip(reason="no CUDA device (or TRITON_INTERPRET=1)")
    if not INTERPRETING:
        skips["interpreter"] = pytest.mark.skip(reason="needs TRITON_INTERPRET=1")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Make garbage collections cheap: they took a twelfth of the time.

    They spare what was imported, a million objects which stay to the end, and are rarer than by default.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.fixture
def fresh_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the cached launches of decoding by empty caches during the test."""
    from flashtile.caches import BoundedCache
    from flashtile.op.operation import CACHE_BYTES
    from flashtile.operators import decode as operators

    for owner, name in (
        (operators.DECODE, "launches"),
        (operators.DECODE, "_grown"),
        (operators.DECODE_INTO, "launches"),
        (operators.DECODE_MASS, "launches"),
        (operators, "_append_and_decode"),
    ):
        monkeypatch.setattr(owner, name, BoundedCache(CACHE_BYTES))


@pytest.fixture
def balanced_work(monkeypatch: pytest.MonkeyPatch, fresh_launches: None) -> None:
    """Let decoding split even short work tiles among programs, which by default are left whole."""
    from flashtile.backends.portable.decode import config

    for name in ("MAX_WHOLE_BYTES", "MAX_UNEVEN_BYTES"):
        monkeypatch.setattr(config, name, -1)


@pytest.fixture(params=["as users get it", "stream-K"])
def either_work(request: pytest.FixtureRequest) -> None:
    """Run a test of decoding twice: with the default work partitioning, and with all work split."""
    if request.param == "stream-K":
        request.getfixturevalue("balanced_work")


@pytest.fixture(autouse=True)
def _own_numbers(request: pytest.FixtureRequest) -> None:
    """Seed torch by the names of the file and the test, so that a failure can be repeated alone."""
    torch.manual_seed(zlib.crc32(f"{request.node.path.name}::{request.node.name}".encode()))


@pytest.fixture(autouse=True)
def _exact_matmuls() -> None:
    """Turn off TF32, so references are exact even if another test has turned it on."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def _leave_memory_to_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return unused GPU memory after a test, because parallel workers share the GPU."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
