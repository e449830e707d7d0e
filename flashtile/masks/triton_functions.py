"""Conversion of ``@triton.jit`` functions to torch functions, so that they can be traced and differentiated.

The Python code of such a function runs with a replacement of ``triton.language``. Each captured tensor is
passed as a pointer to its first element, after the other arguments (:func:`flashtile.masks.from_triton`).
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Scalar:
    """A number that computes as Triton does: divisions of ints round towards zero, and ints have 32 bits.

    ``value`` is a tensor, or the symbol of a trace.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Scalar:
        if bitcast:
            raise TypeError("a conversion with bitcast=True does not compile")
        return Scalar(self.value.to(dtype))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Scalar) else value


def _scalar(value: Any) -> Any:
    """Return an argument or a result of torch as a kernel has it. Python numbers stay constants."""
    return value if isinstance(value, (bool, int, float, Scalar)) else Scalar(value)


def _position(value: Any) -> Any:
    return value if isinstance(value, int) else Scalar(value.to(torch.int32))


def _of_scalars(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors as one of scalars."""

    def apply(*arguments: Any, **options: Any) -> Any:
        plain = {name: _plain(option) for name, option in options.items()}
        return _scalar(function(*map(_plain, arguments), **plain))

    return apply


def _quotient(a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="trunc")


for _name in (
    "add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift", "eq", "ne", "lt", "le", "gt",
    "ge", "neg", "invert", "abs",
):  # fmt: skip
    setattr(Scalar, f"__{_name}__", _of_scalars(getattr(operator, f"__{_name}__")))
for _name, _function in (("floordiv", _quotient), ("mod", torch.fmod)):
    setattr(Scalar, f"__{_name}__", _of_scalars(_function))
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift", "floordiv", "mod"):
    _forward = getattr(Scalar, f"__{_name}__")
    setattr(Scalar, f"__r{_name}__", lambda self, other, forward=_forward: forward(other, self))


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
    offset, mask, other = map(_plain, (pointer.offset, mask, other))
    if mask is None:
        return _scalar(pointer.tensor[offset])
    # Where mask is False, the first element is read instead and replaced by ``other``.
    return _scalar(torch.where(mask, pointer.tensor[torch.where(mask, offset, 0)], other))


def _where(condition: Any, x: Any, y: Any) -> Any:
    chosen = torch.where(*map(_plain, (condition, x, y)))
    return Scalar(chosen.to(torch.int32) if type(x) is type(y) is int else chosen)


def _cast(x: Any, dtype: Any, **options: Any) -> Any:
    return _scalar(x).to(dtype, **options)


_LANGUAGE: dict[str, Any] = {
    name: _of_scalars(getattr(torch, name))
    for name in (
        "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "sigmoid", "erf",
        "clamp",
    )
}  # fmt: skip
_LANGUAGE |= {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64")
}
_LANGUAGE |= {
    "load": _load,
    "cast": _cast,
    "where": _where,
    "minimum": _of_scalars(lambda a, b: torch.where(a < b, a, b)),
    "maximum": _of_scalars(lambda a, b: torch.where(a > b, a, b)),
    "int1": torch.bool,
    "constexpr": lambda value: value,
    "static_assert": lambda *anything: None,
}


class _Language(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"tl.{name} is not one of the functions that compile: {', '.join(sorted(_LANGUAGE))}")


_language = _Language("triton.language")
vars(_language).update(_LANGUAGE)

STAND_INS = (_language, Pointer, _plain, _scalar, _position, *_LANGUAGE.values())
"""Objects that replace those of Triton. They never change."""


def in_torch(function: Any) -> Callable[..., Any]:
    """Return a Python function that computes with torch what a ``@triton.jit`` function computes.

    Its arguments are those of a score_mod or mask_mod, and then pointers. Positions are 32-bit, as kernels'.
    """
    python = _python(function)

    def call(*arguments: Any) -> Any:
        pointers = [argument for argument in arguments if isinstance(argument, Pointer)]
        *score, b, h, q, kv = arguments[: len(arguments) - len(pointers)]
        return _plain(python(*map(_scalar, score), *map(_position, (b, h, q, kv)), *pointers))

    return call


def _python(function: Any) -> Callable[..., Any]:
    """Return the Python function of a ``@triton.jit`` function, with stand-ins for Triton's own objects."""
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
        return _python(value)
    return value
