"""Access to private names of Triton and torch, and to features that differ between Triton's releases.

This module imports triton, so only code that compiles or launches kernels imports it. Differences in Gluon
are handled in ``hopper/compat.py``, so that portable kernels import no Gluon.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashtile.backends import libcuda
from flashtile.caches import BoundedCache

cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Return this thread's current device. torch.cuda's function first checks whether CUDA is initialised."""
cuda_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""Return the address of a device's current stream, without the object that torch.cuda's function creates."""


def is_compilable(kernel: Any) -> bool:
    """Whether ``kernel`` can be compiled; False for kernels made under TRITON_INTERPRET=1."""
    return isinstance(kernel, triton.JITFunction)


def source_type(kernel: Any) -> type:
    """Return Triton's type of the source of a ``@triton.jit`` or Gluon kernel."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def compile_for(backend: str, arch: int | str, warp_size: int, source: Any, options: dict[str, Any]) -> Any:
    """Compile the source of a kernel; needs no GPU.

    ``arch`` is a compute capability (90 is 9.0) for the backend "cuda", a name ("gfx942") for "hip".

    Floating-point fusion is on, as it is for launched kernels. Triton 3.10 turns it off by default.
    """
    target = GPUTarget(backend, arch, warp_size)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


@contextlib.contextmanager
def compiling_driver(capability: tuple[int, int], only_named: bool = False) -> Iterator[None]:
    """Compile launches inside the context for a GPU of this compute capability, which need not be installed.

    Other threads are not affected.

    Args:
        capability: compute capability.
        only_named: whether kernels are only named (:func:`first_calls.only_naming`). No kernel is then
            found because this process has compiled it before.
    """
    arch = 10 * capability[0] + capability[1]
    # Triton caches compiled kernels by device index, so each architecture needs indices of its own.
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: -arch - 1000 * only_named,
        get_current_stream=lambda device: 0,
    )
    token = _compiling.set(driver)
    try:
        with _shared_driver():
            yield
    finally:
        _compiling.reset(token)


@contextlib.contextmanager
def driver_of_torch() -> Iterator[None]:
    """Inside the context, Triton gets the current NVIDIA GPU and its stream from torch.

    Triton's own driver does the same, but its constructor needs a C module, which is built with gcc if it is
    not in Triton's cache. So a driver without that module is active for as long as Triton has none.
    """
    active = triton.runtime.driver._active
    with contextlib.nullcontext() if active and not isinstance(active, _Driver) else _shared_driver():
        yield


@contextlib.contextmanager
def _shared_driver() -> Iterator[None]:
    """Inside the context, a :class:`_Driver` is active, until the last thread has left its context."""
    config = triton.runtime.driver
    with _changing:
        if not isinstance(config._active, _Driver):
            config._active = _Driver(config._active)
        driver = config._active
        driver.contexts += 1
    try:
        yield
    finally:
        with _changing:
            driver.contexts -= 1
            if not driver.contexts and config._active is driver:
                config._active = driver.before


_changing = threading.Lock()
"""Held while Triton's driver is replaced."""
_compiling: ContextVar[Any] = ContextVar("compiling_driver", default=None)
"""Replaces the driver in a thread that is inside :func:`compiling_driver`."""


class _Driver:
    """Triton's driver while threads are in the contexts above. Triton has one driver for all threads.

    Attributes:
        before: Triton's driver outside of all contexts, or None.
        contexts: number of contexts that have not ended.
    """

    def __init__(self, before: Any) -> None:
        self.before, self.contexts = before, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(_compiling.get() or self.before or self._torchs, name)

    @functools.cached_property
    def _torchs(self) -> Any:
        """Driver of the GPU that torch uses."""
        config = triton.runtime.driver
        if torch.version.hip is not None:
            return config.default
        from triton.backends.driver import GPUDriver
        from triton.backends.nvidia.driver import CudaDriver

        class Driver(CudaDriver):
            def __init__(self) -> None:
                GPUDriver.__init__(self)

            def __getattr__(self, name: str) -> Any:  # other threads may need the C module meanwhile
                return getattr(config.default, name)

        return Driver()


def tensor_map_dtype(element_type: int) -> int:
    """Return the driver's number (CUtensorMapDataType) of an element type in a kernel's metadata."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    number: int = TMA_DTYPE_DEVICE_TO_HOST[element_type]
    return number


def cuobjdump_path() -> str:
    """Path of Triton's own disassembler (``TRITON_CUOBJDUMP_PATH`` overrides it)."""
    return knobs.nvidia.cuobjdump.path


def described(views: tuple, tensors: tuple) -> tuple[list, tuple]:
    """Return (TMA descriptors, other tensors).

    Each view makes a descriptor from the next tensor, beginning with the first. A view that is None takes no
    tensor, and its descriptor is None.
    """
    rest = iter(tensors)
    descriptors = [None if view is None else view.of(next(rest)) for view in views]
    return descriptors, tuple(rest)


def launcher(
    compiled: Any,
    grid: tuple[int, int, int],
    tensors: tuple,
    fixed: tuple,
    views: tuple = (),
    pointers: Callable[..., tuple] | None = None,
) -> Any:
    """Return ``launch(stream, tensors, further=None)`` for a compiled kernel on the current device.

    Args:
        tensors: examples of the tensors of later calls. Each call may pass a tensor or its address. With
            ``further``, which are the last ones, all of them are addresses. The kernel receives addresses,
            which saves a driver query per tensor.
        fixed: arguments after the tensors, the same for every launch.
        views: views that make TMA descriptors of the first tensors. None stands for a descriptor that the
            call does not use.
        pointers: structure (NamedTuple type) whose fields are the other tensors. If None, the kernel takes
            each of the other tensors as an argument.

    Each field of a structure is passed to the driver as a single argument, if this release of Triton allows
    it (:func:`_for_leaves`). Launch hooks, such as a profiler's, cost nothing if none is set. In
    Triton's own launch path, they would cost a dictionary and two calls of empty hook chains.

    ``launch.with_fixed(fixed)`` returns a launch with other fixed arguments, for which Triton would compile
    the same kernel.
    """
    hooked = compiled[grid]
    present = tuple(view for view in views if view is not None)
    run, types = _for_leaves(compiled)
    run, maps = _tensor_maps(run, present)
    kernel = (compiled.function, compiled.packed_metadata, None, None, None)
    runtime = knobs.runtime
    first = len(present)
    of_present = iter([m.all_arguments(t.data_ptr()) for m, t in zip(maps, tensors, strict=False)])
    of_views = [[None] if view is None else next(of_present) for view in views]
    of_pointers = types[len(views)] if types and pointers is not None else ()
    of_fixed = types[len(types) - len(fixed) :]
    whole = pointers is not None and not of_pointers
    # From the last to the first, so that replacing one by its fields does not move the others.
    nested: list[Any] = [(i, Leaves(t)) for i, t in enumerate(of_pointers) if isinstance(t, tuple)][::-1]
    undescribed = 1 if whole else len(leaves_of(of_pointers, of_pointers) or tensors[first:])
    count = sum(map(len, of_views)) + undescribed + len(leaves_of(fixed, of_fixed))
    run, before = _without_wrapper(run, grid, kernel, count)
    # Each launch copies this list and replaces what differs: the stream, the descriptors and the addresses.
    arguments: list[Any] = [*grid, None, *before]
    of_stream, places = len(grid), []
    for view, numbers in zip(views, of_views, strict=True):
        if view is not None:
            places.append(len(arguments))
        arguments += numbers
    addresses = slice(len(arguments), len(arguments) + undescribed)
    arguments += [None] * undescribed

    def with_fixed(fixed: tuple) -> Any:
        every = [*arguments, *leaves_of(fixed, of_fixed)]

        def launch(stream: int, tensors: tuple, further: tuple | None = None) -> None:
            are_addresses = further is not None
            if further:
                tensors = (*tensors, *further)
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                launch_by_triton(hooked, stream, tensors, fixed, views, pointers)
                return
            now = every.copy()
            now[of_stream] = stream
            if places:  # an empty loop would take 0.4 us
                for place, encoded, tensor in zip(places, maps, tensors, strict=False):
                    now[place] = encoded[tensor if type(tensor) is int else tensor.data_ptr()]
            of_others: Any = tensors[first:]
            if nested or not are_addresses:
                of_others = [t.data_ptr() if type(t) is Tensor else t for t in of_others]
            for i, leaves in nested:
                of_others[i : i + 1] = leaves(of_others[i])
            now[addresses] = (tuple(of_others),) if whole else of_others
            run(*now)

        launch.with_fixed = with_fixed  # type: ignore[attr-defined]
        return launch

    return with_fixed(fixed)


def forget_version_of_assembler() -> None:
    """Make Triton read the version of ptxas again, which is part of the keys of its cache.

    Triton reads it once per process. torch.compile may choose another ptxas later, by the environment
    variable TRITON_PTXAS_PATH. Kernels that new processes compile then have keys that this process does not
    look for.
    """
    from triton.backends.nvidia import compiler

    forget = getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)
    if forget is not None:
        forget()


def forget_function(function: Any) -> None:
    """Let a ``@triton.jit`` function be freed when nothing else uses it. Triton 3.7 lists all functions."""
    from triton.runtime import jit

    name = f"{function.__module__}:{function.fn.__qualname__}"
    getattr(jit, "_triton_jit_function_registry", {}).pop(name, None)


def tell_key(key: Callable[[], str]) -> None:
    """Give Triton the digest of its installation, which this process then does not compute.

    Args:
        key: returns the digest. It is called once, when Triton first needs the digest.
    """
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):
        cache.triton_key = functools.cache(key)


def load(compiled: Any) -> None:
    """Load a compiled kernel to the current GPU, and make its launchers, which Triton may have to compile."""
    if compiled.module is None:  # not loaded yet
        _for_leaves(compiled)


def launch_by_triton(
    hooked: Callable[..., None],
    stream: int,
    tensors: tuple,
    fixed: tuple,
    views: tuple,
    pointers: Callable[..., tuple] | None,
) -> None:
    """Launch a kernel so that the hooks of launches are called.

    ``hooked`` is Triton's compiled kernel, indexed with a grid. The other arguments are those of
    :func:`launcher`.
    """
    descriptors, others = described(views, tensors)
    given = [t.data_ptr() if type(t) is Tensor else t for t in others]
    given = given if pointers is None else [pointers(*given)]
    hooked(*descriptors, *given, *fixed, stream=stream)


def _for_leaves(compiled: Any) -> tuple[Any, tuple]:
    """Return (launcher, types of the kernel's arguments). The launcher takes structures field by field.

    Up to Triton 3.6, Triton's launcher is a C function that parses nested tuples. Passing their leaves as
    single arguments saves 1 to 5 us (measured on an H200: 3.9 instead of 5.9 us for decoding, 6.4 instead of
    11.5 us with a block mask).

    The types are those of Triton's signature, in which a structure is a tuple. They are empty if the kernel
    has no structures. They are also empty if this release of Triton makes launchers differently; the returned
    launcher then takes whole structures.
    """
    types = tuple(compiled.src.signature.values())
    if not any(isinstance(t, tuple) for t in types):
        return compiled.run, ()
    leaves = SimpleNamespace(signature=dict(enumerate(leaves_of(types, types))))
    try:
        return type(compiled.run)(leaves, compiled.metadata), types
    except (TypeError, AttributeError):
        return compiled.run, ()


def leaves_of(values: Iterable, types: tuple) -> list:
    """Return ``values`` with each structure replaced by its fields, recursively and in order.

    A value is a structure if its entry in ``types`` is a tuple. Without ``types``, no value is a structure.
    """
    if not types:
        return list(values)
    found: list = []
    for value, of_value in zip(values, types, strict=True):
        if isinstance(of_value, tuple):
            found += leaves_of(value, of_value)
        else:
            found.append(value)
    return found


class Leaves:
    """Returns the leaves of a structure in a kernel's pointers, whose fields have the given ``types``.

    Most structures have a single level. Their fields are the leaves, and walking through them would cost each
    launch microseconds. A structure of numbers is usually the same object in all launches of a kernel, so the
    leaves of the last one are kept.
    """

    def __init__(self, types: tuple) -> None:
        self._types = types
        self._is_flat = not any(isinstance(t, tuple) for t in types)
        self._has_pointers = any(str(t).startswith(("*", "tensordesc")) for t in leaves_of(types, types))
        self._last: tuple[Any, Any] = None, None

    def __call__(self, structure: tuple) -> Iterable:
        if self._is_flat:
            return structure
        if self._has_pointers:
            return leaves_of(structure, self._types)
        last, leaves = self._last
        if last is not structure:
            leaves = leaves_of(structure, self._types)
            self._last = structure, leaves
        return leaves


class TensorMaps(BoundedCache):
    """Encoded TMA descriptors of one view, by the address of the tensor. Encoding a descriptor takes 2 us."""

    LIMIT_BYTES = 128 * 1024
    ENTRY_BYTES = 1024
    """Upper bound per entry: 128 bytes for the descriptor, the rest for Python objects."""

    def __init__(self, view: Any, encode: Callable[[Any], list] | None) -> None:
        super().__init__(self.LIMIT_BYTES)
        self._view = view
        self._encode = encode

    def all_arguments(self, address: int) -> list[Any]:
        """Return all kernel arguments of a descriptor: its encoded form, and the view's shape and strides.

        The tensor is on the current device.
        """
        descriptor = self._view.of(address)
        if self._encode is None:
            return [descriptor]
        try:
            arguments = self._encode(descriptor)
        except RuntimeError:
            if not libcuda.make_context_current(cuda_device()):
                raise
            arguments = self._encode(descriptor)
        self.store(address, arguments[0], self.ENTRY_BYTES)
        return arguments

    def __missing__(self, address: int) -> Any:
        return self.all_arguments(address)[0]


def _tensor_maps(run: Any, views: tuple) -> tuple[Any, list[TensorMaps]]:
    """Return (launcher, a :class:`TensorMaps` for each view).

    Up to Triton 3.7, a Python function around the launcher encodes the TMA descriptors at each launch. The
    returned launcher bypasses that function and takes encoded descriptors. In other releases of Triton, the
    launcher takes descriptors that are not encoded.
    """
    wrapped = getattr(run, "launch", None)
    variables = inspect.getclosurevars(wrapped).nonlocals if inspect.isfunction(wrapped) else {}
    known = set(variables) == {"launcher", "tensordesc_indices", "tensordesc_meta"}
    # A descriptor without metadata is not encoded as a tensor map.
    if not known or None in variables["tensordesc_meta"]:
        return run, [TensorMaps(view, None) for view in views]
    from triton.backends.nvidia.driver import make_tensordesc_arg

    run = copy.copy(run)
    run.launch = variables["launcher"]
    return run, [
        TensorMaps(view, partial(make_tensordesc_arg, metadata=metadata))
        for view, metadata in zip(views, variables["tensordesc_meta"], strict=True)
    ]


def _without_wrapper(
    run: Any, grid: tuple[int, int, int], kernel: tuple, count: int
) -> tuple[Callable[..., None], tuple]:
    """Return (launcher, the arguments that it takes after the stream and before the kernel's arguments).

    ``count`` is the number of the kernel's arguments.

    Triton's launcher is an object that allocates scratch memory and calls a C function. If a kernel needs no
    scratch memory, only the stream and the kernel's arguments differ between calls of that function. So the
    object is called once, with placeholders, to record the other arguments, and the C function is returned.
    For a Triton that works differently, its own launcher is returned.
    """
    handed: list[Any] = []
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if scratch == [0, 0] and hasattr(run, "launch"):
        asked = copy.copy(run)
        asked.launch = lambda *given: handed.extend(given)
        stream, arguments = object(), tuple(object() for _ in range(count))
        asked(*grid, stream, *kernel, *arguments)
        if handed[:4] == [*grid, stream]:
            launch = run.launch
            if handed[-count:] == [*arguments]:
                return launch, tuple(handed[4:-count])
            if handed[-1] == arguments:  # Triton 3.7
                before = tuple(handed[4:-1])
                end = 4 + len(before)
                return lambda *given: launch(*given[:end], given[end:]), before
    return run, kernel
