"""Every function of torch that score and mask functions may call, against torch itself, on special values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.masks.evaluate import evaluate
from flashtile.masks.mods import traced
from flashtile.masks.program import derivatives, kernel_sizes
from flashtile.masks.tracing import FUNCTIONS
from flashtile.problems.masks import Mods
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

FLOATS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.75, 2.5, 3.0, 7.0, -3.0, 1e-30, 1e30, -1e30),
    *(math.inf, -math.inf, math.nan),
]
OF_FLOATS = [
    *("abs(x)", "exp(x)", "exp2(x)", "log(x)", "log2(x)", "sqrt(x)", "rsqrt(x)", "sin(x * y)", "cos(x)"),
    *("tanh(x)", "sigmoid(x)", "erf(x)", "floor(x)", "sign(x)", "neg(x)", "positive(x)", "square(x)"),
    *("tan(x)", "relu(x)", "nn.functional.silu(x)", "pow(x, 3)", "pow(x, 0.5)", "pow(x, -1)", "x ** 2"),
    *("2.0 ** x", "x ** y", "add(x, y, alpha=2)", "sub(x, y, alpha=0.5)", "rsub(x, y, alpha=2)"),
    *("subtract(x, y)", "mul(x, y)", "multiply(x, y)", "div(x, y)", "divide(x, y)", "true_divide(x, y)"),
    *("minimum(x, y)", "maximum(x, y)", "fmod(x, y)", "clamp(x, -1.0, 2.5)", "clip(x, max=0.5)"),
    *("clamp(x, y, x)", "clamp(x, max=y)", "where(x < y, x, y)", "where(x == 0, y, 1.0)"),
    *("x.masked_fill(x < y, 2)", "2 - x", "3 / x", "x + 1", "x * 0.5", "(x <= y) * x", "(x != y) * y"),
    *("(x > 0).float() + x.bool()", "(x >= y).type_as(x) * y", "x.double() * 0 + 1"),
    *("x.to(torch.float32)", "x + y.new_ones(())", "x * x.new_zeros(())", "where(logical_not(x), x, y)"),
    *("where(logical_and(x, y), x, y)", "where(logical_or(x, y), y, x)"),
    *("where(logical_xor(x, y), x, y)", "+x", "-x", "(x > 0).half() - y", "(x > 0).bfloat16() - y"),
    *("relu_(x * 1)", "x.abs().sub_(y)"),
]
"""Expressions of floats. Floor division and remainder of floats are in ``OF_INTS`` only."""
OF_INTS = [
    *("x + y", "x - y", "x * y", "x // y", "x % y", "remainder(x, y)", "floor_divide(x, y)"),
    *("fmod(x, y)", "div(x, y, rounding_mode='trunc')", "div(x, y, rounding_mode='floor')", "x & y"),
    *("x | y", "x ^ y", "~x", "-x", "bitwise_and(x, y)", "bitwise_or(x, 3)", "bitwise_xor(x, y)"),
    *("bitwise_not(x)", "x << 3", "x >> 2", "abs(x)", "sign(x)", "square(x)", "x ** 3", "pow(x, 2)"),
    *("relu(x)", "clamp(x, 0, 5)", "minimum(x, y)", "maximum(x, y)", "where(x < y, x, y)"),
    *("where(x > y, x, 7)", "x.masked_fill(x < y, 2.7)", "x.masked_fill(x == y, True)", "x == y"),
    *("x < 300", "x >= 100", "x + 300", "100 * x", "5 - x", "7 // x", "9 % x", "5 ^ x", "x / y"),
    *("x + (y > 2)", "x.int() * y", "x.long() * y", "x.short() * 3000", "x.char() + y.char()"),
    *("x.byte() - 1", "x.bool()", "x.to(torch.int16) + y", "(x * 1000).to(torch.uint8)", "x.type_as(y)"),
    *("x.char().float().to(torch.int8)", "floor(x)", "rsub(x, y, alpha=3)", "add(x, y, alpha=2)"),
    *("x.new_ones(()) + x", "logical_and(x, y)", "x * 2.5", "abs(x) + 0 * y"),
]
"""Expressions of ints, and of bools and floats made of them."""
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def function_of(text: str) -> Callable[[Any, Any], Any]:
    return eval(f"lambda x, y: {text}", {**vars(torch), "torch": torch})


def program_of(text: str, x: Tensor, y: Tensor) -> Any:
    function = function_of(text)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 0 + function(x[i], y[j])

    return traced("score_mod", score_mod).program


def results_of(program: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> list[Tensor]:
    i, j = torch.arange(len(x))[:, None], torch.arange(len(y))
    zero = torch.zeros((), dtype=torch.int64)
    inputs = {"score": torch.zeros((), dtype=dtype), "b": zero, "h": zero, "q": i, "kv": j}
    found = evaluate(program, inputs, [x, y], dtype, "score_mod")
    return [torch.as_tensor(one).to(dtype).expand(len(x), len(y)) for one in found]


def test_every_function_is_in_an_expression() -> None:
    words = set(re.findall(r"[a-z_0-9]+", " ".join((*OF_FLOATS, *OF_INTS))))
    operators = {
        "and", "or", "xor", "invert", "lshift", "rshift", "mod", "floordiv", "truediv", "eq", "ne", "lt",
        "le", "gt", "ge", "pos", "radd", "rmul", "rdiv", "rtruediv", "rand", "ror", "rxor", "rmod",
        "rfloordiv", "rpow",
    }  # fmt: skip
    assert set(FUNCTIONS) - operators <= words


@walk("text", OF_FLOATS)
def test_functions_of_floats(text: str) -> None:
    x, y = torch.tensor(FLOATS, requires_grad=True), torch.tensor(FLOATS, requires_grad=True)
    program, loads = derivatives(program_of(text, x, y), frozenset((0, 1)))
    found, _, *rest = results_of(program, x, y, torch.float32)
    rows, keys = (t.detach().clone().requires_grad_() for t in torch.broadcast_tensors(x[:, None], y))
    expected = torch.as_tensor(function_of(text)(rows, keys)).float()
    torch.testing.assert_close(found, expected.detach(), equal_nan=True)
    gradients = [torch.zeros_like(rows), torch.zeros_like(keys)]
    for load in loads:
        gradients[load.tensor] = rest[0].detach()
        rest = rest[1 + load.indices :]
    if not expected.requires_grad:
        assert not any(map(torch.any, gradients))
        return
    wanted = torch.autograd.grad(expected.sum(), (rows, keys), allow_unused=True, materialize_grads=True)
    for one, other in zip(gradients, wanted, strict=True):
        known = expected.isfinite() & rows.isfinite() & keys.isfinite()
        torch.testing.assert_close(one[known], other[known], equal_nan=True)


def of_ints(dtype: torch.dtype, is_divisor: bool = False) -> Tensor:
    whole = torch.iinfo(dtype)
    numbers = [1, 2, 3, 5, 100, whole.max, whole.max - 1, whole.min + 1]
    if dtype.is_signed:
        numbers += [-1, -2, -7, whole.min]
    return torch.tensor(numbers if is_divisor or dtype == torch.int64 else [0, *numbers], dtype=dtype)


@walk("text", OF_INTS)
def test_functions_of_ints(text: str) -> None:
    divides = any(sign in text for sign in ("/", "%", "rem", "mod", "div"))
    compared = 0
    for first, second in itertools.product(INTS, INTS):
        x, y = of_ints(first, "// x" in text or "% x" in text), of_ints(second, divides)
        if divides:  # the quotient of the smallest int and -1 ends the process
            x = x[x != torch.iinfo(first).min]
        try:
            expected = function_of(text)(x[:, None].expand(-1, len(y)), y)
        except RuntimeError:  # a number that does not fit the dtype
            continue
        (found,) = results_of(program_of(text, x, y), x, y, torch.float64)
        rtol = 1e-6 if expected.is_floating_point() else 0
        torch.testing.assert_close(found, expected.double(), atol=0, rtol=rtol)
        compared += 1
    assert compared


def in_a_kernel(text: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the results of the generated Triton function, in Triton's interpreter."""
    triton = pytest.importorskip("triton")
    tl = triton.language
    from flashtile.backends.portable.attention import functions

    mods = Mods(score_mod=str(program_of(text, x, y)), ranks=(1, 1))
    function = functions.score_function(mods)
    sizes = dict(zip(functions.SIZES, kernel_sizes(mods, (x, y)), strict=True))
    absent = dict.fromkeys(functions.Captured._fields)
    captured = functions.Captured(**absent | sizes | {"tensor_0": x, "tensor_1": y})

    @triton.jit
    def kernel(out, captured, FUNCTION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
        rows, keys = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
        value, _ = FUNCTION(tl.zeros((M, N), tl.float32), 0, 0, rows, keys, captured)
        tl.store(out + rows * N + keys, value)

    out = torch.empty(len(x), len(y))
    kernel[(1,)](out, captured, function, len(x), len(y))
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize("text", OF_FLOATS)
def test_kernels_compute_functions_of_floats(text: str) -> None:
    x = torch.tensor(FLOATS)
    rows, keys = x[:, None].expand(16, 16), x.expand(16, 16)
    expected = torch.as_tensor(function_of(text)(rows, keys)).float()
    known = torch.ones_like(expected, dtype=torch.bool)
    if "pow" in text or "**" in text:
        # Powers of kernels ignore the sign of 0, and know no infinite bases and exponents.
        known = (~rows.signbit() | (rows < 0)) & rows.isfinite() & (keys.isfinite() | ("y" not in text))
    elif "fmod" in text:  # libraries differ if the quotient has no float
        known = (rows / keys).isfinite() | ~rows.isfinite() | ~keys.isfinite()
    # A power is 2 to a rounded exponent of up to 2 ** 7, so the error is 2 ** 7 units of rounding.
    found = in_a_kernel(text, x, x)
    torch.testing.assert_close(found[known], expected[known], rtol=2**-17, atol=2**-17, equal_nan=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("text", OF_INTS)
def test_kernels_compute_functions_of_ints(text: str) -> None:
    x, y = torch.tensor([1, 3, 100, 255], dtype=torch.uint8), torch.tensor([1, -2, 7, -127], dtype=torch.int8)
    for first, second in ((x, y), (y, x), (y, y)):
        try:
            expected = function_of(text)(first[:, None].expand(4, 4), second)
        except RuntimeError:  # a number that does not fit the dtype
            continue
        torch.testing.assert_close(in_a_kernel(text, first, second), expected.float())
