"""Decorators of kernels. The decorated functions get their binaries from :mod:`first_calls`."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import triton
from triton import knobs
from triton import language as tl
from triton.runtime.jit import JITCallable

from flashtile.backends.common.deferred import Deferred, DeviceFunction
from flashtile.backends.common.first_calls import load_or_compile


class _Kept:
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
        key = self.__dict__.get("_key")
        if key is None:
            key = self.__dict__["_key"] = source_digest(self)
        return key

    def create_binder(self) -> Any:
        *others, binder = super().create_binder()  # type: ignore[misc]
        self.compile = load_or_compile
        plain = [p.num for p in self.params if p.do_not_specialize]  # type: ignore[attr-defined]

        def bind(*arguments: Any, **options: Any) -> tuple[dict, list, dict]:
            bound, specialization, options = binder(*arguments, **options)
            values = [*bound.values()]
            for i in plain:
                specialization[i] = unspecialized(values[i], *specialization[i])
            return bound, specialization, options

        return *others, bind

    def _call_hook(self, hook: Any, *arguments: Any) -> Any:
        """Call a compilation hook that somebody set, such as vLLM's monitor of compilations.

        Triton writes the constants as JSON for it, which fails for those that are not numbers or text, such
        as the variants of our kernels. The hook gets the text of such a constant.
        """
        if not hook:
            return None
        call: Any = super()._call_hook  # type: ignore[misc]
        place = [*inspect.signature(call).parameters].index("constants")  # releases differ in the others
        given = [hook, *arguments]
        given[place] = {path: described(value) for path, value in given[place].items()}
        return call(*given)


def described(value: Any) -> Any:
    """Return ``value`` if JSON can represent it, or else its text."""
    try:
        json.dumps(value)
    except TypeError:
        return repr(value)
    return value


def source_digest(function: Any) -> str:
    """Return a digest of a function's source, of all functions that it calls, and of their constants."""
    found: dict[int, tuple] = {}
    _gather(function, found)
    return hashlib.sha256(str(sorted(found.values())).encode()).hexdigest()


def _gather(function: JITCallable, found: dict[int, tuple]) -> None:
    """Add (name, source, first line, constants) of a function, and of each function it calls, to ``found``.

    The keys of ``found`` are the ``id`` of each function.
    """
    if id(function) in found:
        return
    constants: list[tuple[str, str]] = []
    plain = function.fn
    name = f"{plain.__module__}.{plain.__qualname__}"
    text = function.text if isinstance(function, Deferred) else function.src
    found[id(function)] = name, text, plain.__code__.co_firstlineno, constants
    scope = plain.__globals__
    if plain.__closure__:
        scope = {**scope, **inspect.getclosurevars(plain).nonlocals}
    names = sorted(_names(plain.__code__))
    used = [(each, scope[each]) for each in names if each in scope]
    for module_name, module in [pair for pair in used if isinstance(pair[1], ModuleType)]:
        if not module.__name__.startswith("triton"):
            used += [
                (f"{module_name}.{each}", getattr(module, each)) for each in names if hasattr(module, each)
            ]
    for each, value in used:
        members = value.hash_attrs if _is_aggregate(value) else (value,)
        for member in members:
            if isinstance(member, JITCallable):
                _gather(member, found)
            elif isinstance(member, tl.constexpr):
                constants.append((each, str(member.value)))
            elif hasattr(member, "_fields"):  # the type of a structure
                constants.append((each, str(member._fields)))


def _is_aggregate(value: Any) -> bool:
    return not isinstance(value, JITCallable) and getattr(value, "__triton_aggregate__", False)


def _names(code: CodeType) -> set[str]:
    """Return the global names and attributes in a function's code, and in that of functions within it."""
    inner = (_names(value) for value in code.co_consts if isinstance(value, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)


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
    from triton.experimental.gluon._runtime import GluonJITFunction

    class KeptGluonFunction(_Kept, Deferred, GluonJITFunction):
        """A Gluon function that is compiled when it is launched."""

    return lambda function: KeptGluonFunction(function, **options)
