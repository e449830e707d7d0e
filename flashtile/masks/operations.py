"""The operations of programs: how torch computes them, the kinds of their results, and their derivatives.

A program is the traced form of a score or mask function (:mod:`flashtile.masks.program`).

Ints are 64-bit. Where torch computes in a narrower dtype, a conversion such as ``int8`` follows.

Derivatives are programs of the same operations. ``gradient(emit, result, *operands)`` returns the partial
derivative with respect to each operand, or None for an operand without a derivative. Some operations select
one of their operands, such as where. Their partial derivatives are functions from the gradient of the result
to that of the operand. Multiplying an infinite gradient by 0 would give NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.problems.common import DTYPES
from flashtile.torch_private import torch_release

INTS = {
    "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int": torch.int64,
}  # fmt: skip
"""Conversions of ints, with the dtypes that they convert to. All of them return 64-bit ints."""
FLOATS = (
    *DTYPES,
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
"""Dtypes of captured float tensors: all that Triton can load."""
_RANK = {"bool": 0, "int": 1, "float": 2}
_PLURAL = {"bool": "booleans", "int": "ints", "float": "floats"}


class Operation(NamedTuple):
    """An elementary operation of programs.

    Attributes:
        evaluate: computes the result of operands that are tensors or numbers.
        kind: returns the kind of the result ("bool", "int" or "float") from those of the operands.
        gradient: emits and returns the partial derivatives; None if the operation has none.
        simplify: returns the result if it is a number or one of the operands, otherwise None.
    """

    evaluate: Callable[..., Any]
    kind: Callable[..., str]
    gradient: Callable[..., tuple] | None = None
    simplify: Callable[..., Any] | None = None

    def number(self, *numbers: Any) -> Any:
        """Compute the result of the operation on numbers, as a number."""
        result = self.evaluate(*numbers)
        return result.item() if isinstance(result, Tensor) else result


def kind_of_number(number: float) -> str:
    return "bool" if isinstance(number, bool) else "int" if isinstance(number, int) else "float"


def promoted(*kinds: str) -> str:
    return max(kinds, key=_RANK.__getitem__)


def range_of(conversion: str) -> tuple[int, int]:
    """Return the smallest and the largest int that one of the conversions in ``INTS`` returns."""
    bits = 64 if conversion == "int" else int(conversion.lstrip("uint"))
    return (0, 2**bits - 1) if conversion.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def promoted_int(*conversions: str) -> str:
    """Return the conversion to the dtype that torch computes in for operands of these dtypes."""
    if "uint8" in conversions and "int8" in conversions:
        conversions = (*conversions, "int16")
    return max(conversions, key=tuple(INTS).index)


def _always(kind: str) -> Callable[..., str]:
    return lambda *kinds: kind


def _only(symbol: str, *allowed: str) -> Callable[[str], str]:
    """Return the ``kind`` function of a unary operation that is defined only for the ``allowed`` kinds.

    The function returns the kind of the operand, or raises TypeError if this kind is not allowed. ``symbol``
    is the operation's name in the error message.
    """

    def kind_of(kind: str) -> str:
        if kind not in allowed:
            takes = " and ".join(_PLURAL[one] for one in allowed)
            raise TypeError(f"{symbol} takes {takes}, not a {kind}")
        return kind

    return kind_of


def _is(operand: Any, number: float) -> bool:
    return type(operand) in (int, float) and operand == number


def _numbers(*operands: Any) -> bool:
    return all(isinstance(operand, (bool, int, float)) for operand in operands)


def _fold(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: compute(*operands) if _numbers(*operands) else None


def _divided(a: float, b: float) -> float:
    """Divide as torch does, where a quotient by zero is an infinity or NaN."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def _simplify_add(a: Any, b: Any) -> Any:
    if _numbers(a, b):
        return a + b
    return b if _is(a, 0) else a if _is(b, 0) else None


def _simplify_mul(a: Any, b: Any) -> Any:
    if _numbers(a, b):
        return a * b
    if _is(a, 1):
        return b
    return a if _is(b, 1) else None


def _simplify_and(a: Any, b: Any) -> Any:
    if _numbers(a, b):
        return a & b
    if a is True or b is True:
        return b if a is True else a
    return False if a is False or b is False else None


def _simplify_or(a: Any, b: Any) -> Any:
    if _numbers(a, b):
        return a | b
    if a is False or b is False:
        return b if a is False else a
    return True if a is True or b is True else None


def _tensors(*operands: Any) -> tuple[Tensor, ...]:
    """Convert numbers to tensors of another operand's dtype, for torch functions that need tensors."""
    like = next((operand for operand in operands if isinstance(operand, Tensor)), None)
    return tuple(
        operand if isinstance(operand, Tensor) else _number_like(operand, like) for operand in operands
    )


def _number_like(number: float, like: Tensor | None) -> Tensor:
    if isinstance(number, float) and (like is None or not like.is_floating_point()):
        dtype: torch.dtype | None = torch.float64  # no call computes in a wider dtype
    else:
        dtype = None if like is None else like.dtype
    return torch.tensor(number, dtype=dtype, device=None if like is None else like.device)


def _of_tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *operands: function(*_tensors(*operands))


def _to(kind: str) -> Callable[[Any], Any]:
    python, dtype = {"int": (int, torch.int64), "bool": (bool, torch.bool)}[kind]
    return lambda x: x.to(dtype) if isinstance(x, Tensor) else python(x)


def _narrowed(conversion: str) -> Callable[[Any], Any]:
    low, high = range_of(conversion)

    def convert(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(INTS[conversion]).to(torch.int64)
        return (x - low) % (high - low + 1) + low

    return convert


def _unary(function: Callable[..., Tensor], gradient: Callable[..., Any] | None = None) -> Operation:
    """Return an operation that is a function of one float."""
    partials = None if gradient is None else lambda emit, y, x: (gradient(emit, y, x),)
    return Operation(_of_tensors(function), _always("float"), partials)


def _binary(
    function: Callable[..., Any],
    gradient: Callable[..., tuple] | None = None,
    simplify: Callable[..., Any] | None = None,
) -> Operation:
    return Operation(function, promoted, gradient, simplify)


def _comparison(function: Callable[..., Any]) -> Operation:
    return Operation(function, _always("bool"), None, _fold(function))


def _one_minus_square(emit: Any, y: Any) -> Any:
    return emit("sub", 1.0, emit("mul", y, y))


def _chosen(emit: Any, condition: Any, is_chosen: bool = True) -> Callable[[Any], Any]:
    """Return the partial derivative of an operand that is the result where ``condition`` is ``is_chosen``."""

    def through(gradient: Any) -> Any:
        return emit("where", condition, *((gradient, 0.0) if is_chosen else (0.0, gradient)))

    return through


def clamps_share_ties() -> bool:
    """Whether a clamp's gradient at a bound is that of torch from 2.14 on.

    There a bound that is a tensor gets half of it, and one that is a number leaves 0. In earlier releases,
    what is clamped gets the whole gradient.
    """
    return torch_release() >= (2, 14)


def _clamp(which: str) -> Callable[[Any, Any], Tensor]:
    """Return torch.clamp with one bound, whose derivatives at the bound depend on whether it is a number."""

    def clamp(x: Any, bound: Any) -> Tensor:
        stays_a_number = isinstance(x, Tensor) and x.is_floating_point() and not isinstance(bound, Tensor)
        if not stays_a_number:
            x, bound = _tensors(x, bound)
        return torch.clamp(x, **{which: bound})

    return clamp


def _clamped(within: str, up_to: str) -> Callable[..., tuple]:
    """Return ``gradient`` of a clamp by a number.

    What is clamped gets it within the bound (a comparison), or up to the bound. :func:`clamps_share_ties`
    decides.
    """

    def partials(emit: Any, y: Any, x: Any, bound: Any) -> tuple:
        condition = emit(within if clamps_share_ties() else up_to, x, bound)
        return _chosen(emit, condition), _chosen(emit, condition, is_chosen=False)

    return partials


def _extreme(loses: str, wins: str) -> Callable[..., tuple]:
    """Return ``gradient`` of minimum or maximum: equal operands get half of the gradient each.

    ``loses`` and ``wins`` are the comparisons that hold if the first operand is not, and is, the only result.
    """

    def partials(emit: Any, y: Any, a: Any, b: Any) -> tuple:
        def halved(gradient: Any) -> Any:
            return emit("where", emit("eq", a, b), emit("mul", 0.5, gradient), gradient)

        def of_first(gradient: Any) -> Any:
            return emit("where", emit(loses, a, b), 0.0, halved(gradient))

        def of_second(gradient: Any) -> Any:
            return emit("where", emit(wins, a, b), 0.0, halved(gradient))

        return of_first, of_second

    return partials


def _pow_gradient(emit: Any, y: Any, a: Any, b: Any) -> tuple:
    """Return the partial derivatives of pow, which are 0 where torch defines them as 0.

    The derivative with respect to the base is 0 where the exponent is 0. The derivative with respect to the
    exponent is 0 where the base is 0 and the exponent is at least 0. The plain formulas would give 0 * inf.
    """
    by_base = emit("mul", b, emit("pow", a, emit("sub", b, 1.0)))
    by_base = emit("where", emit("eq", b, 0.0), 0.0, by_base)
    is_flat = emit("le", emit("abs", a), emit("minimum", b, 0.0))  # a is 0, and b is not negative
    return by_base, emit("where", is_flat, 0.0, emit("mul", y, emit("log", a)))


OPERATIONS: dict[str, Operation] = {
    "add": _binary(lambda a, b: a + b, lambda emit, y, a, b: (1.0, 1.0), _simplify_add),
    "sub": _binary(
        lambda a, b: a - b,
        lambda emit, y, a, b: (1.0, -1.0),
        lambda a, b: a - b if _numbers(a, b) else a if _is(b, 0) else None,
    ),
    "mul": _binary(lambda a, b: a * b, lambda emit, y, a, b: (b, a), _simplify_mul),
    "div": Operation(
        lambda a, b: a / b,
        _always("float"),
        lambda emit, y, a, b: (emit("div", 1.0, b), emit("neg", emit("div", y, b))),
        _fold(_divided),
    ),
    "floordiv": _binary(_of_tensors(torch.floor_divide)),
    "mod": _binary(
        _of_tensors(torch.remainder),
        lambda emit, y, a, b: (1.0, emit("neg", emit("floor", emit("div", a, b)))),
    ),
    "pow": Operation(_of_tensors(torch.pow), _always("float"), _pow_gradient),
    "quotient": _binary(_of_tensors(functools.partial(torch.div, rounding_mode="trunc"))),
    "fmod": _binary(
        _of_tensors(torch.fmod),
        lambda emit, y, a, b: (1.0, emit("neg", emit("quotient", a, b))),
    ),
    "minimum": _binary(_of_tensors(torch.minimum), _extreme("gt", "lt")),
    "maximum": _binary(_of_tensors(torch.maximum), _extreme("lt", "gt")),
    "clamp_min": _binary(_clamp("min"), _clamped("gt", "ge")),
    "clamp_max": _binary(_clamp("max"), _clamped("lt", "le")),
    "eq": _comparison(lambda a, b: a == b),
    "ne": _comparison(lambda a, b: a != b),
    "lt": _comparison(lambda a, b: a < b),
    "le": _comparison(lambda a, b: a <= b),
    "gt": _comparison(lambda a, b: a > b),
    "ge": _comparison(lambda a, b: a >= b),
    "and": _binary(lambda a, b: a & b, None, _simplify_and),
    "or": _binary(lambda a, b: a | b, None, _simplify_or),
    "xor": _binary(lambda a, b: a ^ b, None, _fold(lambda a, b: a ^ b)),
    "lshift": _binary(lambda a, b: a << b),
    "rshift": _binary(lambda a, b: a >> b),
    "not": Operation(
        _of_tensors(torch.bitwise_not), _only("~", "bool", "int"), None,
        _fold(lambda a: not a if isinstance(a, bool) else ~a),
    ),
    "neg": Operation(
        lambda a: -a, _only("-", "int", "float"), lambda emit, y, a: (-1.0,), _fold(lambda a: -a)
    ),
    "abs": Operation(
        _of_tensors(torch.abs), _only("abs", "int", "float"), lambda emit, y, a: (emit("sign", a),),
        _fold(abs),
    ),
    "sign": Operation(_of_tensors(torch.sign), lambda kind: kind),
    "where": Operation(
        lambda c, a, b: torch.where(_tensors(c)[0], *_tensors(a, b)),
        lambda condition, a, b: promoted(a, b),
        lambda emit, y, c, a, b: (None, _chosen(emit, c), _chosen(emit, c, is_chosen=False)),
        lambda c, a, b: (a if c else b) if _numbers(c) else a if _numbers(a, b) and a == b else None,
    ),
    "exp": _unary(torch.exp, lambda emit, y, x: y),
    "exp2": _unary(torch.exp2, lambda emit, y, x: emit("mul", y, math.log(2))),
    "log": _unary(torch.log, lambda emit, y, x: emit("div", 1.0, x)),
    "log2": _unary(torch.log2, lambda emit, y, x: emit("div", 1 / math.log(2), x)),
    "sqrt": _unary(torch.sqrt, lambda emit, y, x: emit("div", 0.5, y)),
    "rsqrt": _unary(torch.rsqrt, lambda emit, y, x: emit("mul", -0.5, emit("div", y, x))),
    "sin": _unary(torch.sin, lambda emit, y, x: emit("cos", x)),
    "cos": _unary(torch.cos, lambda emit, y, x: emit("neg", emit("sin", x))),
    "tanh": _unary(torch.tanh, lambda emit, y, x: _one_minus_square(emit, y)),
    "sigmoid": _unary(torch.sigmoid, lambda emit, y, x: emit("mul", y, emit("sub", 1.0, y))),
    "erf": _unary(
        torch.erf,
        lambda emit, y, x: emit("mul", 2 / math.sqrt(math.pi), emit("exp", emit("neg", emit("mul", x, x)))),
    ),
    "floor": _unary(torch.floor),
    "float": Operation(lambda x: x, _always("float"), lambda emit, y, x: (1.0,), _fold(float)),
    "int": Operation(_to("int"), _always("int"), None, _fold(_to("int"))),
    "bool": Operation(_to("bool"), _always("bool"), None, _fold(_to("bool"))),
    **{name: Operation(_narrowed(name), _always("int"), None, _fold(_narrowed(name)))
       for name in INTS if name != "int"},
}  # fmt: skip
"""Operations by name."""
