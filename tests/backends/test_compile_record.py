"""The record of compiled configurations is of what the compiler would be given now, or is not used."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

import compile_record

from flashtile.backends.common.compile_report import CompileReport, every_case

ARCH = "sm_90a"
NUMBERS = {
    "registers": 100, "spill_stores": 0, "spill_loads": 0, "stack": 0, "shared": 0, "threads": 128,
    "tensor_core": {"mma": 3}, "lost_barriers": 0,
}  # fmt: skip


@pytest.fixture
def case(monkeypatch, tmp_path):
    """A configuration that a record knows."""
    (case,) = (case for case in every_case(ARCH) if case.name == "dq bf16 head_dim 64 block mask")
    monkeypatch.setattr(compile_record, "PATH", tmp_path / "compiled.json")
    entry = {case.name: {"inputs": compile_record.inputs(case)} | NUMBERS}
    compile_record.PATH.write_text(compile_record.lines({ARCH: entry}))
    compile_record.record.cache_clear()
    yield case
    compile_record.record.cache_clear()


def test_it_is_found_until_something_changes(case, monkeypatch):
    found = compile_record.recorded(case, ARCH)
    assert found is not None
    assert found.violations == []
    assert compile_record.recorded(replace(case, spill_budget=-1), ARCH).violations != []
    assert compile_record.recorded(case, "sm_80") is None
    for changed in (
        {"num_warps": 2 * case.num_warps},
        {"signature": case.signature | {"softmax_scale": "fp64"}},
        {"constants": case.constants | {"C": replace(case.constants["C"], BLOCK_D=8)}},
        {"divisible_by_16": frozenset()},
    ):
        assert compile_record.recorded(replace(case, **changed), ARCH) is None, changed
    monkeypatch.setattr(compile_record.triton, "__version__", "0.0")
    assert compile_record.recorded(case, ARCH) is None


@pytest.mark.parametrize(
    ("below", "noticed"), [("\n# a comment\n", False), ('"""Text."""\n', False), ("NUMBER = 3\n", True)]
)
def test_which_changes_of_an_imported_module_count(case, below, noticed, monkeypatch, tmp_path):
    """Of the walk over blocks, which the kernel calls."""
    name = "flashtile.backends.common.tiles"
    assert name in compile_record.modules_of(case.kernel.fn.__module__)
    before = compile_record.inputs(case)
    path_of, changed = compile_record.path_of, tmp_path / "tiles.py"
    changed.write_text(path_of(name).read_text("utf-8") + below)
    monkeypatch.setattr(
        compile_record, "path_of", lambda module: changed if module == name else path_of(module)
    )
    for function in (compile_record.tree, compile_record.source):  # without what they have kept
        monkeypatch.setattr(compile_record, function.__name__, function.__wrapped__)
    assert (compile_record.inputs(case) != before) is noticed


def test_a_constant_has_one_text_in_every_process():
    @dataclass(frozen=True)
    class Variant:
        FUNCTION: object

        @property
        def derived(self) -> int:
            return 7

    assert "7" in compile_record.text(Variant(None))
    with pytest.raises(TypeError, match="no text"):
        compile_record.text(Variant(object()))


def test_changed_cases_are_compiled_and_written(case, monkeypatch):
    other = replace(case, name="other", num_warps=2 * case.num_warps)
    compiled = []

    def reports(cases, arch):
        compiled.extend((arch, case.name) for case in cases)
        return [
            CompileReport(**NUMBERS | {"spill_stores": 8}, name=case.name, arch=arch, spill_budget=0,
                          shared_limit=0, expects_tensor_cores=True, seconds=1.0)
            for case in cases
        ]  # fmt: skip

    monkeypatch.setattr(compile_record, "reports", reports)
    monkeypatch.setattr(compile_record, "every_case", lambda arch: [other, case] if arch == ARCH else [])
    assert list(compile_record.compile_changed()) == [f"{ARCH} other: 8 bytes of spill stores, budget 0"]
    assert compiled == [(ARCH, "other")]
    written = json.loads(compile_record.PATH.read_text())
    assert [*written[ARCH]] == [case.name, "other"]
    compile_record.record.cache_clear()
    assert compile_record.recorded(other, ARCH).spill_stores == 8
