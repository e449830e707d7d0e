"""Names of Triton that flashtile uses though Triton does not document them, and its releases differ.

Triton documents its language, ``jit``, ``compile`` and Gluon, but neither its driver nor its cache. The rest
of the package takes such names from here; ``tests/test_private_names.py`` says what breaks without each. They
are in Triton 3.6 to 3.9.

This module imports triton, so only code that compiles or launches kernels imports it. It imports Gluon's
names when they are used, because portable kernels need no Gluon. ``hopper/compat.py`` has what differs in
Gluon.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import cache, driver, jit
from triton.runtime.jit import JITCallable as JITCallable


def is_compilable(kernel: Any) -> bool:
    """Whether ``kernel`` can be compiled; False for kernels made under TRITON_INTERPRET=1."""
    return isinstance(kernel, triton.JITFunction)


def source_type(kernel: Any) -> type:
    """Return Triton's type of the source of a ``@triton.jit`` or Gluon kernel."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def gluon_function_type() -> Any:
    """Return the type of functions that Gluon's ``jit`` makes."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    return GluonJITFunction


def gluon_builtin() -> Callable[[Any], Any]:
    """Return Gluon's decorator of functions that write instructions."""
    from triton.experimental.gluon.language._core import builtin

    return builtin


def gluon_aggregate() -> Callable[[type], Any]:
    """Return Gluon's decorator of structures of tensors. It has a public name from Triton 3.7 on."""
    from triton.experimental import gluon
    from triton.language import core

    return getattr(gluon, "aggregate", None) or core._aggregate


def tma_addition() -> Any:
    """Return the compiler's number for a TMA store that adds."""
    from triton._C.libtriton import ir

    return ir.DESCRIPTOR_REDUCE_KIND.ADD


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
    compiling = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: -arch - 1000 * only_named,
        get_current_stream=lambda device: 0,
    )
    token = _compiling.set(compiling)
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
    active = driver._active
    with contextlib.nullcontext() if active and not isinstance(active, _Driver) else _shared_driver():
        yield


@contextlib.contextmanager
def _shared_driver() -> Iterator[None]:
    """Inside the context, a :class:`_Driver` is active, until the last thread has left its context."""
    with _changing:
        if not isinstance(driver._active, _Driver):
            driver.set_active(_Driver(driver._active))
        ours = driver.active
        ours.contexts += 1
    try:
        yield
    finally:
        with _changing:  # another thread may still be inside, so the first to leave must not restore it
            ours.contexts -= 1
            if not ours.contexts and driver.active is ours:
                driver.set_active(ours.before)


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
        if torch.version.hip is not None:
            return driver.default
        from triton.backends.driver import GPUDriver
        from triton.backends.nvidia.driver import CudaDriver

        class Driver(CudaDriver):
            def __init__(self) -> None:
                GPUDriver.__init__(self)  # CudaDriver's constructor builds the C module

            def __getattr__(self, name: str) -> Any:  # other threads may need the C module meanwhile
                return getattr(driver.default, name)

        return Driver()


def tensor_map_dtype(element_type: int) -> int:
    """Return the driver's number (CUtensorMapDataType) of an element type in a kernel's metadata."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    number: int = TMA_DTYPE_DEVICE_TO_HOST[element_type]
    return number


def cuobjdump_path() -> str:
    """Path of Triton's own disassembler (``TRITON_CUOBJDUMP_PATH`` overrides it)."""
    return knobs.nvidia.cuobjdump.path


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
    name = f"{function.__module__}:{function.fn.__qualname__}"
    # The list would keep every generated function of a service alive.
    getattr(jit, "_triton_jit_function_registry", {}).pop(name, None)


def digest_function() -> Callable[[], str] | None:
    """Return Triton's function that computes the digest of its installation, if this release has it."""
    return getattr(cache, "triton_key", None)


def tell_digest(digest: Callable[[], str]) -> None:
    """Give Triton the digest of its installation, which this process then does not compute.

    Args:
        digest: returns the digest. It is called once, when Triton first needs it.
    """
    if digest_function() is not None:
        cache.triton_key = functools.cache(digest)


def compiler_variables() -> list[tuple[str, str]]:
    """Return the environment variables that change what Triton compiles, sorted."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return sorted(get_cache_invalidating_env_vars().items())


def compiler_of(target: GPUTarget) -> Any:
    """Return Triton's compiler for a target, which parses options and has a digest of its own."""
    from triton.compiler.compiler import make_backend

    return make_backend(target)


def files_in_cache(name: str, metadata: str) -> dict[str, str]:
    """Return the paths of an entry of Triton's disk cache, by the files' names; empty without an entry.

    Args:
        name: digest of all that the kernel depends on, which is the name of the entry.
        metadata: name of the file that lists the others.
    """
    return cache.get_cache_manager(name).get_group(metadata) or {}


def compiled_from(source: Any, files: dict[str, str], name: str) -> Any:
    """Return the compiled kernel whose files have these paths, which it reads at once."""
    from triton.compiler.compiler import CompiledKernel

    return CompiledKernel(source, files, name)


class TellsHooks:
    """Mixin for JIT functions whose constants may be anything: hooks of compilation get their texts.

    Somebody may set a hook, such as vLLM's monitor of compilations. Triton writes the constants as JSON for
    it, which fails for those that are not numbers or text, such as the variants of our kernels.
    """

    def _call_hook(self, hook: Any, *arguments: Any) -> Any:
        if not hook:
            return None
        call: Any = super()._call_hook  # type: ignore[misc]
        place = [*inspect.signature(call).parameters].index("constants")  # releases differ in the others
        given = [hook, *arguments]
        given[place] = {path: _as_json(value) for path, value in given[place].items()}
        return call(*given)


def _as_json(value: Any) -> Any:
    """Return ``value`` if JSON can represent it, or else its text."""
    try:
        json.dumps(value)
    except TypeError:
        return repr(value)
    return value
