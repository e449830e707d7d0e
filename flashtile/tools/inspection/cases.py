"""The compile cases of all kernels."""

from __future__ import annotations

from flashtile.tools.inspection import attention, decode, fp8, linear
from flashtile.tools.inspection.report import CompileCase, architecture


def every_case(arch: str) -> list[CompileCase]:
    """Return the cases of all kernels for an architecture, such as "sm_90a".

    Raises:
        ValueError: ``arch`` is unknown.
    """
    name = architecture(arch).name
    return [case for family in (attention, decode, fp8, linear) for case in family.compile_cases(name)]
