"""Turns kernels into Python functions: the same code with the interpreter's functions for Gluon's."""

from __future__ import annotations

import builtins
import inspect
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language import core
from triton.runtime.jit import ConstexprFunction

from gluon_interpreter.language import ASYNC_COPY, BY_NAME, GL, MBARRIER, PYTHON, TL, TMA
from gluon_interpreter.values import LAYOUT

MODULES = {id(gl): GL, id(tl): TL, id(mbarrier): MBARRIER, id(tma): TMA, id(async_copy): ASYNC_COPY}
OURS = "flashtile"


class Functions:
    """Translates kernels, and the functions, classes and constants that they refer to, each only once."""

    def __init__(self) -> None:
        self._modules: dict[str, dict[str, Any]] = {}
        self._found: dict[int, Any] = {}

    def of(self, function: Any) -> FunctionType:
        """Return a ``@gluon.jit`` or ``@triton.jit`` function as a Python function."""
        fn = function.fn
        defaults = tuple(getattr(value, "value", value) for value in fn.__defaults__ or ())
        code, name = self.code_of(fn), fn.__name__
        return FunctionType(code, self._globals(fn.__module__, fn.__globals__), name, defaults)

    def code_of(self, fn: FunctionType) -> Any:
        """Return the code that runs for ``fn``; subclasses may return another one."""
        return fn.__code__

    def _globals(self, module: str, names: dict[str, Any]) -> dict[str, Any]:
        """Return the global names of a module's functions, translated."""
        if module not in self._modules:
            found = self._modules[module] = {"__builtins__": vars(builtins) | PYTHON, "__name__": module}
            for name, value in names.items():
                if not name.startswith("__"):
                    found[name] = self._translated(name, value)
        return self._modules[module]

    def _translated(self, name: str, value: Any) -> Any:
        if name in BY_NAME:
            return BY_NAME[name]
        if id(value) in MODULES:
            return MODULES[id(value)]
        if isinstance(value, ModuleType):
            return _Module(self, value) if value.__name__.startswith(OURS) else value
        if isinstance(value, core.constexpr):
            return LAYOUT if "Layout" in type(value.value).__name__ else value.value
        if getattr(value, "__triton_aggregate__", False):
            return self._once(value, self._aggregate)
        if isinstance(value, ConstexprFunction):
            return value.fn  # runs on constants, so it keeps the original functions
        if hasattr(value, "fn") and hasattr(value.fn, "__code__"):
            return self._once(value, self.of)
        return value

    def _once(self, value: Any, translate: Any) -> Any:
        if id(value) not in self._found:
            self._found[id(value)] = translate(value)
        return self._found[id(value)]

    def _aggregate(self, value: Any) -> type:
        """Return a plain class with the translated methods of a Gluon aggregate."""
        members = {
            name: self.of(member) for name, member in inspect.getmembers(value) if hasattr(member, "fn")
        }
        init = next(member for member in value.hash_attrs if member.fn.__name__ == "__init__")
        return type(value.__name__, (), members | {"__init__": self.of(init)})


class _Module:
    """A module that a kernel uses, as in ``pipeline.put``; its attributes are translated on access."""

    def __init__(self, functions: Functions, module: ModuleType) -> None:
        self._functions, self._module = functions, module

    def __getattr__(self, name: str) -> Any:
        return self._functions._translated(name, getattr(self._module, name))
