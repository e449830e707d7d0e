"""Decorators of kernels. The decorated functions get their binaries from :mod:`first_calls`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import triton
from triton import knobs

from flashtile.backends import compat
from flashtile.backends.common.deferred import Deferred, DeviceFunction
from flashtile.backends.common.first_calls import load_or_compile
from flashtile.backends.common.keys import function_key, source_of, value_text

MOST_KERNELS = 512
"""Compiled kernels of one function that are kept per device. A program that makes new score functions all the
time would otherwise keep megabytes for each. Kernels that a launch uses live as long as the launch."""


class _Newest(dict):
    """The newest MOST_KERNELS entries of a dict. Triton keeps compiled kernels in it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._lock:
            if len(self) >= MOST_KERNELS:
                self.pop(next(iter(self)))
            super().__setitem__(key, value)


class _Kept(compat.TellsHooks):
    """Mixin for JIT functions that :func:`load_or_compile` compiles.

    ``do_not_specialize`` also applies to the integers of tuples.
    """

    @property
    def cache_key(self) -> str:
        """Digest of the kernel's source, of all functions that it calls, and of the constants that they use.

        Triton's own digest also depends on the order in which a process first compiles its kernels. If a
        kernel is hashed before the functions that it calls, the digest lacks their constants. Constants of
        equal names are sorted by address, which differs between processes. So a process might not find a
        kernel in the cache that another process had compiled.
        """
        return self.source_digest

    @cached_property
    def source_digest(self) -> str:
        """:func:`keys.function_key` of this kernel."""
        return function_key(self)

    def create_binder(self) -> Any:
        _, _, *others, binder = super().create_binder()  # type: ignore[misc]
        self.compile, self.ASTSource = load_or_compile, source_of
        constants = [(p.num, p.name) for p in self.params if p.is_constexpr]  # type: ignore[attr-defined]
        plain = [p.num for p in self.params if p.do_not_specialize]  # type: ignore[attr-defined]

        def bind(*arguments: Any, **options: Any) -> tuple[dict, list, dict]:
            bound, specialization, options = binder(*arguments, **options)
            values = [*bound.values()]
            for i in plain:
                specialization[i] = unspecialized(values[i], *specialization[i])
            # Triton tells constants apart by their ``repr``, which a class may have for several of them.
            for i, name in constants:
                specialization[i] = "constexpr", value_text(values[i], name)
            return bound, specialization, options

        return _Newest(), _Newest(), *others, bind


def unspecialized(value: Any, kind: Any, key: Any) -> tuple[Any, Any]:
    """Return Triton's (type, specialisation key) of an argument, without specialising on integer values.

    ``kind`` and ``key`` are the type and key that Triton has computed. Triton always specialises on the
    integers of a tuple.
    """
    if isinstance(value, tuple):
        fields = [unspecialized(*field) for field in zip(value, kind, key, strict=True)]
        kinds, keys = zip(*fields, strict=True)
        return (type(kind)(*kinds), type(key)(*keys)) if hasattr(value, "_fields") else (kinds, keys)
    if type(value) is int:
        return "i32" if kind == "constexpr" else kind, None
    return kind, key


class KeptFunction(_Kept, DeviceFunction):
    """A ``@triton.jit`` function that is compiled when it is launched."""


def kernel(**options: Any) -> Callable[[Callable], Any]:
    """Return a decorator like :func:`triton.jit`. :func:`load_or_compile` compiles the decorated kernels."""
    if knobs.runtime.interpret:
        return triton.jit(**options)
    return lambda function: KeptFunction(function, **options)


def gluon_kernel(**options: Any) -> Callable[[Callable], Any]:
    """Return a decorator like :func:`kernel`, for Gluon."""

    class KeptGluonFunction(_Kept, Deferred, compat.gluon_function_type()):  # type: ignore[misc]
        """A Gluon function that is compiled when it is launched."""

    return lambda function: KeptGluonFunction(function, **options)
