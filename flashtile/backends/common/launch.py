"""Launches that keep their compiled kernel, for all backends that have kernels.

A :class:`CachedLaunch` is one kernel with its grid, scalars and constants, for tensors of one signature. Its
first call compiles the kernel; later calls pass pointers. Triton's own launch path binds and specialises
every argument at every call, which takes 17 us. A cached launch took 7 us in the same measurement, and has
become faster since.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile import torch_private
from flashtile.backends import compat
from flashtile.backends.common import direct_launch
from flashtile.backends.common.config import KernelConfig, allocator
from flashtile.backends.common.device import is_nvidia
from flashtile.garbage import uncollected
from flashtile.problems.attention import clear_lse, new_lse

if TYPE_CHECKING:
    from flashtile.problems.attention import Problem
    from flashtile.problems.decode import DecodeProblem

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
        if run is not None and torch_private.cuda_device() == index:
            run(torch_private.cuda_stream(index), tensors)
        elif (recorded := _recorded.get()) is not None:
            recorded.append((self, tensors))
        elif device.type == "cuda" and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                self(device, *tensors)
        else:
            self._compile(device, tensors)

    def once(self, *tensors: Any) -> None:
        """Launch the kernel through Triton, for a launch that is made anew for each call."""
        if (recorded := _recorded.get()) is not None:
            recorded.append((self, tensors))
            return
        with torch.cuda.device_of(tensors[0]):
            self._launch_by_triton(tensors)

    def _launch_by_triton(self, tensors: tuple) -> Any:
        return self.kernel[self._grid](*self.arguments(tensors), **self.options)

    def stream(self) -> int | None:
        """Return the current stream of the kernel's device; None if another device is current.

        Requires :attr:`takes_addresses`.
        """
        index: Any = self._index
        return torch_private.cuda_stream(index) if torch_private.cuda_device() == index else None

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
            run(torch_private.cuda_stream(device.index), tensors)
        else:
            compiled = self._launch_by_triton(tensors)
            if compiled is None:  # Triton's interpreter has run the kernel
                return
            given = (self._grid, self._fixed, self._views, self._pointers)
            run = direct_launch.by_triton(compiled, device.index, *given)
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
            *map(_dtypes, tensors),
            *(_specialization(parameter, value) for parameter, value in fixed),
            *sorted(self.options.items()),
        )

    def load(self, tensors: tuple) -> None:
        """Compile the kernel as :meth:`compile_ahead` does, and load it to the current GPU.

        The first launch with such tensors then finds the kernel in this process.
        """
        with compat.driver_of_torch():
            compiled = self.compile_ahead(tensors)
        if not direct_launch.load(compiled, torch_private.cuda_device()):
            compiled[self._grid]  # Triton loads it

    def arguments(self, tensors: tuple) -> tuple:
        """Return the kernel's arguments for these tensors."""
        pointers = self._pointers
        descriptors, others = direct_launch.described(self._views, tensors)
        return (*descriptors, *(others if pointers is None else (pointers(*others),)), *self._fixed)


def _dtypes(tensors: Any) -> Any:
    """Return the dtype of a tensor, or of each tensor of a tuple; what is no tensor stays."""
    return tuple(map(_dtypes, tensors)) if isinstance(tensors, tuple) else getattr(tensors, "dtype", tensors)


class Outputs:
    """Prepares (out, lse) of attention for tensors of one signature: the given tensors, or new memory.

    Args:
        problem: has their shapes and the dtype of ``out``; lse is float32. Statistics follow lse in a last
            dimension, if the call returns any.
        all_written: whether programs write every element. If not, unused tokens and tokens in no sequence get
            0 and -inf before the launch.
    """

    def __init__(self, problem: Problem | DecodeProblem, all_written: bool) -> None:
        self.all_written = all_written
        self._out_shape, self._out_dtype = problem.out_shape, problem.out_dtype
        self._lse_shape = problem.lse_shape
        self._statistics = getattr(problem, "statistics", ())
        self._new_out: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self, q: Tensor, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.all_written:
            return self.cleared(q, out, lse)
        if out is None:
            if self._new_out is None:
                self._new_out = allocator(q, self._out_shape, self._out_dtype)
            out = self._new_out(q)
        if self._statistics:
            return out, new_lse(q, self._lse_shape, torch.float32, self._statistics)
        return out, q.new_empty(*self._lse_shape, dtype=torch.float32) if lse is None else lse

    def cleared(self, q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out, lse) filled with 0 and -inf, the result of a row that sees no key."""
        out = q.new_zeros(self._out_shape, dtype=self._out_dtype) if out is None else out.zero_()
        if lse is None and not self._statistics:
            return out, q.new_full(self._lse_shape, -torch.inf, dtype=torch.float32)
        lse = new_lse(q, self._lse_shape, torch.float32, self._statistics) if lse is None else lse
        return out, clear_lse(lse, self._statistics)


def row_pointers(lse: Tensor, statistics: tuple[str, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (lse, maximum of the scores, entropy) of rows, None for what a call lacks."""
    if not statistics:
        return lse, None, None
    own, *more = lse.unbind(-1)
    found = dict(zip(statistics, more, strict=True))
    return own, found.get("max_logits"), found.get("entropy")


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
