"""Decorators of device functions and kernels. They differ from those of Triton and Gluon in two ways.

*Device functions* (``triton.jit`` of this module) read their source when it is needed, not when their modules
are imported (:class:`Deferred`). Triton's decorators find the end of each function with Python's tokenizer,
and a call of the Hopper kernels imports 185 functions, 304 with its backward pass. If its kernels have been
compiled before, Triton needs none of them, and the kernels' keys need only the lines of those that they call.
This saves 65 ms of processor time for the first key of the forward kernel (149 instead of 213 ms after
``import flashtile``) and another 50 ms for the backward kernels (one core of a Xeon, least of 7 processes).

*Kernels* (:func:`kernel`, :func:`gluon_kernel`) get their binaries from ``first_calls``, under keys that are
complete (``keys``), and keep only the newest ones.
"""

from __future__ import annotations

import inspect
import linecache
import threading
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

import triton as plain_triton
from triton import knobs

from flashtile.backends import compat
from flashtile.backends.common.first_calls import load_or_compile
from flashtile.backends.common.keys import function_key, source_of, value_text

MOST_KERNELS = 512
"""Compiled kernels of one function that are kept per device. A program that makes new score functions all the
time would otherwise keep megabytes for each. Kernels that a launch uses live as long as the launch."""

_CONTINUED = (")", "]", "}", "#")
"""First characters of lines that do not end a function, though they are not indented."""
_constructing = threading.RLock()
"""Held while a constructor runs, so that it runs once and other threads wait for its end."""


class Deferred:
    """Mixin for JIT functions whose constructor runs when an attribute is used that it sets."""

    def __init__(self, fn: Any, **options: Any) -> None:
        self._options: dict[str, Any] | None = options
        self.__name__, self.__qualname__, self.__module__ = fn.__name__, fn.__qualname__, fn.__module__
        self.__doc__, self.__globals__, self.fn = fn.__doc__, fn.__globals__, fn
        self._lines, self._first = _lines_of(fn)

    __hash__ = object.__hash__
    """Functions are equal if they are the same. Triton's hash parses the function and all that it calls."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            with _constructing:
                self._construct()
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _construct(self) -> None:
        """Run the constructor unless it has run.

        Raises:
            RuntimeError: the file of the function has changed since its import.
        """
        options = vars(self).get("_options")
        if options is None:
            return
        lines = function_lines(self._lines, self._first)
        if inspect.findsource(self.fn)[0][self._first : self._first + len(lines)] != lines:
            raise RuntimeError(f"{self.fn.__code__.co_filename} has changed since it was imported")
        self._options = None
        try:
            super().__init__(self.fn, **options)  # type: ignore[call-arg]
        except BaseException:  # such as KeyboardInterrupt: the next use of an attribute tries again
            self._options = options
            raise

    @property
    def params(self) -> list:
        """Parameters of the function. The constructor appends to them, so other threads wait for its end."""
        with _constructing:
            self._construct()
            return self._params

    @params.setter
    def params(self, found: list) -> None:
        self._params = found

    @property
    def text(self) -> str:
        """Source of the function with its decorators."""
        return "".join(function_lines(self._lines, self._first))


def source_text(function: Any) -> str:
    """Return the source of a function that is being defined, with its decorators."""
    return "".join(function_lines(*_lines_of(function)))


def _lines_of(function: Any) -> tuple[list[str], int]:
    """Return (lines of the file, index of the first line of the function)."""
    code = function.__code__
    linecache.checkcache(code.co_filename)  # a module that is imported again may have changed
    return linecache.getlines(code.co_filename, function.__globals__), code.co_firstlineno - 1


def function_lines(lines: list[str], first: int) -> list[str]:
    """Return the lines of the function that begins at the index ``first``, its first decorator.

    The function ends before the next line that is not indented more than its first line. Only a text over
    several lines that are not indented would end it too early.
    """
    indent, in_head, end = _indent(lines[first]), True, first + 1
    for i in range(first, len(lines)):
        line = lines[i].lstrip()
        if not line:
            continue
        if _indent(lines[i]) > indent or line.startswith(_CONTINUED[:3]):
            end = i + 1
        elif in_head:
            in_head, end = not line.startswith("def "), i + 1
        elif not line.startswith(_CONTINUED):
            break
    return lines[first:end]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


class DeviceFunction(Deferred, plain_triton.JITFunction):
    """A ``@triton.jit`` function that reads its source when it is needed."""


class Decorators(ModuleType):
    """A module of Triton whose ``jit`` makes functions of the type ``made``. All else is the module's."""

    def __init__(self, module: ModuleType, made: type[Deferred]) -> None:
        super().__init__(module.__name__)
        self._module, self._made = module, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def jit(self, fn: Any = None, **options: Any) -> Any:
        """Decorate a function as the module's ``jit`` does. One that is in no file reads its source now."""

        def decorated(function: Any) -> Any:
            if knobs.runtime.interpret or function.__code__.co_filename.startswith("<"):
                return self._module.jit(function, **options)
            return self._made(function, **options)

        return decorated if fn is None else decorated(fn)


triton: Any = Decorators(plain_triton, DeviceFunction)


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
    """Return a decorator like Triton's ``jit``. :func:`load_or_compile` compiles the decorated kernels."""
    if knobs.runtime.interpret:
        return plain_triton.jit(**options)
    return lambda function: KeptFunction(function, **options)


def gluon_kernel(**options: Any) -> Callable[[Callable], Any]:
    """Return a decorator like :func:`kernel`, for Gluon."""

    class KeptGluonFunction(_Kept, Deferred, compat.gluon_function_type()):  # type: ignore[misc]
        """A Gluon function that is compiled when it is launched."""

    return lambda function: KeptGluonFunction(function, **options)
