"""Score and mask functions as objects that can be combined with ``&``, ``|`` and ``~``."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile.checks.arguments import check_choice, check_dense
from flashtile.masks.traces import called_as, kept
from flashtile.masks.tracing import Trace
from flashtile.masks.triton_functions import Pointer, in_torch


def _global(module: str, name: str) -> Any:
    """Return the object that a dotted ``name`` such as "Class.method" refers to in a module, for pickle."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class Mod:
    """Base of :class:`MaskMod` and :class:`ScoreMod`: callable objects that wrap a function."""

    kind = ""
    """"mask_mod" or "score_mod"."""
    recipe: tuple[Callable[..., Mod], tuple] | None = None
    """(function, arguments) from which pickle rebuilds the object; None if it wraps a user's function."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        traced(self.kind, function)  # raises here if it cannot be traced

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        if self.recipe is not None:
            return self.recipe
        place: Any = tuple(getattr(self.function, name, None) for name in ("__module__", "__qualname__"))
        try:
            is_global = _global(*place) is self  # True if the object was made by a decorator
        except (AttributeError, ImportError, TypeError, ValueError):
            is_global = False
        return (_global, place) if is_global else (type(self), (self.function, self.name))


@called_as("function")
class MaskMod(Mod):
    """``mask_mod(batch, head, q_idx, kv_idx)``: returns True if the query sees the key.

    ``a & b`` shows the keys that both masks show, ``a | b`` the keys that at least one of them shows, and
    ``~a`` the keys that ``a`` hides.

    Examples:
        >>> from flashtile import masks
        >>> near = masks.mask_mod(lambda batch, head, q_idx, kv_idx: (q_idx - kv_idx).abs() < 8)
        >>> near & masks.causal() | masks.prefix_lm(4)
        <mask_mod <lambda> & causal | prefix_lm>
    """

    kind = "mask_mod"
    most_tokens: int | None = None
    """Largest number of queries or keys for which the mask is defined; None for any number."""

    def __call__(self, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(batch, head, q_idx, kv_idx)

    def check_lengths(self, seqlen_q: int, seqlen_k: int) -> None:
        """Raise ValueError if there are more than ``most_tokens`` queries or keys."""
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


@called_as("function")
class ScoreMod(Mod):
    """``score_mod(score, batch, head, q_idx, kv_idx)``: returns the score that replaces ``score``.

    Examples:
        >>> flashtile.masks.score_mod(lambda score, batch, head, q_idx, kv_idx: score / (1 + kv_idx))
        <score_mod <lambda>>
    """

    kind = "score_mod"

    def __call__(self, score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, batch, head, q_idx, kv_idx)


def mask_mod(function: Callable[..., Any]) -> MaskMod:
    """Wrap ``function`` in a :class:`MaskMod`; can be used as a decorator.

    Args:
        function: ``function(batch, head, q_idx, kv_idx)`` from four ints to a bool, written with torch's
            operations, as FlexAttention's ``mask_mod``. Positions count from 0 within a sequence; ``head`` is
            a query head.

    Raises:
        TypeError: the function does not compile; the message shows the line that fails.

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
    """Wrap ``function`` in a :class:`ScoreMod`; can be used as a decorator.

    Args:
        function: ``function(score, batch, head, q_idx, kv_idx)`` from a float and four ints to a float.

    Raises:
        TypeError: the function does not compile; the message shows the line that fails.

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
    """Wrap a ``@triton.jit`` function in a ScoreMod or MaskMod, to be traced like a torch function.

    Args:
        kind: "score_mod" or "mask_mod".
        function: takes the arguments of a score_mod or mask_mod, and then a pointer for each of ``tensors``.
            The elements at a pointer are contiguous, also if those of the tensor are not. The function may
            use operations of ``tl`` on scalars. Its globals are read once, in this call, because Triton does
            not allow them to change.
        tensors: captured tensors, which get gradients if ``kind`` is "score_mod".

    Raises:
        ValueError: ``kind`` is not "score_mod" or "mask_mod".
        TypeError: the function does not compile.

    Examples:
        >>> import triton, triton.language as tl
        >>> @triton.jit
        ... def per_head(score, b, h, q, kv, table):
        ...     return score + tl.load(table + h)  # doctest: +SKIP
    """
    check_choice("kind", kind, ("score_mod", "mask_mod"))
    if not hasattr(function, "fn"):
        raise TypeError(f"function must be a @triton.jit function, got {type(function).__name__}")
    for i, tensor in enumerate(tensors):
        check_dense(f"tensors[{i}]", tensor)
    python = in_torch(function)
    of_kind: type[Mod] = ScoreMod if kind == "score_mod" else MaskMod

    def call(*arguments: Any) -> Any:
        # Tensors are flattened at each call, because a flattened copy would not see later writes to the
        # tensor, and a flattened view would not see a later requires_grad_().
        flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        return python(*arguments, *map(Pointer, flat))

    return of_kind(call, getattr(function, "__name__", None))


def traced(kind: str, function: Callable[..., Any]) -> Trace:
    """Return the trace of a function, cached by the rules of :mod:`flashtile.masks.traces`."""
    if isinstance(function, Mod):
        if function.kind != kind:
            raise TypeError(f"{kind} must be a {kind} or a function, got {function!r}")
        function = function.function
    return kept(kind, function)
