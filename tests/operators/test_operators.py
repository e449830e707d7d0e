"""The operators under all that looks into a call: opcheck, compile, export, fake tensors, CUDA graphs."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from itertools import zip_longest

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.op.registry import flat
from flashtile.operators import attention as operators
from flashtile.operators.gradients import forward
from flashtile.problems.attention import NO_EXTRAS, OptionalTensors, Options
from flashtile.problems.masking import CAUSAL, Masking
from flashtile.reference import attention as reference
from small_calls import DEVICES, OPTIONS, assert_same, dense, needs_compiler, results, slopes, varlen


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def used_keys(device):
    return torch.tensor([5, 12], dtype=torch.int32, device=device)


def cells(device):
    """A mask, a padding mask and a bias for ``dense``."""
    bias = torch.randn(1, 4, 1, 12, device=device)
    bias[..., 3] = -torch.inf
    mask = torch.rand(2, 1, 9, 12, device=device) > 0.3
    return OptionalTensors(mask=mask, key_padding_mask=torch.rand(2, 12, device=device) > 0.3, bias=bias)


def operator_calls(device):
    """Arguments of ``flashtile::forward`` by name."""
    ragged, keywords = varlen(device)
    offsets = keywords["cu_seqlens_q"], keywords["cu_seqlens_k"]
    return {
        "dense": (*dense(device), *NO_EXTRAS, *flat(Options())),
        "causal-alibi": (
            *dense(device),
            *OptionalTensors(alibi_slopes=slopes(device)),
            *flat(Options(masking=CAUSAL)),
        ),
        "window-softcap": (
            *dense(device),
            *NO_EXTRAS,
            *flat(Options(masking=Masking(window_left=3), softcap=2.0)),
        ),
        "heads-first": (
            *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense(device)),
            *NO_EXTRAS,
            *flat(Options()),
        ),
        "strided": (
            *(t[:, ::2] for t in dense(device)),
            *OptionalTensors(alibi_slopes=slopes(device, 2, 4)),
            *flat(Options()),
        ),
        "sink": (*dense(device), *OptionalTensors(sink=slopes(device)), *flat(Options(masking=CAUSAL))),
        "cells": (*dense(device), *cells(device), *flat(Options(masking=CAUSAL))),
        "used": (
            *dense(device),
            *OptionalTensors(seqused_k=used_keys(device)),
            *flat(Options(masking=Masking(window_right=1))),
        ),
        "no-rows": (*dense(device, seqlen_q=0), *NO_EXTRAS, *flat(Options())),
        "varlen": (
            *ragged,
            *OptionalTensors(*offsets),
            *flat(Options(max_seqlen_q=6, max_seqlen_k=6, masking=CAUSAL)),
        ),
    }


CALLS = tuple(operator_calls("cpu"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck_forward(name, device):
    arguments = operator_calls(device)[name]
    names = (*"qkv", *OptionalTensors._fields)
    arguments = [
        a.detach().requires_grad_() if name in (*"qkv", "sink", "bias") and a is not None else a
        for name, a in zip_longest(names, arguments)
    ]
    torch.library.opcheck(torch.ops.flashtile.forward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "given"),
    [*((name, "both") for name in CALLS), *itertools.product(("dense", "varlen", "sink"), ("dout", "dlse"))],
)
def test_opcheck_backward(name, given, device):
    arguments = operator_calls(device)[name]
    out, lse = torch.ops.flashtile.forward(*arguments)
    dout = torch.randn_like(out) if given != "dlse" else None
    dlse = torch.randn_like(lse) if given != "dout" else None
    torch.library.opcheck(
        torch.ops.flashtile.backward.default, (dout, dlse, *arguments[:3], out, lse, *arguments[3:])
    )


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_max_logits(device):
    offsets = varlen(device)[1]["cu_seqlens_q"]
    for rows, given in ((torch.randn(2, 3, 5), None), (torch.randn(3, 30), offsets)):
        torch.library.opcheck(torch.ops.flashtile.max_logits.default, (rows.to(device), given, None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_opcheck_tangents(name, device):
    q, k, v, *others = operator_calls(device)[name]
    torch.library.opcheck(torch.ops.flashtile.tangents.default, (q, k, v, q.cos(), None, v.cos(), *others))


def test_tangents_are_like_their_tensors():
    q, k, v = dense()
    others = *NO_EXTRAS, *flat(Options())
    with pytest.raises(ValueError, match="k_tangent has shape"):
        torch.ops.flashtile.tangents(q, k, v, q, q, v, *others)
    with pytest.raises(TypeError, match=r"v_tangent has dtype torch\.float64, but v has"):
        torch.ops.flashtile.tangents(q, k, v, q, k, v.double(), *others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_are_contiguous_whatever_the_layout(dtype):
    """The operator's fake, which a graph is made of, says so."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense(dtype=dtype))
    out, lse = torch.ops.flashtile.forward(q, k, v, *NO_EXTRAS, *flat(Options()))
    gradients = torch.ops.flashtile.backward(out, None, q, k, v, out, lse, *NO_EXTRAS, *flat(Options()))
    assert all(t.is_contiguous() for t in (out, lse, *gradients))


def test_fake_gradients_are_shaped_as_what_they_are_of():
    """v has a head_dim of its own."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 8, 4, dim, requires_grad=True) for dim in (16, 16, 24))
        out = flashtile.attention(q, k, v)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == (2, 8, 4, 24)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    lse = out[..., 0].mT
    tensors = (torch.empty(t.shape, device="meta") for t in (out, lse, q, k, v, out, lse))
    fakes = operators.BACKWARD.fake(*tensors, NO_EXTRAS, Options())
    assert [t.shape for t in fakes[:3]] == [q.shape, k.shape, v.shape]


def test_a_graph_refuses_what_the_call_refuses():
    """An operator without data, as a graph is made of it, sees the same checks."""
    q, k, v = (t.to("meta") for t in dense())
    with pytest.raises(ValueError, match="k has head_dim 8, but q has"):
        torch.ops.flashtile.forward(q, k[..., :8], v, *NO_EXTRAS, *flat(Options()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_compile_fullgraph(name, device):
    call = partial(flashtile.attention, return_lse=True, **OPTIONS[name])
    tensors = dense(device, grad=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, tensors), results(partial(reference.attention, **OPTIONS[name]), tensors))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
def test_compile_inductor(device):
    needs_compiler(device)
    tensors = dense(device, grad=True)

    def block(attention, q, k, v):
        out, lse = attention(q * 2, k.sin(), v)
        return out.relu() + 1, lse

    call = partial(flashtile.attention, causal=True, return_lse=True)
    compiled = torch.compile(partial(block, call), fullgraph=True)
    expected = results(partial(block, partial(reference.attention, causal=True)), tensors)
    with torch._inductor.config.patch(compile_threads=1):  # a pool of processes would import torch each
        assert_same(results(compiled, tensors), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_compile_with_a_learned_sink_and_unused_keys(device):
    tensors = dense(device, grad=True)
    sink, used = slopes(device).requires_grad_(), used_keys(device)

    def call(attention, q, k, v, sink):
        return attention(q, k, v, sink=sink, seqused_k=used, causal=True)

    ours = partial(call, partial(flashtile.attention, return_lse=True))
    expected = results(partial(call, reference.attention), [*tensors, sink])
    assert_same(results(ours, [*tensors, sink]), expected)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, [*tensors, torch.nn.Parameter(sink)]), expected)


def public_calls():
    """Every public function that computes, on tensors of its own layout."""
    q, k, v = dense(heads_kv=4, seqlen_k=9)
    (vq, vk, vv), keywords = varlen(lengths_k=(3, 0, 6), heads_kv=4)
    offsets = tuple(keywords.values())
    return {
        "attention": (flashtile.attention, (q, k, v)),
        "flash_attn_func": (flashtile.flash_attn_func, (q, k, v)),
        "flash_attn_kvpacked_func": (flashtile.flash_attn_kvpacked_func, (q, torch.stack([k, v], 2))),
        "flash_attn_qkvpacked_func": (flashtile.flash_attn_qkvpacked_func, (torch.stack([q, k, v], 2),)),
        "flash_attn_varlen_func": (flashtile.flash_attn_varlen_func, (vq, vk, vv, *offsets)),
        "flash_attn_varlen_kvpacked_func": (
            flashtile.flash_attn_varlen_kvpacked_func,
            (vq, torch.stack([vk, vv], 1), *offsets),
        ),
        "flash_attn_varlen_qkvpacked_func": (
            flashtile.flash_attn_varlen_qkvpacked_func,
            (torch.stack([vq, vk, vv], 1), offsets[0], offsets[2]),
        ),
        "merge_states": (flashtile.merge_states, (q, torch.randn(2, 4, 9), k, torch.randn(2, 4, 9))),
    }


@pytest.mark.parametrize(
    "name",
    [  # the others call these
        pytest.param(name, marks=pytest.mark.thorough if "packed" in name else ()) for name in public_calls()
    ],
)
def test_no_graph_break(name):
    function, arguments = public_calls()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")  # raises where a graph breaks
    torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_dynamic_shapes_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    call = partial(flashtile.flash_attn_func, causal=True)
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    for batch, seqlen_q, seqlen_k in ((2, 9, 12), (3, 17, 5), (5, 33, 40)):
        # Sizes that are equal in the first call are taken to be equal always: heads differ from all others.
        tensors = dense("cpu", batch, seqlen_q, seqlen_k, heads=14, heads_kv=7, grad=True)
        compiled(*tensors).sum().backward()
        compilations.append(counter.frame_count)
        expected = torch.autograd.grad(reference.attention(*tensors, causal=True)[0].sum(), tensors)
        assert_same([t.grad for t in tensors], expected)
    assert compilations == compilations[:1] * 3


def test_dynamic_lengths_and_windows_compile_twice_at_most():
    """Once static, once dynamic: a variable-length call pins neither total, longest sequence nor window."""
    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def call(q, k, v, keywords, left):
        return flashtile.attention(q, k, v, **keywords, window_size=(left, 0))

    for left, lengths in ((3, (3, 4, 6)), (4, (5, 9, 2)), (5, (20, 7, 8)), (6, (1, 2, 30))):
        tensors, keywords = varlen(lengths_q=lengths, lengths_k=lengths, grad=True)
        out = call(*tensors, keywords, left)
        expected, _ = reference.attention(*tensors, **keywords, window_size=(left, 0))
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)
        out.sum().backward()
    assert counter.frame_count <= 2


def test_lengths_from_data_compile():
    """max_seqlen from ``.item()`` and a total from a mask are symbols without a hint."""

    def call(x, mask, cu_seqlens):
        tokens = x[mask]
        longest = cu_seqlens.diff().max().item()
        qkv = tokens[:, None].expand(-1, 3, -1, -1)
        return flashtile.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest)

    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    x = torch.randn(2, 5, 2, 8, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(config):
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(x, mask, cu_seqlens)
    torch.testing.assert_close(out, call(x, mask, cu_seqlens))
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return flashtile.flash_attn_func(q, k, v, causal=True, return_lse=True)


class CausalVarlen(torch.nn.Module):
    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k):
        return flashtile.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 6, 6, causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, device, tmp_path):
    batch, seqlen = torch.export.Dim("batch", max=64), torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {name: {0: batch, 1: seqlen} for name in "qkv"}
    example = dense(device, seqlen_k=9)
    program = torch.export.export(Causal(), tuple(example), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.flashtile.forward.default in targets
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    other = dense(device, batch=3, seqlen_q=21, seqlen_k=21)
    assert_same(loaded(*other), reference.attention(*other, causal=True))


@pytest.mark.parametrize("strict", [True, False])
def test_export_varlen(strict):
    (q, k, v), keywords = varlen()
    offsets = keywords["cu_seqlens_q"], keywords["cu_seqlens_k"]
    program = torch.export.export(CausalVarlen(), (q, k, v, *offsets), strict=strict)
    expected, _ = reference.attention(q, k, v, **keywords, causal=True)
    torch.testing.assert_close(program.module()(q, k, v, *offsets), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_fake_tensors_have_the_shapes_of_real_ones(dtype):
    (vq, vk, vv), keywords = varlen()
    q, k, v = dense()
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for tensors, options in (
        (heads_first, {}),
        ((q, k, v[..., :8]), {}),
        ((q, k, v), {"causal": True}),  # fewer queries than keys
        ((k, q[:, :, :2], q[:, :, 2:]), {"causal": True}),  # and more
        ((vq, vk, vv), keywords),
        ((q, k, v), {"sink": torch.zeros(4), "seqused_k": torch.tensor([5, 12], dtype=torch.int32)}),
    ):
        tensors = [t.to(dtype) for t in tensors]
        real = flashtile.attention(*tensors, **options, return_lse=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t) for t in tensors]
            fake = flashtile.attention(*fakes, **options, return_lse=True)
        outside = flashtile.attention(*fakes, **{**options, **fake_offsets(mode, options)}, return_lse=True)
        for r, f, o in zip(real, fake, outside, strict=True):
            assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)
            assert (r.shape, r.stride(), r.dtype) == (o.shape, o.stride(), o.dtype)


def fake_offsets(mode, options):
    return {name: mode.from_tensor(t) for name, t in options.items() if isinstance(t, torch.Tensor)}


def test_meta_tensors():
    q, k, v = (t.to("meta").requires_grad_() for t in dense())
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    assert out.is_meta
    assert out.shape == (2, 9, 4, 16)
    assert lse.shape == (2, 4, 9)
    out.sum().backward()
    assert k.grad.is_meta
    assert k.grad.shape == k.shape
    assert flashtile.explain(q, k, v).backend is None


def test_dispatch_modes_see_the_operator():
    """Profilers, flop counters and selective checkpointing watch through a mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.seen.append(function)
            return function(*arguments, **(keywords or {}))

    tensors = dense(grad=True)
    with Watch() as watch:
        out = flashtile.attention(*tensors)
        out.backward(torch.ones_like(out))
    assert torch.ops.flashtile.forward.default in watch.seen
    assert torch.ops.flashtile.backward.default in watch.seen


def test_tensor_subclasses_take_part():
    class Tagged(torch.Tensor):
        pass

    q, k, v = dense()
    out = flashtile.attention(q.as_subclass(Tagged), k, v)
    assert type(out) is Tagged
    torch.testing.assert_close(out.as_subclass(torch.Tensor), flashtile.attention(q, k, v))
    parameter = torch.nn.Parameter(q)
    torch.testing.assert_close(flashtile.attention(parameter, k, v), flashtile.attention(q, k, v))
    assert flashtile.attention(parameter, k, v).requires_grad


def test_make_fx_traces_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda q, k, v: flashtile.attention(q, k, v), tracing_mode="symbolic")(*dense())
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.flashtile.forward.default in targets
    other = dense(batch=3, seqlen_q=5, seqlen_k=8)
    torch.testing.assert_close(graph(*other), flashtile.attention(*other))


def test_jit_trace_records_the_operator():
    q, k, v = dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still used
        traced = torch.jit.trace(lambda q, k, v: flashtile.attention(q, k, v), (q, k, v), check_trace=False)
    other = dense(seqlen_k=20)
    torch.testing.assert_close(traced(*other), flashtile.attention(*other))


@pytest.mark.parametrize("grad", [False, True])
def test_direct_path_and_operator_agree_bitwise(grad):
    """The eager short cut is the operator without the dispatcher."""
    tensors = dense(grad=grad)
    options = Options(masking=CAUSAL)
    direct = forward(*tensors, NO_EXTRAS, options)
    dispatched = torch.ops.flashtile.forward(*tensors, *NO_EXTRAS, *flat(options))
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b)
    if grad:
        gradients = [torch.autograd.grad(out.sum(), tensors) for out, _ in (direct, dispatched)]
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "varlen", "used"])
def test_cuda_graph(kind):
    """Forward and backward replay on new data, lengths among it, in the same memory."""
    keywords = {}
    if kind == "dense":
        tensors = dense("cuda", grad=True, dtype=torch.float16)
    elif kind == "varlen":
        tensors, keywords = varlen("cuda", grad=True)
    else:
        tensors = [*dense("cuda", grad=True), slopes("cuda").requires_grad_()]
        keywords = {"seqused_k": used_keys("cuda"), "sink": tensors[3]}

    def step():
        out, lse = flashtile.attention(*tensors[:3], **keywords, causal=True, return_lse=True)
        loss = out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        return out, *torch.autograd.grad(loss, tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_()
            if kind == "used":
                keywords["seqused_k"].copy_(torch.tensor([12 - seed, 3 * seed]))
        graph.replay()
        for a, e in zip(captured, step(), strict=True):
            torch.testing.assert_close(a, e, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_cuda_calls_do_not_synchronise():
    tensors, keywords = varlen("cuda", grad=True)
    flashtile.attention(*tensors, **keywords).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashtile.attention(*tensors, **keywords).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_side_streams():
    q, k, v = dense("cuda", seqlen_q=512, seqlen_k=512, dtype=torch.float16)
    stream = torch.cuda.Stream()
    expected = flashtile.attention(q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        out = flashtile.attention(q, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)
