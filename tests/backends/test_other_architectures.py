"""Kernels for GPUs that nobody measured them on compile; all of ``architectures.py`` with its make target."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

import architectures
from spills import SPILLS, beyond_limits

from flashtile.tools.inspection.cases import every_case
from flashtile.tools.inspection.report import CompileReport, used_on_amd


@pytest.mark.compile
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("gfx950", "forward bf16 head_dim 64 causal"),
        ("gfx1201", "forward bf16 head_dim 64 causal"),
        ("sm_120a", "forward bf16 head_dim 64 causal"),
    ],
)
def test_a_telling_case_compiles(arch, name):
    (case,) = (case for case in architectures.telling_cases(arch) if case.name == name)
    architectures.check(case, arch)


@pytest.mark.parametrize("arch", SPILLS)
def test_spills_are_accepted_of_cases_that_exist(arch):
    assert SPILLS[arch].keys() <= {case.name for case in every_case(arch)}


@pytest.mark.parametrize(("spilled", "wrong"), [(8, []), (9, ["9 bytes of spill stores, 8 accepted"])])
def test_spills_that_are_not_accepted_are_beyond_the_limits(monkeypatch, spilled, wrong):
    monkeypatch.setitem(SPILLS, "sm_80", {"dq": 8})
    found = CompileReport(
        "dq", "sm_80", registers=100, spill_stores=spilled, spill_loads=0, stack=0, shared=0, threads=128,
        tensor_core={}, lost_barriers=0, shared_limit=0, expects_tensor_cores=False, seconds=0.0,
    )  # fmt: skip
    assert beyond_limits(found) == wrong


@pytest.mark.parametrize(
    ("instructions", "stores", "loads"),
    [
        ("", 0, 0),
        ("scratch_store_dword off, v1, s32\nscratch_load_dwordx4 v[0:3], off, s32 offset:16", 4, 16),
        (
            "scratch_store_b128 off, v[0:3], s32\nscratch_store_b32 off, v1\nscratch_load_b64 v[0:1], off",
            20,
            8,
        ),
    ],
    ids=["none", "gfx9", "gfx12"],
)
def test_scratch_counts_as_spills(instructions, stores, loads):
    """What the compiler's assembly says, of a kernel made for this test."""
    metadata = ".max_flat_workgroup_size: 256\n.private_segment_fixed_size: 32\n.vgpr_count:     94\n"
    used = used_on_amd(f"v_mfma_f32_32x32x8_bf16 a\nv_mfma_f32_x b\n{instructions}\n{metadata}")
    assert (used["spill_stores"], used["spill_loads"]) == (stores, loads)
    assert (used["registers"], used["threads"], used["stack"]) == (94, 256, 32)
    assert used["tensor_core"] == {"mfma": 2}
