"""The ahead-of-time compilation report, on small kernels with known properties."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from flashtile.backends import compat  # noqa: E402
from flashtile.tools.inspection.report import (  # noqa: E402
    ARCHITECTURES,
    CompileCase,
    CompileReport,
    architecture,
    report,
    reports,
)

pytestmark = pytest.mark.compile

TESTED_ARCHITECTURES = ("sm_80", "sm_90a")
TENSOR_CORE = {"sm_80": "mma", "sm_90a": "wgmma"}


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, bias_ptr, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c [M, N] = a [M, k] @ b [k, N] (+ bias)."""
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        a = tl.load(a_ptr + rows[:, None] * k + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(c_ptr.dtype.element_ty))


def product(dtype: str = "bf16", m: int = 64, n: int = 64, **changes) -> CompileCase:
    signature = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "c_ptr": f"*{dtype}", "k": "i32"}
    constants = {"bias_ptr": None, "M": m, "N": n, "K": 64}
    case = {
        "name": f"product {dtype} {m}x{n}",
        "kernel": product_kernel,
        "signature": signature,
        "constants": constants,
        "divisible_by_16": frozenset({"k"}),
    }
    return CompileCase(**(case | changes))


class Inner(NamedTuple):
    number: Any
    tensor: Any


class Sizes(NamedTuple):
    length: Any
    table: Any
    stride: Any
    inner: Any


def test_what_the_compiler_is_given(monkeypatch):
    """Constants within structures, and which arguments are multiples of 16, in the order of the kernel."""
    given = []
    monkeypatch.setattr(compat, "is_compilable", lambda kernel: True)
    monkeypatch.setattr(compat, "compile_for", lambda *arguments: given.append(arguments))
    kernel = SimpleNamespace(
        arg_names=["x", "sizes", "m", "n", "C"], is_gluon=lambda: False, __name__="kernel"
    )
    structure = Sizes("i32", "*fp32", 1, Inner("fp32", None))
    signature = {"n": "i64", "m": "i32", "x": "*bf16", "sizes": structure}
    case = CompileCase(
        "case", kernel, signature, {"C": 3}, frozenset({"sizes", "n"}), 8, 2, {"maxnreg": 64, "num_stages": 4}
    )
    case.compile(ARCHITECTURES["sm_90a"])
    case.compile(ARCHITECTURES["gfx942"])
    types = {
        "x": "*bf16", "sizes": Sizes("i32", "*fp32", "constexpr", Inner("fp32", "constexpr")),
        "m": "i32", "n": "i64", "C": "constexpr",
    }  # fmt: skip
    multiple = [["tt.divisibility", 16]]
    attributes = {(0,): multiple, (1, 0): multiple, (1, 1): multiple, (3,): multiple}
    options = {"num_warps": 8, "num_stages": 4, "maxnreg": 64}
    constants = {(4,): 3, (1, 2): 1, (1, 3, 1): None}
    assert [target for *target, _, _ in given] == [["cuda", 90, 32], ["hip", "gfx942", 64]]
    for *_, source, given_options in given:
        assert source.fn is kernel
        assert source.signature == types
        assert list(source.signature) == kernel.arg_names
        assert (source.constants, source.attrs, given_options) == (constants, attributes, options)


@pytest.mark.parametrize("arch", TESTED_ARCHITECTURES)
def test_sixteen_bit_products_run_on_tensor_cores(arch):
    found = report(product(), arch)
    assert set(found.tensor_core) == {TENSOR_CORE[arch]}
    assert found.violations == []
    assert (found.spill_stores, found.spill_loads, found.stack) == (0, 0, 0)
    assert 0 < found.registers <= 255
    assert found.threads == 128
    # At least both operands of one step lie in shared memory.
    assert found.shared >= 2 * 64 * 64 * 2


def test_exact_float32_products_do_not():
    assert report(product("fp32", tensor_cores=False), "sm_90a").tensor_core == {}
    assert report(product("fp32"), "sm_90a").violations == ["no tensor-core instruction"]


def test_threads_follow_warps():
    assert report(product(num_warps=8), "sm_90a").threads == 256


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.thorough), "sm_90a"])
def test_spills_are_those_that_ptxas_reports(arch, tmp_path):
    from triton.backends.nvidia.compiler import get_ptxas

    case = product(m=128, n=256)  # the accumulator takes 256 registers of each of 128 threads, one too many
    found = report(case, arch)
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(case.compile(ARCHITECTURES[arch]).asm["ptx"])
    options = ["-v", "-lineinfo", "--gpu-name", arch, "-o", tmp_path / "kernel.cubin"]
    command = [get_ptxas(ARCHITECTURES[arch].capability).path, *options, ptx]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (int(re.findall(rf"(\d+) bytes spill {kind}", log)[0]) for kind in ("stores", "loads"))
    assert stores > 0
    # Triton's own call of ptxas has options that move a few registers.
    assert found.spill_stores == pytest.approx(stores, rel=0.1)
    assert found.spill_loads == pytest.approx(loads, rel=0.1)


DEEP = product(m=128, n=128, num_stages=6)
"""A kernel that needs more shared memory than a block of sm_89 has."""


def test_shared_memory_above_the_limit_is_a_violation():
    assert report(DEEP, "sm_90a").violations == []
    (violation,) = report(DEEP, "sm_89").violations
    assert "shared memory" in violation
    assert str(99 * 1024) in violation


@gluon.jit
def await_partition(barriers):
    mbarrier.wait(barriers.index(0), 0)


@gluon.jit
def arrive_partition(barriers):
    mbarrier.arrive(barriers.index(0), count=1)


@gluon.jit
def partitions_kernel(LOST: gl.constexpr):
    """Two partitions that share one array of barriers, and ``LOST`` barriers that no partition has."""
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    if LOST > 0:
        lost = gl.allocate_shared_memory(gl.int64, [LOST, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(LOST):
            mbarrier.init(lost.index(i), count=1)
    gl.warp_specialize([(await_partition, (barriers,)), (arrive_partition, (barriers,))], [1], [24])


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_barriers_that_no_partition_has_are_a_violation(lost):
    case = CompileCase("partitions", partitions_kernel, {}, {"LOST": lost}, tensor_cores=False)
    found = report(case, "sm_90a")
    assert found.lost_barriers == lost
    assert bool(found.violations) == bool(lost)


def test_reports_keep_the_order_of_cases():
    cases = [product(m=m) for m in (128, 64, 32)]
    assert [found.name for found in reports(cases, "sm_80", jobs=2)] == [case.name for case in cases]


def test_shared_memory_of_a_block():
    """The CUDA programming guide's table of compute capabilities, and AMD's local data share."""
    kib = {name: one.shared_limit / 1024 for name, one in ARCHITECTURES.items()}
    assert kib == {
        "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227,
        "sm_120a": 99, "gfx942": 64, "gfx950": 160, "gfx1201": 64,
    }  # fmt: skip


def test_architectures_are_named_as_ptxas_does():
    nvidia = [one for one in ARCHITECTURES.values() if not one.amd]
    assert [(one.name.rstrip("a"), one.warp_size) for one in nvidia] == [
        (f"sm_{one.capability}", 32) for one in nvidia
    ]
    assert architecture("sm_90") == architecture("sm_90a")
    with pytest.raises(ValueError, match=r"arch must be one of sm_80.*got 'sm_12'"):
        architecture("sm_12")


def test_a_case_must_name_every_argument_once():
    with pytest.raises(ValueError, match=r"differ in k$"):
        report(product(signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16"}), "sm_80")
    twice = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "k": "i32", "K": "i32"}
    with pytest.raises(ValueError, match=r"differ in K$"):
        report(product(signature=twice), "sm_80")


def test_objects_other_than_kernels_are_refused():
    with pytest.raises(TypeError, match=r"kernel must be a triton\.jit function, got function"):
        report(product(kernel=print_nothing), "sm_80")


def print_nothing() -> None:
    """No kernel."""


@pytest.fixture
def command(monkeypatch):
    """Run ``flashtile inspect`` on given cases."""
    import typer

    from flashtile.tools.commands import inspect as module

    def run(cases: list[CompileCase], *arguments: str, columns: int = 200):
        monkeypatch.setattr("flashtile.tools.inspection.cases.every_case", lambda arch: cases)
        app = typer.Typer()
        app.command()(module.inspect)
        return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})

    return run


def test_inspect_tabulates_and_writes_json(command, tmp_path: Path):
    path = tmp_path / "report.json"
    result = command([product()], "--arch", "sm_80", "--arch", "sm_90a", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "wgmma" in result.output
    assert "product bf16 64x64" in result.output
    rows = json.loads(path.read_text())
    assert [row["arch"] for row in rows] == ["sm_80", "sm_90a"]
    assert all(row["violations"] == [] and row["registers"] > 0 for row in rows)


def test_inspect_fails_beyond_the_limits(command):
    result = command([product(), DEEP], "--arch", "sm_89")
    assert result.exit_code == 1
    assert "2 configurations, 1 beyond their limits" in result.output
    assert command([product(), DEEP], "--arch", "sm_89", "--kernel", "64x64").exit_code == 0


def test_inspect_says_in_one_line_what_triton_cannot_compile(command, monkeypatch):
    """As if Triton had removed a function that a kernel calls."""

    def removed(*arguments):
        raise triton.CompilationError("", None, "async_copy has been removed")

    monkeypatch.setattr(compat, "compile_for", removed)
    result = command([product()], "--arch", "sm_90a")
    assert result.exit_code == 1
    assert result.exception.code == 1
    line = f"product bf16 64x64 cannot be compiled for sm_90a with Triton {triton.__version__}"
    assert result.output.splitlines() == [f"{line}: async_copy has been removed"]


def test_inspect_s_table_is_whole_where_nothing_is_a_terminal(command, monkeypatch):
    """As in a file or a pipe, whose width rich takes to be 80."""
    from flashtile.tools.commands import inspect as module

    name = "hopper forward head_dim 128/128 128x128 causal"
    made = CompileReport(
        name, "sm_90a", registers=168, spill_stores=0, spill_loads=0, stack=0, shared=197120, threads=384,
        tensor_core={"wgmma": 120}, lost_barriers=0, shared_limit=232448,
        expects_tensor_cores=True, seconds=9.9,
    )  # fmt: skip
    monkeypatch.setattr(module, "reports", lambda cases, arch, jobs: iter([made]))
    output = command([product()], "--arch", "sm_90a", columns=80).output
    assert name in output
    assert " 197120 " in output


def test_inspect_names_bad_arguments(command):
    assert "sm_90a" in command([product()], "--arch", "sm_1").output
    assert command([product()], "--kernel", "nothing").exit_code == 2
