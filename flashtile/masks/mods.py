"""Functions of scores and masks as objects that join with ``&``, ``|`` and ``~``, and their programs, kept.

A function is traced again only when something that it reads has changed: a number in a closure, a global, a
default. What cannot be compared that way (an attribute, an element of a list) makes it traced at every call,
which costs some 100 us of host time.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.masks.tracing import Trace, trace
from flashtile.masks.triton_functions import Pointer, in_torch

_KNOWN_MODULES = ("torch", "math", "triton", "triton.language", "flashtile.masks")
_UNCHANGING = (bool, int, float, str, Tensor, torch.dtype, types.CodeType)
"""That they are the same object says that they are read alike; a tensor's numbers are read later."""
_MISSING = object()

Guard = tuple[Callable[[], Any], Any]
"""How to read something, and what it was."""

_traces: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[Guard], Trace]]] = weakref.WeakKeyDictionary()


class Mod:
    """A ``mask_mod`` or ``score_mod``: called like the function that it is made of."""

    kind = ""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        traced(self.kind, function)  # what does not compile is an error here

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


class MaskMod(Mod):
    """``mask_mod(batch, head, q_idx, kv_idx)``: True where the key takes part.

    ``a & b`` is seen by both, ``a | b`` by either, ``~a`` what ``a`` hides.

    Examples:
        >>> from flashtile import masks
        >>> near = masks.mask_mod(lambda batch, head, q_idx, kv_idx: (q_idx - kv_idx).abs() < 8)
        >>> near & masks.causal() | masks.prefix_lm(4)
        <mask_mod <lambda> & causal | prefix_lm>
    """

    kind = "mask_mod"

    def __call__(self, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(batch, head, q_idx, kv_idx)

    def __and__(self, other: Callable[..., Any]) -> MaskMod:
        other = mask_mod(other)
        return MaskMod(
            lambda b, h, q, kv: self(b, h, q, kv) & other(b, h, q, kv), f"{self.name} & {other.name}"
        )

    def __or__(self, other: Callable[..., Any]) -> MaskMod:
        other = mask_mod(other)
        return MaskMod(
            lambda b, h, q, kv: self(b, h, q, kv) | other(b, h, q, kv), f"{self.name} | {other.name}"
        )

    def __invert__(self) -> MaskMod:
        return MaskMod(lambda b, h, q, kv: ~self(b, h, q, kv), f"~({self.name})")


class ScoreMod(Mod):
    """``score_mod(score, batch, head, q_idx, kv_idx)``: the score that takes its place."""

    kind = "score_mod"

    def __call__(self, score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, batch, head, q_idx, kv_idx)


def mask_mod(function: Callable[..., Any]) -> MaskMod:
    """``function`` as a :class:`MaskMod`; a decorator, too.

    Args:
        function: ``function(batch, head, q_idx, kv_idx)`` of four ints to a bool, in torch's operations. It
            is
            FlexAttention's ``mask_mod``. Positions count from 0 within a sequence; ``head`` is a query head.

    Raises:
        TypeError: it does not compile; the text shows its line.

    Examples:
        >>> @flashtile.masks.mask_mod
        ... def every_other(batch, head, q_idx, kv_idx):
        ...     return (q_idx - kv_idx) % 2 == 0
        >>> q = torch.randn(1, 8, 2, 16)
        >>> flashtile.attention(q, q, q, mask_mod=every_other & flashtile.masks.causal()).shape
        torch.Size([1, 8, 2, 16])
    """
    return function if isinstance(function, MaskMod) else MaskMod(function)


def score_mod(function: Callable[..., Any]) -> ScoreMod:
    """``function`` as a :class:`ScoreMod`; a decorator, too.

    Args:
        function: ``function(score, batch, head, q_idx, kv_idx)`` of a float and four ints to a float.

    Raises:
        TypeError: it does not compile; the text shows its line.

    Examples:
        >>> @flashtile.masks.score_mod
        ... def nearer(score, batch, head, q_idx, kv_idx):
        ...     return score - 0.1 * (q_idx - kv_idx).abs()
        >>> q = torch.randn(1, 8, 2, 16)
        >>> flashtile.attention(q, q, q, score_mod=nearer).shape
        torch.Size([1, 8, 2, 16])
    """
    return function if isinstance(function, ScoreMod) else ScoreMod(function)


def from_triton(kind: str, function: Any, *tensors: Tensor) -> Mod:
    """A ``@triton.jit`` function as a mod, compiled and differentiated as one of torch is.

    Args:
        kind: "score_mod" or "mask_mod".
        function: of the arguments of that kind, then a pointer for each of ``tensors``, which ``tl.load``
            reads as it lies in memory when contiguous. Its own operations are those of ``tl`` on one value.
        tensors: captured ones; a ``score_mod`` has their gradients.

    Raises:
        ValueError: another ``kind``.
        TypeError: it does not compile.

    Examples:
        >>> import triton, triton.language as tl
        >>> @triton.jit
        ... def per_head(score, b, h, q, kv, table):
        ...     return score + tl.load(table + h)  # doctest: +SKIP
    """
    if kind not in ("score_mod", "mask_mod"):
        raise ValueError(f"kind must be 'score_mod' or 'mask_mod', got {kind!r}")
    if not hasattr(function, "fn"):
        raise TypeError(f"function must be a @triton.jit function, got {type(function).__name__}")
    python = in_torch(function)
    of_kind: type[Mod] = ScoreMod if kind == "score_mod" else MaskMod

    flat = tuple(tensor.reshape(-1) for tensor in tensors)

    def call(*arguments: Any) -> Any:
        return python(*arguments, *map(Pointer, flat))

    return of_kind(call, getattr(function, "__name__", None))


def traced(kind: str, function: Callable[..., Any]) -> Trace:
    """The program of a function, kept as long as the function lives and reads what it read."""
    if isinstance(function, Mod):
        if function.kind != kind:
            raise TypeError(f"{kind} must not be a {function.kind}, got {function!r}")
        function = function.function
    try:
        kept = _traces.get(function, {}).get(kind)
    except TypeError:  # not hashable, or without weak references
        return trace(kind, function)
    if kept is not None and all(read() is was for read, was in kept[0]):
        return kept[1]
    made = trace(kind, function)
    guards: list[Guard] = []
    if _guard(function, guards, set()) and _holds_only_read(made, guards):
        _traces.setdefault(function, {})[kind] = guards, made
    return made


def _holds_only_read(made: Trace, guards: list[Guard]) -> bool:
    """Whether no captured tensor was made by the function itself, which would be another at each call."""
    read = {id(was) for _, was in guards}
    return all(id(tensor) in read for tensor in made.tensors)


def _guard(value: Any, guards: list[Guard], seen: set[int]) -> bool:
    """Add a guard for everything that ``value`` can read when it is called; False if that is not possible."""
    if value is None or isinstance(value, _UNCHANGING) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, Mod):
        return _guard(value.function, guards, seen)
    if isinstance(value, functools.partial):
        return all(_guard(part, guards, seen) for part in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, tuple):
        guards.extend((_constant(part), part) for part in value if isinstance(part, Tensor))
        return all(_guard(part, guards, seen) for part in value)
    if isinstance(value, types.ModuleType):
        return value.__name__ in _KNOWN_MODULES
    if isinstance(value, types.FunctionType) and not value.__module__.startswith("torch."):
        for read, was in list(_reads(value)):
            guards.append((read, was))
            if was is not _MISSING and not _guard(was, guards, seen):
                return False
        return True
    builtin = isinstance(value, (types.BuiltinFunctionType, type))
    return builtin or (getattr(value, "__module__", None) or "").startswith("torch")


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _reads(function: types.FunctionType) -> Iterator[Guard]:
    """What a function reads beside its arguments: code, cells, defaults and globals."""
    itself = weakref.ref(function)  # whose life the guards must not prolong
    yield (lambda: getattr(itself(), "__code__", None)), function.__code__
    for cell in function.__closure__ or ():
        yield functools.partial(_contents, cell), _contents(cell)
    yield (lambda: getattr(itself(), "__defaults__", None)), function.__defaults__
    yield (lambda: getattr(itself(), "__kwdefaults__", None)), function.__kwdefaults__
    names = function.__globals__
    for name in _global_names(function.__code__):
        yield functools.partial(names.get, name, _MISSING), names.get(name, _MISSING)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _MISSING


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
