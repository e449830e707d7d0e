"""Functions of scores and masks as objects that join with ``&``, ``|`` and ``~``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile.masks.traces import called_as, kept
from flashtile.masks.tracing import Trace
from flashtile.masks.triton_functions import Pointer, in_torch


class Mod:
    """A ``mask_mod`` or ``score_mod``: called like the function that it is made of."""

    kind = ""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        traced(self.kind, function)  # what does not compile is an error here

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


@called_as("function")
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


@called_as("function")
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
            Globals are read here, once: Triton lets none of them change.
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

    def call(*arguments: Any) -> Any:
        # Not before: a copy would miss what is written later, a view made now a later requires_grad_().
        flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        return python(*arguments, *map(Pointer, flat))

    return of_kind(call, getattr(function, "__name__", None))


def traced(kind: str, function: Callable[..., Any]) -> Trace:
    """The program of a function, kept as :mod:`flashtile.masks.traces` says."""
    if isinstance(function, Mod):
        if function.kind != kind:
            raise TypeError(f"{kind} must not be a {function.kind}, got {function!r}")
        function = function.function
    return kept(kind, function)
