"""Kernels with a planted fault: an edit of their source text."""

from __future__ import annotations

import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any

from gluon_interpreter.functions import Functions


class Edited(Functions):
    """Functions of which ``function`` is edited: ``new`` replaces ``old``, which must occur once in it."""

    def __init__(self, function: Any, old: str, new: str) -> None:
        super().__init__()
        self._original = function.fn.__code__
        self._edited = _compiled(function.fn, old, new)

    def code_of(self, fn: FunctionType) -> CodeType:
        return self._edited if fn.__code__ is self._original else fn.__code__


def _compiled(fn: FunctionType, old: str, new: str) -> CodeType:
    lines, first = inspect.getsourcelines(fn)
    text = textwrap.dedent("".join(lines))
    if text.count(old) != 1:
        raise ValueError(f"{fn.__name__} has {old!r} {text.count(old)} times")
    head = next(i for i, line in enumerate(text.splitlines()) if line.startswith("def "))
    body = "\n".join(text.replace(old, new).splitlines()[head:])
    # Keeps the line numbers, because the interpreter names memory by the source line of its allocation.
    module = compile("\n" * (first - 1 + head) + body, fn.__code__.co_filename, "exec", dont_inherit=True)
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))
