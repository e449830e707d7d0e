"""Device functions that read their source when it is needed, not when their modules are imported.

Triton's decorators find the end of each function with Python's tokenizer, which takes 0.5 ms for 20 lines. A
call of the Hopper kernels imports 250 functions. If its kernels have been compiled before, Triton needs none
of them, and the kernels' keys need only the lines of those that they call.
"""

from __future__ import annotations

import inspect
import linecache
import threading
from types import ModuleType
from typing import Any

import triton as plain_triton
from triton import knobs

_CONTINUED = (")", "]", "}", "#")
"""First characters of lines that do not end a function, though they are not indented."""
_constructing = threading.RLock()


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
