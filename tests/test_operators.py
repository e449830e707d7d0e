"""The operators under all that looks into a call: compile, export, autograd, checkpoints, autocast, vmap."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import operators, reference
from flashtile.problem import Options

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.3},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dense(
    device="cpu", batch=2, seqlen_q=9, seqlen_k=12, heads=4, heads_kv=2, head_dim=16, grad=False, dtype=None
):
    generator = torch.Generator(device).manual_seed(0)
    sizes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    tensors = [
        torch.randn(batch, seqlen, h, head_dim, device=device, dtype=dtype, generator=generator)
        for seqlen, h in sizes
    ]
    return [tensor.requires_grad_(grad) for tensor in tensors]


def varlen(device="cpu", lengths_q=(3, 0, 6), lengths_k=(4, 2, 6), heads=4, heads_kv=2, grad=False):
    """q, k, v and the keyword arguments that go with them."""
    q, _, _ = dense(device, 1, sum(lengths_q), 1, heads, heads_kv)
    _, k, v = dense(device, 1, 1, sum(lengths_k), heads, heads_kv)
    offsets = [
        torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    ]
    keywords = {
        "cu_seqlens_q": offsets[0],
        "cu_seqlens_k": offsets[1],
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return [t[0].detach().clone().requires_grad_(grad) for t in (q, k, v)], keywords


def slopes(device="cpu", *shape):
    return torch.rand(shape or (4,), device=device)


def operator_calls(device):
    """Arguments of ``flashtile::forward`` by name."""
    (vq, vk, vv), keywords = varlen(device)
    offsets = keywords["cu_seqlens_q"], keywords["cu_seqlens_k"]
    return {
        "dense": (*dense(device), None, None, None, *Options()),
        "causal-alibi": (*dense(device), None, None, slopes(device), *Options(causal=True)),
        "window-softcap": (*dense(device), None, None, None, *Options(window_left=3, softcap=2.0)),
        "strided": (*(t[:, ::2] for t in dense(device)), None, None, slopes(device, 2, 4), *Options()),
        "no-rows": (*dense(device, seqlen_q=0), None, None, None, *Options()),
        "varlen": (vq, vk, vv, *offsets, None, *Options(max_seqlen_q=6, max_seqlen_k=6, causal=True)),
    }


CALLS = tuple(operator_calls("cpu"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck_forward(name, device):
    arguments = operator_calls(device)[name]
    arguments = (*(t.detach().requires_grad_() for t in arguments[:3]), *arguments[3:])
    torch.library.opcheck(torch.ops.flashtile.forward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("given", ["both", "dout", "dlse"])
def test_opcheck_backward(name, given, device):
    arguments = operator_calls(device)[name]
    out, lse = torch.ops.flashtile.forward(*arguments)
    dout = torch.randn_like(out) if given != "dlse" else None
    dlse = torch.randn_like(lse) if given != "dout" else None
    torch.library.opcheck(
        torch.ops.flashtile.backward.default, (dout, dlse, *arguments[:3], out, lse, *arguments[3:])
    )


def results(function, tensors):
    """(out, lse) and the gradients of all tensors that want one, by a loss that uses both."""
    out, lse = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    loss = (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return out, lse, *torch.autograd.grad(loss, [t for t in tensors if t.requires_grad])


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPTIONS)
def test_compile_fullgraph(name, backend, device):
    call = partial(flashtile.attention, return_lse=True, **OPTIONS[name])
    tensors = dense(device, grad=True)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    assert_same(results(compiled, tensors), results(partial(reference.attention, **OPTIONS[name]), tensors))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compile_inductor(device):
    tensors = dense(device, grad=True)

    def block(attention, q, k, v):
        out, lse = attention(q * 2, k.sin(), v)
        return out.relu() + 1, lse

    call = partial(flashtile.attention, causal=True, return_lse=True)
    compiled = torch.compile(partial(block, call), fullgraph=True)
    expected = results(partial(block, partial(reference.attention, causal=True)), tensors)
    assert_same(results(compiled, tensors), expected)


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


@pytest.mark.parametrize("name", public_calls())
def test_no_graph_break(name):
    function, arguments = public_calls()[name]
    explanation = torch._dynamo.explain(function)(*arguments)
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments), function(*arguments)
    )


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


def results_with_backward(function, tensors):
    """Like ``results``, by ``backward``: reentrant checkpointing knows no other."""
    for tensor in tensors:
        tensor.grad = None
    out, lse = function(*tensors)
    (out.square().sum() + lse.sin().sum()).backward()
    return out, lse, *(t.grad for t in tensors)


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


@pytest.mark.parametrize("forward_compiled", [False, True])
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


def gradient_with_graph(call, q, k, v):
    (gradient,) = torch.autograd.grad(call(q, k, v).square().sum(), q, create_graph=True)
    return gradient


def test_second_derivative_is_refused():
    q, k, v = dense(grad=True)
    gradient = gradient_with_graph(flashtile.attention, q, k, v)
    expected = gradient_with_graph(lambda *t: reference.attention(*t)[0], q, k, v)
    assert_same((gradient,), (expected,))
    assert gradient.requires_grad
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        gradient.square().sum().backward()
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad((gradient.sum() + q.sum()), q)


def test_second_derivative_is_refused_through_the_operator():
    def call(q, k, v):
        return torch.ops.flashtile.forward(q, k, v, None, None, None, *Options())[0]

    gradient = gradient_with_graph(call, *dense(grad=True))
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        gradient.sum().backward()


def test_second_derivative_is_refused_when_compiled():
    compiled = torch.compile(flashtile.attention, backend="aot_eager")

    def second_derivative():
        gradient_with_graph(compiled, *dense(grad=True)).sum().backward()

    with pytest.raises(RuntimeError, match="double backward"):
        second_derivative()


def test_forward_mode_is_refused():
    q, k, v = dense()
    with forward_ad.dual_level():
        for tensors in ((forward_ad.make_dual(q, q), k, v), (q, forward_ad.make_dual(k, k), v)):
            with pytest.raises(NotImplementedError, match="tangents"):
                flashtile.attention(*tensors)
        torch.testing.assert_close(flashtile.attention(q, k, v), reference.attention(q, k, v)[0])
    for wrap in (lambda f: f, partial(torch.compile, backend="aot_eager")):
        with pytest.raises(NotImplementedError, match="tangents"):
            wrap(lambda q: torch.func.jvp(lambda a: flashtile.attention(a, k, v), (q,), (q,))[1])(q)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_func_grad(options):
    tensors = dense()

    def loss(attention, *tensors):
        out, lse = attention(*tensors, **options)
        return out.square().sum() + lse.cos().sum()

    ours = torch.func.grad(partial(loss, partial(flashtile.attention, return_lse=True)), argnums=(0, 1, 2))
    expected = torch.func.grad(partial(loss, reference.attention), argnums=(0, 1, 2))
    assert_same(ours(*tensors), expected(*tensors))


def test_func_second_derivative_is_refused():
    q, k, v = dense()
    gradient = torch.func.grad(lambda a: flashtile.attention(a, k, v).sum())
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.func.grad(lambda a: gradient(a).sum())(q)


def test_functional_call():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x):
            return flashtile.flash_attn_qkvpacked_func(self.qkv(x).unflatten(-1, (3, 2, 8)), causal=True)

    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 2, 7, 16)
    weights = dict(block.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(block, weights, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for i in range(3):
        expected = torch.autograd.grad(block(x[i]).square().sum(), list(weights.values()))
        assert_same([per_sample[name][i] for name in weights], expected)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0, 0), (0, None, None, None), (1, 0, None, 0), (None, 0, 2, None)]
)
@pytest.mark.parametrize("slopes_shape", [(), (4,), (2, 4)], ids=["plain", "slopes", "slopes-of-batches"])
def test_vmap_equals_a_loop(in_dims, slopes_shape):
    samples = 3

    def mapped(tensor, dim):
        return tensor if dim is None else torch.stack([tensor + i / 3 for i in range(samples)], dim)

    tensors = [mapped(t, d) for t, d in zip(dense(), in_dims[:3], strict=True)]
    if slopes_shape:
        tensors.append(mapped(slopes("cpu", *slopes_shape), in_dims[3]))
    dims = in_dims[: len(tensors)]

    def call(attention, q, k, v, alibi_slopes=None):
        return attention(q, k, v, causal=True, alibi_slopes=alibi_slopes)

    ours = partial(call, partial(flashtile.attention, return_lse=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it would loop itself
        out, lse = torch.func.vmap(ours, in_dims=dims)(*tensors)
        gradient_of_sample = torch.func.grad(lambda *t: ours(*t)[0].square().sum())
        gradient = torch.func.vmap(gradient_of_sample, in_dims=dims)(*tensors)
    for i in range(samples):
        sample = [t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)]
        q = sample[0].clone().requires_grad_()
        expected = call(reference.attention, q, *sample[1:])
        assert_same((out[i], lse[i]), expected)
        assert_same((gradient[i],), torch.autograd.grad(expected[0].square().sum(), q))


def test_vmap_nests():
    x = torch.randn(2, 3, 2, 5, 2, 8)
    out = torch.func.vmap(torch.func.vmap(lambda a: flashtile.attention(a, a, a)))(x)
    flat = x.flatten(0, 2)
    torch.testing.assert_close(out, flashtile.attention(flat, flat, flat).view_as(out), atol=2e-6, rtol=1e-5)


def test_vmap_of_varlen_is_refused():
    (q, k, v), keywords = varlen()
    with pytest.raises(NotImplementedError, match="cu_seqlens_q must be None under vmap"):
        torch.func.vmap(lambda a: flashtile.attention(a, k, v, **keywords))(torch.stack([q, q]))


def test_jacrev():
    q, k, v = (t.double() for t in dense(batch=1, seqlen_q=2, seqlen_k=3, heads=2, heads_kv=1, head_dim=2))
    ours = torch.func.jacrev(lambda a: flashtile.attention(a, k, v, causal=True))(q)
    expected = torch.func.jacrev(lambda a: reference.attention(a, k, v, causal=True)[0])(q)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_fake_tensors_have_the_shapes_of_real_ones(dtype):
    (vq, vk, vv), keywords = varlen()
    q, k, v = dense()
    for tensors, options in (
        ((q, k, v[..., :8]), {}),
        ((q, k, v), {"causal": True}),  # fewer queries than keys
        ((k, q[:, :, :2], q[:, :, 2:]), {"causal": True}),  # and more
        ((vq, vk, vv), keywords),
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
    options = Options(causal=True)
    direct = operators.forward(*tensors, None, None, None, options)
    dispatched = torch.ops.flashtile.forward(*tensors, None, None, None, *options)
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b)
    if grad:
        gradients = [torch.autograd.grad(out.sum(), tensors) for out, _ in (direct, dispatched)]
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_cuda_graph(kind):
    """Forward and backward replay on new data in the same memory."""
    if kind == "dense":
        tensors, keywords = dense("cuda", grad=True, dtype=torch.float16), {}
    else:
        tensors, keywords = varlen("cuda", grad=True)

    def step():
        out, lse = flashtile.attention(*tensors, **keywords, causal=True, return_lse=True)
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
