"""Launches kernels with a driver that records them: a libcuda.so.1 made of ``fake_libcuda.c``.

``test_direct_launch.py`` runs it in a process of its own:

    direct_launch_program.py same NAMES       compares direct launches of CALLS with Triton's, byte for byte
    direct_launch_program.py folder FOLDER    launches a kernel of a folder of compiled kernels

Each line of the output is a kernel that was launched as expected.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import build

import flashtile
from flashtile import torch_private
from flashtile.backends import compat, libcuda
from flashtile.backends.common import direct_launch, first_calls, jit, kernel_store
from flashtile.backends.common.device import Target, compiling_for
from flashtile.backends.common.launch import CachedLaunch
from flashtile.compilation.calls import calls_of
from flashtile.compilation.compiling import launches
from flashtile.op.operation import remembering

H200 = Target("H200", (9, 0), 132)
FUNCTION = 0x123456789
fake = ctypes.CDLL("libcuda.so.1")


class Recorded(ctypes.Structure):
    _fields_ = (
        ("launches", ctypes.c_uint), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        *[(name, ctypes.c_uint) for name in ("shared", "num_attributes", "attribute", "value", "nbytes")],
        ("stream", ctypes.c_uint64), ("function", ctypes.c_uint64), ("values", ctypes.c_ubyte * 8192),
    )  # fmt: skip


def recorded() -> dict[str, Any]:
    """What the newest launch has handed to the driver."""
    record = Recorded.in_dll(fake, "recorded")
    found = {name: getattr(record, name) for name, _ in Recorded._fields_ if name != "launches"}
    found["values"] = bytes(found["values"][: found["nbytes"]])
    return {name: value if isinstance(value, (int, bytes)) else [*value] for name, value in found.items()}


def compiled_for_h200(launch: CachedLaunch, tensors: tuple) -> Any:
    with compat.compiling_driver(H200.capability), compiling_for(H200):
        return launch.compile_ahead(tensors)


def as_triton_runs(compiled: Any) -> None:
    """Give a compiled kernel what Triton makes at its first launch, up to Triton 3.6 with gcc."""
    compiled._run = CudaLauncher(compiled.src, compiled.metadata)
    compiled.module, compiled.function = 2, FUNCTION


def compare(name: str, launch: CachedLaunch, tensors: tuple, others: tuple[tuple, ...] = ()) -> None:
    """Launch a kernel in both ways with made-up addresses and other scalars, and compare the records."""
    compiled = compiled_for_h200(launch, tensors)
    sizes = libcuda.parameter_sizes(compiled.name, compiled.kernel)
    fake.fake_parameters(len(sizes), (ctypes.c_uint * len(sizes))(*sizes))
    as_triton_runs(compiled)
    given = launch._fixed, launch._views, launch._pointers
    ours = direct_launch.launcher(compiled, 0, launch._grid, tensors, *given)
    theirs = direct_launch.by_triton(compiled, 0, launch._grid, *given)
    assert ours is not None, (name, sizes, compiled.src.signature)
    draw = torch.Generator().manual_seed(1)

    def address(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return 16 * int(torch.randint(1, 2**58, (), generator=draw))
        return type(value)(*map(address, value)) if hasattr(value, "_fields") else value

    for fixed in (launch._fixed, *others):
        ours, theirs = ours.with_fixed(fixed), theirs.with_fixed(fixed)
        for stream in (0, 2**47 + 5):
            addresses = tuple(map(address, tensors))
            count = 1 + sum(view is not None for view in launch._views)
            records = []
            for run in (ours, theirs):
                # Ours needs no context, as in a thread that has not called CUDA. Triton 3.9 needs one.
                fake.fake_context(0 if run is ours else 1)
                run(stream, addresses[:count], addresses[count:])
                records.append(recorded())
            assert records[0] == records[1], name
            assert records[0]["nbytes"] == sum(sizes)
            assert records[0]["function"] == FUNCTION
    print(name, len(sizes), flush=True)


Inner = namedtuple("Inner", "count scale pointer")
Pointers = namedtuple("Pointers", "a absent inner b")
Numbers = namedtuple("Numbers", "one big inner negative")


@dataclass(frozen=True)
class Variant:
    BLOCK: int = 32
    names: tuple = field(default=("x", "y"))


@jit.kernel()
def of_every_type(
    pointers, numbers, small, wide, unsigned, single, infinite, truth, unit, absent, VARIANT: tl.constexpr
):
    at = pointers.a + tl.arange(0, VARIANT.BLOCK)
    number = small + wide + unit + numbers.big + numbers.inner.count + numbers.negative + pointers.inner.count
    value = number + single + infinite + numbers.inner.scale + pointers.inner.scale
    value += tl.load(pointers.b) + tl.load(pointers.inner.pointer)
    value += tl.where(truth, 1.0, 0.0) + unsigned.to(tl.float32)
    tl.store(at, value)


def of_types() -> None:
    def fixed(small: int, wide: int, unsigned: int, single: float, truth: bool) -> tuple:
        numbers = Numbers(1, 2**40, Inner(48, 2.0, None), -(2**31))
        return numbers, small, wide, unsigned, single, math.inf, truth, 1, None

    a, b, c = (torch.empty(64, device="meta") for _ in range(3))
    first = fixed(-7, 2**33 + 3, 2**63 + 7, 0.1, True)
    launch = CachedLaunch(of_every_type, 77, first, (Variant(),), None, (), Pointers)
    others = (
        fixed(2**31 - 1, -(2**62) + 1, 2**64 - 1, -1e-40, False),
        fixed(-5, 2**33 + 1, 2**63 + 1, 1e39, True),
    )
    compare("types", launch, (a, None, Inner(5, 0.3, c), b), tuple((*other, Variant()) for other in others))


def call_of(**options: Any) -> list:
    with remembering() as remembered, FakeTensorMode():
        q, k, v = (torch.empty(1, 512, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        flashtile.attention(q, k, v, **options).sum().backward()
    return calls_of(remembered)


def decode_call() -> list:
    with remembering() as remembered, FakeTensorMode():
        q = torch.empty(2, 1, 8, 64, dtype=torch.bfloat16)
        cache = torch.empty(2, 4096, 2, 64, dtype=torch.bfloat16)
        used = torch.empty(2, dtype=torch.int32)
        flashtile.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used)
    return calls_of(remembered)


CALLS = {
    "forward": lambda: call_of(causal=True)[:1],
    "plain": lambda: call_of(causal=True),
    "functions": lambda: call_of(score_mod=lambda s, b, h, i, j: s + (i - j)),
    "portable": lambda: call_of(backend="portable"),
    "decode": decode_call,
}


def same(names: list[str]) -> None:
    torch_private.cuda_device = lambda: 0
    triton.runtime.driver.set_active(SimpleNamespace(utils=CudaUtils()))
    if triton.__version__.startswith("3.6"):  # it does not clear a bit that a bug of older drivers sets
        fake.fake_driver_version(13020)
    of_types()
    for name in names:
        for call in CALLS[name]():
            for launch, tensors in launches(call, H200):
                compare(f"{name} {launch.kernel.__name__}", launch, tensors)


def in_folder(folder: Path, launch: CachedLaunch, tensors: tuple) -> tuple[int, ...]:
    """Compile a kernel for an H200 into a folder, and return the sizes of its parameters."""
    with (
        compat.compiling_driver(H200.capability, only_named=True),
        compiling_for(H200),
        first_calls.only_naming() as named,
    ):
        launch.compile_ahead(tensors)
    (key,) = named
    compiled = compiled_for_h200(launch, tensors)
    digests = kernel_store.write_kernel(folder, key, compiled)
    kernel_store.write_index(folder, {key: (H200.arch, digests)})
    launch.kernel.device_caches.clear()
    return libcuda.parameter_sizes(compiled.name, compiled.kernel)


def nothing_is_built(*arguments: Any, **more: Any) -> None:
    raise AssertionError("gcc is called")


def like_an_h200(current: list[int]) -> None:
    """Let torch have GPUs like an H200, on which ``current`` holds the current device."""
    torch.cuda.current_device = torch_private.cuda_device = lambda: current[0]
    torch.cuda.get_device_capability = lambda device=None: H200.capability
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=50 + current[0])
    torch_private.cuda_stream = lambda index: 50 + index


def folder(path: Path) -> None:
    """The first launch of a kernel of a folder builds nothing, and Triton's driver is not created."""
    tensors = torch.empty(64), None, Inner(5, 0.3, torch.empty(64)), torch.empty(64)
    numbers = Numbers(1, 2**40, Inner(48, 2.0, None), -7)
    scalars = numbers, 3, 2**33, 2**63 + 7, 0.1, 1e9, True, 1, None
    launch = CachedLaunch(of_every_type, 77, scalars, (Variant(),), None, (), Pointers)
    sizes = in_folder(path, launch, tensors)
    fake.fake_parameters(len(sizes), (ctypes.c_uint * len(sizes))(*sizes))
    kernel_store.use_compiled(path)
    build._build = triton.compile = nothing_is_built
    current = [1]
    like_an_h200(current)
    device, driver = torch.device("cuda", 1), triton.runtime.driver
    for count in (1, 2):
        launch(device, *tensors)
        first = recorded()
        assert Recorded.in_dll(fake, "recorded").launches == count
    assert driver._active is None
    assert driver._default is None
    assert (first["stream"], first["grid"], first["block"]) == (51, [77, 1, 1], [128, 1, 1])
    assert first["values"][:8] == tensors[0].data_ptr().to_bytes(8, "little")
    print("launched", len(sizes))

    fake.fake_failures(1)
    try:
        launch(device, *tensors)
    except RuntimeError as error:
        print(error)
    fake.fake_context(0)  # as in a thread that has not called CUDA
    launch(device, *tensors)
    assert recorded() == first
    assert ctypes.c_uint64.in_dll(fake, "current").value == 101
    print("launched without a context")

    other = launch.with_scalars((numbers, 3, 2**33, 2**63 + 7, 0.1, 2e9, True, 1, None))
    assert other is not None
    other(device, *tensors)
    assert recorded()["values"] != first["values"]
    print("launched with other scalars")


if __name__ == "__main__":
    if sys.argv[1] == "same":
        same(sys.argv[2:])
    else:
        folder(Path(sys.argv[2]))
