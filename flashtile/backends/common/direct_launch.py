"""Launches of compiled kernels: by the CUDA driver itself (:mod:`libcuda`), or by Triton where it has to be.

Triton's launchers are C modules, which are built with gcc when they are not in Triton's cache. For kernels
from a folder of compiled kernels, this would be most of the time of a first call.

A frame (:class:`_Frame`) is the memory of a launch: the driver's configuration of the launch, and the values
of the kernel's parameters. These are first TMA descriptors, then addresses of tensors, then the bytes of what
is the same in all launches. A launch writes only what differs from the frame's last launch.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from torch import Tensor
from triton import knobs

from flashtile import torch_private
from flashtile.backends import compat, libcuda
from flashtile.caches import BoundedCache

FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip
"""Formats of ``struct`` for Triton's types of numbers."""
_PLAIN = {
    "global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "launch_cooperative_grid": False,
}  # fmt: skip
"""Metadata of kernels that can be launched directly."""
_POINTER = "Q"
_MAP = f"{libcuda.TENSOR_MAP_BYTES}s"
_kernels: dict[tuple[str, int], libcuda.Kernel | None] = {}
"""Loaded kernels by their keys in Triton's cache, and the index of the device. None: only Triton can launch
it. Kernels are never unloaded, as by Triton itself, because a captured graph may launch them at any time and
CUDA does not count that. docs/mechanisms.md says what unloading would need."""
_loading = threading.Lock()
"""Held while a kernel is loaded, so that threads do not load it twice."""
_NUMBERS = frozenset((int, float, bool))
_ALIGNMENT = 128
"""Alignment of the parameters' values. No parameter needs more."""


def launcher(
    compiled: Any,
    index: int,
    grid: tuple[int, int, int],
    tensors: tuple,
    fixed: tuple,
    views: tuple = (),
    pointers: Callable[..., tuple] | None = None,
) -> Any:
    """Return ``launch(stream, tensors, further=None)``, or None for a kernel that only Triton can launch.

    Each call may pass a tensor or its address. With ``further``, which are the last ones, all of them are
    addresses, which always divide in the same place. ``launch.with_fixed(fixed)`` returns a launch with other
    fixed arguments, for which Triton would compile the same kernel.

    Args:
        index: index of the current device, on which the kernel is launched.
        tensors: examples of the tensors of later calls.
        fixed: arguments after the tensors, the same for every launch.
        views: views that make TMA descriptors of the first tensors. None stands for a descriptor that the
            call does not use.
        pointers: structure (NamedTuple type) whose fields are the other tensors. If None, the kernel takes
            each of the other tensors as an argument.
    """
    if 0 in grid or not _is_plain(compiled.metadata) or not libcuda.is_usable():
        return None
    maps = _tensor_maps(compiled.metadata, views)
    if maps is None:
        return None
    types = tuple(compiled.src.signature.values())
    of_tensors, of_fixed = types[len(views) : len(types) - len(fixed)], types[len(types) - len(fixed) :]
    if pointers is not None:
        (of_tensors,) = of_tensors
    # A structure of numbers that comes last is nearly always the same object. It is packed with ``fixed``.
    has_numbers = bool(of_tensors) and isinstance(of_tensors[-1], tuple) and not has_pointers(of_tensors[-1])
    if has_numbers:
        of_tensors, of_fixed = (*of_tensors[:-1], "constexpr"), (of_tensors[-1], *of_fixed)
    described = [m.all_arguments(t.data_ptr())[1:] for m, t in zip(maps, tensors, strict=False)]
    leaves = leaves_of(of_tensors, of_tensors), leaves_of(of_fixed, of_fixed)
    try:
        layout = _Layout([len(shape_and_strides) // 2 for shape_and_strides in described], *leaves)
    except KeyError:  # a type without a format
        return None
    kernel = _loaded(compiled, index)
    if kernel is None or layout.sizes != kernel.sizes:  # a release of Triton with other parameters
        return None
    sizes = [*chain(*described)]
    values_of = _values(of_tensors, layout.pick_tensors)
    frames: list[_Frame] = []
    new_frame = partial(_Frame, layout, compiled.metadata, grid, kernel.function)
    first, of_maps, runtime = len(maps), layout.of_maps, knobs.runtime
    is_flat = layout.has_only_addresses and not any(isinstance(t, tuple) for t in of_tensors)
    parts: tuple = ()

    def with_fixed(fixed: tuple) -> Any:
        def pack(*numbers: Any) -> tuple:
            return (*numbers, layout.pack_fixed(sizes, leaves_of((*numbers, *fixed), of_fixed)))

        packed = (None, b"") if has_numbers else (None, *pack())

        def launch(stream: int, tensors: tuple, further: tuple | None = None) -> None:
            nonlocal parts, packed
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                # Hooks get objects that only Triton's launch makes.
                by_triton(compiled, index, grid, fixed, views, pointers)(stream, tensors, further)
                return
            numbers, same = packed
            if has_numbers and (further or tensors)[-1] is not numbers:
                packed = numbers, same = pack((further or tensors)[-1])
            try:  # threads that launch at the same time have different frames
                frame = frames.pop()
            except IndexError:
                frame = new_frame()
            if maps:
                encoded = [
                    known[t if type(t) is int else t.data_ptr()]
                    for known, t in zip(maps, tensors, strict=False)
                ]
                of_maps.pack_into(frame.values, 0, *encoded)
            if further is not None and is_flat:
                pick, pick_further, count = parts = parts or layout.parts(len(tensors) - first)
                frame.addresses[:count] = pick(tensors[first:])
                if frame.further is not further:
                    frame.addresses[count:] = pick_further(further)
                    frame.further = further
            else:
                values = values_of((*tensors[first:], *(further or ())))
                if is_flat:
                    frame.addresses[:] = values
                else:
                    layout.of_tensors.pack_into(frame.values, of_maps.size, *values)
                frame.further = None
            if frame.same is not same:
                frame.replace_same(same)
            frame.config.stream = stream
            result = frame.launch()
            # A thread that has not called CUDA has no context, so the driver has refused its launch.
            if result and libcuda.make_context_current(index):
                result = frame.launch()
            frames.append(frame)
            if result:
                libcuda.check(result, f"launch of {compiled.name}")

        launch.with_fixed = with_fixed  # type: ignore[attr-defined]
        return launch

    return with_fixed(fixed)


def by_triton(
    compiled: Any,
    index: int,
    grid: tuple[int, int, int],
    fixed: tuple,
    views: tuple = (),
    pointers: Callable[..., tuple] | None = None,
) -> Any:
    """Return a launch like that of :func:`launcher`, by Triton, which calls the hooks of launches."""
    triton_launch = compiled[grid]

    def with_fixed(fixed: tuple) -> Any:
        def launch(stream: int, tensors: tuple, further: tuple | None = None) -> None:
            if views:
                libcuda.make_context_current(index)  # Triton encodes descriptors without one
            descriptors, others = described(views, (*tensors, *(further or ())))
            given = [t.data_ptr() if type(t) is Tensor else t for t in others]
            structures = given if pointers is None else [pointers(*given)]
            triton_launch(*descriptors, *structures, *fixed, stream=stream)

        launch.with_fixed = with_fixed  # type: ignore[attr-defined]
        return launch

    return with_fixed(fixed)


def described(views: tuple, tensors: tuple) -> tuple[list, tuple]:
    """Return (TMA descriptors, other tensors).

    Each view makes a descriptor from the next tensor, beginning with the first. A view that is None takes no
    tensor, and its descriptor is None.
    """
    rest = iter(tensors)
    descriptors = [None if view is None else view.of(next(rest)) for view in views]
    return descriptors, tuple(rest)


def load(compiled: Any, index: int) -> bool:
    """Load a kernel to the current device, ``index``. Return False if only Triton can launch it."""
    return _is_plain(compiled.metadata) and libcuda.is_usable() and _loaded(compiled, index) is not None


def _is_plain(metadata: Any) -> bool:
    """Whether launches of a kernel need only its parameters, and no hook observes that it is loaded."""
    runtime = knobs.runtime
    return (
        all(getattr(metadata, name, None) == value for name, value in _PLAIN.items())
        and hasattr(metadata, "launch_pdl")
        and not getattr(metadata, "tmem_size", None)  # Triton checks the size of tensor memory
        and not runtime.kernel_load_start_hook.calls
        and not runtime.kernel_load_end_hook.calls
    )


def _loaded(compiled: Any, index: int) -> libcuda.Kernel | None:
    """Return the loaded kernel. The same kernel is loaded only once, also if it was read again meanwhile."""
    key = compiled.hash, index
    with _loading:
        if key not in _kernels:
            shared, threads = compiled.metadata.shared, 32 * compiled.metadata.num_warps
            _kernels[key] = libcuda.load(compiled.name, compiled.kernel, shared, threads, index)
        return _kernels[key]


class TensorMaps(BoundedCache):
    """Encoded TMA descriptors of one view, by the address of the tensor. Encoding a descriptor takes 2 us."""

    LIMIT_BYTES = 128 * 1024
    ENTRY_BYTES = 1024
    """Upper bound per entry: 128 bytes for the descriptor, the rest for Python objects."""

    def __init__(self, view: Any, encode: Callable[[Any], list]) -> None:
        super().__init__(self.LIMIT_BYTES)
        self._view = view
        self._encode = encode

    def all_arguments(self, address: int) -> list[Any]:
        """Return all kernel arguments of a descriptor: its encoded form, and the view's shape and strides.

        The tensor is on the current device.
        """
        descriptor = self._view.of(address)
        try:
            arguments = self._encode(descriptor)
        except RuntimeError:  # the driver encodes descriptors only in a context
            if not libcuda.make_context_current(torch_private.cuda_device()):
                raise
            arguments = self._encode(descriptor)
        self.store(address, arguments[0], self.ENTRY_BYTES)
        return arguments

    def __missing__(self, address: int) -> Any:
        return self.all_arguments(address)[0]


def _tensor_maps(metadata: Any, views: tuple) -> list[TensorMaps] | None:
    """Return the TMA descriptors of each view, or None if the kernel does not take such descriptors."""
    present = [view for view in views if view is not None]
    found = getattr(metadata, "tensordesc_meta", None) or []
    if len(found) != len(present) or None in found or any(each.get("fp4_padded", True) for each in found):
        return None
    return [TensorMaps(*pair) for pair in zip(present, map(_encoder, found, present), strict=True)]


def _encoder(metadata: dict[str, Any], view: Any) -> Callable[[Any], list[Any]]:
    """Return a function of a descriptor that returns the kernel's arguments for it.

    These are the encoded descriptor, and the view's shape and strides.
    """
    shape, strides = view.of(0).shape, view.of(0).strides
    encode = libcuda.tensor_map_encoder(
        compat.tensor_map_dtype(metadata["elem_type"]), metadata["elem_size"], metadata["swizzle"], shape,
        strides, metadata["block_size"],
    )  # fmt: skip
    return lambda descriptor: [encode(descriptor.base.data_ptr()), *shape, *strides]


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


def has_pointers(types: tuple) -> bool:
    """Whether a structure with fields of these types has pointers among its leaves."""
    return any(str(t).startswith(("*", "tensordesc")) for t in leaves_of(types, types))


class Leaves:
    """Returns the leaves of a structure in a kernel's pointers, whose fields have the given ``types``.

    Most structures have a single level. Their fields are the leaves, and walking through them would cost each
    launch microseconds. A structure of numbers is usually the same object in all launches of a kernel, so the
    leaves of the last one are kept.
    """

    def __init__(self, types: tuple) -> None:
        self._types = types
        self._is_flat = not any(isinstance(t, tuple) for t in types)
        self._has_pointers = has_pointers(types)
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


def _values(types: tuple, pick: Callable[[Any], Any]) -> Callable[[tuple], list]:
    """Return a function from the tensors of a launch to the values of parameters. ``pick`` picks leaves."""
    nested = [(i, Leaves(t)) for i, t in enumerate(types) if isinstance(t, tuple)][::-1]
    if not nested:
        return lambda tensors: [t if type(t) is int else t.data_ptr() for t in pick(tensors)]

    def of_leaves(tensors: tuple) -> list:
        found = [*tensors]
        for i, leaves in nested:
            found[i : i + 1] = leaves(found[i])
        return [t if type(t) in _NUMBERS else t.data_ptr() for t in pick(found)]

    return of_leaves


class _Layout:
    """Where the values of a kernel's parameters are in a frame.

    Args:
        ranks: number of dimensions of each TMA descriptor.
        of_tensors, of_fixed: Triton's types of the leaves of the tensors' arguments, and of the fixed ones.

    Attributes:
        of_maps: packs the descriptors, at the beginning.
        of_tensors: packs the tensors' leaves, which come next.
        has_only_addresses: whether all of these are addresses.
        num_addresses: number of the tensors' leaves that are parameters of the kernel.
        start_of_same, size: position of what is the same in all launches, and of the end.
        pick_tensors: picks the tensors' leaves that are parameters of the kernel.
        sizes: bytes of each parameter of the kernel.
        places: position of each parameter's value.
    """

    def __init__(self, ranks: list[int], of_tensors: list, of_fixed: list) -> None:
        self.pick_tensors, tensors = _kept(of_tensors)
        self._pick_fixed, fixed = _kept(of_fixed)
        descriptors = [[_MAP, *"i" * rank, *"q" * rank] for rank in ranks]
        self.of_maps = struct.Struct("".join(["@", *[_MAP] * len(ranks)]))
        self.num_addresses = len(tensors)
        self.of_tensors = struct.Struct("".join(["@", *tensors, "0q"]))
        self.has_only_addresses = set(tensors) <= {_POINTER}
        self._of_tensors = of_tensors
        # Triton adds two addresses of scratch memory, which are 0 for these kernels.
        same = [*(code for _, *numbers in descriptors for code in numbers), *fixed, _POINTER, _POINTER]
        self._same = struct.Struct("".join(["@", *same]))
        self.start_of_same = self.of_maps.size + self.of_tensors.size
        self.size = self.start_of_same + self._same.size
        of_same = iter(_places(same, self.start_of_same))
        self.places: list[int] = []
        for i, codes in enumerate(descriptors):
            self.places += [i * libcuda.TENSOR_MAP_BYTES, *islice(of_same, len(codes) - 1)]
        self.places += [*_places(tensors, self.of_maps.size), *of_same]
        every = [*chain(*descriptors), *tensors, *fixed, _POINTER, _POINTER]
        self.sizes = tuple(map(struct.calcsize, every))

    def parts(self, count: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any], int]:
        """Return how the first ``count`` tensors and the others are picked, and how many are first."""
        (first, codes), (others, _) = _kept(self._of_tensors[:count]), _kept(self._of_tensors[count:])
        return first, others, len(codes)

    def pack_fixed(self, numbers: list[int], leaves: list) -> bytes:
        """Return the bytes of shapes and strides of descriptors, and of fixed arguments."""
        return self._same.pack(*numbers, *self._pick_fixed(leaves), 0, 0)


def _kept(types: list[str]) -> tuple[Callable[[Any], Any], list[str]]:
    """Return (function that picks the values of parameters, their formats). Constants are no parameters."""
    places = [i for i, of_value in enumerate(types) if of_value != "constexpr"]
    codes = [_POINTER if types[i][0] == "*" else FORMATS[types[i]] for i in places]
    if len(places) == len(types):
        return tuple, codes
    if len(places) > 1:
        return itemgetter(*places), codes
    return lambda values: [values[i] for i in places], codes


def _places(codes: list[str], start: int) -> list[int]:
    """Return the positions of values that ``struct`` packs at ``start``: multiples of each value's size."""
    places = []
    for size in map(struct.calcsize, codes):
        places.append(-(-start // size) * size)
        start = places[-1] + size
    return places


class _Frame:
    """Memory of one launch at a time. The driver copies everything from it before a launch returns.

    Attributes:
        config: the driver's configuration of the launch.
        values: memory of all parameters.
        addresses: the part of ``values`` that holds the tensors' addresses.
        further: the second part of the addresses, as it was written last.
        same: what is the same in all launches, as it was written last.
        launch: launches the kernel and returns the driver's result.
    """

    __slots__ = ("_parameters", "_start", "addresses", "config", "further", "launch", "same", "values")

    def __init__(self, layout: _Layout, metadata: Any, grid: tuple[int, int, int], function: int) -> None:
        self.values = libcuda.aligned(layout.size, _ALIGNMENT)
        start = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_uint64 * layout.num_addresses).from_address(start + layout.of_maps.size)
        self.further: tuple | None = None
        self.same = b""
        self._start = start + layout.start_of_same
        places = [start + place for place in layout.places]
        self._parameters = (ctypes.c_void_p * len(places))(*places)
        self.config = libcuda.LaunchConfig(
            grid, 32 * metadata.num_warps, metadata.shared, bool(metadata.launch_pdl)
        )
        of_parameters = ctypes.addressof(self._parameters)
        self.launch = libcuda.bound(
            "cuLaunchKernelEx", ctypes.addressof(self.config), function, of_parameters, None
        )

    def replace_same(self, same: bytes) -> None:
        ctypes.memmove(self._start, same, len(same))
        self.same = same
