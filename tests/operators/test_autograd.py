"""Gradients by every path: checkpoints, autocast, partial and compiled ones, and those that are refused."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile.op.registry import flat
from flashtile.operators.attention import BACKWARD, REPEATS
from flashtile.problems.attention import NO_EXTRAS, Options
from flashtile.reference import attention as reference
from small_calls import DEVICES, OPTIONS, assert_same, dense, results, results_with_backward, slopes, varlen

pytestmark = [pytest.mark.numerical, pytest.mark.quick]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("compiled", "use_reentrant"), [(False, True), (False, False), (True, False)])
def test_checkpoint(compiled, use_reentrant, device):
    tensors = dense(device, grad=True)
    call = partial(flashtile.attention, causal=True, return_lse=True)

    def checkpointed(*arguments):
        return checkpoint(call, *arguments, use_reentrant=use_reentrant)

    if compiled:
        checkpointed = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    assert_same(results_with_backward(checkpointed, tensors), results_with_backward(call, tensors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_casts_like_torch(dtype, compiled, device):
    tensors = dense(device, dtype=dtype, grad=True)
    call = flashtile.attention
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = call(*tensors, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    expected, _ = reference.attention(*(t.detach().bfloat16() for t in tensors), upcast=torch.float32)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == dtype for t in tensors)


def test_autocast_leaves_float64_and_disabled_calls():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashtile.attention(*dense(dtype=torch.float64)).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert flashtile.attention(*dense()).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        assert flashtile.attention(*dense()).dtype == torch.float32
    assert flashtile.attention(*dense()).dtype == torch.float32


def test_autocast_mixed_dtypes_become_one():
    q, k, v = dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashtile.attention(q, k.bfloat16(), v.half()).dtype == torch.bfloat16
        assert flashtile.explain(q, k.bfloat16(), v.half()).problem.dtype == torch.bfloat16


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_for_some_inputs(compiled, wanted):
    tensors = dense()
    for i in wanted:
        tensors[i].requires_grad_()
    call = partial(flashtile.attention, causal=True, return_lse=True)
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(results(call, tensors), results(partial(reference.attention, causal=True), tensors))


@pytest.mark.parametrize("forward_compiled", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_autograd(forward_compiled):
    """The backward pass is traced from the graph of nodes that eager or compiled calls left."""
    tensors = dense(grad=True)
    call = partial(flashtile.attention, causal=True, return_lse=True)
    expected = results_with_backward(call, tensors)[2:]
    out, lse = (torch.compile(call, backend="aot_eager") if forward_compiled else call)(*tensors)
    for tensor in tensors:
        tensor.grad = None
    with compiled_autograd._enable(partial(torch.compile, backend="aot_eager", fullgraph=True)):
        (out.square().sum() + lse.sin().sum()).backward()
    assert_same([t.grad for t in tensors], expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_gradient_through_one_output(used, compiled):
    tensors = dense(grad=True)
    call = partial(flashtile.attention, return_lse=True)
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    actual, expected = (
        torch.autograd.grad(output.sin().sum(), tensors, allow_unused=True, materialize_grads=True)
        for output in (call(*tensors)[used], reference.attention(*tensors)[used])
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("shape_of_gradient", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_strides(shape_of_gradient):
    tensors = dense(grad=True)
    out = flashtile.attention(*tensors)
    expected_out, _ = reference.attention(*tensors)
    dout = {
        "expanded": torch.ones(()).expand(out.shape),
        "transposed": torch.randn(2, 4, 9, 16).transpose(1, 2),
        "sliced": torch.randn(2, 9, 4, 33)[..., 1::2],
    }[shape_of_gradient]
    assert_same(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected_out, tensors, dout))


def differentiated(name):
    """A call that returns (out, lse), as a function of the tensors that want a gradient, and those."""
    q, k, v = dense(grad=True)
    if name == "packed":
        tensors, keywords = varlen(grad=True)
        return partial(flashtile.attention, return_lse=True, **keywords), tensors
    if name == "sink":
        sink = slopes().requires_grad_()
        return lambda q, k, v, s: flashtile.attention(q, k, v, sink=s, return_lse=True), (q, k, v, sink)
    if name == "one query":
        q = q[:, :1].detach().requires_grad_()
    return partial(flashtile.attention, return_lse=True, **OPTIONS.get(name, {})), (q, k, v)


DIFFERENTIATED = (*OPTIONS, "sink", "packed", "one query")


def saved_bytes(call):
    """Bytes of distinct storages that autograd keeps for the backward of a call."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    return sum(storages.values()), out


@pytest.mark.parametrize("compiled", [False, True])
def test_saves_inputs_out_and_lse_only(compiled):
    tensors = dense(grad=True)
    call = partial(flashtile.attention, *tensors, return_lse=True, causal=True)
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    saved, (out, lse) = saved_bytes(call)
    assert saved <= sum(t.untyped_storage().nbytes() for t in (*tensors, out, lse))


def test_packed_gradient_is_one_tensor():
    qkv = torch.randn(2, 7, 3, 4, 16, requires_grad=True)
    saved, out = saved_bytes(lambda: flashtile.flash_attn_qkvpacked_func(qkv))
    lse_bytes = 2 * 4 * 7 * 4
    assert saved <= qkv.untyped_storage().nbytes() + out.untyped_storage().nbytes() + lse_bytes
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    expected = torch.autograd.grad(reference.attention(*qkv.unbind(2))[0].sum(), qkv)
    assert_same((gradient,), expected)


def test_no_node_without_a_gradient():
    q, k, v = dense(grad=True)
    with torch.no_grad():
        assert flashtile.attention(q, k, v).grad_fn is None
    assert flashtile.attention(*dense()).grad_fn is None
    with torch.inference_mode():
        out = flashtile.attention(*dense())
        assert out.is_inference()
    torch.testing.assert_close(out.clone(), flashtile.attention(*dense()))
    assert flashtile.attention(q.detach(), k, v.detach()).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_modified_inputs_are_noticed(compiled):
    q, k, v = dense(grad=True)
    call = torch.compile(flashtile.attention, backend="aot_eager") if compiled else flashtile.attention
    scaled = k * 1.0
    out = call(q, scaled, v)
    scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("which", ["out", "lse", "part of out"])
def test_a_result_that_is_changed_in_place_is_noticed(name, which):
    """As torch's own attention does: the backward pass needs what the forward pass returned."""
    call, tensors = differentiated(name)
    out, lse = call(*tensors)
    assert not out._is_view()
    assert not lse._is_view()
    changed = {"out": out, "lse": lse, "part of out": out[..., :1]}[which]
    changed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum() + lse.sum(), tensors)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_result_without_a_gradient_may_be_changed_in_place(name):
    call, tensors = differentiated(name)
    with torch.no_grad():
        out, _ = call(*tensors)
        expected = out + 1
        out += 1
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_batched_gradients_equal_a_loop(name):
    call, tensors = differentiated(name)
    results = call(*tensors)
    outputs = [torch.randn(3, *t.shape) for t in results]
    batched = torch.autograd.grad(results, tensors, outputs, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        expected = torch.autograd.grad(results, tensors, [t[i] for t in outputs], retain_graph=True)
        assert_same([t[i] for t in batched], expected)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_vectorized_jacobian_equals_a_loop(name):
    call, tensors = differentiated(name)
    tensors = tuple(t.detach() for t in tensors)

    def small(*tensors):
        out, lse = call(*tensors)
        return out[..., :2].sum(-1).sum(-1), lse.sum(-1)

    jacobian = partial(torch.autograd.functional.jacobian, small, tensors)
    for ours, expected in zip(jacobian(vectorize=True), jacobian(), strict=True):
        assert_same(ours, expected)


def gradient_with_graph(call, q, k, v):
    (gradient,) = torch.autograd.grad(call(q, k, v).square().sum(), q, create_graph=True)
    return gradient


def test_second_derivative_through_the_operator():
    def call(q, k, v):
        return torch.ops.flashtile.forward(q, k, v, *NO_EXTRAS, *flat(Options()))[0]

    tensors = dense(grad=True)
    ours, expected = (
        torch.autograd.grad(gradient_with_graph(f, *tensors).square().sum(), tensors)
        for f in (call, lambda *t: reference.attention(*t)[0])
    )
    assert_same(ours, expected)


def test_second_derivative_is_refused_when_compiled():
    compiled = torch.compile(flashtile.attention, backend="aot_eager")

    def second_derivative():
        gradient_with_graph(compiled, *dense(grad=True)).sum().backward()

    with pytest.raises(RuntimeError, match="double backward"):
        second_derivative()


def test_forward_mode_leaves_the_graph():
    q, k, v = dense()

    def tangent(q):
        return torch.func.jvp(lambda a: flashtile.attention(a, k, v), (q,), (q,))[1]

    assert_same((torch.compile(tangent, backend="aot_eager")(q),), (tangent(q),))


class TestRepeatedBackward:
    """After REPEATS backward passes, a launch is found by a guard instead of the tensors' signature."""

    @staticmethod
    def inputs(seqlen=16, offset=0):
        count = 2 * seqlen * 2 * 16
        tensors = [torch.randn(count + offset)[offset:].view(2, seqlen, 2, 16) for _ in range(4)]
        return [t.requires_grad_() for t in tensors[:3]], tensors[3]

    @staticmethod
    def gradients(leaves, dout, **options):
        out = flashtile.flash_attn_func(*leaves, causal=True)
        return torch.autograd.grad(out, [t for t in leaves if t.requires_grad], dout, **options)

    @pytest.fixture
    def lookups(self, monkeypatch):
        """Has repeated the call of ``inputs``; a list that grows whenever a launch is looked up."""
        BACKWARD._repeated.clear()
        for _ in range(REPEATS):
            self.gradients(*self.inputs())
        found, prepared = [], BACKWARD.prepared
        monkeypatch.setattr(BACKWARD, "prepared", lambda *given: found.append(given) or prepared(*given))
        return found

    def test_it_computes_the_same(self, lookups):
        leaves, dout = self.inputs()
        fast = self.gradients(leaves, dout)
        assert not lookups
        BACKWARD._repeated.clear()
        slow = self.gradients(leaves, dout)
        assert len(lookups) == 1
        assert all(map(torch.equal, fast, slow))

    @pytest.mark.parametrize("change", [
        "shape", "strides of dout", "alignment", "lse", "one leaf", "mode", "batched", "graph",
    ])  # fmt: skip
    def test_other_calls_are_looked_up(self, lookups, change):
        leaves, dout = self.inputs(
            seqlen=20 if change == "shape" else 16, offset=1 if change == "alignment" else 0
        )
        options, mode = {}, contextlib.nullcontext()
        if change == "strides of dout":
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        if change == "one leaf":
            leaves[0].requires_grad_(False)
        if change == "mode":
            mode = FlopCounterMode(display=False)
        if change == "batched":
            options["is_grads_batched"], dout = True, torch.stack([dout, 2 * dout])
        if change == "graph":
            options["create_graph"] = True
        if change == "lse":
            expected, found = (
                torch.autograd.grad((out * dout).sum() + lse.sum(), leaves)
                for out, lse in (
                    reference.attention(*leaves, causal=True),
                    flashtile.attention(*leaves, causal=True, return_lse=True),
                )
            )
        else:
            with mode:
                found = self.gradients(leaves, dout, **options)
            learning = [t for t in leaves if t.requires_grad]
            exact = reference.attention(*leaves, causal=True)[0]
            options.pop("create_graph", None)
            expected = torch.autograd.grad(exact, learning, dout, **options)
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
        if change not in ("mode", "batched", "graph"):  # these go through the operator
            assert lookups
        assert change != "mode" or mode.get_total_flops() > 0

    def test_tensors_given_twice_have_no_guard(self, lookups):
        x = torch.randn(2, 24, 2, 16, requires_grad=True)
        dout = torch.randn_like(x)
        for _ in range(REPEATS + 2):
            self.gradients([x, x.detach(), x.detach()], dout)
            out = flashtile.flash_attn_func(x, x, x, causal=True)
            torch.autograd.grad(out, x, dout)
        assert len(lookups) >= REPEATS
