"""flashtile in place of torch's scaled_dot_product_attention gives what torch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashtile
from walk import walk

pytestmark = pytest.mark.numerical

torch_attention = F.scaled_dot_product_attention


def tensors(*shapes, **options):
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(s, generator=generator).to(**options).requires_grad_() for s in shapes]


def compare(q, k, v, **options):
    """Out and gradients of a call, which flashtile must serve, beside those of torch's plain computation."""
    results = []
    with flashtile.sdpa(fallback=False) as door:
        results.append(F.scaled_dot_product_attention(q, k, v, **options))
    assert door.served == 1
    with sdpa_kernel(SDPBackend.MATH):
        results.append(torch_attention(q, k, v, **options))
    grad = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad(out, (q, k, v), grad) for out in results]
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)


@walk("seqlen_q", [5, 9, 14])
@walk("is_causal", [False, True])
def test_causal_is_aligned_to_the_upper_left(seqlen_q, is_causal):
    q, k, v = tensors((2, 4, seqlen_q, 8), (2, 2, 9, 8), (2, 2, 9, 6))
    compare(q, k, v, is_causal=is_causal, enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 3, 4, 7, 8)])
def test_any_number_of_leading_dimensions(shape):
    compare(*tensors(shape, shape, shape), is_causal=True)


def masks():
    """Masks of (3, 4, 6, 6) that flashtile serves, by what they are; every row has a key."""
    lengths = torch.tensor([6, 4, 1])
    right = torch.arange(6) < lengths[:, None]
    holes = torch.tensor([[1, 0, 1, 1, 0, 1], [1] * 6, [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    return {
        "right padding": right[:, None, None],
        "left padding": right.flip(1)[:, None, None].expand(3, 4, 6, 6),
        "holes": holes[:, None, None],
        "one for all": holes[0].expand(6, 6),
        "everything": torch.ones(6, 6, dtype=torch.bool),
        "causal": causal,
        "causal, right padding": causal & right[:, None, None],
        "causal by -inf": torch.zeros(6, 6).masked_fill(~causal, -torch.inf),
    }


@walk("name", masks())
def test_masks_that_padding_and_causality_make(name):
    compare(*tensors(*[(3, 4, 6, 8)] * 3), attn_mask=masks()[name])


def test_causal_with_left_padding_leaves_rows_without_keys_at_zero():
    mask = (torch.ones(4, 6, dtype=torch.bool).tril(2)) & (torch.arange(6) >= 4)
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    compare(q, k, v, attn_mask=mask)
    with flashtile.sdpa(fallback=False):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask)[:, :, :2], torch.zeros(1, 2, 2, 8))


@pytest.mark.parametrize("bias", [causal_lower_right(4, 6), causal_upper_left(4, 6)], ids=str)
def test_torch_s_causal_biases(bias):
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    expected = torch_attention(q, k, v, bias)
    with flashtile.sdpa(fallback=False) as door:
        out = F.scaled_dot_product_attention(q, k, v, bias)
    with flashtile.sdpa(backend="portable") as refusing:  # which needs a GPU
        by_torch = F.scaled_dot_product_attention(q, k, v, bias)
    assert (door.served, refusing.passed.total()) == (1, 1)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(by_torch, expected)


def test_a_mask_that_changes_is_looked_at_again():
    q, k, v = tensors(*[(1, 2, 6, 8)] * 3)
    mask = torch.ones(6, 6, dtype=torch.bool)
    with flashtile.sdpa() as door:
        F.scaled_dot_product_attention(q, k, v, mask)
        mask[:, 3:] = False
        out = F.scaled_dot_product_attention(q, k, v, mask)
        mask[0, 0] = False
        other = F.scaled_dot_product_attention(q, k, v, mask)
    assert door.served == 3
    torch.testing.assert_close(out, torch_attention(q, k[:, :, :3], v[:, :, :3]), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(other, torch_attention(q, k, v, mask), atol=2e-6, rtol=1e-5)


def written_from_numpy():
    memory = np.ones((6, 6), dtype=bool)
    return torch.from_numpy(memory), lambda: memory[:, 3:].fill(False)


def written_through_data():
    mask = torch.zeros(2, 1, 1, 6).expand(2, 4, 6, 6)
    return mask, lambda: mask.data[0, 0, 0, 3:].fill_(-torch.inf)


@pytest.mark.parametrize("make", [written_from_numpy, written_through_data])
def test_writes_that_no_version_counts_are_seen(make):
    q, k, v = tensors(*[(2, 4, 6, 8)] * 3)
    mask, write = make()
    with flashtile.sdpa(fallback=False):
        F.scaled_dot_product_attention(q, k, v, mask)
        write()
        out = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, torch_attention(q, k, v, mask.clone()), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("of_each", [True, False])
def test_masks_under_vmap_are_read_as_they_are(of_each):
    q, k, v = tensors(*[(3, 2, 6, 8)] * 3)
    mask = torch.ones(3, 6, 6, dtype=torch.bool).tril() if of_each else torch.ones(6, 6).tril().bool()
    with flashtile.sdpa(fallback=False) as door:
        attend = torch.func.vmap(
            lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
            in_dims=(0, 0, 0, 0 if of_each else None),
        )
        out = attend(q, k, v, mask)
    assert door.served == 1
    expected = torch_attention(q, k, v, mask[:, None] if of_each else mask)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_bad_options_of_the_door_are_refused_at_once():
    with pytest.raises(TypeError, match="fallback must be True or False, got int"):
        flashtile.sdpa(fallback=1)
    with pytest.raises(ValueError, match="backend must be None or one of hopper, portable, cpu, got 'hoper'"):
        flashtile.sdpa(backend="hoper")
    with pytest.raises(TypeError, match="backend must be None or a backend's name, got int"):
        flashtile.sdpa(backend=3)


NOT_SERVED = {
    "head_dim 600": {},
}


OTHER_MASKS = {
    "eye": torch.eye(6, dtype=torch.bool),
    "of each head": torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.5,
    "biases": torch.linspace(-1, 1, 36).view(6, 6),
    "biases of keys": torch.linspace(-1, 1, 6),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_any_other_mask_is_read_as_it_is(name):
    compare(*tensors(*[(2, 2, 6, 8)] * 3), attn_mask=OTHER_MASKS[name])


def test_a_mask_that_learns_gets_its_gradient():
    q, k, v = tensors(*[(2, 2, 6, 8)] * 3)
    bias = torch.randn(2, 6, 6, requires_grad=True)
    expected = torch.autograd.grad(torch_attention(q, k, v, bias).square().sum(), bias)
    with flashtile.sdpa(fallback=False):
        ours = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, bias).square().sum(), bias)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_dropout_follows_torch_s_generator():
    q, k, v = tensors(*[(1, 2, 6, 8)] * 3)
    outs = []
    with flashtile.sdpa(fallback=False):
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("reason", NOT_SERVED)
def test_what_is_not_served_goes_to_torch_or_raises(reason):
    head_dim = 600 if "600" in reason else 8
    q, k, v = tensors(*[(1, 2, 6, head_dim)] * 3)
    torch.manual_seed(0)
    expected = torch_attention(q, k, v, **NOT_SERVED[reason])
    torch.manual_seed(0)
    with flashtile.sdpa() as door:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **NOT_SERVED[reason]), expected)
    assert door.served == 0
    assert reason in "".join(door.passed)
    with flashtile.sdpa(fallback=False), pytest.raises(NotImplementedError, match=reason):
        F.scaled_dot_product_attention(q, k, v, **NOT_SERVED[reason])


def test_what_torch_refuses_stays_refused():
    q, k, v = tensors((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    with flashtile.sdpa(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v)
    with flashtile.sdpa(fallback=False), pytest.raises(ValueError, match="enable_gqa"):
        F.scaled_dot_product_attention(q, k, v)
    with flashtile.sdpa(fallback=False), pytest.raises(TypeError, match=r"^key must be a dense .* a nested"):
        F.scaled_dot_product_attention(q, torch.nested.nested_tensor([t[:, :2] for t in k]), v)
    with flashtile.sdpa(fallback=False), pytest.raises(TypeError, match=r"^value has dtype"):
        F.scaled_dot_product_attention(q, q, q.half())
    for shape, mask, says in (
        ((1, 2, 6, 8), (1, 1, 2, 6, 6), r"\(1, 2, 6, 6\), got shape \(1, 1, 2, 6, 6\)"),
        ((3, 1, 2, 6, 8), (2, 6, 6), r"\(1, 6, 6\), got shape \(2, 6, 6\)"),
        ((3, 1, 2, 6, 8), (5, 6), r"\(1, 6, 6\), got shape \(5, 6\)"),
    ):
        q, attn_mask = torch.ones(shape), torch.zeros(mask)
        with flashtile.sdpa(fallback=False), pytest.raises(ValueError, match=f"broadcast to {says}"):
            F.scaled_dot_product_attention(q, q, q, attn_mask)
    q, one, mask = torch.ones(1, 2, 6, 8), torch.ones(8), torch.zeros(6, 6)
    for tensors_and_options, says in (
        (
            dict(query=q, key=q, value=q, attn_mask=mask, is_causal=True),
            "attn_mask must be None with is_causal",
        ),
        (dict(query=one, key=one, value=one), r"must have 2 dimensions or more, got \(8,\)"),
        (
            dict(query=q, key=q, value=q, attn_mask=mask.to("meta")),
            "attn_mask must be on query's device, cpu",
        ),
    ):
        with flashtile.sdpa(fallback=False), pytest.raises(ValueError, match=says):
            F.scaled_dot_product_attention(**tensors_and_options)


def test_the_function_s_place_is_given_back():
    outer, inner = flashtile.sdpa(), flashtile.sdpa()
    with outer, pytest.raises(ZeroDivisionError), inner:
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is torch_attention
    with pytest.raises(RuntimeError, match=r"must be this flashtile\.sdpa"):
        outer.disable()
    outer.enable()
    with pytest.raises(RuntimeError, match="already"):
        outer.enable()
    inner.enable()
    with pytest.raises(RuntimeError, match=r"must be this flashtile\.sdpa"):
        outer.disable()
    inner.disable()
    outer.disable()
    assert F.scaled_dot_product_attention is torch_attention


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_multihead_attention_comes_this_way_and_compiles():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    with flashtile.sdpa() as door:
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
        q, k, v = tensors(*[(1, 2, 6, 8)] * 3)
        attend = torch.compile(causal_attention, backend="eager", fullgraph=True)
        out = attend(q, k, v)
    assert door.served == 2
    torch.testing.assert_close(out, torch_attention(q, k, v, is_causal=True), atol=2e-6, rtol=1e-5)


def test_torchscript_calls_torch() -> None:
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    (x,) = tensors((1, 2, 5, 8))
    with flashtile.sdpa() as door:
        scripted = torch.jit.script(attend)
        torch.jit.script(torch.nn.TransformerEncoderLayer(8, 2))
        out = scripted(x)
        assert door.served == 0
        torch.testing.assert_close(attend(x), out)
    assert torch.jit._builtins._find_builtin(door._function) is None


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_block_may_be_in_a_compiled_function(fullgraph):
    def attend(q):
        with flashtile.sdpa():
            if not fullgraph:
                torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch._dynamo.reset()
    before, q = F.scaled_dot_product_attention, torch.randn(1, 2, 9, 8)
    out = torch.compile(attend, backend="eager", fullgraph=fullgraph)(q)
    assert F.scaled_dot_product_attention is before
    torch.testing.assert_close(out, before(q, q, q, is_causal=True), atol=2e-6, rtol=1e-5)
