"""Checks of attention on this machine: error rule, random inputs in hard layouts, poisoned outputs.

    from flashtile import testing
    q, k, v = (testing.random_tensor((2, 1024, 8, 64), torch.bfloat16, "cuda", seed=i) for i in range(3))
    print(testing.check(q, k, v, causal=True))

The rule is FlashAttention's: the error of an implementation may be at most a small multiple of the error of
plain PyTorch in the same dtype. Errors are differences from standard attention in float64. The rule applies
to the largest error. It also applies to the root mean square of the errors, because a few rows with large
values can dominate the largest error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashtile.api import attention as functional
from flashtile.operators.statistics import split
from flashtile.problems.attention import STATISTICS
from flashtile.reference import attention as reference
from flashtile.rounding import finite, largest, rms
from flashtile.testing.calls import CANCELLED_UNITS, LSE_UNITS, described, rounding_noise
from flashtile.torch_private import negated_view

__all__ = [
    "CANCELLED_UNITS",
    "FACTORS",
    "FLOAT64_UNITS",
    "LAYOUTS",
    "LEARNED",
    "LSE_UNITS",
    "Bound",
    "Comparison",
    "Report",
    "check",
    "compare",
    "cu_seqlens",
    "measure",
    "poisoned_memory",
    "random_alibi_slopes",
    "random_gradients",
    "random_tensor",
]


def __getattr__(name: str) -> Any:
    """Import the checks of decoding and of FP8 at their first use."""
    if name in ("decode", "fp8"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


FACTORS = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0, "dsink": 3.0, "dbias": 3.0}
FACTORS |= {"max_logits": 2.0, "entropy": 2.0, "mass": 2.0, "out_tangent": 3.0, "lse_tangent": 3.0}
"""Allowed error of each result, in multiples of plain PyTorch's error."""

FLOAT64_UNITS = 64.0
"""Rounding units allowed for float64 inputs, for which the reference has no higher precision."""

LEARNED = ("sink", "bias")
"""Arguments other than q, k and v that get gradients."""

LAYOUTS = ("contiguous", "packed", "transposed", "offset", "expanded", "overlapping", "negated")
"""Memory layouts of :func:`random_tensor`."""


@dataclass(frozen=True)
class Bound:
    """One norm of an error, and its limit: ``factor`` times plain PyTorch's error, plus ``unit``."""

    norm: str
    error: float
    plain_error: float
    factor: float
    unit: float

    @property
    def allowed(self) -> float:
        return self.factor * self.plain_error + self.unit

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.norm} error {self.error:.3g}, allowed {self.allowed:.3g} "
            f"(= {self.factor:g} x plain PyTorch's {self.plain_error:.3g} + rounding {self.unit:.3g})"
        )


@dataclass(frozen=True)
class Comparison:
    """One result compared with the reference: its bounds, and the element with the largest error."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: tuple[Bound, ...]
    worst: str

    @property
    def holds(self) -> bool:
        return all(bound.holds for bound in self.bounds)

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "WRONG"
        bounds = "; ".join(map(str, self.bounds))
        return f"{self.name} {self.shape} {self.dtype}: {verdict}: {bounds}; worst at {self.worst}"


@dataclass(frozen=True)
class Report:
    """All comparisons of one call. ``str()`` lists every measured and allowed error."""

    call: str
    comparisons: tuple[Comparison, ...]

    @property
    def holds(self) -> bool:
        return all(comparison.holds for comparison in self.comparisons)

    def __str__(self) -> str:
        return "\n  ".join([self.call, *map(str, self.comparisons)])

    def require(self) -> Report:
        """Return the report. Raise an AssertionError that lists all errors if a result breaks the rule."""
        if not self.holds:
            raise AssertionError(str(self))
        return self


def check(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Report:
    """Raise AssertionError unless the results of the call are within the error rule.

    The rule and the arguments are those of :func:`measure`. The error's message lists every measured and
    allowed error, and so does ``str()`` of the returned report.

    Examples:
        >>> from flashtile import testing
        >>> q, k, v = (testing.random_tensor((1, 50, 4, 32), torch.float32, "cpu", seed=i) for i in range(3))
        >>> testing.check(q, k, v, causal=True).holds  # otherwise check raises an AssertionError
        True
    """
    return measure(q, k, v, **arguments).require()


def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    gradients: bool = True,
    tangents: Sequence[Tensor | None] | None = None,
    poison: bool = True,
    function: Callable[..., Any] = functional.attention,
    **arguments: Any,
) -> Report:
    """Measure the errors of out, lse and the gradients of one call, and compare them with the error rule.

    The error rule compares the call with standard attention in plain PyTorch. The error of out and of each
    gradient may be at most 2 or 3 times (``FACTORS``) the error of PyTorch in the dtype of q, plus rounding
    noise. lse and the statistics are not rounded to the dtype of q: their errors are compared with those of
    PyTorch's in float32 (float64 for float64 inputs).

    The measurement takes the memory of standard attention in float64: several times 8 bytes per score
    (batch * heads * seqlen_q * seqlen_k).

    Args:
        q, k, v: as for :func:`flashtile.attention`, on any device. They are not changed and get no gradients.
        dout: gradient of out, in the shape and dtype of out. If dout and dlse are None, both are random.
        dlse: gradient of lse, in the shape and dtype of lse.
        gradients: whether dq, dk and dv are computed and compared, and dsink and dbias if the call has them.
        tangents: tangents of q, k and v, None for a tensor without one. The call is then in forward mode, and
            the tangents of out and lse are compared instead of gradients.
        poison: run the call under :func:`poisoned_memory`.
        function: the function to measure, with the arguments and results of :func:`flashtile.attention`.
        arguments: the other arguments of :func:`flashtile.attention`, passed to ``function`` and, except for
            ``deterministic`` and ``backend``, to the reference. A ``sink`` and a ``bias`` also get gradients.
            With ``return_max_logits`` and ``return_entropy`` the statistics are compared as well, and the
            entropy gets a random gradient.

    Examples:
        >>> from flashtile import testing
        >>> q, k, v = (testing.random_tensor((1, 50, 4, 32), torch.float32, "cpu", seed=i) for i in range(3))
        >>> report = testing.measure(q, k, v, window_size=(8, 0))
        >>> [comparison.name for comparison in report.comparisons if comparison.holds]
        ['out', 'lse', 'dq', 'dk', 'dv']
    """
    learned = {name: arguments.pop(name) for name in LEARNED if arguments.get(name) is not None}
    sink = learned.get("sink")
    statistics = [name for name in STATISTICS if arguments.get(f"return_{name}")]
    elsewhere = ("deterministic", "backend", *(f"return_{name}" for name in STATISTICS))
    defining = {name: a for name, a in arguments.items() if name not in elsewhere}
    given = {"q": q, "k": k, "v": v, **learned}
    given = {name: t.detach() for name, t in given.items()}
    q, k, v = given["q"], given["k"], given["v"]
    moving = {name: t for name, t in zip(given, tangents or (), strict=False) if t is not None}
    if tangents is not None:
        gradients = False
        if statistics or not moving:
            raise ValueError("tangents must have one of q, k or v, and cannot be combined with statistics")
    if not gradients:
        dout = dlse = None
    elif dout is None and dlse is None:
        dout, dlse = random_gradients(q, v, varlen="cu_seqlens_q" in arguments)
    dentropy = None
    if "entropy" in statistics and gradients:
        _, dentropy = random_gradients(q, v, varlen="cu_seqlens_q" in arguments, seed=101)
    upstream = (dout, dlse, *(dentropy if name == "entropy" else None for name in statistics))

    def run(
        attend: Callable[..., Any], given: dict[str, Tensor], moving: dict[str, Tensor], gradients: bool
    ) -> list[Tensor]:
        return _along(attend, given, moving) if moving else _run(attend, given, upstream, gradients)

    with poisoned_memory() if poison else nullcontext():
        ours = run(partial(function, return_lse=True, **arguments), given, moving, gradients)
    standard = partial(_standard, statistics, **defining)
    wide, wide_moving = ({name: _wide(t) for name, t in of.items()} for of in (given, moving))
    exact = run(standard, wide, wide_moving, gradients)
    plain = run(standard, given, moving, gradients)
    of_lse = run(partial(standard, upcast=ours[1].dtype), given, moving, gradients=False)

    names = ["out", "lse", *statistics, *(f"d{name}" for name in given if gradients)]
    names += ["out_tangent", "lse_tangent"] if moving else []
    for i, name in enumerate(names):
        if name in ("lse", "lse_tangent", *statistics):
            plain[i] = of_lse[i]
    noise = rounding_noise(
        q, k, v, sink, (dout, dlse), dentropy, moving, dict(zip(names, exact, strict=True)), arguments
    )
    comparisons = [
        compare(name, *results, factor=FACTORS[name], noise=noise[name])
        for name, *results in zip(names, ours, exact, plain, strict=True)
    ]
    more = {"tangents": ", ".join(moving)} if moving else {}
    return Report(described(q, k, v, arguments | learned | more), tuple(comparisons))


def compare(
    name: str,
    actual: Tensor,
    exact: Tensor,
    plain: Tensor,
    *,
    factor: float = 2.0,
    noise: tuple[float, float] = (0.0, 0.0),
) -> Comparison:
    """Apply the error rule to one result: its error is bounded by ``factor`` times the error of ``plain``.

    Where the exact result is infinite, ``actual`` must be the same infinity. NaN is always an error.

    Args:
        name: name of the result in the report.
        actual: the result to check, in any shape and floating dtype.
        exact: the result of the reference, usually float64.
        plain: the result of plain PyTorch in the dtype of ``actual``.
        factor: allowed error in multiples of the error of ``plain``.
        noise: errors (largest, rms) that are allowed in addition to one rounding unit of the result.

    Raises:
        AssertionError: ``actual`` has another shape than ``exact``.

    Examples:
        >>> from flashtile import testing
        >>> exact = torch.linspace(0, 1, 100, dtype=torch.float64)
        >>> testing.compare("x", exact.half(), exact, exact.half()).holds
        True
        >>> testing.compare("x", exact.half() + 0.01, exact, exact.half()).holds
        False
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{name} has shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    exact = exact.double()
    error, plain_error = _difference(actual, exact), _difference(plain, exact)
    size = finite(exact)
    eps = torch.finfo(actual.dtype).eps
    units = FLOAT64_UNITS if actual.dtype == torch.float64 else 1.0
    bounds = tuple(
        Bound(norm, of(error), of(plain_error), factor, units * (eps * of(size) + more))
        for norm, of, more in (("largest", largest, noise[0]), ("rms", rms, noise[1]))
    )
    return Comparison(name, tuple(actual.shape), actual.dtype, bounds, _worst(error, actual, exact, plain))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Put NaN (integers: the maximum) into all memory that ``torch.empty`` and similar functions return.

    Output elements that are never written become visible. torch fills memory in its deterministic mode, which
    is switched on inside the context. Operations without a deterministic form only warn. Inside the context,
    ``torch.are_deterministic_algorithms_enabled()`` still returns its previous value, so flashtile chooses
    the same kernels as without the context.

    Examples:
        >>> from flashtile import testing
        >>> with testing.poisoned_memory():
        ...     print(torch.empty(2), torch.empty(1, dtype=torch.int16))
        tensor([nan, nan]) tensor([32767], dtype=torch.int16)
    """
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=enabled):
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill


def random_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    seed: int = 0,
    layout: str = "contiguous",
) -> Tensor:
    """Return standard normal numbers in a chosen memory layout, with NaN in its gaps.

    Args:
        shape: any shape if ``layout`` is "contiguous", otherwise (batch, seqlen, heads, head_dim) or (total,
            heads, head_dim).
        dtype: a floating dtype.
        device: device of the tensor; the numbers depend on the device type.
        seed: seed of the numbers.
        layout: layout in memory.

            * "contiguous": no gaps.
            * "packed": some heads of a larger tensor, as in packed q, k and v.
            * "transposed": heads before seqlen.
            * "offset": some columns of a larger head_dim, so that rows are not aligned.
            * "expanded": one head, expanded to all heads (stride 0).
            * "overlapping": heads that share memory, each one element after the one before (``unfold``).
            * "negated": memory holds the negative numbers, which torch negates lazily (``z.conj().imag``).

    Raises:
        ValueError: ``layout`` is unknown.

    Examples:
        >>> from flashtile import testing
        >>> testing.random_tensor((1, 5, 2, 8), torch.bfloat16, "cpu", layout="transposed").stride()
        (80, 8, 40, 1)
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        drawn = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(size, generator=generator, dtype=drawn, device=device).to(dtype)

    if layout == "contiguous":
        return normal(*shape)
    *rows, heads, head_dim = shape
    if layout == "packed":
        storage = torch.full((*rows, heads + 3, head_dim), torch.nan, dtype=dtype, device=device)
        return storage[..., 1 : 1 + heads, :].copy_(normal(*shape))
    if layout == "transposed":
        return normal(*rows[:-1], heads, rows[-1], head_dim).transpose(-2, -3)
    if layout == "offset":
        storage = torch.full((*rows, heads, head_dim + 3), torch.nan, dtype=dtype, device=device)
        return storage[..., 1 : 1 + head_dim].copy_(normal(*shape))
    if layout == "expanded":
        return normal(*rows, 1, head_dim).expand(*shape)
    if layout == "overlapping":
        return normal(*rows, heads + head_dim - 1).unfold(-1, head_dim, 1)
    if layout == "negated":
        return negated_view(normal(*shape))
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def _wide(tensor: Tensor) -> Tensor:
    """Convert to float64. A copy that keeps the order of strides may have another last stride than 1."""
    return tensor.to(torch.float64, memory_format=torch.contiguous_format)


def random_gradients(q: Tensor, v: Tensor, *, varlen: bool = False, seed: int = 100) -> tuple[Tensor, Tensor]:
    """Return standard normal (dout, dlse) in the shapes and dtypes of out and lse of a call with q and v.

    Examples:
        >>> from flashtile import testing
        >>> q, v = torch.empty(2, 5, 4, 8), torch.empty(2, 7, 4, 16)
        >>> dout, dlse = testing.random_gradients(q, v)
        >>> dout.shape, dlse.shape
        (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]))
    """
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if varlen else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dout = random_tensor((*rows, heads, v.shape[-1]), q.dtype, q.device, seed=2 * seed)
    return dout, random_tensor(lse_shape, lse_dtype, q.device, seed=2 * seed + 1)


def random_alibi_slopes(shape: Sequence[int], device: torch.device | str, *, seed: int = 0) -> Tensor:
    """Return float32 slopes from 0 to 255/256 in steps of 1/256, so that slope times distance is exact.

    Examples:
        >>> from flashtile import testing
        >>> slopes = testing.random_alibi_slopes((4,), "cpu")
        >>> slopes.dtype, bool((256 * slopes == (256 * slopes).round()).all())
        (torch.float32, True)
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, 256, tuple(shape), generator=generator, device=device).float() / 256


def cu_seqlens(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Return the cumulative sums of ``lengths``, starting with 0: (len(lengths) + 1,) int32.

    Examples:
        >>> from flashtile import testing
        >>> testing.cu_seqlens([5, 0, 7], "cpu")
        tensor([ 0,  5,  5, 12], dtype=torch.int32)
    """
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def _standard(statistics: Sequence[str], *tensors: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    """Return (out, lse) and the ``statistics`` of standard attention."""
    out, rows = reference.attention(*tensors, **arguments | dict.fromkeys(statistics, True))
    lse, found = split(rows, statistics, arguments.get("cu_seqlens_q"))
    return out, lse, *found


def _run(
    attend: Callable[..., Any],
    given: dict[str, Tensor],
    upstream: Sequence[Tensor | None],
    gradients: bool,
) -> list[Tensor]:
    """Return all results, and with ``gradients`` also the gradient of every tensor in ``given``.

    ``given`` holds q, k, v, and the sink and bias if the call has them. The gradient of a tensor is 0 if no
    result depends on the tensor.
    """
    leaves = [t.detach().requires_grad_(gradients) for t in given.values()]
    results = attend(*leaves[:3], **dict(zip([*given][3:], leaves[3:], strict=True)))
    detached = [result.detach() for result in results]
    if not gradients:
        return detached
    pairs = [
        (result, gradient.to(result.dtype))
        for result, gradient in zip(results, upstream, strict=True)
        if gradient is not None and result.requires_grad
    ]
    if not pairs:
        return detached + [torch.zeros_like(leaf) for leaf in leaves]
    outputs, received = zip(*pairs, strict=True)
    return detached + list(
        torch.autograd.grad(outputs, leaves, received, allow_unused=True, materialize_grads=True)
    )


def _along(attend: Callable[..., Any], given: dict[str, Tensor], moving: dict[str, Tensor]) -> list[Tensor]:
    """Return out, lse and their tangents, where ``moving`` are the tangents of some tensors in ``given``."""

    def of_moving(*tensors: Tensor) -> Any:
        q, k, v, *learned = (given | dict(zip(moving, tensors, strict=True))).values()
        return attend(q, k, v, **dict(zip([*given][3:], learned, strict=True)))

    results, found, *_ = torch.func.jvp(of_moving, tuple(given[name] for name in moving), (*moving.values(),))
    return [*results, *found]


def _difference(actual: Tensor, exact: Tensor) -> Tensor:
    """Return the absolute difference of two tensors. It is 0 where both have the same infinity."""
    actual = actual.double()
    return torch.where(actual == exact, 0.0, actual - exact).abs()


def _worst(error: Tensor, actual: Tensor, exact: Tensor, plain: Tensor) -> str:
    if not error.numel():
        return "no element"
    flat = int(torch.nan_to_num(error, nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), error.shape))
    got, expected, theirs = (t[index].item() for t in (actual, exact, plain))
    return f"{index}: got {got:.6g}, exact {expected:.6g}, plain PyTorch {theirs:.6g}"
