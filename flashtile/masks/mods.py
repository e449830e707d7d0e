"""Functions of scores and masks as objects that join with ``&``, ``|`` and ``~``, and their programs, kept.

A function is traced again only when something that it reads has changed: a number in a closure, a global, a
default. What cannot be compared that way (an attribute, an element of a list) makes it traced at every call,
which costs some 100 us of host time.
"""

from __future__ import annotations

import functools
import importlib
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import check_dense
from flashtile.masks.tracing import Trace, trace
from flashtile.masks.triton_functions import Pointer, in_torch

_KNOWN_MODULES = ("torch", "math", "triton", "triton.language", "flashtile.masks")
_UNCHANGING = (bool, int, float, str, Tensor, torch.dtype, types.CodeType)
"""That they are the same object says that they are read alike; a tensor's numbers are read later."""
_MISSING = object()


class _Guards:
    """What a function read when it was traced; :meth:`hold` says whether it would read the same now."""

    def __init__(self) -> None:
        self.functions: list[tuple[weakref.ref, Any, Any, Any]] = []
        """(function, code, defaults, defaults of keywords); a guard must not prolong a function's life."""
        self.cells: list[tuple[types.CellType, Any]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.constants: list[Any] = []
        """Tensors in tuples, which cannot change."""

    def hold(self) -> bool:
        for reference, code, defaults, keywords in self.functions:
            function = reference()
            if (
                function is None
                or function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
            ):
                return False
        for names, name, was in self.names:
            if names.get(name, _MISSING) is not was:
                return False
        try:
            for cell, was in self.cells:
                if cell.cell_contents is not was:
                    return False
        except ValueError:  # not assigned
            return False
        return True

    def read(self) -> set[int]:
        """The ids of what may be a captured tensor."""
        read = [*self.constants, *(was for _, was in self.cells), *(was for _, _, was in self.names)]
        return set(map(id, read))


_traces: weakref.WeakKeyDictionary[Any, dict[str, tuple[_Guards, Trace]]] = weakref.WeakKeyDictionary()


def _global(module: str, name: str) -> Any:
    """What is called ``name`` (with dots) in a module, for pickle."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class Mod:
    """A ``mask_mod`` or ``score_mod``: called like the function that it is made of."""

    kind = ""
    recipe: tuple[Callable[..., Mod], tuple] | None = None
    """(function, arguments) that make it again, where it is pickled; None of one of a user's function."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        traced(self.kind, function)  # what does not compile is an error here

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        if self.recipe is not None:
            return self.recipe
        place: Any = tuple(getattr(self.function, name, None) for name in ("__module__", "__qualname__"))
        try:
            is_global = _global(*place) is self  # decorated: the function's name is the mod's
        except (AttributeError, ImportError, TypeError, ValueError):
            is_global = False
        return (_global, place) if is_global else (type(self), (self.function, self.name))


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
    most_tokens: int | None = None
    """Queries and keys that it is defined for, at most; None is any number."""

    def __call__(self, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(batch, head, q_idx, kv_idx)

    def check_lengths(self, seqlen_q: int, seqlen_k: int) -> None:
        """Raise ValueError for more queries or keys than the mask is defined for."""
        if self.most_tokens is not None and max(seqlen_q, seqlen_k) > self.most_tokens:
            raise ValueError(
                f"mask_mod {self.name} must have at most {self.most_tokens} tokens, got {seqlen_q} queries "
                f"and {seqlen_k} keys"
            )

    def __and__(self, other: Callable[..., Any]) -> MaskMod:
        other = mask_mod(other)
        both = MaskMod(
            lambda b, h, q, kv: self(b, h, q, kv) & other(b, h, q, kv), f"{self.name} & {other.name}"
        )
        limits = [mask.most_tokens for mask in (self, other) if mask.most_tokens is not None]
        both.recipe, both.most_tokens = (operator.and_, (self, other)), min(limits, default=None)
        return both

    def __or__(self, other: Callable[..., Any]) -> MaskMod:
        other = mask_mod(other)
        either = MaskMod(
            lambda b, h, q, kv: self(b, h, q, kv) | other(b, h, q, kv), f"{self.name} | {other.name}"
        )
        either.recipe = operator.or_, (self, other)
        return either

    def __invert__(self) -> MaskMod:
        opposite = MaskMod(lambda b, h, q, kv: _opposite(self(b, h, q, kv)), f"~({self.name})")
        opposite.recipe = operator.invert, (self,)
        return opposite


def _opposite(seen: Any) -> Any:
    return not seen if isinstance(seen, bool) else ~seen  # ~True is -2


class ScoreMod(Mod):
    """``score_mod(score, batch, head, q_idx, kv_idx)``: the score that takes its place.

    Examples:
        >>> flashtile.masks.score_mod(lambda score, batch, head, q_idx, kv_idx: score / (1 + kv_idx))
        <score_mod <lambda>>
    """

    kind = "score_mod"

    def __call__(self, score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, batch, head, q_idx, kv_idx)


def mask_mod(function: Callable[..., Any]) -> MaskMod:
    """``function`` as a :class:`MaskMod`; a decorator, too.

    Args:
        function: ``function(batch, head, q_idx, kv_idx)`` of four ints to a bool, in torch's operations. It
            is FlexAttention's ``mask_mod``. Positions count from 0 within a sequence; ``head`` is a query
            head.

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
    for i, tensor in enumerate(tensors):
        check_dense(f"tensors[{i}]", tensor)
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
    if kept is not None and kept[0].hold():
        return kept[1]
    made = trace(kind, function)
    guards = _Guards()
    if _guard(function, guards, set()) and _holds_only_read(made, guards):
        _traces.setdefault(function, {})[kind] = guards, made
    return made


def _holds_only_read(made: Trace, guards: _Guards) -> bool:
    """Whether no captured tensor was made by the function itself, which would be another at each call."""
    read = guards.read()
    return all(id(tensor) in read for tensor in made.tensors)


def _guard(value: Any, guards: _Guards, seen: set[int]) -> bool:
    """Add a guard for everything that ``value`` can read when it is called; False if that is not possible."""
    if value is None or isinstance(value, _UNCHANGING) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, Mod):
        return _guard(value.function, guards, seen)
    if isinstance(value, functools.partial):
        return all(_guard(part, guards, seen) for part in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, tuple):
        guards.constants.extend(part for part in value if isinstance(part, Tensor))
        return all(_guard(part, guards, seen) for part in value)
    if isinstance(value, types.ModuleType):
        return value.__name__ in _KNOWN_MODULES
    if isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith("torch."):
        return all(was is _MISSING or _guard(was, guards, seen) for was in _read_by(value, guards))
    builtin = isinstance(value, (types.BuiltinFunctionType, type))
    return builtin or (getattr(value, "__module__", None) or "").startswith("torch")


def _read_by(function: types.FunctionType, guards: _Guards) -> list[Any]:
    """What a function reads beside its arguments, each under a guard: code, defaults, cells and globals."""
    parts = function.__code__, function.__defaults__, function.__kwdefaults__
    guards.functions.append((weakref.ref(function), *parts))
    cells = [(cell, _contents(cell)) for cell in function.__closure__ or ()]
    names = function.__globals__
    read = [(names, name, names.get(name, _MISSING)) for name in _global_names(function.__code__)]
    guards.cells += cells
    guards.names += read
    return [*parts, *(was for _, was in cells), *(was for _, _, was in read)]


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
