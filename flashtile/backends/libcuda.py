"""Functions of the CUDA driver that load and launch kernels, called through ctypes.

Triton calls these functions from C modules, which it builds with gcc when they are not in its cache: one
module for the driver and, up to Triton 3.6, one for each kernel. ctypes needs no compiler.

The driver is opened at the first use. Addresses and handles are integers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, partial
from typing import Any, NamedTuple

# Values of enumerations in cuda.h.
_MAX_THREADS_PER_BLOCK, _SHARED_SIZE_BYTES, _MAX_DYNAMIC_SHARED_SIZE_BYTES = 0, 1, 8  # CUfunction_attribute
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # CUdevice_attribute
_PREFER_SHARED = 1  # CUfunc_cache
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion

_WITH_LENGTH, _KPARAM_INFO = 4, 0x17
"""Form and attribute of the records in ELF files of kernels that describe a parameter."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that every kernel may use. More has to be allowed by an attribute of the kernel."""
TENSOR_MAP_BYTES = 128
"""Size of an encoded TMA descriptor."""
_TENSOR_MAP_ALIGNMENT = 64
_SMALL_TENSOR_BYTES, _LAST_WITH_BUG = 128 * 1024, 13010
"""Drivers up to CUDA 13.1 set a bit wrongly in TMA descriptors of tensors that are not larger. CUTLASS and
Triton 3.7 also clear it."""
_WRONG_BIT = 1 << 21  # of the second word

_FUNCTIONS: dict[str, tuple] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuDriverGetVersion": (c_void_p,),
    "cuFuncGetAttribute": (c_void_p, c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncSetCacheConfig": (c_void_p, c_int),
    "cuGetErrorString": (c_int, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, *[c_void_p] * 5, *[c_int] * 4),
}
"""Types of the parameters of each function. All return a CUresult, which is 0 for success."""


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute. ``value`` is a union, of which only integers are used."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: how a kernel is launched.

    Args:
        grid: number of programs.
        threads: threads of a program.
        shared: bytes of dynamic shared memory.
        is_dependent: whether it is a programmatic dependent launch.
    """

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", c_void_p), ("num_attributes", c_uint),
    )  # fmt: skip

    def __init__(self, grid: tuple[int, int, int], threads: int, shared: int, is_dependent: bool) -> None:
        super().__init__(grid, (threads, 1, 1), shared)
        if is_dependent:
            self._attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
            self.attributes = ctypes.addressof(self._attribute)
            self.num_attributes = 1


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def function(name: str) -> Callable[..., int]:
    """Return a function of the driver.

    Raises:
        OSError: there is no driver.
        AttributeError: this driver lacks the function.
    """
    found = _driver()[name]
    found.argtypes = _FUNCTIONS[name]
    return found


def bound(name: str, *addresses: int | None) -> Callable[[], int]:
    """Return a function that calls a function of the driver with addresses, which are converted only once."""
    unconverting = _driver()[name]  # a new object, without types of parameters
    return partial(unconverting, *map(c_void_p.from_param, addresses))


def is_usable() -> bool:
    """Whether all functions are found: the driver is of CUDA 12.0 or later, and this is not Windows."""
    try:
        return all(map(function, _FUNCTIONS))
    except (AttributeError, OSError):
        return False


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        RuntimeError: the function has failed.
    """
    check(function(name)(*arguments), name)


def check(result: int, what: str) -> None:
    """Raise a RuntimeError with the driver's words if ``result`` is an error. ``what`` is what has failed."""
    if result:
        text = c_char_p()
        function("cuGetErrorString")(result, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {result}: {(text.value or b'unknown').decode()}")


def _asked(name: str, kind: Any, *arguments: Any) -> Any:
    """Return the value of type ``kind`` that a function writes to the address in its first parameter."""
    value = kind()
    call(name, ctypes.byref(value), *arguments)
    return value.value


def make_context_current(index: int) -> bool:
    """Make the context of a device current if this thread has none. Return whether it had none.

    torch's context is the device's primary context. A thread has it after the thread's first call of CUDA's
    runtime. Without a context, functions that need one fail, and succeed if they are called again with it.
    """
    if _asked("cuCtxGetCurrent", c_void_p):
        return False
    call("cuCtxSetCurrent", _asked("cuDevicePrimaryCtxRetain", c_void_p, _asked("cuDeviceGet", c_int, index)))
    return True


class Kernel(NamedTuple):
    """A loaded kernel: the driver's handle, and the size of each parameter in bytes."""

    function: int
    sizes: tuple[int, ...]


def load(name: str, binary: bytes, shared: int, threads: int, index: int) -> Kernel | None:
    """Load a kernel on a device, as Triton does. It stays loaded until the process ends.

    Return None if the device has too little shared memory or too few threads for it.

    Args:
        name: name of the kernel in ``binary``.
        shared: bytes of dynamic shared memory that its launches use.
        threads: threads of a block.
        index: index of the current device.
    """
    make_context_current(index)
    device = _asked("cuDeviceGet", c_int, index)
    most = _asked("cuDeviceGetAttribute", c_int, _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
    if shared > most:
        return None
    module = _asked("cuModuleLoadData", c_void_p, binary)
    found = _asked("cuModuleGetFunction", c_void_p, module, name.encode())
    if threads > _asked("cuFuncGetAttribute", c_int, _MAX_THREADS_PER_BLOCK, found):
        return None
    if shared > DEFAULT_SHARED_BYTES:
        static = _asked("cuFuncGetAttribute", c_int, _SHARED_SIZE_BYTES, found)
        call("cuFuncSetCacheConfig", found, _PREFER_SHARED)
        call("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED_SIZE_BYTES, most - static)
    return Kernel(found, parameter_sizes(name, binary))


def parameter_sizes(name: str, binary: bytes) -> tuple[int, ...]:
    """Return the size of each parameter of a kernel in bytes; () if its ELF file does not contain the sizes.

    ptxas writes them to the section .nv.info of the kernel. The driver's cuFuncGetParamInfo tells the number
    of parameters only by an error, which compute-sanitizer reports.
    """
    sections, entry, count = struct.unpack_from("<Q", binary, 40)[0], *struct.unpack_from("<HH", binary, 58)
    headers = [struct.unpack_from("<IIQQQQ", binary, sections + i * entry) for i in range(count)]
    names = headers[struct.unpack_from("<H", binary, 62)[0]][4]
    wanted = f".nv.info.{name}\0".encode()
    found: dict[int, int] = {}
    for of_name, _, _, _, place, size in headers:
        end = place + size if binary.startswith(wanted, names + of_name) else place
        while place < end:
            form, attribute, length = struct.unpack_from("<BBH", binary, place)
            place += 4
            if (form, attribute) == (_WITH_LENGTH, _KPARAM_INFO):
                _, number, _, packed = struct.unpack_from("<IHHI", binary, place)
                found[number] = packed >> 18
            place += length if form == _WITH_LENGTH else 0
    return tuple(found[i] for i in sorted(found))


def aligned(nbytes: int, alignment: int) -> Any:
    """Return zeroed memory, a ctypes array of bytes whose address is a multiple of ``alignment``."""
    memory = bytearray(nbytes + alignment)
    start = -ctypes.addressof(c_int.from_buffer(memory)) % alignment
    return (ctypes.c_char * nbytes).from_buffer(memory, start)


def tensor_map_encoder(
    dtype: int, element_size: int, swizzle: int, shape: list[int], strides: list[int], block: list[int]
) -> Callable[[int], bytes]:
    """Return a function that encodes the TMA descriptor of the tensor at an address.

    Elements outside of the tensor are read as zeros.

    Args:
        dtype: CUtensorMapDataType.
        element_size: bytes of an element.
        swizzle: CUtensorMapSwizzle.
        shape, strides: of the tensor, in elements. The last stride is 1.
        block: shape of the tile that one TMA operation moves.
    """
    rank = len(shape)
    steps = [element_size * stride for stride in strides]
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    has_wrong_bit = last + 1 < _SMALL_TENSOR_BYTES and _asked("cuDriverGetVersion", c_int) <= _LAST_WITH_BUG
    # The driver's order of dimensions begins with the last one, whose stride it does not take.
    sizes, boxes = (c_uint64 * rank)(*shape[::-1]), (c_uint32 * rank)(*block[::-1])
    others, ones = (c_uint64 * rank)(*steps[-2::-1]), (c_uint32 * rank)(*[1] * rank)
    encode, what = function("cuTensorMapEncodeTiled"), f"TMA descriptor of {shape}, strides {strides}"

    def encoded(address: int) -> bytes:
        found = aligned(TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT)
        result = encode(
            found, dtype, rank, address, sizes, others, boxes, ones, 0, swizzle, _L2_PROMOTION_128B, 0
        )
        if result:
            check(result, f"{what}, block {block} at {address:#x}")
        if has_wrong_bit:
            c_uint64.from_buffer(found, 8).value &= ~_WRONG_BIT
        return bytes(found)

    return encoded
