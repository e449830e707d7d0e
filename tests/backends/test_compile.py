"""Every kernel configuration, compiled ahead of time, is within its limits.

``make test`` compiles one configuration of each kernel for Hopper, of kernels that differ little from another
none. ``make test-thorough`` compiles one of these, too, and those that tell most. The rest are marked
``exhaustive`` (``make test-compile``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

from descriptors import wrong_descriptors
from spills import beyond_limits

from flashtile.tools.inspection.cases import every_case
from flashtile.tools.inspection.report import CompileCase, CompileReport, architecture, cuobjdump, report

pytestmark = pytest.mark.compile

HOPPER = "sm_90a"
TENSOR_CORE = {"sm_80": "mma", HOPPER: "wgmma"}
CASES = {arch: every_case(arch) for arch in TENSOR_CORE}
VALUE = "value"
ALIKE = re.compile(
    r"(forward|dkdv|dq) \w+ head_dim (512|576) "
    r"|(forward|dkdv|dq) .* (block mask|mask_mod|score_mod)$"
    r"|tangents "
    r"|(modified )?weights "
    r"|decode bf16 latent "
    r"|linear flat profiled whole waves "
    r"|hopper (mods|dropout|bias) "
    r"|hopper backward head_dim .* shared$"
    r"|hopper backward dkv head_dim 256/128 .* shared$"
    r"|hopper backward (\w+ )?head_dim (40/40|80/80|96/96|192/128|160/160|320/320) "
    r"|hopper backward .* (single|one block)$"
    r"|hopper decode (head_dim (64|256)/.* e4m3|.* e4m3 by )"
    r"|hopper linear (plain|e4m3) "
)
"""Names of cases that differ little from another case, unless they are among TELLING."""
TELLING = {
    *(f"{kernel} bf16 head_dim 128 block mask" for kernel in ("forward", "dkdv", "dq")),
    "tangents bf16 head_dim 128 features",
    "weights bf16 head_dim 128 columns",
    "weights bf16 head_dim 128 top 8",
    "modified weights bf16 head_dim 64 columns",
    "decode bf16 latent 64 and 512 rows 16",
    "hopper mods forward head_dim 64 128x128 block mask",
    "hopper mods forward head_dim 256 128x64 block mask",
    "hopper mods backward dkv head_dim 256 64x64 block mask",
    "hopper mods backward dq head_dim 256 128x64 block mask",
    "hopper backward head_dim 64/64 64x128 full one block",
    "hopper backward head_dim 128/128 64x128 causal one block",
    "hopper dropout forward head_dim 128 128x128 causal",
    "hopper dropout backward head_dim 128 64x128 causal",
    "hopper bias forward head_dim 64 128x128 causal",
    "hopper bias gradient head_dim 64 128x128 causal",
    "hopper linear plain 8x16x64 stages 8 warps 4 x 2",
    "hopper linear plain 16x16x64 stages 6 warps 4 x 2",
    "hopper linear e4m3 8x16x128 stages 4 warps 4 x 3",
    "hopper linear e4m3 16x32x128 stages 3 warps 4 x 2",
}
WIDTHS = ("BLOCK_D", "BLOCK_DV", "HEAD_DIM", "HEAD_DIM_V", "QK_COLUMNS", "O_LEFT")


def is_alike(case: CompileCase) -> bool:
    return case.name not in TELLING and ALIKE.match(case.name) is not None


def type_of_q(case: CompileCase) -> str:
    if own := getattr(case.signature.get("pointers"), "q", None):
        return own
    return next((case.signature[name] for name in ("q", "q_ptr", "q_desc") if name in case.signature), "")


def is_16_bit(case: CompileCase) -> bool:
    """Whether the case multiplies 16-bit queries; of fp32, Triton picks the tensor-core instruction."""
    q = type_of_q(case)
    return q in ("*bf16", "*fp16") or q.startswith(("tensordesc<bf16", "tensordesc<fp16"))


def constants_of(case: CompileCase) -> dict:
    return vars(case.constants["C"]) if "C" in case.constants else {}


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def telling() -> set[tuple[str, str]]:
    """(architecture, name) of cases that compile each value of each constant but the width of heads.

    First, with the widest heads and the most features, values that are no numbers and other architectures'
    numbers; then, with the fewest, Hopper's numbers, and each kernel for each architecture. The case that
    shows most that is new is chosen next. Heads of q and v are as wide as each other."""
    chosen: set[tuple[str, str]] = set()
    known: set[tuple] = set()
    cases = [(arch, case, shown_by(arch, case)) for arch in CASES for case in CASES[arch]]

    def cover(wanted: Callable[[str, tuple], bool], preferred: Callable[[CompileCase], tuple]) -> None:
        missing = {item for arch, _, shown in cases for item in shown if wanted(arch, item)} - known
        by_preference = sorted(cases, key=lambda entry: preferred(entry[1]), reverse=True)
        while missing:
            arch, case, shown = max(by_preference, key=lambda entry: len(entry[2] & missing))
            chosen.add((arch, case.name))
            known.update(shown)
            missing -= shown

    cover(lambda arch, item: item[0] == VALUE and (arch != HOPPER or not is_number(item[-1])), weight)
    cover(lambda arch, item: True, lambda case: tuple(-number for number in weight(case)))
    return chosen


def shown_by(arch: str, case: CompileCase) -> set[tuple]:
    """Its kernel for the architecture, and the values of its constants, each with the kernel."""
    constants = constants_of(case)
    width, of_heads = constants.get("BLOCK_D"), constants.get("HEAD_DIM")
    differ = width is not None and constants.get("BLOCK_DV", width) != width
    if of_heads is not None:  # tiles of v may have half of the columns
        differ = differ and constants["HEAD_DIM_V"] != of_heads
    if is_alike(case) or differ:
        return set()
    kernel = kernel_of(case)
    values = ((VALUE, *kernel, *item) for item in constants.items() if item[0] not in WIDTHS)
    return {("kernel", arch, *kernel), *values}


def weight(case: CompileCase) -> tuple[int, int]:
    """Width of heads, then number of features."""
    constants = constants_of(case)
    return max(constants.get(name, 0) for name in WIDTHS), sum(value is True for value in constants.values())


def kernel_of(case: CompileCase) -> tuple[str, str]:
    """Its module and name."""
    return case.kernel.fn.__module__, case.kernel.fn.__name__


def of_each_kernel() -> dict[tuple[str, str], CompileCase]:
    """A case of each kernel for Hopper, with its narrowest heads: with most features, or fewest where the
    compiler takes long, in Gluon's kernels."""
    chosen: dict[tuple[str, str], CompileCase] = {}

    def order(case: CompileCase) -> tuple[int, int]:
        width, features = weight(case)
        return width, features if ".hopper." in kernel_of(case)[0] else -features

    for case in CASES[HOPPER]:
        if order(case) < order(chosen.setdefault(kernel_of(case), case)):
            chosen[kernel_of(case)] = case
    return chosen


TOLD_BY_OTHERS = {kernel_of(case) for case in CASES[HOPPER]} - {
    kernel_of(case) for case in CASES[HOPPER] if not is_alike(case)
}
"""Kernels of which every case differs little from another kernel's."""
OF_EACH = {kernel: (HOPPER, case.name) for kernel, case in of_each_kernel().items()}
FEW = {case for kernel, case in OF_EACH.items() if kernel not in TOLD_BY_OTHERS}
FEW.add((HOPPER, "decode bf16 head_dim 128 rows 16 chunk"))  # the only one with chunks
FEW.add((HOPPER, "forward bf16 head_dim 16 features"))  # the other one of its kernel has tangents
THOROUGH = {*OF_EACH.values()} | telling()


def marks(arch: str, case: CompileCase) -> tuple[pytest.MarkDecorator, ...]:
    if (arch, case.name) in FEW:
        return ()
    return (pytest.mark.thorough if (arch, case.name) in THOROUGH else pytest.mark.exhaustive,)


def wrong_instructions(case: CompileCase, found: CompileReport) -> list[str]:
    """What is wrong with the tensor-core instructions of a case that multiplies 16-bit numbers."""
    if not (case.tensor_cores and is_16_bit(case)):
        return []
    # wgmma takes 64 rows, fewer run on the older instruction. In Hopper's kernels, rows may be keys.
    is_narrow = case.constants["C"].BLOCK_M < 64 and ".hopper." not in kernel_of(case)[0]
    wanted = "mma" if is_narrow else TENSOR_CORE[found.arch]
    return [] if wanted in found.tensor_core else [f"no {wanted}"]


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        pytest.param(arch, case, id=f"{arch}-{case.name}", marks=marks(arch, case))
        for arch, cases in CASES.items()
        for case in cases
    ],
)
def test_every_configuration_is_within_its_limits(arch, case):
    found = report(case, arch)
    assert beyond_limits(found) + wrong_instructions(case, found) == []
    if "wgmma" in found.tensor_core:
        asm = case.compile(architecture(arch)).asm  # compiled above, so this reads Triton's disk cache
        assert wrong_descriptors(asm["ptx"], cuobjdump("-sass", asm["cubin"])) == []


@pytest.mark.parametrize("arch", CASES)
def test_every_kernel_has_cases(arch):
    """The list that the tests above walk is whole: unique names, 16-bit products held to the tensor cores."""
    cases = CASES[arch]
    assert len({case.name for case in cases}) == len(cases)
    kernels = {case.kernel.fn.__name__ for case in cases}
    assert {"forward_kernel", "dkdv_kernel", "dq_kernel"} <= kernels
    told = telling()
    assert {case.name for case in CASES[HOPPER]} >= TELLING
    assert kernels == {case.kernel.fn.__name__ for case in cases if (arch, case.name) in told}
    assert {kernel_of(case) for case in cases} <= OF_EACH.keys()
    assert len(FEW) > 30
    of_16_bits = [case for case in cases if is_16_bit(case)]
    assert len(of_16_bits) > 50
    assert [case.name for case in of_16_bits if not case.tensor_cores] == []
