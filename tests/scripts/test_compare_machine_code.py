"""The script that compares compiled kernels: what it takes for a kernel's code, and what differs."""

from __future__ import annotations

import re

import pytest

import script_runner
from flashtile.backends.common import compile_report

script = script_runner.load("scripts/compare_machine_code.py")

OLD = {"sm_80": {"prepare": {"sha256": "a", "shared": 1}, "forward": {"sha256": "b", "shared": 2}}}


def test_only_what_differs_is_named():
    new = {"sm_80": {"preprocess": {"sha256": "a", "shared": 1}, "forward": {"sha256": "c", "shared": 2}}}
    found = list(script.differences(OLD, new, [["prepare", "preprocess"]]))
    assert found == ["sm_80 forward: sha256 b -> c"]


def test_cases_of_one_side_are_named():
    found = list(script.differences(OLD, {"sm_80": {"forward": OLD["sm_80"]["forward"], "dq": {}}}, []))
    assert found == ["sm_80 dq: only in the new dump", "sm_80 prepare: only in the old dump"]


@pytest.mark.compile
def test_code_has_the_instructions_that_the_disassembler_shows():
    pytest.importorskip("triton")
    case = next(case for case in compile_report.every_case("sm_80") if case.name.startswith("preprocess"))
    cubin = case.compile(compile_report.architecture("sm_80")).asm["cubin"]
    shown = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", compile_report.cuobjdump("-sass", cubin), re.MULTILINE)
    assert len(script.machine_code(cubin)) == script.INSTRUCTION_BYTES * len(shown) > 0
