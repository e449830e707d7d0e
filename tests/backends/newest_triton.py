"""The Hopper kernels with another release of Triton than the environment's: ``make test-newest-triton``.

Gluon is experimental and changes with each release, so the newest one compiles a part of the configurations:
of each kernel and head size, equal for q and v, the last with sequences of one length and the last with
variable ones, which have the most features; of the FP8 kernel only these, and v in rows for one head size.
Of these the widest heads tell, of those that are multiplied in one piece and of those in parts; the others
are marked ``exhaustive`` (``make test-newest-triton ARGS="-m compile"``).
"""

from __future__ import annotations

import pytest
import triton
from spills import accepted

from flashtile.backends.hopper.fp8.config import Fp8Variant
from flashtile.tools.inspection.cases import every_case
from flashtile.tools.inspection.report import HOPPER, CompileCase, report

pytestmark = pytest.mark.compile

MORE_SPILLS = 1280
"""Bytes of register spills beyond those accepted, which are what the releases of the measurements spill.
Triton 3.9.0 spills up to 1236 more."""


def representative_cases() -> list:
    chosen = {}
    cases = [case for case in every_case(HOPPER) if case.name.startswith("hopper ")]
    for case in cases:
        variant = case.constants.get("C")
        block_d, block_dv, parts, *others = (
            getattr(variant, name, None)
            for name in (
                "BLOCK_D",
                "BLOCK_DV",
                "D_PARTS",
                "VARLEN",
                "PACK",
                "V_TRANSPOSED",
                "GATHER",
                "COPIES_Q",
                "E4M3",
            )
        )
        if isinstance(variant, Fp8Variant):
            if not variant.VARLEN:
                continue
            if not variant.V_TRANSPOSED:
                block_d = block_dv = None
        if block_d == block_dv:
            kernel = case.kernel.fn.__module__, case.kernel.fn.__name__
            chosen[(*kernel, block_d, *others)] = case, (*kernel, parts not in (None, 1), *others)
    widest = {code: case for case, code in sorted(chosen.values(), key=lambda pair: width(pair[0]))}
    return [
        pytest.param(case, id=case.name, marks=() if widest[code] is case else (pytest.mark.exhaustive,))
        for case, code in chosen.values()
    ]


def width(case: CompileCase) -> int:
    return getattr(case.constants.get("C"), "BLOCK_D", 0)


@pytest.mark.parametrize("case", representative_cases())
def test_compiles_within_its_limits(case: CompileCase) -> None:
    found = report(case, HOPPER)
    assert found.shared <= found.shared_limit, triton.__version__
    assert found.spill_stores <= accepted(HOPPER, case.name) + MORE_SPILLS, triton.__version__
    assert found.lost_barriers == 0, triton.__version__
    # Hopper's kernels for few rows multiply by the older instruction, because wgmma takes 64 rows or more.
    wanted = "mma" if ".hopper.linear." in case.kernel.fn.__module__ else "wgmma"
    assert (wanted in found.tensor_core) == case.tensor_cores
