"""The compile cases of all kernels."""

from __future__ import annotations

from flashtile.tools.inspection import (
    hopper_backward,
    hopper_decode,
    hopper_forward,
    hopper_fp8,
    hopper_linear,
    portable,
    portable_decode,
    portable_fp8,
    portable_linear,
)
from flashtile.tools.inspection.report import CompileCase, architecture

FAMILIES = (
    hopper_backward,
    hopper_decode,
    hopper_forward,
    hopper_fp8,
    hopper_linear,
    portable,
    portable_decode,
    portable_fp8,
    portable_linear,
)
"""Modules with a function ``compile_cases(arch)``."""


def every_case(arch: str) -> list[CompileCase]:
    """Return the cases of all kernels for an architecture, such as "sm_90a".

    Raises:
        ValueError: ``arch`` is unknown.
    """
    name = architecture(arch).name
    return [case for family in FAMILIES for case in family.compile_cases(name)]
