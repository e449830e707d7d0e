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
from flashtile.reference import attention as reference
from flashtile.rounding import SCORE_UNITS, finite, largest, product, rms, scale_of, score_noise
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
"""Allowed error of each result, in multiples of plain PyTorch's error."""

FLOAT64_UNITS = 64.0
"""Rounding units allowed for float64 inputs, for which the reference has no higher precision."""

CANCELLED_UNITS = 16.0
"""Rounding units allowed for a gradient of a score, which is a difference of sums that may cancel."""

LSE_UNITS = 1 / 8
"""Rounding units of q's dtype allowed for lse. This is far less than the error of rounding P to q's dtype."""

LEARNED = ("sink", "bias")
"""Arguments other than q, k and v that get gradients."""

SHOWN_ELEMENTS = 64
"""Largest size of a tensor argument whose elements a report lists."""

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
    poison: bool = True,
    function: Callable[..., Any] = functional.attention,
    **arguments: Any,
) -> Report:
    """Measure the errors of out, lse and the gradients of one call, and compare them with the error rule.

    The error rule compares the call with standard attention in plain PyTorch. The error of out and of each
    gradient may be at most 2 or 3 times (``FACTORS``) the error of PyTorch in the dtype of q, plus rounding
    noise. lse is not rounded to the dtype of q: its error is compared with that of PyTorch's lse in float32
    (float64 for float64 inputs).

    The measurement takes the memory of standard attention in float64: several times 8 bytes per score
    (batch * heads * seqlen_q * seqlen_k).

    Args:
        q, k, v: as for :func:`flashtile.attention`, on any device. They are not changed and get no gradients.
        dout: gradient of out, in the shape and dtype of out. If dout and dlse are None, both are random.
        dlse: gradient of lse, in the shape and dtype of lse.
        gradients: whether dq, dk and dv are computed and compared, and dsink and dbias if the call has them.
        poison: run the call under :func:`poisoned_memory`.
        function: the function to measure, with the arguments and results of :func:`flashtile.attention`.
        arguments: the other arguments of :func:`flashtile.attention`, passed to ``function`` and, except for
            ``deterministic`` and ``backend``, to the reference. A ``sink`` and a ``bias`` also get gradients.

    Examples:
        >>> from flashtile import testing
        >>> q, k, v = (testing.random_tensor((1, 50, 4, 32), torch.float32, "cpu", seed=i) for i in range(3))
        >>> report = testing.measure(q, k, v, window_size=(8, 0))
        >>> [comparison.name for comparison in report.comparisons if comparison.holds]
        ['out', 'lse', 'dq', 'dk', 'dv']
    """
    learned = {name: arguments.pop(name) for name in LEARNED if arguments.get(name) is not None}
    sink = learned.get("sink")
    defining = {name: a for name, a in arguments.items() if name not in ("deterministic", "backend")}
    given = {"q": q, "k": k, "v": v, **learned}
    given = {name: t.detach() for name, t in given.items()}
    q, k, v = given["q"], given["k"], given["v"]
    if not gradients:
        dout = dlse = None
    elif dout is None and dlse is None:
        dout, dlse = random_gradients(q, v, varlen="cu_seqlens_q" in arguments)
    upstream = (dout, dlse)
    with poisoned_memory() if poison else nullcontext():
        ours = _run(partial(function, return_lse=True, **arguments), given, upstream, gradients)
    standard = partial(reference.attention, **defining)
    exact = _run(standard, {name: _wide(t) for name, t in given.items()}, upstream, gradients)
    plain = _run(standard, given, upstream, gradients)
    plain[1] = _run(partial(standard, upcast=ours[1].dtype), given, upstream, False)[1]

    names = ["out", "lse", *(f"d{name}" for name in given if gradients)]
    noise = _rounding_noise(q, k, v, sink, upstream, dict(zip(names, exact, strict=True)), arguments)
    comparisons = [
        compare(name, *results, factor=FACTORS[name], noise=noise[name])
        for name, *results in zip(names, ours, exact, plain, strict=True)
    ]
    return Report(_describe(q, k, v, arguments | learned), tuple(comparisons))


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


def random_gradients(q: Tensor, v: Tensor, *, varlen: bool = False, seed: int = 1) -> tuple[Tensor, Tensor]:
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


def _run(
    attend: Callable[..., Any],
    given: dict[str, Tensor],
    upstream: Sequence[Tensor | None],
    gradients: bool,
) -> list[Tensor]:
    """Return [out, lse], and with ``gradients`` also the gradient of every tensor in ``given``.

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


def _rounding_noise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None],
    exact: dict[str, Tensor],
    arguments: dict[str, Any],
) -> dict[str, tuple[float, float]]:
    """Return the rounding errors (largest, rms) allowed in each result even if plain PyTorch is exact.

    A score is a sum of products of q and k, and P is exp(score - lse). A small absolute error of the score is
    therefore an equal relative error of P, and of all that is computed from P. In the backward pass, the same
    holds for an error of lse.

    The gradient of a score is ``dS = P (dP - delta)``, where dP and delta are sums of products of dout and v.
    With one visible key, dP equals delta and dS is 0. With more keys there are two rounding errors: delta is
    computed from out in the dtype of q, and dS is rounded to this dtype for the products. The gradient of a
    key sums dS over all queries that see the key. The sink has no value vector, so the gradient of its score
    is ``P (dlse - delta)``, summed over all rows.
    """
    dout, dlse = upstream
    eps = torch.finfo(q.dtype).eps
    eps_of_sums = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    scale = scale_of(q, arguments.get("softmax_scale"))
    p = 1 / _keys_seen(q, k, arguments)
    queries_per_key = max(q[..., 0].numel() / max(k[..., 0].numel(), 1), 1.0)

    def noise(of: Callable[[Tensor], float]) -> dict[str, float]:
        score = score_noise(q, k, scale, of)
        lse = SCORE_UNITS * eps_of_sums * of(finite(exact["lse"]))
        allowed = {name: (score + lse) * of(finite(result)) for name, result in exact.items()}
        allowed["lse"] = score + LSE_UNITS * eps
        if dout is not None:
            score_gradient = scale * product(dout, v, of)
            score_gradient *= p * (CANCELLED_UNITS * eps_of_sums + (eps if p < 1 else 0.0))
            allowed["dq"] += score_gradient * of(finite(k))
            allowed["dk"] += score_gradient * of(finite(q)) * queries_per_key**0.5
        if dout is not None and "dbias" in exact:
            scores = exact["lse"].numel() * max(k.shape[-3], 1)
            gathered = max(scores / max(exact["dbias"].numel(), 1), 1.0)  # scores per element of dbias
            allowed["dbias"] += score_gradient / scale * gathered**0.5 if scale else 0.0
        if sink is not None:
            delta = 0.0 if dout is None else product(dout, exact["out"], of)
            score_gradient = delta + (0.0 if dlse is None else of(finite(dlse)))
            error = score_gradient * (score + lse + CANCELLED_UNITS * eps_of_sums) + eps * delta
            allowed["dsink"] = error * of(_gathered(sink, exact["lse"]))
        return allowed

    at_most, on_average = noise(largest), noise(rms)
    return {name: (at_most[name], on_average[name]) for name in at_most}


def _gathered(sink: Tensor, lse: Tensor) -> Tensor:
    """Return the Euclidean norm of the sink's probabilities over all rows, (heads,).

    The gradient of the sink is a sum over rows, in which each row's error is multiplied by the sink's
    probability in this row. The errors of the rows are assumed to be independent and to have equal variance.
    The variance of the sum is then this variance times the sum of the squared probabilities. Therefore the
    error of the sum is the error of a row times this norm.
    """
    p = torch.exp(sink.detach().double()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    squares = p.square().sum(-1)
    return (squares if squares.dim() == 1 else squares.sum(0)).sqrt()


def _keys_seen(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> float:
    """Estimate the number of keys that a query sees, at least 1."""
    cu_seqlens_k = arguments.get("cu_seqlens_k")
    sequences = 1 if cu_seqlens_k is None else max(cu_seqlens_k.numel() - 1, 1)
    seqlen_q, seqlen_k = q.shape[-3] / sequences, k.shape[-3] / sequences
    seqused_k = arguments.get("seqused_k")
    if seqused_k is not None and seqused_k.numel():
        seqlen_k = seqused_k.double().mean().item()
    for name in ("mask", "key_padding_mask"):
        if arguments.get(name) is not None and arguments[name].numel():
            seqlen_k *= arguments[name].double().mean().item()
    left, right = arguments.get("window_size", (-1, -1))
    right = 0 if arguments.get("causal", False) else right
    left = min(left, seqlen_k) if left >= 0 else seqlen_k
    right = min(right, seqlen_q) if right >= 0 else seqlen_q
    return max(1.0, min(seqlen_k, left + right + 1))


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


def _describe(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> str:
    tensors = [f"{name}: {tuple(t.shape)} strides {t.stride()}" for name, t in (("q", q), ("k", k), ("v", v))]
    options = [f"{name}={_shown(a) if isinstance(a, Tensor) else repr(a)}" for name, a in arguments.items()]
    return f"attention({', '.join(tensors + options)}) in {q.dtype} on {q.device}"


def _shown(tensor: Tensor) -> str:
    """Describe a tensor by its elements if there are few, otherwise by shape, strides and dtype."""
    if tensor.numel() <= SHOWN_ELEMENTS:
        return str(tensor.tolist())
    return f"{tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype}"
