"""The decoding kernels in Triton's interpreter: every feature, the schedule, what a launch must not touch."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from cases import FP16, FP32
from decode_cases import CASES, build
from flashtile.decode import testing
from flashtile.decode.problem import FP8

pytestmark = pytest.mark.interpreter

BY_NAME = {case.name: case for case in CASES}
IN_FLOAT16 = [name for name, case in BY_NAME.items() if case.cache_dtype == FP8] + ["paged", "everything"]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_feature_in_float32(name):
    tensors, arguments = build(BY_NAME[name], FP32, "cpu")
    testing.check(*tensors, backend="portable", **arguments)


@pytest.mark.parametrize("name", IN_FLOAT16)
def test_float16(name):
    tensors, arguments = build(BY_NAME[name], FP16, "cpu")
    testing.check(*tensors, backend="portable", **arguments)
