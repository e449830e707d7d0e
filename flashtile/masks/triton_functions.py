"""Conversion of ``@triton.jit`` functions to torch functions, so that they can be traced and differentiated.

The Python code of such a function runs with a replacement of ``triton.language``. Each captured tensor is
passed as a pointer to its first element, after the other arguments (:func:`flashtile.masks.from_triton`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Pointer:
    """A pointer to an element of a captured tensor of one dimension."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    __radd__ = __add__


def _load(pointer: Any, mask: Any = None, other: Any = 0) -> Any:
    if not isinstance(pointer, Pointer):
        raise TypeError(f"tl.load must get a pointer of a captured tensor, got {type(pointer).__name__}")
    if mask is None:
        return pointer.tensor[pointer.offset]
    # Where mask is False, the first element is read instead and replaced by ``other``.
    return torch.where(mask, pointer.tensor[torch.where(mask, pointer.offset, 0)], other)


def _cast(x: Any, dtype: Any, **options: Any) -> Any:
    return x.to(dtype)


_LANGUAGE: dict[str, Any] = {
    name: getattr(torch, name)
    for name in (
        "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "sigmoid", "erf",
        "where", "clamp", "float16", "bfloat16", "float32", "float64", "int32", "int64",
    )
}  # fmt: skip
_LANGUAGE |= {
    "load": _load,
    "cast": _cast,
    "minimum": lambda a, b: torch.where(a < b, a, b),
    "maximum": lambda a, b: torch.where(a > b, a, b),
    "int1": torch.bool,
    "constexpr": lambda value: value,
    "static_assert": lambda *anything: None,
}


class _Language(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"tl.{name} is not one of the functions that compile: {', '.join(sorted(_LANGUAGE))}")


_language = _Language("triton.language")
vars(_language).update(_LANGUAGE)

STAND_INS = (_language, Pointer, *_LANGUAGE.values())
"""Objects that replace those of Triton. They never change."""


def in_torch(function: Any) -> Callable[..., Any]:
    """Return a Python function that computes with torch what a ``@triton.jit`` function computes.

    Its arguments are tensors, or the symbols of a trace.
    """
    python = function.fn
    names = {
        name: _translated(value)
        for name, value in python.__globals__.items()
        if name in python.__code__.co_names
    }
    cells = tuple(types.CellType(_translated(cell.cell_contents)) for cell in python.__closure__ or ())
    return types.FunctionType(
        python.__code__, {**python.__globals__, **names}, python.__name__, python.__defaults__, cells
    )


def _translated(value: Any) -> Any:
    if isinstance(value, types.ModuleType) and value.__name__ == "triton.language":
        return _language
    if isinstance(value, types.ModuleType) and value.__name__ == "triton":
        stand_in = types.ModuleType("triton")
        vars(stand_in)["language"] = _language
        return stand_in
    if type(value).__name__ == "constexpr":
        return value.value
    if not isinstance(value, types.FunctionType) and hasattr(value, "fn"):
        return in_torch(value)
    return value
