"""The error rule accepts what is right and refuses each common way to be wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flashtile
import targets
from cases import BF16, FP16, FP32, FP64, Case
from flashtile import testing
from flashtile.reference import attention as reference
from flashtile.testing.decode import check_cache
from walk import walk

pytestmark = pytest.mark.numerical

CALL = Case(name="rule", seqlen_q=40, seqlen_k=50, causal=True, head_dim=32)


def exactly(q, k, v, *, return_lse, **arguments):
    """Standard attention in float32, rounded once at the end: as right as a result in q's dtype can be."""
    upcast = torch.float32 if q.dtype != FP64 else None
    out, lse = reference.attention(q, k, v, upcast=upcast, **arguments)
    return out.to(q.dtype), lse


def wrong(change):
    """``exactly`` with one thing changed in its arguments, by ``change(q, k, v, arguments)``."""

    def function(q, k, v, *, return_lse, **arguments):
        q, k, v = change(q, k, v, arguments) or (q, k, v)
        return exactly(q, k, v, return_lse=return_lse, **arguments)

    return function


def changed(**replacements):
    return wrong(lambda q, k, v, arguments: arguments.update(replacements))


class WrongGradient(torch.autograd.Function):
    """Identity, with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def forward_changed(change):
    def function(q, k, v, **arguments):
        return change(*exactly(q, k, v, **arguments))

    return function


def last_key_lost(q, k, v, arguments):
    return q, k[:, :-1], v[:, :-1]


def one_element(value):
    def change(out, lse):
        out = out.clone()
        out[-1, -1, -1, -1] = value
        return out, lse

    return forward_changed(change)


WRONG = {
    "not causal": changed(causal=False),
    "diagonal off by one": changed(causal=False, window_size=(-1, 1)),
    "window nobody asked for": changed(window_size=(45, -1)),
    "scale one percent off": changed(softmax_scale=1.01 * 32**-0.5),
    "softcap nobody asked for": changed(softcap=30.0),
    "last key lost": wrong(last_key_lost),
    "lse in log2": forward_changed(lambda out, lse: (out, lse / math.log(2))),
    "lse without gradient": forward_changed(lambda out, lse: (out, lse.detach())),
    "out without gradient": forward_changed(lambda out, lse: (out.detach(), lse)),
    "NaN at the end": one_element(torch.nan),
    "last element not written": one_element(0.0),
    "dq 5% off": wrong(lambda q, k, v, _: (WrongGradient.apply(q, 1.05), k, v)),
    "dk 5% off": wrong(lambda q, k, v, _: (q, WrongGradient.apply(k, 1.05), v)),
    "dv 5% off": wrong(lambda q, k, v, _: (q, k, WrongGradient.apply(v, 1.05))),
}


def with_argument(name, change):
    return wrong(lambda q, k, v, arguments: arguments.update({name: change(arguments[name])}))


WRONG_WITH_SINK = {
    "sink lost": changed(sink=None),
    "sink scaled": with_argument("sink", lambda sink: sink * 1.05),
    "sink without gradient": with_argument("sink", lambda sink: sink.detach()),
    "dsink 5% off": with_argument("sink", lambda sink: WrongGradient.apply(sink, 1.05)),
    "unused keys seen": changed(seqused_k=None),
    "one key too few": with_argument("seqused_k", lambda used: used - 1),
}


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
def test_right_is_accepted(dtype) -> None:
    inputs = Case(name="right", seqlen_q=40, seqlen_k=50, causal=True, dtype=dtype).inputs("cpu")
    report = testing.check(*inputs.qkv, function=exactly, **inputs.arguments)
    assert [comparison.name for comparison in report.comparisons] == ["out", "lse", "dq", "dk", "dv"]
    assert report.holds


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
def test_right_is_accepted_with_a_sink_and_a_bias(dtype) -> None:
    case = Case(name="right", seqlen_q=40, seqlen_k=50, dtype=dtype, sink="own", unused_keys=3, bias="h-own")
    report = case.inputs("cpu").check(function=exactly)
    names = [comparison.name for comparison in report.comparisons]
    assert names == ["out", "lse", "dq", "dk", "dv", "dsink", "dbias"]
    assert [comparison.dtype for comparison in report.comparisons[-2:]] == [dtype, dtype]
    assert "sink=[" in str(report)


@walk("name", WRONG)
def test_wrong_is_refused(name: str) -> None:
    inputs = CALL.inputs("cpu")
    with pytest.raises(AssertionError, match="WRONG"):
        inputs.check(function=WRONG[name])


@walk("name", WRONG_WITH_SINK)
def test_wrong_with_sink_is_refused(name: str) -> None:
    case = replace(CALL, causal=False, sink="float32", unused_keys=5)
    with pytest.raises(AssertionError, match="WRONG"):
        case.inputs("cpu").check(function=WRONG_WITH_SINK[name])


class Confused(torch.autograd.Function):
    """Identity of two tensors, each of which gets the other's gradient."""

    @staticmethod
    def forward(ctx, one, other):
        return one.clone(), other.clone()

    @staticmethod
    def backward(ctx, of_one, of_other):
        return of_other, of_one


class ValuesAsGradient(torch.autograd.Function):
    """Identity of out, which passes v on as the gradient."""

    @staticmethod
    def forward(ctx, out, v):
        ctx.save_for_backward(v)
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def test_random_tensors_of_a_call_are_not_confused() -> None:
    """Equal numbers would hide that a kernel reads one tensor in place of another."""

    def swapped(q, k, v, **arguments):
        out, lse, entropy = flashtile.attention(q, k, v, **arguments)
        return out, *Confused.apply(lse, entropy)

    def of_values(q, k, v, **arguments):
        out, lse = flashtile.attention(q, k, v, **arguments)
        return ValuesAsGradient.apply(out, v), lse

    q, k, v = (testing.random_tensor((1, 40, 2, 16), FP32, "cpu", seed=i) for i in range(3))
    assert not testing.measure(q, k, v, return_entropy=True, function=swapped).holds
    assert not testing.measure(q, k, v, function=of_values).holds


def test_half_precision_in_float32_is_refused() -> None:
    """TF32 or bfloat16 products would pass a bfloat16 rule, not that of float32."""

    def rounded(q, k, v, *, return_lse, **arguments):
        return reference.attention(q.bfloat16().float(), k, v, **arguments)

    inputs = Case(name="rounded", seqlen_q=40, seqlen_k=50, dtype=FP32).inputs("cpu")
    with pytest.raises(AssertionError, match=r"out .* WRONG"):
        inputs.check(function=rounded, gradients=False)


def test_float32_in_float64_is_refused() -> None:
    def rounded(q, k, v, *, return_lse, **arguments):
        out, lse = reference.attention(q.float(), k.float(), v.float(), **arguments)
        return out.double(), lse.double()

    inputs = Case(name="rounded", seqlen_q=40, seqlen_k=50, dtype=FP64).inputs("cpu")
    with pytest.raises(AssertionError, match=r"out .* WRONG"):
        inputs.check(function=rounded, gradients=False)


def test_few_wrong_rows_hide_from_neither_norm() -> None:
    """A small wrong tail: the rms error sees what the largest error of large rows would cover."""
    exact = torch.cat([torch.full((1, 8), 100.0), torch.full((999, 8), 1.0)]).double()
    plain = exact + torch.cat([torch.full((1, 8), 0.5), torch.full((999, 8), 0.001)])
    actual = (exact + torch.cat([torch.zeros(1, 8), torch.full((999, 8), 0.5)])).half()
    largest, rms = testing.compare("out", actual, exact, plain).bounds
    assert largest.holds
    assert not rms.holds


def test_a_wrong_infinity_is_refused() -> None:
    exact = torch.tensor([1.0, -torch.inf]).double()
    for actual in ([1.0, 5.0], [1.0, torch.inf], [-torch.inf, -torch.inf], [1.0, torch.nan]):
        assert not testing.compare("lse", torch.tensor(actual), exact, exact).holds
    assert testing.compare("lse", exact.float(), exact, exact).holds


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"out has shape \(3,\), expected \(4,\)"):
        testing.compare("out", torch.zeros(3), torch.zeros(4), torch.zeros(4))


def test_the_message_states_every_number() -> None:
    inputs = CALL.inputs("cpu")
    with pytest.raises(AssertionError) as caught:
        inputs.check(function=WRONG["not causal"])
    text = str(caught.value)
    for part in ("q: (2, 40, 4, 32)", "causal=True", "torch.float16 on cpu", "largest error", "rms error",
                 "x plain PyTorch's", "worst at (", "exact", "dq (2, 40, 4, 32)"):  # fmt: skip
        assert part in text, part


def test_memory_is_poisoned_inside_only() -> None:
    with testing.poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.ones(2).new_empty((2,), dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.ones(4)).isnan().all()
        assert torch.is_deterministic_algorithms_warn_only_enabled()  # calls are what they were
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_an_output_that_is_never_written_is_refused() -> None:
    def lazy(q, k, v, *, return_lse, **arguments):
        out, lse = exactly(q, k, v, return_lse=return_lse, **arguments)
        unwritten = torch.empty_like(out)
        unwritten[:, :-1] = out[:, :-1]
        return unwritten, lse

    with pytest.raises(AssertionError, match="WRONG"):
        CALL.inputs("cpu").check(function=lazy, gradients=False)


@walk("layout", testing.LAYOUTS)
@walk("shape", [(2, 5, 3, 8), (7, 3, 8)])
def test_layouts(layout: str, shape: tuple[int, ...]) -> None:
    tensor = testing.random_tensor(shape, FP16, "cpu", layout=layout)
    assert tensor.shape == shape
    assert tensor.stride(-1) == 1
    assert tensor.isfinite().all()
    assert tensor.is_contiguous() == (layout in ("contiguous", "negated"))
    assert tensor.is_neg() == (layout == "negated")
    storage = torch.tensor(tensor.untyped_storage(), dtype=torch.uint8).view(FP16)
    assert storage.isnan().any() == (layout in ("packed", "offset"))
    assert (tensor.data_ptr() % 16 == 0) == (layout != "offset")


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match=r"layout must be one of contiguous, packed.*got 'diagonal'"):
        testing.random_tensor((1, 1, 1, 1), FP16, "cpu", layout="diagonal")


def test_inputs_repeat() -> None:
    first, second = CALL.inputs("cpu"), CALL.inputs("cpu")
    assert all(torch.equal(a, b) for a, b in zip(first.qkv, second.qkv, strict=True))
    assert not torch.equal(first.k, first.v)


@walk(
    ("visible", "count", "worker", "expected"),
    [
        (None, 4, "gw0", "0,1,2,3"),
        (None, 4, "gw6", "2,3,0,1"),
        ("5,7", 2, "gw3", "7,5"),
        (None, 1, "gw3", None),
        ("2", 1, "gw3", "2"),
        (None, 4, "", None),
        ("", 0, "gw1", ""),
    ],
)
def test_workers_share_the_gpus(visible, count, worker, expected):
    assert targets.own_gpu_first(visible, count, worker) == expected


def test_a_cache_is_held_to_every_bit():
    """What a call writes elsewhere is found, and a wrong token. A rotated one may differ in its last bit."""
    before = torch.arange(24, dtype=FP32).view(2, 3, 4)
    expected = before.clone()
    expected[1, 2] = 0.5
    elsewhere, last_bit, off = (expected.clone() for _ in range(3))
    elsewhere[0, 1, 3] = -0.0
    last_bit[1, 2, 1] += 2**-24
    off[1, 2, 1] += 1e-3
    check_cache("k_cache", expected, expected, before, computed=False)
    check_cache("k_cache", last_bit, expected, before, computed=True)
    for actual, computed, says in (
        (elsewhere, True, r"k_cache must be unchanged at \[0, 1, 3\]"),
        (last_bit, False, r"k_cache at \[1, 2, 1\] is 0.50000"),
        (off, True, r"k_cache at \[1, 2, 1\] is 0.50"),
    ):
        with pytest.raises(AssertionError, match=says):
            check_cache("k_cache", actual, expected, before, computed)
