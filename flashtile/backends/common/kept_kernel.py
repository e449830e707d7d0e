"""Compiled kernels kept after their first launch.

Triton's own launch path binds and specialises every argument on every call (17 us); a kept kernel does not
(7 us, before it also left out what Triton prepares for a profiler).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from flashtile.backends import compat
from flashtile.backends.common.config import KernelConfig

NUM_WARPS = 4
"""Of kernels without a configuration, unless said otherwise."""


class KeptKernel:
    """One kernel at one grid with fixed scalar arguments; tensors of one signature come with each call.

    Constants are the kernel's last parameters, in its order. ``views`` say how TMA sees the first tensors
    (``flashtile.backends.hopper.forward.launch.View``). ``options`` are further ones of the compiler.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        scalars: tuple,
        constants: tuple,
        config: KernelConfig | None,
        views: tuple = (),
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._views = views
        self.programs = grid
        self._grid = (grid, 1, 1)
        self._fixed = (*scalars, *constants)
        self._options: dict[str, Any] = {"enable_fp_fusion": True}
        if config is None:
            self._options |= {"num_warps": NUM_WARPS, **options}
        else:
            self._options |= {"num_warps": config.num_warps, "num_stages": config.num_stages, **options}
        self._run: Any = None
        self._index: int | None = None
        """Of the device that it was compiled on."""

    @property
    def takes_addresses(self) -> bool:
        """Whether it is compiled, so that a tensor may be given by its address."""
        return self._run is not None

    def with_scalars(self, scalars: tuple) -> KeptKernel | None:
        """This kernel as it is compiled, with other scalar arguments.

        None if Triton would compile another for them, or if none is compiled yet.
        """
        run, fixed = self._run, self._fixed
        if run is None:
            return None
        of_scalars = self._kernel.params[-len(fixed) :]
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
        elif device.type == "cuda" and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                self(device, *tensors)
        else:
            self._compile(device, tensors)

    def _compile(self, device: torch.device, tensors: tuple) -> None:
        """Launch by Triton's own path, which compiles what it does not find, and keep what it launched."""
        views = self._views
        descriptors = [view.of(tensor) for view, tensor in zip(views, tensors, strict=False)]
        arguments = (*descriptors, *tensors[len(views) :], *self._fixed)
        compiled = self._kernel[self._grid](*arguments, **self._options)
        if compiled is not None:  # None from the interpreter
            # In this order: another thread that sees the one has to see the other.
            self._index = device.index
            self._run = compat.launcher(compiled, self._grid, tensors, self._fixed, views)


def _compiled_alike(parameter: Any, before: Any, now: Any) -> bool:
    """Whether Triton compiles a kernel alike for two values of a scalar parameter."""
    if type(before) is not type(now):
        return False
    if before == now or type(now) is float:
        return True
    if type(now) is not int or not (-(2**31) <= before < 2**31 and -(2**31) <= now < 2**31):
        return False
    return parameter.do_not_specialize or (1 not in (before, now) and before % 16 == now % 16 == 0)
