"""Compile cases from launches: a recorded launch gives the compiler what a launch on a GPU gives it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

import torch

from benchmarks.suite.flash1 import Flash1Launch
from flashtile.backends.common.device import capability, compiling_for
from flashtile.backends.common.launch import Launched
from flashtile.backends.portable.key_bounds import BLOCK, KeyBounds
from flashtile.tools.inspection.attention import PLAIN
from flashtile.tools.inspection.recording import case_of, launches_of, meta


def launched_bounds(*shape: int) -> Launched:
    padding = meta(*shape, dtype=torch.bool)
    bounds = KeyBounds(replace(PLAIN, seqlen_k=shape[1]), padding)
    (launched,) = launches_of((9, 0), partial(bounds, padding))
    return launched


def test_arguments():
    case = case_of(launched_bounds(2, 4096), "bounds", tensor_cores=False)
    signature = {"padding": "*i1", "bounds": "*i32", "stride_b": "i32", "stride_k": 1, "seqlen_k": "i32"}
    assert case.signature == signature
    assert case.constants == {"BLOCK": BLOCK}
    assert case.divisible_by_16 == {"stride_b"}
    assert (case.num_warps, case.num_stages, case.options) == (4, 3, {})


def test_a_stride_that_is_no_multiple_of_16():
    assert case_of(launched_bounds(2, 4097), "bounds").divisible_by_16 == set()


def test_a_structure_that_mixes_multiples_with_others_is_refused():
    q = meta(2, 64, 3, 8)  # strides of tokens are 24
    launch = partial(Flash1Launch(True, 1.0), q, q, q)
    (launched,) = launches_of((9, 0), launch)
    with pytest.raises(ValueError, match="strides mixes multiples of 16 with other integers"):
        case_of(launched, "flash1")


def test_capability_of_meta():
    device = torch.device("meta")
    with compiling_for((8, 9)):
        assert capability(device) == (8, 9)
    assert capability(device) == (0, 0)
