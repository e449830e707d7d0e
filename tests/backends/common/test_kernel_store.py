"""Compiled kernels of earlier processes are found as Triton would find them, without its digest of itself."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to keep", allow_module_level=True)

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.runtime import cache as triton_cache
from triton.runtime import driver

from flashtile.backends import compat
from flashtile.backends.common import first_calls, jit, kernel_store
from flashtile.backends.portable.attention import functions
from flashtile.caches import BoundedCache

pytestmark = pytest.mark.compile

TARGET = GPUTarget("cuda", 90, 32)


@jit.kernel(do_not_specialize=["n"])
def double(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, 2 * x, mask=offsets < n)


class Sizes(NamedTuple):
    rows: Any
    inner: Any


@jit.kernel(do_not_specialize=["lengths", "n"])
def structured(pointers, strides, lengths, n, BLOCK: tl.constexpr):
    tl.store(pointers.rows + strides.rows, lengths.inner.rows + n)


@dataclass(frozen=True)
class Variant:
    BLOCK: int
    SCORE_MOD: Any = None


@jit.kernel()
def of_variant(x_ptr, C: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, C.BLOCK), 1.0)


@jit.gluon_kernel()
def gluon_of_variant(x_ptr, C: gl.constexpr):
    gl.store(x_ptr + gl.arange(0, C.BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0])), 1.0)


class FakeDevice:
    """What Triton asks a driver when it compiles for a launch."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """The calls of Triton's own compile, each of which computes the key."""
    calls = []
    compile_ = triton.compile

    def counted(*arguments, **more):
        calls.append(arguments)
        return compile_(*arguments, **more)

    monkeypatch.setattr(triton, "compile", counted)
    return calls


def source(block=64):
    return ASTSource(double, {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": block})


def load_or_compile(block=64, **options):
    return first_calls.load_or_compile(source(block), target=TARGET, options=options)


def key_files(cache):
    return list((cache / "flashtile").iterdir())


def test_the_second_time_is_a_look_up(cache, compilations):
    first = load_or_compile()
    assert len(compilations) == 1
    second = load_or_compile()
    assert len(compilations) == 1
    theirs = triton.compile(source(), target=TARGET, options={})
    for found in (second, theirs):
        assert (found.hash, found.name, found.kernel) == (first.hash, first.name, first.kernel)
        assert found.metadata == first.metadata


def test_what_triton_compiled_is_found(compilations):
    load_or_compile(block=32)
    theirs = triton.compile(source(), target=TARGET, options={"num_warps": 2})
    compilations.clear()
    assert load_or_compile(num_warps=2).kernel == theirs.kernel
    assert not compilations


@pytest.mark.parametrize("change", [{"block": 128}, {"num_warps": 8}, {"num_stages": 1}])
def test_another_source_or_option_is_compiled(compilations, change):
    first = load_or_compile()
    assert load_or_compile(**change).hash != first.hash
    assert len(compilations) == 2


def test_variables_that_change_the_code_are_seen(compilations, monkeypatch):
    load_or_compile()
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    load_or_compile()
    assert len(compilations) == 2


def test_a_cleared_cache(cache, compilations):
    load_or_compile()
    shutil.rmtree(cache)
    load_or_compile()
    assert len(compilations) == 2
    load_or_compile()
    assert len(compilations) == 2


def test_an_entry_without_its_files(cache, compilations):
    first = load_or_compile()
    for path in cache.rglob("double.*"):
        path.unlink()
    assert load_or_compile().kernel == first.kernel
    assert len(compilations) == 2


def test_a_stored_key_is_not_computed_again(cache, compilations, monkeypatch):
    """Also if kernels are compiled. They have the names that Triton gives them."""
    if not hasattr(triton_cache, "triton_key"):
        pytest.skip("this Triton has no such function")
    load_or_compile()
    theirs = triton.compile(source(32), target=TARGET, options={})
    for path in cache.rglob("double.*"):
        path.unlink()
    monkeypatch.setattr(triton_cache, "triton_key", pytest.fail)  # as in a new process
    compilations.clear()
    assert load_or_compile(block=32).hash == theirs.hash
    assert len(compilations) == 1


@pytest.mark.parametrize("content", ["", "3.0.0-another", "0 3.0.0-another", "\x00" * 9])
def test_a_wrong_key_is_written_anew(cache, compilations, content):
    load_or_compile()
    (path,) = key_files(cache)
    right = path.read_text()
    path.write_text(content)
    load_or_compile()
    assert path.read_text() == right
    compilations.clear()
    load_or_compile()
    assert not compilations
    assert key_files(cache) == [path]


def test_a_cache_that_takes_no_key(cache, compilations):
    cache.mkdir()
    (cache / "flashtile").write_text("in the way")
    for count in (1, 2):
        assert load_or_compile().kernel
        assert len(compilations) == count


def test_a_triton_of_another_build_has_another_key_file(tmp_path):
    """Each file of the compiler counts, by size and times; what Python wrote beside them does not."""

    def path(name):
        return tmp_path / "triton" / name

    names = ("_C/libtriton.so", "backends/nvidia/compiler.py", "compiler/compiler.py", "language/core.py")
    for name in (*names, "tools/disasm.py", "compiler/__pycache__/compiler.pyc"):
        path(name).parent.mkdir(parents=True, exist_ok=True)
        path(name).write_text("as it was")
    seen = [kernel_store.fingerprint(tmp_path / "triton")]
    for name in names:
        path(name).write_text("longer than it was")
        seen.append(kernel_store.fingerprint(tmp_path / "triton"))
        os.utime(path(name), ns=(0, 12345))
        seen.append(kernel_store.fingerprint(tmp_path / "triton"))
    path("backends/other.py").touch()
    seen.append(kernel_store.fingerprint(tmp_path / "triton"))
    assert len(set(seen)) == len(seen)
    for name in ("tools/disasm.py", "compiler/__pycache__/compiler.pyc"):
        path(name).write_text("not a file of the compiler")
    assert kernel_store.fingerprint(tmp_path / "triton") == seen[-1]


def test_integers_of_a_structure_are_not_specialized_if_it_says_so(monkeypatch):
    """As lone integers are not; those of other structures are, and pointers by their alignment."""
    monkeypatch.setattr(driver, "_active", FakeDevice())
    *_, bind = structured.create_binder()

    def specialization(stride, rows, inner):
        tensor = torch.empty(64)
        pointers, strides = Sizes(tensor, None), Sizes(stride, 1)
        lengths = Sizes(Sizes(rows, 2.5), Sizes(tensor, inner))
        return bind(pointers, strides, lengths, rows, BLOCK=64)[1]

    pointers, strides, lengths, n, block = specialization(16, 1, None)
    assert (pointers, strides) == ((("*fp32", "constexpr"), ("D", None)), (("i32", "constexpr"), ("D", 1)))
    assert isinstance(lengths[0], Sizes)
    assert lengths == ((("i32", "fp32"), ("*fp32", "constexpr")), ((None, None), ("D", None)))
    assert n == ("i32", None)
    for rows in (2, 16, 17):
        assert specialization(16, rows, None) == [pointers, strides, lengths, n, block]
    assert specialization(16, 2**31, None)[2][0] == (("i64", "fp32"), ("*fp32", "constexpr"))
    assert specialization(17, 1, None)[1] != strides


def test_kernels_of_functions_that_are_made_all_the_time_are_freed(monkeypatch):
    """As a service does whose score functions are new in each request."""
    monkeypatch.setattr(driver, "_active", FakeDevice())
    monkeypatch.setattr(jit, "load_or_compile", lambda src, **more: SimpleNamespace(src=src))
    monkeypatch.setattr(jit, "MOST_KERNELS", 3)
    monkeypatch.setattr(functions, "_kept", BoundedCache(10**4))
    of_variant.device_caches.clear()
    made = []
    for i in range(20):
        body = f"    return score + {i}\n" + "    # words\n" * 20
        function = functions._function("score_mod", "score", body)
        made.append(weakref.ref(function))
        variant = Variant(64, function)
        compiled = of_variant.warmup(triton.MockTensor(tl.float32), variant, grid=(1,))
        assert compiled.src.constants == {(1,): variant}
        assert of_variant.warmup(triton.MockTensor(tl.float32), variant, grid=(1,)) is compiled
    del function, variant, compiled
    gc.collect()
    assert [len(kept) for kept in of_variant.device_caches[0][:2]] == [3, 3]
    assert 3 <= sum(each() is not None for each in made) < 10
    of_variant.device_caches.clear()


def test_a_listener_gets_every_kernel(compilations, monkeypatch):
    heard = []
    load_or_compile()
    monkeypatch.setattr(knobs.compilation, "listener", lambda **found: heard.append(found["cache_hit"]))
    load_or_compile()
    assert heard == [True]


@pytest.mark.parametrize("function", [of_variant, gluon_of_variant])
@pytest.mark.parametrize("hook", ["jit_cache_hook", "jit_post_compile_hook"])
def test_hooks_of_compilation_are_told_of_constants_that_json_lacks(monkeypatch, hook, function):
    """vLLM's monitor of compilations is such a hook."""
    monkeypatch.setattr(driver, "_active", FakeDevice())
    heard = []
    listener = lambda **found: heard.append(json.loads(found["compile"]["specialization_data"]))  # noqa: E731
    monkeypatch.setattr(knobs.runtime, hook, listener)
    function.device_caches.clear()
    function.warmup(triton.MockTensor(tl.float32), Variant(128), grid=(1,))
    assert [found["constant_vals"] for found in heard] == [["Variant(BLOCK=128, SCORE_MOD=None)"]]


def test_always_compile_is_heeded(compilations, monkeypatch):
    for count in (1, 2):
        monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
        load_or_compile()
        assert len(compilations) == count


def test_a_launch_looks_here(compilations, monkeypatch):
    """Triton's own path to a launch, up to the driver."""
    monkeypatch.setattr(driver, "_active", FakeDevice())
    kernels = []
    for _ in range(2):
        double.device_caches.clear()  # as in a new process
        kernels.append(double.warmup(triton.MockTensor(tl.float32), 5, BLOCK=64, grid=(1,)))
    double.device_caches.clear()
    assert len(compilations) == 1
    assert kernels[0].kernel == kernels[1].kernel
    assert kernels[0] is not kernels[1]


def test_eight_threads_make_first_calls_at_once(monkeypatch):
    """Some launch kernels, also the same ones, and others compile for another GPU ahead of time."""
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    double.device_caches.clear()
    together, found = threading.Barrier(8), {}

    def call(thread):
        contexts = {90: compat.driver_of_torch, 80: lambda: compat.compiling_driver((8, 0))}
        arch = (90, 80)[thread % 2]
        for block in (32, 64, 128 << thread):
            together.wait(60)
            with contexts[arch]():
                compiled = double.warmup(triton.MockTensor(tl.float32), 5, BLOCK=block, grid=(1,))
            found[thread, block] = compiled.metadata.target.arch == arch, compiled.src.constants

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert found == {(i, block): (True, {(2,): block}) for i in range(8) for block in (32, 64, 128 << i)}
    assert driver._active is None


def start_process():
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])
    return subprocess.Popen(
        [sys.executable, "-c", "import test_kernel_store as test; print(test.load_or_compile().hash)"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.thorough
def test_processes_share_the_key(cache, compilations):
    """Two that begin at once, on an empty cache, and this one."""
    both = [start_process() for _ in range(2)]
    found = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(key_files(cache)) == 1
    assert {load_or_compile().hash} == found
    assert not compilations


@pytest.mark.gpu
def test_a_new_process_calls_attention_without_the_digest():
    call = """
import torch, flashtile
from triton.runtime.cache import triton_key
q = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
flashtile.attention(q, q, q, causal=True, backend="portable").sum().backward()
print(triton_key.cache_info().misses)
"""
    command = [sys.executable, "-c", call]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert [output.strip() for output in outputs] == ["1", "0"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_what_compiles_for_long(monkeypatch):
    printed = Terminal()
    monkeypatch.delenv(first_calls.QUIET, raising=False)
    monkeypatch.setattr(sys, "stderr", printed)
    monkeypatch.setattr(first_calls, "ANNOUNCED_AFTER", 0.0)

    def compile_long(src, **more):
        deadline = time.monotonic() + 60
        while "\n" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(triton, "compile", compile_long)
    load_or_compile()
    assert printed.getvalue().startswith("flashtile: compiling double; `flashtile compile` does it ahead")
    assert printed.getvalue().count("\n") == 1


@pytest.mark.parametrize(("quiet", "stream"), [("1", Terminal), ("0", io.StringIO)])
def test_no_line_is_printed_if_it_is_hidden_or_not_at_a_terminal(monkeypatch, quiet, stream):
    monkeypatch.setenv(first_calls.QUIET, quiet)
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(threading, "Timer", pytest.fail)
    monkeypatch.setattr(triton, "compile", lambda src, **more: None)
    load_or_compile()


@pytest.mark.parametrize("stream", ["none", "closed", "without isatty"])
def test_kernels_compile_without_a_usable_stderr(monkeypatch, stream):
    streams = {"none": None, "closed": io.StringIO(), "without isatty": object()}
    streams["closed"].close()
    monkeypatch.delenv(first_calls.QUIET, raising=False)
    monkeypatch.setattr(sys, "stderr", streams[stream])
    monkeypatch.setattr(triton, "compile", lambda src, **more: "compiled")
    assert load_or_compile() == "compiled"
