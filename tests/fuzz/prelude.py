"""Names that the text of a call may use: makers of tensors, and functions that check results."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flashtile
from flashtile import compat, engine, fp8, kv_cache, linear, masks, nn, padding, parallel
from flashtile.checks.conversions import as_masking
from flashtile.compat import flash_attn, flash_attn_interface
from flashtile.compat.flash_attn import bert_padding
from flashtile.compat.flash_attn.layers import rotary
from flashtile.operators.decode import SharedKeys, attend_shared, decode
from flashtile.problems.decode import CacheTensors, DecodeOptions
from flashtile.testing import poisoned_memory
from fuzz import oracle

__all__ = [
    "F", "Wrong", "agree", "bert_padding", "cascade", "compat", "ends_well", "engine", "flash_attn", "flash_attn_interface", "flashtile", "flex", "fp8",
    "ints", "kv_cache", "learning", "linear", "manager", "masks", "math", "nested", "nn", "offsets", "oracle", "padding", "parallel", "rand",
    "refuses", "reserve_step", "rotary", "scaled", "sparse", "surrounded", "torch",
]  # fmt: skip

FACTORS = {"result": 2.0, "gradient": 3.0}
"""Allowed error as a multiple of plain PyTorch's error, by kind of result."""
MOVED = 8.0
"""Allowed error as a multiple of the oracle's largest change under random rounding errors, in addition.

In float64 the factor is four times as large, because the oracle itself rounds as much."""
ERRORS = (ValueError, TypeError, NotImplementedError)


_trials, _leeway = 2, 1.0


@contextlib.contextmanager
def confirming() -> Iterator[None]:
    """Let :func:`agree` take the worst of eight trials and double its bounds in the block.

    A bound is drawn at random with its trials. A fault in the code is seldom within twice the bound.
    """
    global _trials, _leeway
    before, (_trials, _leeway) = (_trials, _leeway), (8, 2.0)
    try:
        yield
    finally:
        _trials, _leeway = before


class Wrong(AssertionError):  # noqa: N818 - a verdict
    """Raised if the result of a call is wrong. ``label`` says in a few words what is wrong."""

    def __init__(self, label: str, text: str = ""):
        super().__init__(f"{label}: {text}")
        self.label = label


def rand(*shape, dtype=torch.float32, device="cpu", seed=0, layout="contiguous", scale=1.0) -> Tensor:
    """Return a tensor of normal numbers.

    The layout "offset" has misaligned rows with NaN between them, "transposed" has heads before tokens in memory.
    In "overlapping" each head begins one element after the one before, and "negated" has torch's negative bit.
    """
    if layout == "overlapping":
        (*_, rows, columns), shape = shape, (*shape[:-2], sum(shape[-2:]))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    numbers = numbers.to(dtype).to(device)
    if layout == "offset":
        memory = torch.full((*shape[:-1], shape[-1] + 3), math.nan, device=device).to(dtype)
        memory[..., 1 : 1 + shape[-1]] = numbers
        return memory[..., 1 : 1 + shape[-1]]
    if layout == "transposed":
        return numbers.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "overlapping":
        return numbers.unfold(-1, columns, 1)[..., :rows, :]
    return torch._neg_view(numbers) if layout == "negated" else numbers


SURROUNDINGS = (
    "default device", "inference mode before", "fake tensors before", "thread", "functionalize", "vmap",
)  # fmt: skip


def surrounded(call, how: str, seed: int = 0):
    """Return a function like ``call`` that is called in one of SURROUNDINGS, none of which changes its results."""

    def in_thread(*tensors, **options):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *tensors, **options).result()

    def with_default_device(*tensors, **options):
        with torch.device("meta"):
            return call(*tensors, **options)

    def after_inference_mode(*tensors, **options):
        with torch.inference_mode():
            call(*tensors, **options)
        return call(*tensors, **options)

    def after_fake_tensors(*tensors, **options):
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # functions capture real tensors

        def fake(x):
            return mode.from_tensor(x.detach()) if isinstance(x, Tensor) else x

        of_tensors, of_options = [*map(fake, tensors)], {name: fake(x) for name, x in options.items()}
        with mode:
            call(*of_tensors, **of_options)
        return call(*tensors, **options)

    def functionalized(*tensors, **options):
        return torch.func.functionalize(lambda *given: call(*given, **options))(*tensors)

    def mapped(*tensors, **options):
        """Two equal calls in one, with the new dimension at any place of each tensor."""
        named = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        others = {name: x for name, x in options.items() if name not in named}
        all_tensors = [*tensors, *named.values()]
        dims = [(seed + n) % (x.dim() + 1) for n, x in enumerate(all_tensors)]
        doubled = [torch.stack([x, x], dim) for x, dim in zip(all_tensors, dims, strict=True)]

        def one(*mapped_tensors):
            values = dict(zip(named, mapped_tensors[len(tensors) :], strict=True))
            return call(*mapped_tensors[: len(tensors)], **values, **others)

        results = torch.func.vmap(one, in_dims=tuple(dims))(*doubled)
        return results[0] if isinstance(results, Tensor) else tuple(x[0] for x in results)

    ways = with_default_device, after_inference_mode, after_fake_tensors, in_thread, functionalized, mapped
    return dict(zip(SURROUNDINGS, ways, strict=True))[how]


def ints(*values, dtype=torch.int32, device="cpu") -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def offsets(*lengths, device="cpu") -> Tensor:
    return F.pad(ints(*lengths).cumsum(0, dtype=torch.int32), (1, 0)).to(device)


def scaled(x: Tensor, factor: float) -> Tensor:
    return (x.double() * factor).to(x.dtype)


def sparse(x: Tensor) -> Tensor:
    return _in_torch(x).to_sparse()


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([_in_torch(x)])


def _in_torch(x: Tensor) -> Tensor:
    """Convert FP8 to float16, because torch has no sparse or nested FP8 tensors."""
    return x.half() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def learning(x: Tensor) -> Tensor:
    """Return a copy of x that requires a gradient, if its dtype can have one."""
    return x.clone().requires_grad_(x.is_floating_point())


def manager() -> kv_cache.PagedKVCache:
    """Return a paged cache with one sequence, number 0, of five tokens."""
    cache = kv_cache.PagedKVCache(
        1, 8, 4, 2, 16, max_sequences=3, max_seqlen=16, dtype=torch.float32, num_host_blocks=4
    )
    step = cache.reserve_step(cache.batch([cache.create()]), 5)
    cache.write(0, rand(5, 2, 16), rand(5, 2, 16), step)
    return cache


def reserve_step(num_tokens) -> kv_cache.Step:
    cache = manager()
    return cache.reserve_step(cache.batch([0]), num_tokens)


def cascade(
    q,
    k_cache,
    v_cache,
    levels,
    shared,
    *,
    causal=False,
    softmax_scale=None,
    softcap=0.0,
    backend=None,
    **tensors,
):
    """Attend in levels: each has the offsets of groups of sequences, and the first and last keys that they share."""
    made = []
    for offsets_, first, end in levels:
        rows = tensors["block_table"][torch.tensor(offsets_[:-1], device=q.device).clamp(max=len(q) - 1)]
        starts = ints(*(q.shape[1] * at for at in offsets_), device=q.device)
        made.append(
            SharedKeys(
                rows, ints(*end, device=q.device), ints(*first, device=q.device), starts, len(q) * q.shape[1]
            )
        )
    own, cache = CacheTensors(cache_leftpad=shared, **tensors), (q, k_cache, v_cache)
    options = DecodeOptions(
        masking=as_masking(causal), softmax_scale=softmax_scale, softcap=softcap, backend=backend
    )
    return decode(cache, attend_shared(cache, own, options, made), options, ())


def _run(call, function, given, dtype, upstream, gradients, exact=False):
    """Return the results of a call and, with ``gradients``, the gradients of its tensors, by name."""
    as_default = torch.get_default_dtype()
    leaves = {
        name: x.detach().to(dtype if dtype is not None and x.is_floating_point() else x.dtype)
        for name, x in given.items()
    }
    for x in leaves.values():
        x.requires_grad_(gradients and x.is_floating_point())
    try:
        if exact:
            torch.set_default_dtype(torch.float64)  # for constants such as 1.0 in score functions
        results = call(function, **leaves)
    finally:
        torch.set_default_dtype(as_default)
    results = [results] if isinstance(results, Tensor) else [x for x in results if x is not None]
    found = {f"result {n}": x.detach() for n, x in enumerate(results)}
    learned = {name: x for name, x in leaves.items() if x.requires_grad}
    if gradients:
        pairs = [
            (x, rand(*x.shape, seed=97 + n, dtype=torch.float64).to(x))
            for n, x in enumerate(results)
            if x.requires_grad
        ]
        for n, name in enumerate(upstream):
            pairs = [pair for pair in pairs if pair[0] is not results[n]] if name is None else pairs
        taken = [torch.zeros_like(x) for x in learned.values()]
        if pairs:
            sums = [(torch.where(x.isfinite(), x, 0.0) * g).sum() for x, g in pairs]
            taken = torch.autograd.grad(sums, [*learned.values()], allow_unused=True, materialize_grads=True)
        found |= {f"gradient of {name}": g for name, g in zip(learned, taken, strict=True)}
    return found


def agree(call, ours, exact, *, gradients=True, upstream=(), again=True, scores_at=None, **given) -> None:
    """Check that ``call(ours, **given)`` agrees with ``call(exact, **given)`` in float64 by the error rule.

    Args:
        gradients: whether to compare the gradients of all given tensors as well.
        upstream: names of the results; a result with the name None gets no gradient.
        again: whether a second call must give the same bits.
        scores_at: dtype to which operands are rounded, if it is not the call's dtype (FP8).

    Raises:
        Wrong: the results do not agree.
    """
    dtype = scores_at or next(x.dtype for x in given.values() if x.is_floating_point())
    with poisoned_memory():
        found = _run(call, ours, given, None, upstream, gradients)
        if again:
            repeated = _run(call, ours, given, None, upstream, gradients)
            for name, x in found.items():
                if "gradient" not in name and not torch.equal(
                    x.nan_to_num(7.0), repeated[name].nan_to_num(7.0)
                ):
                    raise Wrong(f"{name} differs from run to run")
    right = _run(call, exact, given, torch.float64, upstream, gradients, exact=True)
    trials = []
    for seed in range(1, 1 + _trials):
        with oracle.rounding(dtype, seed):
            trials.append(_run(call, exact, given, torch.float64, upstream, gradients, exact=True))
    plain: dict = {}
    largest = max((_size(x) for x in right.values() if x.is_floating_point()), default=0.0)
    for name, x in found.items():
        if x.shape != right[name].shape:
            raise Wrong(f"{name} has another shape", f"{tuple(x.shape)}, expected {tuple(right[name].shape)}")
        if not x.is_floating_point():
            if not torch.equal(x, right[name]):
                raise Wrong(f"{name} differs")
            continue
        wider = "result" in name and x.dtype != dtype and x.dtype.itemsize > 1  # such as lse
        kind = x.dtype if wider else None
        if kind not in plain:
            plain[kind] = _run(call, exact, given, kind, upstream, gradients)
        compare(name, x, right[name], plain[kind][name], [trial[name] for trial in trials], dtype, largest)


def _error(x: Tensor, right: Tensor) -> Tensor:
    """Return the absolute errors: 0 where both are NaN, as by a score function that is NaN for a visible score."""
    x, right = x.double(), right.double()
    return torch.where((x == right) | (x.isnan() & right.isnan()), 0.0, x - right).abs()


def _size(x: Tensor) -> float:
    """Return the largest finite magnitude in x."""
    return torch.where(x.isfinite(), x, 0.0).double().abs().max().item() if x.numel() else 0.0


def compare(
    name: str, found: Tensor, right: Tensor, plain: Tensor, trials: list[Tensor], dtype, largest: float = 0.0
) -> None:
    """Apply the error rule to the largest error and to the root mean square error.

    A gradient may also be off by a rounding error of the largest result of the call, ``largest``, in the
    precision of sums. A factor that is close to 0 has such an error if it is a difference, as the derivative
    1 - tanh(x)^2 of a soft cap. The oracle has the same error where it rounds as the call does, so its own
    changes do not show it.

    Raises:
        Wrong: an error is larger than allowed.
    """
    if not found.numel():
        return
    error = _error(found, right)
    unit = torch.finfo(found.dtype).eps * _size(right)
    unit += torch.finfo(dtype).eps / 8 if found.dtype != dtype else 0.0
    if "gradient" in name:
        unit += torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps * largest
    unit *= 16 if found.dtype == torch.float64 else 1
    factor = FACTORS[name.split()[0]]
    for norm in (lambda e: e.max().item(), lambda e: e.square().mean().sqrt().item()):
        moved = max(norm(torch.nan_to_num(_error(trial, right), posinf=0.0)) for trial in trials)
        allowed = _leeway * (
            factor * norm(torch.nan_to_num(_error(plain, right), posinf=0.0))
            + (4 if found.dtype == torch.float64 else 1) * MOVED * moved
            + unit
        )
        if not norm(error) <= allowed:
            at = tuple(
                int(n)
                for n in torch.unravel_index(torch.nan_to_num(error, nan=math.inf).argmax(), error.shape)
            )
            raise Wrong(
                f"{name} is off", f"by {norm(error):.3g}, allowed {allowed:.3g}; worst at {at}: {found[at].item():.6g}, "
                f"exact {right[at].item():.6g}",
            )  # fmt: skip


def names_argument(error: Exception, names) -> bool:
    return any(re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", str(error)) for name in names)


def refuses(call, *names: str) -> None:
    """Check that the call raises a ValueError, TypeError or NotImplementedError with one of the names.

    Raises:
        Wrong: the call returns, raises another error, or its error has none of the names.
    """
    try:
        call()
    except ERRORS as error:
        if not names_argument(error, names):
            raise Wrong(f"the error does not name {names[0]}", f"{type(error).__name__}: {error}") from None
        return
    except Exception as error:
        raise Wrong(f"a {type(error).__name__} instead of a ValueError", str(error)[:300]) from None
    raise Wrong(f"{names[0]} is taken")


def ends_well(call, *names: str) -> None:
    """Check that the call gives a result, or raises an error as :func:`refuses` expects it."""
    try:
        refuses(call, *names)
    except Wrong as error:
        if not error.label.endswith("is taken"):
            raise
