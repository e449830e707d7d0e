"""The door to private names of Triton and torch, and to what differs between Triton's releases.

Imports triton, so only code that compiles or launches kernels imports it. What differs in Gluon is in
``hopper/compat.py``, so that portable kernels import no Gluon.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashtile.caches import BoundedCache

cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""This thread's current device. torch.cuda's function asks first whether CUDA is initialised."""
cuda_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""The address of a device's current stream, for which torch.cuda's function makes an object."""


def is_compilable(kernel: Any) -> bool:
    """Whether ``kernel`` can be compiled. Under TRITON_INTERPRET=1, ``@triton.jit`` makes none that can."""
    return isinstance(kernel, triton.JITFunction)


def compile_for(
    backend: str,
    arch: int | str,
    warp_size: int,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: Mapping[tuple[int, ...], list],
    options: dict[str, Any],
) -> Any:
    """Compile a ``@triton.jit`` or Gluon kernel; needs no GPU.

    ``arch`` is a compute capability (90 is 9.0) for the backend "cuda", a name ("gfx942") for "hip".

    Floating-point fusion is on, as in the launchers: Triton 3.10 turns it off by default.
    """
    source_type = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(kernel, signature, constants, dict(attributes))
    target = GPUTarget(backend, arch, warp_size)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


def cuobjdump_path() -> str:
    """The disassembler that comes with Triton (``TRITON_CUOBJDUMP_PATH`` names another)."""
    return knobs.nvidia.cuobjdump.path


def launcher(
    compiled: Any, grid: tuple[int, int, int], tensors: tuple, fixed: tuple, views: tuple = ()
) -> Any:
    """``(stream, tensors)``: launch a compiled kernel on the current device, with ``fixed`` arguments last.

    Tensors go by address (some come so), which saves a question to the driver for each. The first ones go as
    TMA descriptors, which ``views`` make of them; ``tensors`` are such as they may come. Without hooks on
    launches, a profiler's, nothing is prepared for them, where Triton itself gathers a dictionary and calls
    two empty chains. ``launch.with_fixed(fixed)`` is the same with other arguments, for which Triton would
    compile the same kernel.
    """
    hooked = compiled[grid]
    run, maps = _tensor_maps(compiled.run, views)
    kernel = (compiled.function, compiled.packed_metadata, None, None, None)
    runtime = knobs.runtime
    described = len(views)
    of_views = [m.all_arguments(t.data_ptr()) for m, t in zip(maps, tensors, strict=False)]
    undescribed = len(tensors) - described
    count = sum(map(len, of_views)) + undescribed + len(fixed)
    run, before = _without_wrapper(run, grid, kernel, count)
    # What differs from launch to launch is written into a copy of these arguments, at these places.
    arguments: list[Any] = [*grid, None, *before]
    of_stream, places = len(grid), []
    for numbers in of_views:
        places.append(len(arguments))
        arguments += numbers
    addresses = slice(len(arguments), len(arguments) + undescribed)
    arguments += [None] * undescribed

    def with_fixed(fixed: tuple) -> Any:
        every = [*arguments, *fixed]

        def launch(stream: int, tensors: tuple) -> None:
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                descriptors = [view.of(t) for view, t in zip(views, tensors, strict=False)]
                given = [t.data_ptr() if type(t) is Tensor else t for t in tensors[described:]]
                hooked(*descriptors, *given, *fixed, stream=stream)
                return
            now = every.copy()
            now[of_stream] = stream
            for place, encoded, tensor in zip(places, maps, tensors, strict=False):
                now[place] = encoded[tensor if type(tensor) is int else tensor.data_ptr()]
            now[addresses] = [t.data_ptr() if type(t) is Tensor else t for t in tensors[described:]]
            run(*now)

        launch.with_fixed = with_fixed  # type: ignore[attr-defined]
        return launch

    return with_fixed(fixed)


class TensorMaps(BoundedCache):
    """What Triton hands to the driver for a descriptor, by the address of its tensor: it depends on nothing
    else that changes, and takes 2 us to encode."""

    LIMIT_BYTES = 128 * 1024
    ENTRY_BYTES = 1024
    """At most: 128 of the map, the rest for Python's objects."""

    def __init__(self, view: Any, encode: Callable[[Any], list] | None) -> None:
        super().__init__(self.LIMIT_BYTES)
        self._view = view
        self._encode = encode

    def all_arguments(self, address: int) -> list[Any]:
        """What the kernel is given for the descriptor: the map, and numbers of the view."""
        descriptor = self._view.of(address)
        if self._encode is None:
            return [descriptor]
        arguments = self._encode(descriptor)
        self.store(address, arguments[0], self.ENTRY_BYTES)
        return arguments

    def __missing__(self, address: int) -> Any:
        return self.all_arguments(address)[0]


def _tensor_maps(run: Any, views: tuple) -> tuple[Any, list[TensorMaps]]:
    """(launcher, maps) of a kernel's first arguments.

    Up to Triton 3.7, a Python function around the launcher encodes the descriptors of each launch; that is
    then left out. Whatever else Triton does, it gets its descriptors.
    """
    wrapped = getattr(run, "launch", None)
    variables = inspect.getclosurevars(wrapped).nonlocals if inspect.isfunction(wrapped) else {}
    known = set(variables) == {"launcher", "tensordesc_indices", "tensordesc_meta"}
    # What has no metadata becomes no tensor map.
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
    """(launcher, what it is given between the stream and the kernel's ``count`` arguments).

    Triton's launcher is an object whose call asks for scratch memory and goes on to a function in C. Without
    such memory the function is given the same at every launch but for stream and arguments. So the object is
    asked once, with placeholders, what it hands on. A Triton that does otherwise gets its own call.
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
