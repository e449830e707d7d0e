"""The one place that knows what differs between the Triton releases that flashtile runs on.

Imports triton, so only code that compiles or launches kernels imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARP_SIZE = 32


def is_compilable(kernel: Any) -> bool:
    """Whether ``kernel`` can be compiled. Under TRITON_INTERPRET=1, ``@triton.jit`` makes none that can."""
    return isinstance(kernel, triton.JITFunction)


def compile_for(
    capability: int,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: Mapping[tuple[int, ...], list],
    options: dict[str, Any],
) -> Any:
    """Compile a ``@triton.jit`` or Gluon kernel for an NVIDIA compute capability (90 is 9.0); needs no GPU.

    Floating-point fusion is on, as in the launchers: Triton 3.10 turns it off by default.
    """
    source_type = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(kernel, signature, constants, dict(attributes))
    target = GPUTarget("cuda", capability, WARP_SIZE)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


def cuobjdump_path() -> str:
    """The disassembler that comes with Triton (``TRITON_CUOBJDUMP_PATH`` names another)."""
    return knobs.nvidia.cuobjdump.path


def launcher(compiled: Any, grid: tuple[int, int, int], fixed: tuple) -> Callable[[int, tuple], None]:
    """``(stream, tensors)``: launch a compiled kernel on the current device, with ``fixed`` arguments last.

    Tensors go by address (some may come so), which saves a question to the driver for each. Without hooks on
    launches, a profiler's, nothing is prepared for them, where Triton itself gathers a dictionary and calls
    two empty chains.
    """
    hooked = compiled[grid]
    run = compiled.run
    kernel = (compiled.function, compiled.packed_metadata, None, None, None)
    runtime = knobs.runtime

    def launch(stream: int, tensors: tuple) -> None:
        addresses = [t.data_ptr() if type(t) is Tensor else t for t in tensors]
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            hooked(*addresses, *fixed, stream=stream)
        else:
            run(*grid, stream, *kernel, *addresses, *fixed)

    return launch
