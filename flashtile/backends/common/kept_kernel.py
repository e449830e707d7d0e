"""Compiled kernels kept after their first launch.

Triton's own launch path binds and specialises every argument on every call (17 us); a kept kernel does not
(7 us, before it also left out what Triton prepares for a profiler).
"""

from __future__ import annotations

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
