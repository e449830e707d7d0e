"""Makes Triton's interpreter over twice as fast on small kernels, without work that changes no result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def spare() -> None:
    """Patch Triton's interpreter to leave out three kinds of work.

    At each call of a nested function, the interpreter patches all of ``triton.language``, although the launch
    or an earlier call has done so. For each value it builds a table of all dtypes. It also repeats integer
    additions and multiplications to check for overflow, although it reports overflows only in debug mode.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules: set[str] = set()

    def patch_once(function: Any) -> Any:
        if function.__module__ in modules:
            return None
        modules.add(function.__module__)
        return patch(function)

    def launch_anew(self: Any, *arguments: Any, **named: Any) -> None:
        modules.clear()  # the end of a launch puts the language back
        launch(self, *arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def by_name(function: Any) -> Any:
    """Return ``function`` of a dtype with its results cached by the dtype's name."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return found
