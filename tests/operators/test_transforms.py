"""``torch.func``: grad, vmap, jacrev and functional_call equal loops and standard attention."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch.func import functionalize, grad, jvp, vjp, vmap

import flashtile
from flashtile.reference import attention as reference
from small_calls import OPTIONS, assert_same, dense, slopes, varlen
from walk import walk

pytestmark = pytest.mark.numerical


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_func_grad(options):
    tensors = dense()

    def loss(attention, *tensors):
        out, lse = attention(*tensors, **options)
        return out.square().sum() + lse.cos().sum()

    ours = torch.func.grad(partial(loss, partial(flashtile.attention, return_lse=True)), argnums=(0, 1, 2))
    expected = torch.func.grad(partial(loss, reference.attention), argnums=(0, 1, 2))
    assert_same(ours(*tensors), expected(*tensors))


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


@pytest.mark.parametrize("slopes_dim", [None, 0])
@pytest.mark.parametrize("options", [{}, {"causal": True, "sink": slopes(), "softcap": 2.0}])
@pytest.mark.parametrize("way", ["backward", "grad", "compiled"])
def test_slopes_learn_under_vmap(way, options, slopes_dim):
    """vmap hides from the call that slopes require a gradient."""
    q, k, v = (torch.stack([t, t / 2]).double() for t in dense())
    learned = (slopes() if slopes_dim is None else slopes("cpu", 2, 4)).requires_grad_()
    each = (learned, learned) if slopes_dim is None else learned
    expected = sum(
        reference.attention(*sample, alibi_slopes=of_sample, **options)[0].square().sum()
        for *sample, of_sample in zip(q, k, v, each, strict=True)
    )

    def loss(x):
        def attend(*sample):
            return flashtile.attention(*sample[:3], alibi_slopes=sample[3], **options)

        return torch.func.vmap(attend, in_dims=(0, 0, 0, slopes_dim))(q, k, v, x).square().sum()

    if way == "grad":
        gradient = torch.func.grad(loss)(learned.detach())
    else:
        run = torch.compile(loss, backend="aot_eager") if way == "compiled" else loss
        gradient = torch.autograd.grad(run(learned), learned)[0]
    assert_same((gradient,), torch.autograd.grad(expected, learned))


@pytest.mark.parametrize(
    "differentiate", [torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))]
)
def test_second_derivatives_of_slopes(differentiate):
    tensors, learned = dense(batch=1, seqlen_q=3, seqlen_k=5, dtype=torch.float64), slopes()

    def derivative(attention):
        return differentiate(lambda s: attention(*tensors, alibi_slopes=s)[0].square().sum())(learned)

    ours, expected = map(derivative, (partial(flashtile.attention, return_lse=True), reference.attention))
    assert_same((ours,), (expected,))


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_vmap_of_second_derivatives_of_slopes_equals_a_loop(options):
    tensors = dense(batch=1, seqlen_q=3, seqlen_k=5, dtype=torch.float64)
    second = torch.func.jacrev(
        torch.func.jacrev(lambda s: flashtile.attention(*tensors, alibi_slopes=s, **options).square().sum())
    )
    learned = torch.stack([slopes(), 2 * slopes()])
    assert_same((torch.func.vmap(second)(learned),), (torch.stack([second(one) for one in learned]),))


@pytest.mark.parametrize("sink_dim", [None, 0])
def test_vmap_of_sinks_equals_a_loop(sink_dim):
    """The gradient of a sink that samples share is still one for each of them."""
    samples = 3
    q, k, v = (torch.stack([t + i / 3 for i in range(samples)]) for t in dense())
    sink = slopes() if sink_dim is None else slopes("cpu", samples, 4)
    dims = (0, 0, 0, sink_dim)

    def loss(attention, q, k, v, sink):
        out, lse = attention(q, k, v, sink=sink, causal=True)
        return out.square().sum() + lse.sin().sum()

    ours = partial(loss, partial(flashtile.attention, return_lse=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = torch.func.vmap(ours, in_dims=dims)(q, k, v, sink)
        gradients = torch.func.vmap(torch.func.grad(ours, argnums=(0, 1, 2, 3)), in_dims=dims)(q, k, v, sink)
    for i in range(samples):
        sample = [t if d is None else t.select(d, i) for t, d in zip((q, k, v, sink), dims, strict=True)]
        leaves = [t.clone().requires_grad_() for t in sample]
        expected = loss(reference.attention, *leaves)
        torch.testing.assert_close(value[i], expected, atol=1e-4, rtol=1e-5)
        assert_same([g[i] for g in gradients], torch.autograd.grad(expected, leaves))


def test_vmap_of_masks_and_biases_equals_a_loop():
    """A bias and a mask that samples share, or that have sizes of 1, need no batch of their own."""
    samples = 3
    q, k, v = (torch.randn(samples, 2, 7, 4, 16) for _ in range(3))
    mask, bias = torch.rand(2, 1, 7, 7) > 0.3, torch.randn(samples, 1, 4, 1, 7)

    def loss(attention, q, k, v, mask, bias):
        out = attention(q, k, v, mask=mask, bias=bias)
        return (out if isinstance(out, torch.Tensor) else out[0]).square().sum()

    differentiate = torch.func.grad(partial(loss, flashtile.attention), argnums=(0, 1, 2, 4))
    ours = torch.func.vmap(differentiate, in_dims=(0, 0, 0, None, 0))(q, k, v, mask, bias)
    theirs = torch.func.grad(partial(loss, reference.attention), argnums=(0, 1, 2, 4))
    for i in range(samples):
        for gradient, expected in zip(ours, theirs(q[i], k[i], v[i], mask, bias[i]), strict=True):
            torch.testing.assert_close(gradient[i], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sink_dim", [None, 0, "no sink"])
def test_vmap_over_no_samples(sink_dim):
    q, k, v = (t.new_empty(0, *t.shape) for t in dense())
    sink = slopes() if sink_dim is None else slopes("cpu", 0, 4)

    def call(q, k, v, sink):
        return flashtile.attention(q, k, v, sink=None if sink_dim == "no sink" else sink, return_lse=True)

    def loss(*tensors):
        out, lse = call(*tensors)
        return out.sum() + lse.sum()

    dims = (0, 0, 0, None if sink_dim is None else 0)
    out, lse = torch.func.vmap(call, in_dims=dims)(q, k, v, sink)
    assert (out.shape, lse.shape) == (q.shape, (0, 2, 4, 9))
    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=dims)(q, k, v, sink)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, (0, 4)]


@pytest.mark.parametrize("used_dim", [None, 0])
def test_vmap_of_used_lengths_equals_a_loop(used_dim):
    samples = 3
    q, k, v = (torch.stack([t + i / 3 for i in range(samples)]) for t in dense())
    used = torch.tensor([4, 11], dtype=torch.int32)
    if used_dim is not None:
        used = torch.stack([used - i for i in range(samples)])
    dims = (0, 0, 0, used_dim)

    def call(attention, q, k, v, used):
        return attention(q, k, v, seqused_k=used, causal=True)

    ours = partial(call, partial(flashtile.attention, return_lse=True))
    out, lse = torch.func.vmap(ours, in_dims=dims)(q, k, v, used)
    for i in range(samples):
        sample = [t if d is None else t.select(d, i) for t, d in zip((q, k, v, used), dims, strict=True)]
        assert_same((out[i], lse[i]), call(reference.attention, *sample))


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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sink", torch.rand(4, 3)),
        ("alibi_slopes", torch.rand(4, 3)),
        ("seqused_k", torch.tensor([[3, 5, 9]], dtype=torch.int32)),
        ("seqused_q", torch.tensor([[3, 5, 9]], dtype=torch.int32)),
        ("sink", torch.rand(4)),
        ("seqused_k", torch.tensor([5], dtype=torch.int32)),
    ],
)
@pytest.mark.parametrize("has_qv", [False, True])
def test_vmap_over_any_dimension(name, values, has_qv):
    """The last dimension of a small tensor, or none, so that the samples share it."""
    q, k, v = dense(batch=1, seqlen_k=9)
    samples = torch.stack([q, 2 * q, 3 * q])
    dim = 1 if values.dim() == 2 else None
    attend = lambda q, x: flashtile.attention(q, k, v, qv=q if has_qv else None, **{name: x})  # noqa: E731
    out = torch.func.vmap(attend, in_dims=(0, dim))(samples, values)
    own = [values if dim is None else values[:, i].contiguous() for i in range(3)]
    expected = torch.stack([attend(x, y) for x, y in zip(samples, own, strict=True)])
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def _attend(q, k, v):
    return flashtile.attention(q, k, v, causal=True)


def test_functionalize_changes_nothing():
    tensors = tuple(dense())
    tangents = tuple(t.cos() for t in tensors)
    functional = functionalize(_attend)
    expected = jvp(_attend, tensors, tangents)
    assert_same(jvp(functional, tensors, tangents), expected)
    within = functionalize(lambda *given: jvp(_attend, given, tangents))
    assert_same(within(*tensors), expected)
    gradients = []
    for attend in (functional, _attend):
        learned = [t.requires_grad_() for t in dense()]
        gradients.append(torch.autograd.grad(attend(*learned).square().sum(), learned))
    assert_same(*gradients)


def _append(q, k_cache, v_cache):
    flashtile.append_kvcache(k_cache, v_cache, q[:, :1, :2], q[:, :1, :2], cache_seqlens=0)


def _decode(q, k_cache, v_cache):
    return flashtile.flash_attn_with_kvcache(q, k_cache, v_cache)


_NO_RULE = "^q must not be differentiated or mapped .* functionalize"
REFUSED = {
    "grad within": (lambda f, *t: functionalize(grad(lambda *t: f(*t).sum()))(*t), _attend, _NO_RULE),
    "grad around": (lambda f, *t: grad(lambda *t: functionalize(f)(*t).sum())(*t), _attend, _NO_RULE),
    "decoding": (lambda f, *t: grad(lambda *t: functionalize(f)(*t).sum())(*t), _decode, _NO_RULE),
    "vmap within": (lambda f, *t: functionalize(vmap(f))(*(x[None] for x in t)), _attend, _NO_RULE),
    "tangents around": (lambda f, *t: jvp(functionalize(f), t, t), _decode, "^q must carry no tangents"),
    "a later gradient": (lambda f, *t: functionalize(vjp(f, *t)[1])(t[0]), _attend, "^dout must not be"),
    "a cache": (lambda f, *t: functionalize(f)(*t), _append, "^k_cache must not be written under func"),
    "a cache of each sample": (lambda f, *t: vmap(f)(*(x[None] for x in t)), _append, "^k_cache .* vmap"),
}


@walk("transform", REFUSED)
def test_what_torch_func_cannot_transform_is_named(transform):
    transformed, call, message = REFUSED[transform]
    with pytest.raises(NotImplementedError, match=message):
        transformed(call, *dense())
