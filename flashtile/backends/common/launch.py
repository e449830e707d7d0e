"""Configuration of a kernel, and helpers for launches that all backends with kernels share.

Launches that keep their compiled kernel.

Triton's own launch path binds and specialises every argument at every call, which takes 17 us. A cached
launch took 7 us in the same measurement, and has become faster since.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends import compat
from flashtile.backends.common import direct_launch
from flashtile.backends.common.device import is_nvidia
from flashtile.garbage import uncollected
from flashtile.problems.attention import Problem


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch of one kernel.

    ``spill_budget`` is the number of bytes of register spills that is accepted for plain and causal problems,
    after measurement. ``features_spill_budget`` is the number for problems that have soft-cap, ALiBi, windows
    and unused keys at once.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    spill_budget: int = 0
    features_spill_budget: int = 0


RAGGED_ROWS = 2**30
"""Rows of a ragged descriptor (``tma.ragged_view``), and the maximum number of rows of its tensor."""


class TokenStrides(NamedTuple):
    """Strides of q, k, v or a cache, in elements.

    ``batch`` is the stride between pages in a paged cache, and 0 for packed sequences.
    """

    batch: Any
    token: Any
    head: Any


def token_strides(tensor: Tensor) -> TokenStrides:
    """Return the strides of a tensor (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""
    return TokenStrides(tensor.stride(0) if tensor.dim() == 4 else 0, tensor.stride(-3), tensor.stride(-2))


def is_aligned(tensor: Tensor) -> bool:
    """Whether Triton loads rows of ``tensor`` asynchronously.

    The address must be a multiple of 16 bytes, and all strides but the last multiples of 16 elements.
    """
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def padded(head_dim: int, least: int = 16) -> int:
    """Return ``head_dim`` rounded up to a power of two, at least ``least``."""
    return max(least, 1 << (head_dim - 1).bit_length())


def tile_widths(head_dim: int, head_dim_v: int, aligned: bool, least: int = 16) -> tuple[int, int]:
    """Return the columns of the tiles of k and of v: head sizes rounded up to powers of two.

    ``aligned``: whether Triton loads both asynchronously (:func:`is_aligned`).

    Tiles that are not loaded asynchronously share one address in shared memory. If their swizzles also
    differ, the descriptors of Q K^T and P V differ in the upper half only. ptxas 12.8, which Triton 3.6 and
    3.7 bring, then takes the upper half for P V from registers that hold something else, so P V reads out of
    range. Such tiles get equal widths, which gives them equal swizzles. Heads of one column need 64 columns:
    their tokens may lie side by side in memory, and Triton then stores the tile of k transposed, in rows of
    BLOCK_N keys, which have the swizzle of 64 columns, 128 bytes. Triton 3.8 (ptxas 12.9) needs none of this.
    """
    width, width_v = padded(head_dim, least), padded(head_dim_v, least)
    if not aligned:
        width = width_v = max(width, width_v, 64 if min(head_dim, head_dim_v) == 1 else 0)
    return width, width_v


def has_score_mod(problem: Problem) -> bool:
    """Whether a score is more than the product q k^T times a positive scale.

    The largest score of a row then need not belong to the row's largest product.
    """
    return problem.softcap > 0 or problem.alibi or problem.bias or problem.softmax_scale <= 0


def outer_stride(tensor: Tensor | None) -> int:
    """Return the stride of the first dimension, from one sequence to the next, in elements.

    It is 0 if ``tensor`` is None, or if it has one dimension, because all sequences then share it.
    """
    return tensor.stride(0) if tensor is not None and tensor.dim() > 1 else 0


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def allocator(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, zeroed: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the fastest torch function that allocates contiguous memory of this shape and dtype.

    The function takes a tensor that has the shape, strides and dtype of ``like``. It allocates on the device
    of that tensor.
    """
    if (like.shape, like.stride(), like.dtype) == (shape, contiguous_strides(shape), dtype):
        return torch.zeros_like if zeroed else torch.empty_like
    # The shape is passed as separate arguments: parsing a tuple takes twice as long.
    if zeroed:
        return lambda tensor: tensor.new_zeros(*shape, dtype=dtype)
    return lambda tensor: tensor.new_empty(*shape, dtype=dtype)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` >= 1 that is at most ``most``; 1 if ``most`` is below 1."""
    return next(size for size in range(max(min(most, number), 1), 0, -1) if number % size == 0)


NUM_WARPS = 4
"""Default number of warps, for kernels without a configuration."""


Launched = tuple["CachedLaunch", tuple]
"""A launch, and the tensors of its call."""
_recorded: ContextVar[list[Launched] | None] = ContextVar("recorded_launches", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Launched]]:
    """Inside the context, record each launch whose kernel is not compiled yet, instead of launching it.

    Kernels are never compiled for tensors on torch's "meta" device, so all launches with such tensors are
    recorded.
    """
    launches: list[Launched] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


class CachedLaunch:
    """One kernel with a fixed grid and fixed scalar arguments. Each call passes tensors of one signature.

    Args:
        kernel: its parameters are, in this order, TMA descriptors, other tensors, scalars and constants.
        grid: number of programs.
        scalars: numbers, or NamedTuples of numbers.
        constants: values of the ``constexpr`` parameters.
        config: number of warps and stages; None means NUM_WARPS warps.
        views: ``common.tma.View`` of each tensor that gets a TMA descriptor; these are the first tensors of a
            call. If a view is None, the kernel gets None instead of a descriptor, and calls pass no tensor.
        pointers: NamedTuple type of the parameter that holds all other tensors. If None, the kernel has a
            parameter for each of the other tensors.
        options: further options of the compiler and of the launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        scalars: tuple,
        constants: tuple,
        config: KernelConfig | None,
        views: tuple = (),
        pointers: type | None = None,
        **options: Any,
    ) -> None:
        self.kernel = kernel
        self._views = views
        self._pointers = pointers
        self.programs = grid
        self._grid = (grid, 1, 1)
        self._fixed = (*scalars, *constants)
        self.options: dict[str, Any] = {"enable_fp_fusion": True}
        """Options of the compiler and of the launch."""
        if config is None:
            self.options |= {"num_warps": NUM_WARPS, **options}
        else:
            self.options |= {"num_warps": config.num_warps, "num_stages": config.num_stages, **options}
        self._run: Any = None
        self._index: int | None = None
        """Index of the device that the kernel was compiled on."""

    @property
    def takes_addresses(self) -> bool:
        """Whether the kernel is compiled, so that tensors may be passed as addresses."""
        return self._run is not None

    @property
    def descriptor_types(self) -> tuple[str | None, ...]:
        """Triton's types of the kernel's first parameters, which are descriptors; None for one not given."""
        return tuple(view and view.type_name for view in self._views)

    def with_scalars(self, scalars: tuple) -> CachedLaunch | None:
        """Return a launch of the same compiled kernel with other scalar arguments.

        None if Triton would compile another kernel for them, or if this kernel is not compiled yet.
        """
        run, fixed = self._run, self._fixed
        if run is None:
            return None
        of_scalars = self.kernel.params[-len(fixed) :]
        for parameter, before, now in zip(of_scalars, fixed, scalars, strict=False):
            if before is not now and not _compiled_alike(parameter, before, now):
                return None
        other = copy.copy(self)
        other._fixed = (*scalars, *fixed[len(scalars) :])
        other._run = run.with_fixed(other._fixed)
        return other

    def __call__(self, device: torch.device, *tensors: Any) -> None:
        run, index = self._run, self._index
        if run is not None and compat.cuda_device() == index:
            run(compat.cuda_stream(index), tensors)
        elif (recorded := _recorded.get()) is not None:
            recorded.append((self, tensors))
        elif device.type == "cuda" and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                self(device, *tensors)
        else:
            self._compile(device, tensors)

    def stream(self) -> int | None:
        """Return the current stream of the kernel's device; None if another device is current.

        Requires :attr:`takes_addresses`.
        """
        index: Any = self._index
        return compat.cuda_stream(index) if compat.cuda_device() == index else None

    def by_address(self, stream: int, addresses: tuple, further: tuple = ()) -> None:
        """Launch the kernel on a :meth:`stream` with nothing but addresses, which saves host time.

        ``further`` are the last of them. If they are the same object as in the launch before, as for all
        layers of a step, they need not be written again. Their number is the same in all launches.
        """
        self._run(stream, addresses, further)

    def _compile(self, device: torch.device, tensors: tuple) -> None:
        """Compile the kernel if necessary, launch it, and keep the launch."""
        run = self._direct_launch(device, tensors)
        if run is not None:
            run(compat.cuda_stream(device.index), tensors)
        else:
            compiled = self.kernel[self._grid](*self.arguments(tensors), **self.options)
            if compiled is None:  # Triton's interpreter has run the kernel
                return
            run = compat.launcher(compiled, self._grid, tensors, self._fixed, self._views, self._pointers)
        # The index comes first: another thread that sees ``_run`` must also see ``_index``.
        self._index = device.index
        self._run = run

    def _direct_launch(self, device: torch.device, tensors: tuple) -> Any:
        """Compile the kernel and return its direct launch, or None if only Triton can launch it."""
        if not (is_nvidia(device) and compat.is_compilable(self.kernel)):
            return None
        with uncollected(), compat.driver_of_torch():
            compiled = self.compile_ahead(tensors)
        if compiled is None:  # a hook has prevented the compilation
            return None
        if hasattr(compiled, "result"):  # another thread compiles it
            compiled = compiled.result()
        return direct_launch.launcher(
            compiled, device.index, self._grid, tensors, self._fixed, self._views, self._pointers
        )

    def compile_ahead(self, tensors: tuple) -> Any:
        """Compile the kernel for these tensors, which may be on torch's "meta" device, without a launch."""
        return self.kernel.warmup(*self.arguments(tensors), grid=self._grid, **self.options)

    def kernel_key(self, tensors: tuple) -> tuple:
        """Return a key that two launches share only if Triton compiles the same kernel for both.

        All tensors must be aligned to 16 bytes. The key is cheap, unlike the name of the compiled kernel.
        """
        fixed = zip(self.kernel.params[-len(self._fixed) :], self._fixed, strict=True)
        return (
            self.kernel,
            *self.descriptor_types,
            *(getattr(tensor, "dtype", tensor) for tensor in tensors),
            *(_specialization(parameter, value) for parameter, value in fixed),
            *sorted(self.options.items()),
        )

    def load(self, tensors: tuple) -> None:
        """Compile the kernel as :meth:`compile_ahead` does, and load it to the current GPU.

        The first launch with such tensors then finds the kernel in this process.
        """
        with compat.driver_of_torch():
            compiled = self.compile_ahead(tensors)
        if not direct_launch.load(compiled, compat.cuda_device()):
            compat.load(compiled)

    def arguments(self, tensors: tuple) -> tuple:
        """Return the kernel's arguments for these tensors."""
        pointers = self._pointers
        descriptors, others = compat.described(self._views, tensors)
        return (*descriptors, *(others if pointers is None else (pointers(*others),)), *self._fixed)


def _specialization(parameter: Any, value: Any) -> Any:
    """Return the properties of a parameter's value for which Triton compiles a kernel of its own."""
    if parameter.is_constexpr or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(_specialization(parameter, field) for field in value)
    if type(value) is not int:
        return type(value)
    fits = -(2**31) <= value < 2**31
    return fits if parameter.do_not_specialize else (fits, value == 1, value % 16 == 0)


def _compiled_alike(parameter: Any, before: Any, now: Any) -> bool:
    """Whether Triton compiles the same kernel for two values of a parameter that is a scalar or a tuple."""
    if type(before) is not type(now):
        return False
    if isinstance(now, tuple):
        return len(before) == len(now) and all(
            _compiled_alike(parameter, *pair) for pair in zip(before, now, strict=True)
        )
    if before == now or type(now) is float:
        return True
    if type(now) is not int or not (-(2**31) <= before < 2**31 and -(2**31) <= now < 2**31):
        return False
    return parameter.do_not_specialize or (1 not in (before, now) and before % 16 == now % 16 == 0)
