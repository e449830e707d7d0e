"""Every case on every backend, forward and backward, by the error rule and into poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import flashtile
from cases import CASES, Case, Inputs
from flashtile import testing
from targets import Target
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

FEATURES = (
    "causal", "softcap", "alibi", "sink", "lengths", "unused_tail", "unused_keys", "softmax_scale",
    "head_dim_v",
)  # fmt: skip
MIXED = Case(
    name="mixed",
    lengths=((7, 13), (0, 4), (5, 0), (20, 9), (16, 33)),
    unused_tail=3,
    heads_q=2,
    heads_kv=1,
    head_dim=24,
    causal=True,
    layout="offset",
)
DENSE = Case(name="dense", seqlen_q=17, seqlen_k=40, heads_q=2, heads_kv=2, head_dim=24)


def test_case(target: Target, case: Case) -> None:
    case.inputs(target.device).check(backend=target.backend)


IN_FORWARD_MODE = (
    "full", "causal", "window", "softcap-window", "alibi-batch", "scale-negative-causal", "scale-zero",
    "sink-causal", "everything", "more-queries-causal", "1x1-full", "33x32-causal", "heads-6-2-causal",
    "whole-blocks-cells", "d40-8-causal", "transposed-causal", "varlen-offset-causal", "fp32-everything",
    "varlen-fp64-window", "no-keys-everything", "varlen-tail-everything", "varlen-no-keys-full",
    "varlen-no-sequence-causal", "padding-mask", "bias-own-causal", "dropout-bias", "chunk-causal",
    "varlen-used-everything", "diagonals-causal",
)  # fmt: skip
"""Names of tiny cases that together have every step of the kernels."""


@walk("name", IN_FORWARD_MODE)
def test_case_in_forward_mode(target: Target, name: str) -> None:
    (case,) = (case for case in CASES if case.name == f"tiny-{name}")
    if not target.takes(case) or target.name == "hopper":  # the portable kernels serve it
        return
    inputs = case.inputs(target.device)
    moving = [
        testing.random_tensor(t.shape, t.dtype, t.device, seed=90 + i).masked_fill_(t.isnan(), torch.nan)
        for i, t in enumerate(inputs.qkv)
    ]
    testing.check(*inputs.qkv, tangents=moving, backend=target.backend, **inputs.arguments)


@walk("given", ["q", "k", "v", "qk", "kv"])
def test_tensors_without_a_tangent_stand_still(target: Target, given: str) -> None:
    case = replace(DENSE, dtype=target.dtypes[0], causal=True)
    inputs = case.inputs(target.device)
    moving = [t.cos() if name in given else None for name, t in zip("qkv", inputs.qkv, strict=True)]
    testing.check(*inputs.qkv, tangents=moving, backend=target.backend, **inputs.arguments)


def test_a_common_move_of_all_scores_moves_only_lse(target: Target) -> None:
    """It is 64 times as large as the others, and must not be rounded to 16 bits with them."""
    q, k, v = replace(DENSE, dtype=target.dtypes[0]).inputs(target.device).qkv
    q, k = (torch.cat([t[..., :-1], torch.ones_like(t[..., :1])], -1) for t in (q, k))
    moving = q.cos(), k.cos(), v.cos()
    moving[0][..., -1] += 64 * q.shape[-1] ** 0.5
    attend = partial(flashtile.attention, return_lse=True, backend=target.backend)
    _, (of_out, of_lse) = torch.func.jvp(attend, (q, k, v), moving)
    moving[0][..., -1] -= 64 * q.shape[-1] ** 0.5
    _, (of_out_alone, of_lse_alone) = torch.func.jvp(attend, (q, k, v), moving)
    eps = torch.finfo(q.dtype).eps
    torch.testing.assert_close(of_lse, of_lse_alone + 64, rtol=64 * eps, atol=64 * eps)
    torch.testing.assert_close(of_out, of_out_alone, rtol=0, atol=8 * eps * of_out_alone.abs().max().item())


def test_hidden_keys_move_nothing(target: Target) -> None:
    """Whatever they hold, as long as their values are numbers: a score may then be NaN, and its move too."""
    q, k, v = replace(DENSE, dtype=target.dtypes[0]).inputs(target.device).qkv
    mask = torch.arange(k.shape[1], device=k.device) % 3 > 0
    attend = partial(flashtile.attention, mask=mask[None, None, None], backend=target.backend)
    results = [
        torch.func.jvp(attend, (q, filled, v), (q.cos(), filled.cos(), v.cos()))
        for filled in (k, k.masked_fill(~mask[:, None, None], torch.nan))
    ]
    _assert_same_bits(*results)


def test_every_feature_is_asked_for(target: Target) -> None:
    """A filter that dropped the cases of a target would pass silently."""
    taken = [case for case in CASES if target.takes(case)]
    assert len(taken) > 130
    assert {case.dtype for case in taken} == set(target.dtypes)
    assert {case.layout for case in taken} == set(testing.LAYOUTS)
    for feature in FEATURES:
        assert sum(bool(getattr(case, feature)) for case in taken) >= 8, feature


@pytest.mark.parametrize("call", [MIXED, DENSE], ids=lambda call: call.name)
class TestAnyGradientMode:
    """The same call gives the same bits however much of it autograd follows."""

    def test_forward_alone(self, target: Target, call: Case) -> None:
        inputs = call.inputs(target.device)
        followed = _attend(target, inputs, "qkv")
        with torch.no_grad():
            alone = _attend(target, inputs, "qkv")
        _assert_same_bits(alone, followed)
        _assert_same_bits(_attend(target, inputs, ""), followed)

    def test_some_gradients(self, target: Target, call: Case) -> None:
        inputs = call.inputs(target.device)
        every = dict(zip("qkv", _gradients(target, inputs, "qkv"), strict=True))
        for asked in ("q", "k", "v", "qk", "kv"):
            for name, gradient in zip(asked, _gradients(target, inputs, asked), strict=True):
                _assert_same_bits([gradient], [every[name]])

    def test_inputs_are_not_written(self, target: Target, call: Case) -> None:
        inputs = call.inputs(target.device)
        given = (*inputs.qkv, *inputs.arguments.values(), inputs.dout, inputs.dlse)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        before = [t.clone() for t in tensors]
        _gradients(target, inputs, "qkv")
        _assert_same_bits(tensors, before)


def _leaves(inputs: Inputs, asked: str) -> list[torch.Tensor]:
    return [t.detach().requires_grad_(name in asked) for name, t in zip("qkv", inputs.qkv, strict=True)]


def _attend(target: Target, inputs: Inputs, asked: str) -> tuple[torch.Tensor, torch.Tensor]:
    leaves = _leaves(inputs, asked)
    return flashtile.attention(*leaves, return_lse=True, backend=target.backend, **inputs.arguments)


def _gradients(target: Target, inputs: Inputs, asked: str) -> tuple[torch.Tensor, ...]:
    leaves = _leaves(inputs, asked)
    results = flashtile.attention(*leaves, return_lse=True, backend=target.backend, **inputs.arguments)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(results, wanted, (inputs.dout, inputs.dlse))


def _assert_same_bits(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_gradients_into_the_lse_of_rows_without_keys_are_not_looked_at(target: Target) -> None:
    """It is -inf, so that whatever is made of it comes back with infinities and NaN."""
    case = Case(name="no keys", seqlen_q=24, seqlen_k=9, heads_q=2, heads_kv=1, head_dim=16, causal=True)
    inputs = replace(case, dtype=target.dtypes[0]).inputs(target.device)
    empty = case.seqlen_q - case.seqlen_k
    assert inputs.dlse is not None
    results = []
    for poison in (0.0, torch.nan, -torch.inf):
        inputs.dlse[..., :empty] = poison
        results.append(_gradients(target, inputs, "qkv"))
    _assert_same_bits(results[1], results[0])
    _assert_same_bits(results[2], results[0])
    assert results[0][0][:, :empty].eq(0).all()


def test_a_sink_of_minus_infinity_is_none(target: Target) -> None:
    """In rows without keys as well, which then have nothing at all."""
    case = Case(name="no sink", seqlen_q=24, seqlen_k=9, heads_q=2, heads_kv=1, head_dim=16, causal=True)
    inputs = replace(case, dtype=target.dtypes[0]).inputs(target.device)
    without = _attend(target, inputs, "")
    inputs.arguments["sink"] = torch.full((2,), -torch.inf, device=target.device)
    _assert_same_bits(_attend(target, inputs, ""), without)


@pytest.mark.parametrize("call", ["attention", "score_mod", "decode", "splits", "fp8"])
def test_a_sink_may_be_any_number(target: Target, call: str) -> None:
    """Its product with log2(e) may be infinite. lse is the sink, if that is larger or the only score."""
    sink = torch.tensor([3e38, -3e38, 1e30, 0.5], device=target.device, requires_grad=True)
    q = torch.randn(1, 6, 4, 32, device=target.device, requires_grad=True)
    # Two rows have no key.
    k, v = torch.randn(2, 1, 4, 2, 32, device=target.device, requires_grad=True).unbind()
    common: dict[str, Any] = {"causal": True, "backend": target.backend}
    if call in ("decode", "splits"):
        out, lse = flashtile.flash_attn_with_kvcache(
            q.detach(), k.detach(), v.detach(), num_splits=1 + (call == "splits"), return_softmax_lse=True,
            sink=sink.detach(), **common,
        )  # fmt: skip
    elif call == "fp8":
        q16, k16, v16 = (t.detach().half() for t in (q, k, v))
        out, lse = flashtile.fp8.attention(q16, k16, v16, return_lse=True, sink=sink.detach(), **common)
    else:
        mod = (lambda s, b, h, i, j: s + 0.5 * i) if call == "score_mod" else None
        out, lse = flashtile.attention(q, k, v, return_lse=True, score_mod=mod, sink=sink, **common)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, sink))
        assert all(grad.isfinite().all() for grad in grads)
        assert grads[0][:, :, [0, 2]].eq(0).all()
    assert out.isfinite().all()
    assert out[:, :, [0, 2]].eq(0).all()
    assert out[:, :2].eq(0).all()
    for head in (0, 2):
        assert lse[:, head].eq(sink[head]).all()
    assert lse[:, :, :2].eq(sink[:, None]).all()
    assert lse[:, 1, 2:].abs().amax() < 10


def test_every_tensor_may_be_a_lazy_negation(target: Target) -> None:
    """Memory of ``z.conj().imag`` holds the numbers before a negation that torch's dispatcher applies."""
    case = Case(name="negated", seqlen_q=9, seqlen_k=9, heads_q=2, heads_kv=1, head_dim=16, sink="float32")
    inputs = replace(case, alibi="head", bias="hq", dtype=target.dtypes[0]).inputs(target.device)
    (q, k, v), extras = inputs.qkv, inputs.arguments
    names = ("sink", "alibi_slopes", "bias")
    given = [t.neg() for t in (q, k, v, *(extras[name] for name in names), inputs.dout, inputs.dlse)]

    def results(negated: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        q, k, v, sink, slopes, bias, dout, dlse = map(negated, given)
        q.requires_grad_()
        arguments = {**extras, "sink": sink, "alibi_slopes": slopes, "bias": bias, "backend": target.backend}
        out, lse = flashtile.attention(q, k, v, return_lse=True, **arguments)
        score_mod = lambda score, b, h, i, j: score + sink[h]  # noqa: E731
        by_function = flashtile.attention(q, k, v, score_mod=score_mod, backend=target.backend)
        decoded = flashtile.flash_attn_with_kvcache(q.detach(), k, v, sink=sink, backend=target.backend)
        (dq,) = torch.autograd.grad((out, lse, by_function), q, (dout, dlse, dout))
        return [out, lse, by_function, decoded, dq]

    _assert_same_bits(results(torch._neg_view), results(torch.neg))
