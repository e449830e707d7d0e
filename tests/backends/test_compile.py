"""Every kernel configuration, compiled ahead of time, is within its limits."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

from flashtile.compile_report import CompileCase, every_case, report

pytestmark = pytest.mark.compile

TENSOR_CORE = {"sm_80": "HMMA", "sm_90a": "HGMMA"}


def is_16_bit(case: CompileCase) -> bool:
    """Whether the case multiplies 16-bit queries; of fp32, Triton picks the tensor-core instruction."""
    q = next((case.signature[name] for name in ("q", "q_ptr", "q_desc") if name in case.signature), "")
    return q in ("*bf16", "*fp16") or q.startswith(("tensordesc<bf16", "tensordesc<fp16"))


def rows_of(case: CompileCase) -> int:
    """Rows of the case's tile; wgmma takes 64, fewer run on the older instruction."""
    return case.constants["C"].BLOCK_M


def every_configuration() -> list:
    return [
        pytest.param(arch, case, id=f"{arch}-{case.name}")
        for arch in TENSOR_CORE
        for case in every_case(arch)
    ]


@pytest.mark.parametrize(("arch", "case"), every_configuration())
def test_every_configuration_is_within_its_limits(arch, case):
    found = report(case, arch)
    assert found.violations == []
    if case.tensor_cores and is_16_bit(case):
        assert (TENSOR_CORE[arch] if rows_of(case) >= 64 else "HMMA") in found.tensor_core


@pytest.mark.parametrize("arch", TENSOR_CORE)
def test_every_kernel_has_cases(arch):
    """The list that the test above walks is whole: unique names, 16-bit products held to the tensor cores."""
    cases = every_case(arch)
    assert len({case.name for case in cases}) == len(cases)
    kernels = {case.kernel.fn.__name__ for case in cases}
    assert {"forward_kernel", "dkdv_kernel", "dq_kernel"} <= kernels
    of_16_bits = [case for case in cases if is_16_bit(case)]
    assert len(of_16_bits) > 50
    assert [case.name for case in of_16_bits if not case.tensor_cores] == []
