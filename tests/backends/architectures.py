"""The portable kernels compiled for GPUs that nobody measured them on: ``make test-architectures``.

A kernel of each kind, with the head sizes and features that tell most. ``flashtile inspect --arch gfx942``
compiles all.
"""

from __future__ import annotations

import pytest
from spills import beyond_limits

from flashtile.tools.inspection.cases import every_case
from flashtile.tools.inspection.report import CompileCase, report

pytestmark = pytest.mark.compile

MATRIX_UNITS = {
    "gfx942": "mfma",
    "gfx950": "mfma",
    "gfx1201": "wmma",
    "sm_86": "mma",
    "sm_89": "mma",
    "sm_100a": "tcgen05",
    "sm_120a": "mma",
}
"""By architecture: what 16-bit products of whole tiles of attention run on."""

ATTENTION = ("forward", "dkdv", "dq")
TELLING = (
    *(f"{kernel} bf16 head_dim 128 causal" for kernel in ATTENTION),
    *(f"{kernel} bf16 head_dim 128 features" for kernel in ATTENTION),
    *(f"{kernel} bf16 head_dim 64 causal" for kernel in ATTENTION),
    *(f"{kernel} bf16 head_dim 256 causal" for kernel in ATTENTION),
    *(f"{kernel} fp32 head_dim 128 causal" for kernel in ATTENTION),
    "tangents bf16 head_dim 128 causal",
    "preprocess bf16 head_dim 128",
    "decode bf16 head_dim 128 rows 16 page 16",
    "decode bf16 head_dim 128 rows 64 page 16",
    "decode bf16 head_dim 128 rows 16 features",
    "decode fp8e4nv head_dim 128 rows 16 page 16",
    "decode combine bf16 head_dim 128 rows 16 page 16",
    "decode append bf16",
    "decode copy blocks",
    "fp8 quantize q head_dim 128",
    "fp8 attend head_dim 128 full",
    "linear gemv plain 1 rows",
    "linear flat norm qkv 16 rows",
)  # fmt: skip


def telling_cases(arch: str) -> list[CompileCase]:
    """The cases of :data:`TELLING`; names of products go on with their tile."""
    cases = [case for case in every_case(arch) if ".hopper" not in case.kernel.fn.__module__]
    return [
        next(case for case in cases if case.name == name or case.name.startswith(f"{name} "))
        for name in TELLING
    ]


def check(case: CompileCase, arch: str) -> None:
    """Compiled, within shared memory, on the matrix units, and with no more spills than accepted."""
    found = report(case, arch)
    assert beyond_limits(found) == []
    if case.kernel.fn.__name__ == "forward_kernel" and case.tensor_cores and "bf16" in case.name:
        assert MATRIX_UNITS[arch] in found.tensor_core


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("arch", MATRIX_UNITS)
def test_it_compiles(arch: str, name: str) -> None:
    check(telling_cases(arch)[TELLING.index(name)], arch)
