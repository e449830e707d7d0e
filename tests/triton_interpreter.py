"""Triton's interpreter without work that changes no result: over half of its time on small kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def spare() -> None:
    """At each call of a nested function it looks through all of ``triton.language`` for what to replace,
    although the launch or an earlier call has replaced it. It makes a table of all dtypes for each value. And
    it adds and multiplies integers again to check for overflows, which it does in debug mode alone."""
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
    """A function of a dtype, called once for each name."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return found
