"""Keys of compiled kernels: digests of everything that their compilation can read.

Triton's own key leaves out what only objects have: the properties and class variables of a constant, the
functions in it, and Python functions that run during compilation. A disk cache outlives the code, so a key
that leaves something out finds machine code of another version of flashtile. The keys of this module contain
each object that the compiler can reach from a kernel, by its value or its source text. Objects without either
are refused with a TypeError, so no key is incomplete. A key is the same in every process and with every
version of Python.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import is_dataclass
from dis import EXTENDED_ARG, opmap
from enum import Enum
from functools import cache
from types import CodeType, ModuleType
from typing import Any

from triton import language as tl

from flashtile.backends import compat

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, type(...)))
"""Types whose ``repr`` says all."""
_Bare = namedtuple("_Bare", ())
"""A structure without fields."""
_LIBRARIES = frozenset(("triton", *sys.stdlib_module_names))
"""Packages whose functions and classes are known by their names. The keys of Triton's cache and of folders
contain Triton's version."""
_ENVIRONMENT = os.environ, os.getenv
"""Environment variables, which differ between processes, although a library has them."""


class Source:
    """Mixin for the sources of kernels that Triton compiles, whose ``hash`` is complete."""

    fn: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attrs: dict[Any, Any]
    _digest = ""

    def hash(self) -> str:
        """Return a digest of the kernel, its signature and its constants."""
        self._digest = self._digest or source_key(self)
        return self._digest

    def __reduce__(self) -> tuple:
        """Pickle without the digest: another process computes it from what it has itself."""
        return source_of, (self.fn, self.signature, self.constants, self.attrs)


def source_of(
    kernel: Any, signature: dict[str, Any], constants: dict[Any, Any] | None = None, attributes: Any = None
) -> Any:
    """Return the source of a kernel for ``triton.compile``, an ``ASTSource`` with a complete key."""
    return _source_type(compat.source_type(kernel))(kernel, signature, constants, attributes)


@cache
def _source_type(base: type) -> type:
    return type(base.__name__, (Source, base), {})


def source_key(src: Any) -> str:
    """Return a digest of everything that the compilation of an ``ASTSource`` can read, except its options."""
    reader = _Reader()
    parts = (
        getattr(src.fn, "source_digest", None) or function_key(src.fn),
        *map(str, src.signature.items()),
        *map(str, sorted(src.attrs.items())),
        *(f"{path} {reader.text(value, src.name)}" for path, value in sorted(src.constants.items())),
    )
    return _sha256("\n".join(parts))


def function_key(function: Any) -> str:
    """Return a digest of a device function, of all functions that it calls, and of their constants.

    Raises:
        TypeError: one of the functions reads a value that no key can contain.
    """
    return _Reader().function(function)


def value_text(value: Any, place: str) -> str:
    """Return everything that the compiler can read of a constant as text. ``place`` names it in errors."""
    return _Reader().text(value, place)


class _Reader:
    """Writes values as text, the same text in every process. Functions are written as digests."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Any, str]] = {}

    def text(self, value: Any, place: str) -> str:
        """Return everything that the compiler can read of ``value``.

        Raises:
            TypeError: no key can contain ``value``.
        """
        if isinstance(value, tl.constexpr):
            value = value.value
        value = getattr(value, "__func__", value)  # of a method
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if any(value is each for each in _ENVIRONMENT):
            raise _of_process(place)
        if _is_of_library(value):
            return _library_text(value, place)
        if isinstance(value, compat.JITCallable) or "text" in getattr(value, "__dict__", ()):
            return self.function(value)
        if isinstance(value, type) and hasattr(value, "_fields"):  # the type of a structure
            return f"{_name(value)}{value._fields}{self.text(value._field_defaults, place)}"  # type: ignore[attr-defined]
        if getattr(value, "__triton_aggregate__", False):
            members = ", ".join(self.text(member, place) for member in value.hash_attrs)
            return f"{_name(value)}({value.__annotations__}, {members})"
        if isinstance(value, tuple | list):
            extra = self._members(value, place) if hasattr(value, "_fields") else ""
            return f"{_name(kind)}({', '.join(self.text(each, place) for each in value)}){extra}"
        if isinstance(value, dict):
            pairs = (f"{self.text(key, place)}: {self.text(each, place)}" for key, each in value.items())
            return f"{{{', '.join(sorted(pairs))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(self.text(each, place) for each in value))}}}"
        if isinstance(value, Enum):
            return f"{_name(kind)}.{value.name}={self.text(value.value, place)}"
        if is_dataclass(value) and not isinstance(value, type):
            return f"{_name(kind)}{self._members(value, place)}"
        raise _unreadable(value, place)

    def _members(self, value: Any, place: str) -> str:
        """Return the fields, class variables and properties of an object with their values."""
        names = (name for name in dir(value) if not name.startswith("__"))
        if hasattr(value, "_fields"):
            names = (name for name in names if not hasattr(_Bare, name))
        members = ((name, getattr(value, name)) for name in names)
        return str([f"{name}={self.text(each, f'{place}.{name}')}" for name, each in members])

    def function(self, function: Any) -> str:
        """Return a digest of a function and of all that it reads."""
        known = self._digests.get(id(function))
        if known is not None:
            return known[1]
        plain = inspect.unwrap(getattr(function, "fn", function))
        name = _name(plain)
        self._digests[id(function)] = function, name  # for a function that calls itself
        text = getattr(function, "text", None) or f"{getattr(function, 'noinline', False)} {function.src}"
        parts = [
            f"{type(function).__name__} {name} {plain.__code__.co_firstlineno} {text}",
            self.text([plain.__defaults__, plain.__kwdefaults__], name),
            *(f"{each} = {self.text(value, f'{name}: {each}')}" for each, value in _read_by(plain)),
        ]
        digest = _sha256("\n".join(parts))
        self._digests[id(function)] = function, digest
        return digest


def _read_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the globals that a Python function reads, also through modules that it reads.

    Raises:
        TypeError: the function imports in its body, or reads environment variables.
    """
    code = function.__code__
    if _imports(code):
        raise TypeError(
            f"{_name(function)}: the key of a compiled kernel cannot contain what a function imports in its "
            "body: import it in its module"
        )
    cells = function.__closure__ or ()
    bound = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    paths = {*_paths(code), *((name,) for name in bound)}
    attributes = sorted({path[1] for path in paths if path[0] == ""})
    read: dict[str, Any] = {}
    passed_on: list[ModuleType] = []

    def read_through(name: str, value: Any, path: tuple[str, ...]) -> None:
        if not isinstance(value, ModuleType):
            read[name] = value
            return
        if not path:  # any attribute may be one of this module
            if value in passed_on:
                return
            passed_on.append(value)
        for each in path[:1] or attributes:
            member = vars(value).get(each)
            if any(member is one for one in _ENVIRONMENT):
                raise _of_process(f"{_name(function)}: {name}.{each}")
            if each in vars(value) and not _is_library(value.__name__):
                read_through(f"{name}.{each}", member, path[1:])

    for name, *path in sorted(paths):
        members = bound if name in bound else function.__globals__
        if name in members:
            read_through(name, members[name], tuple(path))
    yield from read.items()


_SHIFTS = {
    "LOAD_GLOBAL": int(sys.version_info >= (3, 11)),
    "LOAD_NAME": 0,
    "LOAD_ATTR": int(sys.version_info >= (3, 12)),
    "LOAD_METHOD": 0,  # up to Python 3.11
    "STORE_ATTR": 0,
}
"""Instructions with the number of a name, which is shifted by so many bits that say something else."""


def _any_of(*instructions: str) -> bytes:
    """Return a regular expression of these instructions, as far as this version of Python has them."""
    codes = (opmap.get(name, 256) for name in instructions)
    return b"[" + re.escape(bytes(code for code in codes if code < 256)) + b"]"


_GLOBAL, _ATTRIBUTE = _any_of("LOAD_GLOBAL", "LOAD_NAME"), _any_of("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
_BETWEEN = _any_of("CACHE", "EXTENDED_ARG") + b"*"
_CHAIN = re.compile(b"(" + _GLOBAL + b")(?:" + _BETWEEN + _ATTRIBUTE + b")*|" + _ATTRIBUTE, re.DOTALL)
_NAMED = {opmap[name]: shift for name, shift in _SHIFTS.items() if name in opmap}


def _paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield what code, and functions within it, read: (name of a global, attribute of it, attribute of that).

    Attributes of other objects are yielded as ("", attribute). ``dis`` finds the same, but takes 20 ms for
    the functions of one kernel.
    """
    names, unseen = code.co_names, set(code.co_names)
    instructions, arguments = code.co_code[::2], code.co_code[1::2]
    for chain in _CHAIN.finditer(instructions):
        path = [] if chain[1] else [""]
        for i in range(*chain.span()):
            shift = _NAMED.get(instructions[i])
            if shift is not None:
                number = arguments[i]
                if i and instructions[i - 1] == EXTENDED_ARG:
                    number |= arguments[i - 1] << 8
                path.append(names[number >> shift])
        unseen.difference_update(path)
        yield tuple(path)
    yield from ((name,) for name in unseen)  # names that only unreachable code uses
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _paths(value)


def _imports(code: CodeType) -> bool:
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    return opmap["IMPORT_NAME"] in code.co_code[::2] or any(map(_imports, inner))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_of_library(value: Any) -> bool:
    return _is_library(str(getattr(value, "__module__", "")))


def _library_text(value: Any, place: str) -> str:
    text = _name(value) if hasattr(value, "__qualname__") else repr(value)
    if " at 0x" in text:
        raise _unreadable(value, place)
    return text


def _unreadable(value: Any, place: str) -> TypeError:
    return TypeError(
        f"{place}: the key of a compiled kernel can contain numbers, text, structures, dataclasses, and "
        f"functions decorated with jit or constexpr_function, got {value!r:.200}"
    )


def _of_process(place: str) -> TypeError:
    return TypeError(
        f"{place}: the key of a compiled kernel cannot contain environment variables: pass a value"
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
