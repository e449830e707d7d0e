"""flash_attn_with_kvcache: every feature against standard attention, on the CPU."""

from __future__ import annotations

import pytest

from cases import BF16, FP16, FP32, FP64
from decode_cases import CASES, build
from flashtile.decode import testing

BY_NAME = {case.name: case for case in CASES}
DTYPES = [FP64, FP32, FP16, BF16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_feature(name, dtype):
    tensors, arguments = build(BY_NAME[name], dtype, "cpu")
    testing.check(*tensors, backend="cpu", **arguments)
