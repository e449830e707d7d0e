"""flashtile.nn.MultiheadAttention computes what torch's does, from torch's weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import flashtile
from walk import walk

pytestmark = pytest.mark.numerical

KINDS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 12, "vdim": 20, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}
LENGTHS = torch.tensor([7, 4, 1])
RIGHT = torch.arange(7) >= LENGTHS[:, None]  # True is left out
CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)
CALLS = {
    "nothing": {},
    "right padding": {"key_padding_mask": RIGHT},
    "padding as floats": {"key_padding_mask": torch.zeros(3, 7).masked_fill(RIGHT, -torch.inf)},
    "causal": {"attn_mask": CAUSAL},
    "causal of each head": {"attn_mask": CAUSAL.expand(6, 7, 7)},
    "causal hint": {"attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True},
    "causal, right padding": {"attn_mask": CAUSAL, "key_padding_mask": RIGHT},
    "other": {"attn_mask": torch.ones(6).diag(1).bool(), "key_padding_mask": RIGHT},
    "biases": {"attn_mask": torch.linspace(-1, 1, 6 * 49).view(6, 7, 7)},
    "biases of both": {
        "attn_mask": torch.full((7, 7), 0.3),
        "key_padding_mask": torch.linspace(0, 1, 21).view(3, 7),
    },
    "causal hint, right padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": RIGHT},
    "padding in between, with the hint": {
        "attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": torch.arange(7) == LENGTHS[:, None] - 2,
    },
}  # fmt: skip


def pair(**options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(16, 2, **options)
    for parameter in theirs.parameters():  # torch's biases are 0 at first
        torch.nn.init.normal_(parameter, std=0.2)
    ours = flashtile.nn.MultiheadAttention(16, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(module, seqlen_q=7):
    generator = torch.Generator().manual_seed(1)
    sizes = (seqlen_q, 16), (7, module.kdim), (7, module.vdim)
    tensors = [torch.randn(3, *size, generator=generator) for size in sizes]
    return tensors if module.batch_first else [t.transpose(0, 1) for t in tensors]


def compare(modules, tensors, **call):
    results = []
    for module in modules:
        given = [t.detach().requires_grad_() for t in tensors]
        out, weights = module(*given, **call)
        call = {**call, "is_causal": False}  # with the hint torch forgets the key of add_zero_attn
        gradients = torch.autograd.grad(out.square().sum(), [*given, *module.parameters()])
        results.append((out, weights, gradients))
    torch.testing.assert_close(results[0], results[1], atol=5e-5, rtol=1e-4)


@walk("kind", KINDS)
@walk("call", CALLS)
def test_out_weights_and_gradients_are_torch_s(kind, call):
    modules = pair(**KINDS[kind])
    if KINDS[kind].get("add_bias_kv") and "causal" in call:
        with pytest.raises(NotImplementedError, match="add_bias_kv"):
            modules[0](*inputs(modules[0]), **CALLS[call])
        return
    compare(modules, inputs(modules[0]), **CALLS[call])


def test_queries_of_another_length_weights_of_each_head_and_no_batch():
    modules = pair(batch_first=True)
    compare(modules, inputs(modules[0], 5), key_padding_mask=RIGHT, average_attn_weights=False)
    compare(modules, [t[0] for t in inputs(modules[0], 5)], key_padding_mask=RIGHT[1])


@walk("kind", ["bias_kv", "both"])
def test_the_added_key_is_seen_where_there_are_no_others(kind):
    modules = pair(**KINDS[kind])
    query, key, value = inputs(modules[0], 5)
    none = (slice(None), slice(0)) if modules[0].batch_first else slice(0)
    compare(modules, [query, key[none], value[none]])


@walk("floats", [False, True])
def test_a_mask_of_each_head_of_no_sequences(floats):
    query, mask = torch.randn(5, 0, 16), torch.zeros(0, 5, 5)
    out, weights = flashtile.nn.MultiheadAttention(16, 2)(
        *[query] * 3, attn_mask=mask if floats else mask > 0
    )
    assert (out.shape, weights.shape) == ((5, 0, 16), (0, 5, 5))


@pytest.mark.parametrize("of", [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)])
def test_one_tensor_is_several_inputs(of):
    modules = pair(batch_first=True)
    results = []
    for module in modules:
        given = [t.clone().requires_grad_() for t in inputs(module)[: 1 + max(of)]]
        out, weights = module(*(given[i] for i in of), need_weights=False)
        assert weights is None
        results.append((out, *torch.autograd.grad(out.square().sum(), [*given, *module.parameters()])))
    torch.testing.assert_close(results[0], results[1], atol=5e-5, rtol=1e-4)


def test_weights_add_up_to_1_if_torch_rounds_products_of_float32():
    """lse is of exact scores. The projections are rounded, as in torch's module."""
    module = flashtile.nn.MultiheadAttention(64, 2, batch_first=True)
    x = 4 * torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        _, weights = module(x, x, x)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 50))


def test_weights_have_the_gradient_of_torch_s():
    modules = pair(batch_first=True)
    gradients = []
    for module in modules:
        q = inputs(module)[0].clone().requires_grad_()
        _, weights = module(q, q, q, attn_mask=CAUSAL)
        gradients.append(torch.autograd.grad(weights.square().sum(), q))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)


def test_statistics_follow_the_weights():
    module = flashtile.nn.MultiheadAttention(32, 4, batch_first=True, add_zero_attn=True)
    x = torch.randn(2, 10, 32)
    padding = torch.tensor([[False] * 10, [False] * 7 + [True] * 3])
    options = {"key_padding_mask": padding, "average_attn_weights": False}
    _, weights, largest, entropy = module(x, x, x, return_max_logits=True, return_entropy=True, **options)
    torch.testing.assert_close(entropy, torch.special.entr(weights).sum(-1))
    ratio = (weights[..., :-1].amax(-1) / weights[..., -1]).amax(-1)  # to the key of zeros, whose score is 0
    torch.testing.assert_close(largest, ratio.log())
    _, _, alone = module(x[0], x[0], x[0], return_max_logits=True)
    torch.testing.assert_close(alone, largest[0])


def test_it_serves_within_torch_s_layers():
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    ours.self_attn = flashtile.nn.MultiheadAttention(16, 2, batch_first=True)
    ours.self_attn.load_state_dict(theirs.self_attn.state_dict())
    x = torch.randn(3, 7, 16)
    out, expected = (layer(x, src_key_padding_mask=RIGHT) for layer in (ours, theirs))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_weights_show_what_dropout_in_training_dropped():
    module = flashtile.nn.MultiheadAttention(16, 2, dropout=0.4, batch_first=True)
    x = torch.randn(3, 7, 16)
    out, weights = module(x, x, x, key_padding_mask=RIGHT, average_attn_weights=False)
    values = F.linear(x, module.in_proj_weight[32:], module.in_proj_bias[32:]).unflatten(-1, (2, 8))
    heads = torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(-2)
    torch.testing.assert_close(out, module.out_proj(heads), atol=1e-5, rtol=1e-4)
    assert (weights == 0).sum() > RIGHT.sum() * 14
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_what_it_does_not_serve_has_a_name():
    module = flashtile.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 7, 16)
    narrow = torch.zeros(7, 7, dtype=torch.float8_e5m2)
    refused = [
        (TypeError, "attn_mask must be bool", {"attn_mask": torch.zeros(7, 7, dtype=torch.int64)}),
        *(
            (TypeError, f"{name} must be bool, float16.* got torch.float8_e5m2", {name: mask})
            for name, mask in (("attn_mask", narrow), ("key_padding_mask", narrow[:3]))
        ),
        (ValueError, r"key_padding_mask must have shape \(3, 7\)", {"key_padding_mask": RIGHT[:2]}),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            module(x, x, x, **call)
    with pytest.raises(ValueError, match="key must have"):
        module(x, x[..., :8], x)
    with pytest.raises(ValueError, match="key has batch size 2"):
        module(x, x[:2], x[:2])
    with pytest.raises(TypeError, match="nested"):
        module(*[torch.nested.nested_tensor([x[0], x[1]])] * 3)


@pytest.mark.parametrize("how", ["vmap", "compile", "meta"])
def test_masks_that_cannot_be_looked_at(how):
    """Under a transform, in a graph and without data they are read as they are."""
    ours = flashtile.nn.MultiheadAttention(16, 2, batch_first=True)
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x, named = torch.randn(3, 7, 16), {"attn_mask": CAUSAL, "key_padding_mask": RIGHT}
    if how == "meta":
        x, named = x.to("meta"), {name: mask.to("meta") for name, mask in named.items()}
        out, weights = ours.to("meta")(x, x, x, **named)
        assert (out.shape, weights.shape) == ((3, 7, 16), (3, 7, 7))
        return
    expected = theirs(x, x, x, **named)
    if how == "vmap":
        found = torch.func.vmap(lambda x: ours(x, x, x, **named))(x[None])
        found = tuple(t[0] for t in found)
    else:
        found = torch.compile(ours, backend="eager", fullgraph=True)(x, x, x, **named)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@walk(
    ("changed", "error", "says"),
    [
        ({"query": torch.ones(3, 7, 8).half()}, TypeError, "query must have the dtype of the module's"),
        ({"value": torch.ones(3, 7, 8).double()}, TypeError, "value must have the dtype of the module"),
        ({"key": torch.ones(3, 7, 8, device="meta")}, ValueError, "key must be on the device of the module"),
        ({"need_weights": "no"}, TypeError, "need_weights must be True or False, got str"),
        ({"average_attn_weights": None}, TypeError, "average_attn_weights must be True or False"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False, got int"),
        (
            dict.fromkeys(("query", "key", "value"), torch.ones(7, 8)) | {"key_padding_mask": 3},
            TypeError,
            "key_padding_mask must be a torch.Tensor",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed, error, says):
    x = torch.ones(3, 7, 8)
    module = flashtile.nn.MultiheadAttention(8, 2, batch_first=True)
    with pytest.raises(error, match=says):
        module(**{"query": x, "key": x, "value": x, **changed})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_under_dropout_are_of_the_dtype_of_the_module(dtype):
    module = flashtile.nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).to(dtype)
    x = torch.randn(3, 7, 8, dtype=dtype)
    out, weights = module(x, x, x, average_attn_weights=False)
    assert weights.dtype == dtype
    value = module._project(True, x, x, x)[2]
    expected = module.out_proj(torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(-2))
    bound = 8 * torch.finfo(dtype).eps * (1 + expected.abs().max().item())  # a few roundings each
    torch.testing.assert_close(out, expected, atol=bound, rtol=0)
