"""Direct launches hand the driver what Triton's launchers hand it, and need no compiler."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not loaded", allow_module_level=True)

import triton
from triton import knobs

from flashtile import torch_private
from flashtile.backends import compat, libcuda
from flashtile.backends.common import direct_launch
from flashtile.backends.common.tma import View
from walk import walk

HERE = Path(__file__).parent
GRID = (7, 2, 1)
FUNCTION = 0x123456789
INVALID_CONTEXT = 201
Pair = namedtuple("Pair", "first second")


def program(folder: Path, *arguments: str) -> list[str]:
    """Run ``direct_launch_program.py`` with a driver that records launches, and return its lines."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    library = folder / "libcuda.so.1"
    source = HERE / "fake_libcuda.c"
    flags = ["-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    for name, place in (("LD_LIBRARY_PATH", folder), ("PYTHONPATH", HERE.parents[2])):
        environment[name] = os.pathsep.join(filter(None, (str(place), os.environ.get(name))))
    done = subprocess.run(
        [sys.executable, str(HERE / "direct_launch_program.py"), *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LAUNCHED = {
    "forward": ("forward",),
    "plain": ("forward", "preprocess", "backward", "sum_parts"),
    "functions": ("forward", "preprocess", "backward", "sum_parts"),
    "portable": ("forward", "preprocess", "dkdv", "dq"),
    "decode": ("decode", "combine"),
}
"""Names of calls, and of their kernels."""


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("forward", "decode"), pytest.param(("plain", "functions", "portable"), marks=pytest.mark.thorough)],
    ids=" and ".join,
)
def test_the_driver_gets_the_same_from_triton(tmp_path, names):
    """Numbers of every type, structures, constants, None and TMA descriptors, each without a context."""
    lines = program(tmp_path, "same", *names)
    kernels = [f"{name} {kernel}_kernel" for name in names for kernel in LAUNCHED[name]]
    assert [line.rpartition(" ")[0] for line in lines] == ["types", *kernels]


@pytest.mark.compile
def test_a_kernel_of_a_folder_is_launched_without_gcc(tmp_path):
    kernels = tmp_path / "kernels"
    kernels.mkdir(mode=0o755)
    assert program(tmp_path, "folder", str(kernels)) == [
        "launched 17",
        "launch of of_every_type: CUDA error 701: too many resources requested for launch",
        "launched without a context",
        "launched with other scalars",
    ]


class Driver:
    """Functions of the CUDA driver. Launches are kept as (stream, values of the parameters).

    The thread that creates it has a context. Other threads have none until they make one current.
    """

    without_context = ("cuCtx", "cuDevice", "cuDriver", "cuGetErrorString")
    """Names of functions that need no context begin so."""
    shared, threads, result, version = 232448, 1024, 0, 13020
    missing: type[Exception] | None = None

    def __init__(self, *sizes: int) -> None:
        self.sizes = (*sizes, 8, 8)
        self.launches: list[tuple[int, list[bytes]]] = []
        self.loaded = 0
        self.attributes: dict[int, int] = {}
        self.during_a_launch: Any = None
        self.of_thread = threading.local()
        self.of_thread.context = 1

    def function(self, name: str) -> Any:
        if name == "cuLaunchKernelEx" and self.missing is not None:
            raise self.missing(name)
        found = getattr(self, name.lower())
        if name.startswith(self.without_context):
            return found
        return lambda *arguments: found(*arguments) if self.context() else INVALID_CONTEXT

    def context(self) -> int:
        return getattr(self.of_thread, "context", 0)

    def cuctxgetcurrent(self, context: Any) -> int:
        context._obj.value = self.context()
        return 0

    def cuctxsetcurrent(self, context: int) -> int:
        self.of_thread.context = context
        return 0

    def cudeviceprimaryctxretain(self, context: Any, device: int) -> int:
        context._obj.value = 100 + device
        return 0

    def cudeviceget(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cudevicegetattribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = self.shared
        return 0

    def cumoduleloaddata(self, module: Any, binary: bytes) -> int:
        self.loaded += 1
        module._obj.value = 2
        return 0 if binary == b"binary" else 200

    def cumodulegetfunction(self, function: Any, module: int, name: bytes) -> int:
        assert name == b"a_kernel"
        function._obj.value = FUNCTION
        return 0

    def cufuncgetattribute(self, value: Any, attribute: int, function: int) -> int:
        value._obj.value = self.threads if attribute == 0 else 1000
        return 0

    def cufuncsetattribute(self, function: int, attribute: int, value: int) -> int:
        self.attributes[attribute] = value
        return 0

    def cufuncsetcacheconfig(self, function: int, config: int) -> int:
        return 0

    def cugeterrorstring(self, result: int, text: Any) -> int:
        text._obj.value = b"the driver's words"
        return 0

    def cudrivergetversion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cutensormapencodetiled(self, encoded: Any, *more: Any) -> int:
        assert ctypes.addressof(encoded) % 64 == 0
        ctypes.memset(encoded, 255, 128)
        return self.result

    def culaunchkernelex(self, config: int, function: int, parameters: int, extra: None) -> int:
        assert function == FUNCTION
        if (then := self.during_a_launch) is not None:
            self.during_a_launch = None
            then()
        given = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(place, size) for place, size in zip(given, self.sizes, strict=True)]
        self.launches.append((libcuda.LaunchConfig.from_address(config).stream or 0, values))
        return self.result


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    """A driver for kernels with two pointers and a number."""
    found = Driver(8, 8, 4)
    monkeypatch.setattr(libcuda, "function", found.function)
    monkeypatch.setattr(libcuda, "bound", lambda name, *given: partial(found.function(name), *given))
    monkeypatch.setattr(libcuda, "parameter_sizes", lambda name, binary: tuple(found.sizes))
    return found


NUMBERS = itertools.count()


class Compiled:
    """A kernel that Triton has compiled. ``types`` are those of its arguments."""

    name, kernel = "a_kernel", b"binary"

    def __init__(self, *types: Any, **metadata: Any) -> None:
        plain = {
            "global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "num_warps": 4, "shared": 0,
            "launch_cooperative_grid": False, "launch_pdl": False, "tensordesc_meta": None,
        }  # fmt: skip
        self.metadata = SimpleNamespace(**{**plain, **metadata})
        self.src = SimpleNamespace(signature=dict(enumerate(types)))
        self.hooked: list[tuple] = []
        self.hash = str(next(NUMBERS))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.hooked.append((grid, stream, *arguments))


PLAIN = ("*fp32", "*fp32", "i32", "constexpr")


def launcher(compiled: Compiled, *tensors: Any, fixed: tuple = (5, "constant"), **more: Any) -> Any:
    return direct_launch.launcher(compiled, 0, GRID, tensors, fixed, **more)


def of_pointers(launch: tuple[int, list[bytes]]) -> list[int]:
    return [int.from_bytes(value, "little") for value in launch[1][:2]]


def test_tensors_and_addresses(driver):
    a, b = torch.empty(3), torch.nn.Parameter(torch.empty(3))
    launch = launcher(Compiled(*PLAIN), a, b)
    launch(11, (a, b))
    launch(0, (4096, 2**63))
    launch.with_fixed((-6, "constant"))(2**63, (1,), (2,))
    assert [stream for stream, _ in driver.launches] == [11, 0, 2**63]
    assert [of_pointers(each) for each in driver.launches] == [
        [a.data_ptr(), b.data_ptr()], [4096, 2**63], [1, 2]
    ]  # fmt: skip
    numbers = [int.from_bytes(values[2], "little", signed=True) for _, values in driver.launches]
    assert numbers == [5, 5, -6]


def test_structures_in_the_structure_of_tensors(driver):
    driver.sizes = (8, 4, 8, 4, 8, 4, 8, 8)
    types = (("*fp32", "i32"), "*fp32", "constexpr", ("i32", "*fp32"))
    given, c = ((10, 3), 11, None, (4, 12)), torch.empty(3)
    launch = launcher(Compiled(types, "i32", "constexpr"), *given, pointers=lambda *fields: fields)
    for tensors in (given, ((20, 5), 21, None, (6, c)), given):
        launch(11, tensors[:2], tensors[2:]) if tensors is given else launch(11, tensors)
    found = [[int.from_bytes(value, "little") for value in values] for _, values in driver.launches]
    first, second = [10, 3, 11, 4, 12, 5, 0, 0], [20, 5, 21, 6, c.data_ptr(), 5, 0, 0]
    assert found == [first, second, first]


def test_a_structure_of_numbers_may_come_last(driver):
    """It is packed with the fixed arguments, and again if a launch brings another one."""
    driver.sizes = (8, 4, 4, 4, 8, 8)
    types = ("*fp32", "constexpr", (("i32",), "i32"))
    numbers, others = ((7,), 8), ((9,), 10)
    launch = launcher(Compiled(types, "i32", "constexpr"), 1, None, numbers, pointers=lambda *fields: fields)
    other = launch.with_fixed((6, "constant"))
    launch(11, (1, None, numbers))
    launch(11, (2, None), (numbers,))
    launch(11, (3, None, others))
    other(11, (4, None, numbers))
    launch(11, (5, None, numbers))
    assert numbers_of(driver) == [
        (11, 1, 7, 8, 5), (11, 2, 7, 8, 5), (11, 3, 9, 10, 5), (11, 4, 7, 8, 6), (11, 5, 7, 8, 5)
    ]  # fmt: skip


def test_launches_at_the_same_time_have_their_own_memory(driver):
    """Another thread launches while the driver reads the parameters of the first launch."""
    launch = launcher(Compiled(*PLAIN), 1, 2)

    def in_a_thread() -> None:
        thread = threading.Thread(target=launch, args=(12, (3, 4)))
        thread.start()
        thread.join()

    for _ in range(2):
        driver.during_a_launch = in_a_thread
        launch(11, (1, 2))
    assert [(stream, of_pointers((stream, values))) for stream, values in driver.launches] == [
        (12, [3, 4]), (11, [1, 2]), (12, [3, 4]), (11, [1, 2])
    ]  # fmt: skip


def numbers_of(driver: Driver) -> list[tuple]:
    """Return (stream, values of all parameters but the scratch memory's) of each launch, and forget them."""
    found = [
        (stream, *[int.from_bytes(value, "little") for value in values[:-2]])
        for stream, values in driver.launches
    ]
    driver.launches.clear()
    return found


def test_addresses_that_stay_are_written_once(driver):
    """A launch sees the newest addresses, whatever the launch before it has written into the same memory."""
    driver.sizes = (8, 8, 8, 4, 8, 8)
    types = ("*fp32", "constexpr", "*fp32", "*fp32", "i32", "constexpr")
    launch = launcher(Compiled(*types), 1, None, 2, 3)
    other = launch.with_fixed((6, "constant"))
    step, next_step = (20, 30), (21, 31)
    launch(11, (10, None), step)
    launch(11, (12, None), step)
    launch(12, (13, None), next_step)
    launch(11, (14, None), step)
    other(11, (15, None), step)
    launch(11, (16, None, 22, 32))
    launch(11, (17, None), step)
    launch(11, (18, None), (*step,))
    assert numbers_of(driver) == [
        (11, 10, 20, 30, 5), (11, 12, 20, 30, 5), (12, 13, 21, 31, 5), (11, 14, 20, 30, 5),
        (11, 15, 20, 30, 6), (11, 16, 22, 32, 5), (11, 17, 20, 30, 5), (11, 18, 20, 30, 5),
    ]  # fmt: skip


def test_a_launch_that_fails_leaves_nothing_half_written(driver):
    driver.sizes = (8, 8, 8, 4, 8, 8)
    launch = launcher(Compiled("*fp32", "*fp32", "*fp32", "i32", "constexpr"), 1, 2, 3)
    step, wrong = (20, 30), (21, "an address")
    launch(11, (10,), step)
    with pytest.raises(TypeError):
        launch(11, (11,), wrong)
    launch(11, (12,), step)
    assert numbers_of(driver) == [(11, 10, 20, 30, 5), (11, 12, 20, 30, 5)]


@pytest.mark.parametrize("first", ["*fp32", "i32"])
def test_further_addresses_after_a_structure(driver, first):
    driver.sizes = (8 if first == "*fp32" else 4, 8, 8, 4, 8, 8)
    compiled = Compiled(((first, "*fp32"), "*fp32"), "i32", "constexpr")
    launch = launcher(compiled, (1, 2), 3, pointers=Pair)
    if first == "i32":  # leaves that are addresses are given as tensors
        launch(11, ((10, 20),), (30,))
        assert numbers_of(driver) == [(11, 10, 20, 30, 5)]
    else:
        a, b = torch.empty(3), torch.empty(3)
        launch(11, ((a, b),), (30,))
        assert numbers_of(driver) == [(11, a.data_ptr(), b.data_ptr(), 30, 5)]


def test_threads_with_steps_of_their_own(driver):
    driver.sizes = (8, 8, 8, 4, 8, 8)
    launch = launcher(Compiled("*fp32", "*fp32", "*fp32", "i32", "constexpr"), 1, 2, 3)

    def layers(thread: int) -> None:
        driver.of_thread.context = 1
        step = (100 + thread, 200 + thread)
        for layer in range(300):
            launch(thread, (1000 * thread + layer,), step)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(layers, range(4)))
    assert sorted(numbers_of(driver)) == [
        (thread, 1000 * thread + layer, 100 + thread, 200 + thread, 5)
        for thread in range(4)
        for layer in range(300)
    ]


def test_a_launch_during_a_launch_of_the_same_step(driver):
    driver.sizes = (8, 8, 8, 4, 8, 8)
    launch = launcher(Compiled("*fp32", "*fp32", "*fp32", "i32", "constexpr"), 1, 2, 3)
    step = (20, 30)
    for _ in range(2):
        driver.during_a_launch = lambda: launch(12, (11,), step)
        launch(11, (10,), step)
    assert numbers_of(driver) == [(12, 11, 20, 30, 5), (11, 10, 20, 30, 5)] * 2


def test_hooks_see_further_addresses(driver, monkeypatch):
    compiled = Compiled(*PLAIN)
    launch = launcher(compiled, 1, 2)
    launch(11, (1,), (2,))
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    launch(12, (3,), (4,))
    assert compiled.hooked == [(GRID, 12, 3, 4, 5, "constant")]
    assert numbers_of(driver) == [(11, 1, 2, 5)]


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Return the result of ``function`` in a thread that has not called CUDA."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


VIEW = View([64, 16], [16, 1], [16, 16], torch.bfloat16)
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 16], "fp4_padded": False}


def of_a_descriptor(driver: Driver) -> tuple[Compiled, tuple]:
    """A kernel with a TMA descriptor, and tensors of its first launch."""
    driver.sizes = (128, 4, 4, 8, 8, 4, 8, 8)
    return Compiled(VIEW.type_name, "i32", tensordesc_meta=[META]), (torch.empty(64, 16),)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_thread_without_a_context_gets_that_of_the_device(driver, monkeypatch, is_first):
    """Also if the thread loads the kernel, and for descriptors that are not encoded yet."""
    monkeypatch.setattr(torch_private, "cuda_device", lambda: 3)
    compiled, tensors = of_a_descriptor(driver)
    prepare = partial(direct_launch.launcher, compiled, 3, GRID, tensors, (5,), (VIEW,))
    launch = None if is_first else prepare()

    def run() -> int:
        (launch or prepare())(11, (torch.empty(64, 16),))
        return driver.context()

    assert in_a_thread(run) == 103
    assert len(driver.launches) == 1
    assert driver.context() == 1


def test_a_thread_without_a_context_launches_encoded_descriptors(driver):
    compiled, tensors = of_a_descriptor(driver)
    launch = direct_launch.launcher(compiled, 3, GRID, tensors, (5,), (VIEW,))
    assert in_a_thread(lambda: launch(11, tensors) or driver.context()) == 103
    assert len(driver.launches) == 1


def test_a_kernel_is_loaded_by_a_thread_without_a_context(driver):
    assert in_a_thread(lambda: direct_launch.load(Compiled(*PLAIN), 3) and driver.context()) == 103
    assert driver.loaded == 1


def test_hooks_of_launches_find_a_context(driver, monkeypatch):
    """Triton's launch encodes descriptors, for which it makes no context current."""
    compiled, tensors = of_a_descriptor(driver)
    launch = direct_launch.launcher(compiled, 3, GRID, tensors, (5,), (VIEW,))
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    assert in_a_thread(lambda: launch(11, tensors) or driver.context()) == 103
    assert len(compiled.hooked) == 1


def test_descriptors_are_encoded_in_a_context(driver, monkeypatch):
    monkeypatch.setattr(torch_private, "cuda_device", lambda: 3)

    def encode(descriptor: Any) -> list:
        if not driver.context():
            raise RuntimeError("Triton Error [CUDA]: invalid device context")
        if descriptor.base.data_ptr() == 32:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        return [descriptor.base.data_ptr()]

    maps = direct_launch.TensorMaps(VIEW, encode)
    assert in_a_thread(lambda: (maps[16], driver.context())) == (16, 103)
    for run in (in_a_thread, lambda function: function()):
        with pytest.raises(RuntimeError, match="invalid argument"):
            run(lambda: maps[32])


def test_a_failed_launch_is_named_and_the_next_one_succeeds(driver):
    launch = launcher(Compiled(*PLAIN), 1, 2)
    driver.result = 719
    with pytest.raises(RuntimeError, match=r"^launch of a_kernel: CUDA error 719: the driver's words$"):
        launch(11, (1, 2))
    driver.result = 0
    launch(11, (1, 2))
    assert len(driver.launches) == 2


def test_a_kernel_is_loaded_once(driver):
    """Also if Triton has dropped it and reads it again: a loaded kernel is never unloaded."""
    compiled, again = Compiled(*PLAIN), Compiled(*PLAIN)
    again.hash = compiled.hash
    for each in (compiled, compiled, again):
        launcher(each, 1, 2)(11, (1, 2))
    assert driver.loaded == 1
    compiled = Compiled(*PLAIN)
    compiled.kernel = b"damaged"
    with pytest.raises(RuntimeError, match="cuModuleLoadData: CUDA error 200"):
        launcher(compiled, 1, 2)


@pytest.mark.parametrize(("shared", "attributes"), [(48 * 1024, {}), (48 * 1024 + 1, {8: 232448 - 1000})])
def test_shared_memory_above_the_default_is_asked_for(driver, shared, attributes):
    assert launcher(Compiled(*PLAIN, shared=shared), 1, 2) is not None
    assert driver.attributes == attributes


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_launches_are_called(driver, monkeypatch, name):
    """By Triton's own launch: a hook gets an object of Triton's."""
    compiled, a = Compiled(("*fp32", "*fp32"), "i32", "constexpr"), torch.empty(3)
    launch = launcher(compiled, a, 4096, pointers=Pair)
    monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    launch(11, (a, 4096))
    assert compiled.hooked == [(GRID, 11, Pair(a.data_ptr(), 4096), 5, "constant")]
    assert driver.launches == []


@walk(
    "metadata",
    [
        {"global_scratch_size": 64}, {"profile_scratch_size": 64}, {"num_ctas": 2}, {"tmem_size": 64},
        {"launch_cooperative_grid": True}, {"shared": 232449}, {"num_warps": 33},
    ],
)  # fmt: skip
def test_what_only_triton_launches(driver, metadata):
    assert launcher(Compiled(*PLAIN, **metadata), 1, 2) is None


def test_other_parameters_than_expected_are_left_to_triton(driver):
    """A release of Triton whose kernels have further parameters, or parameters of other sizes."""
    for types in (("i64", "constexpr"), ("i32", "i32"), ("bf16", "constexpr")):
        assert launcher(Compiled("*fp32", "*fp32", *types), 1, 2) is None
    driver.sizes = (*driver.sizes, 8)
    assert launcher(Compiled(*PLAIN), 1, 2) is None


def test_no_call_of_the_driver_fails(driver, monkeypatch):
    """compute-sanitizer reports each call that fails, also those that were only a question."""
    results = []

    def function(name: str) -> Any:
        found = driver.function(name)
        return lambda *arguments: results.append(found(*arguments)) or results[-1]

    monkeypatch.setattr(libcuda, "function", function)
    launch = launcher(Compiled(*PLAIN), 1, 2)
    launch(3, (16, 32))
    assert len(driver.launches) == 1
    assert results == [0] * len(results)


@pytest.mark.parametrize("missing", [AttributeError, OSError])
def test_a_driver_without_the_functions(driver, missing):
    """It is older than CUDA 12.0, or a library of another name."""
    view = View([64, 16], [16, 1], [16, 16], torch.bfloat16)
    driver.missing = missing
    assert launcher(Compiled(*PLAIN), 1, 2) is None
    assert launcher(Compiled(view.type_name), torch.empty(64, 16), fixed=(), views=(view,)) is None
    assert driver.loaded == 0


@pytest.mark.parametrize("name", ["kernel_load_start_hook", "kernel_load_end_hook"])
def test_hooks_of_loading_are_called_by_triton(driver, monkeypatch, name):
    monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    assert launcher(Compiled(*PLAIN), 1, 2) is None


@pytest.mark.parametrize("grid", [(0, 1, 1), (3, 0, 1)])
def test_no_programs(driver, grid):
    assert direct_launch.launcher(Compiled(*PLAIN), 0, grid, (1, 2), (5, "constant")) is None


@pytest.mark.parametrize("meta", [None, [], [None]], ids=str)
def test_descriptors_that_are_made_on_the_device(driver, meta):
    view = View([64, 16], [16, 1], [16, 16], torch.bfloat16)
    compiled = Compiled(view.type_name, "i32", tensordesc_meta=meta)
    assert launcher(compiled, torch.empty(64, 16), fixed=(5,), views=(view,)) is None


@pytest.mark.parametrize(("version", "rows"), [(13010, 4096), (13010, 4097), (13020, 4096)])
def test_the_bit_of_small_tensors(driver, version, rows):
    """It is cleared for tensors of at most 128 KiB, for the drivers that set it wrongly."""
    driver.version = version
    encoded = libcuda.tensor_map_encoder(9, 2, 3, [rows, 16], [16, 1], [16, 16])(0)
    cleared = version == 13010 and rows == 4096
    expected = bytearray(b"\xff" * 128)
    expected[10] ^= 0x20 * cleared
    assert encoded == expected


def test_a_descriptor_that_the_driver_refuses(driver):
    encode = libcuda.tensor_map_encoder(9, 2, 3, [64, 16], [16, 1], [8, 16])
    driver.result = 1
    what = "TMA descriptor of [64, 16], strides [16, 1], block [8, 16] at 0x10"
    with pytest.raises(RuntimeError, match=re.escape(f"{what}: CUDA error 1: the driver's words")):
        encode(16)


def test_only_tritons_driver_has_its_c_module(monkeypatch):
    """Another thread that needs the module gets Triton's driver, also while ours is active."""
    config = triton.runtime.driver
    monkeypatch.setattr(config, "_active", None)
    monkeypatch.setattr(config, "_default", SimpleNamespace(utils="the module"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, device))
    with compat.driver_of_torch():
        ours = config.active
        assert ours.get_current_target() == triton.backends.compiler.GPUTarget("cuda", 93, 32)
        assert ours.get_current_device() == 3
        assert ours.utils == "the module"
        with compat.driver_of_torch():
            assert config.active is ours
        assert config.active is ours
    assert config._active is None
    with compat.driver_of_torch():
        config.set_active("another")
        with compat.driver_of_torch():
            assert config.active == "another"
    assert config.active == "another"


def test_drivers_of_threads_that_enter_and_leave(monkeypatch):
    """Whoever leaves first takes the driver from nobody, and each thread compiles for a GPU of its own."""
    config = triton.runtime.driver
    monkeypatch.setattr(config, "_active", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    seen = []

    def architecture() -> int:
        return config.active.get_current_target().arch

    def compiles_for(capability: tuple[int, int], inside: threading.Event, leave: threading.Event) -> None:
        with compat.compiling_driver(capability):
            inside.set()
            leave.wait(10)
            seen.append(architecture())

    inside, leave = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    threads = [
        threading.Thread(target=compiles_for, args=given)
        for given in zip([(8, 0), (10, 0)], inside, leave, strict=True)
    ]
    threads[0].start()
    inside[0].wait(10)
    with compat.driver_of_torch():
        threads[1].start()
        inside[1].wait(10)
        leave[0].set()
        threads[0].join()
        assert architecture() == 90
    leave[1].set()
    threads[1].join()
    assert seen == [80, 100]
    assert config._active is None
