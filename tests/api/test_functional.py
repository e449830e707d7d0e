"""The public functions: FlashAttention-2's signatures, packed forms, return values, number-like arguments."""

from __future__ import annotations

import inspect
import itertools
import warnings
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile import fp8
from flashtile.checks.conversions import make_options
from flashtile.compat.flash_attn.flash_attn_interface import _flash_attn_varlen_forward
from flashtile.problems.masking import EVERYTHING
from flashtile.reference import attention as reference
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

COMMON = (
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

# flash-attn 2.8: names, order and defaults.
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), COMMON),
    "flash_attn_kvpacked_func": (("q", "kv"), COMMON),
    "flash_attn_qkvpacked_func": (("qkv",), COMMON),
    "flash_attn_varlen_func": (("q", "k", "v", *LENGTHS), (*COMMON, ("block_table", None))),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *LENGTHS), COMMON),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), COMMON),
}
OWN_KEYWORDS = {
    "sink": None,
    "return_lse": False,
    "return_max_logits": False,
    "return_entropy": False,
    "backend": None,
}


@walk("name", SIGNATURES)
def test_signature_is_flash_attentions(name):
    required, defaulted = SIGNATURES[name]
    parameters = inspect.signature(getattr(flashtile, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [
        *((argument, inspect.Parameter.empty) for argument in required),
        *defaulted,
    ]
    types = [type(p.default) for p in positional[len(required) :]]  # 0.0 == False
    assert types == [type(default) for _, default in defaulted]
    keyword_only = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    own = OWN_KEYWORDS | ({"seqused_k": None, "invariant": False} if name == "flash_attn_varlen_func" else {})
    if "packed" not in name:  # as FlashAttention-3's, and memory for results
        own |= dict.fromkeys(("q_descale", "k_descale", "v_descale", "qv", "out", "lse"))
    assert keyword_only == own
    unknown = [p for p in parameters if p.kind is p.VAR_KEYWORD]  # which are refused
    assert len(positional) + len(keyword_only) + len(unknown) == len(parameters)


@walk("name", ["attention", *SIGNATURES])
@walk(
    ("keyword", "instead"),
    [
        ("attn_mask", "window_size"),
        ("attention_mask", "flash_attn_varlen_func"),
        ("is_causal", "causal"),
        ("odd", None),
    ],
)
def test_other_functions_keywords_are_refused_with_what_to_use(name, keyword, instead):
    required = 3 if name == "attention" else len(SIGNATURES[name][0])
    with pytest.raises(TypeError) as raised:
        getattr(flashtile, name)(*[None] * required, **{keyword: True})  # before any of them is looked at
    message = str(raised.value)
    assert message.startswith(f"{name}() got an unexpected keyword argument '{keyword}'")
    assert instead is None or instead in message.partition(":")[2]


def test_attention_takes_three_tensors_by_place():
    attention = inspect.signature(flashtile.attention).parameters
    assert [p.name for p in attention.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == ["q", "k", "v"]
    for name, default in COMMON[1:-1]:
        assert attention[name].default == default


def test_every_public_function_is_documented():
    for name in flashtile.__all__:
        documentation = inspect.getdoc(getattr(flashtile, name))
        assert documentation, name
        assert len(documentation) > 60, name


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 9, 4, 16) for _ in range(3)]


@pytest.fixture
def ragged():
    """q, k, v of 10 tokens in sequences of 3, 0 and 7, and their offsets."""
    torch.manual_seed(0)
    return [torch.randn(10, 4, 16) for _ in range(3)], torch.tensor([0, 3, 3, 10], dtype=torch.int32)


def slopes():
    return torch.tensor([0.5, 0.25, 0.125, 0.0625])


POSITIONAL = (0.0, 0.3, True, (4, -1), 2.0, slopes(), True)
"""dropout_p to deterministic, by position."""
KEYWORDS = dict(zip([name for name, _ in COMMON[1:-1]], POSITIONAL[1:], strict=True))


def equal(actual, expected):
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None and e is None) or torch.equal(a, e)


@pytest.mark.parametrize("keywords", [{}, {"return_lse": True}, {"return_attn_probs": True}])
def test_positional_packed_and_named_forms_agree(tensors, keywords):
    q, k, v = tensors
    expected = flashtile.flash_attn_func(q, k, v, **KEYWORDS, **keywords)
    equal(flashtile.flash_attn_func(q, k, v, *POSITIONAL, **keywords), expected)
    equal(flashtile.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *POSITIONAL, **keywords), expected)
    equal(flashtile.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *POSITIONAL, **keywords), expected)


@pytest.mark.parametrize("keywords", [{}, {"return_lse": True}, {"return_attn_probs": True}])
def test_positional_packed_and_named_varlen_forms_agree(ragged, keywords):
    (q, k, v), offsets = ragged
    lengths = (offsets, offsets, 7, 7)
    expected = flashtile.flash_attn_varlen_func(q, k, v, *lengths, **KEYWORDS, **keywords)
    equal(flashtile.flash_attn_varlen_func(q, k, v, *lengths, *POSITIONAL, **keywords), expected)
    kv = torch.stack([k, v], 1)
    equal(flashtile.flash_attn_varlen_kvpacked_func(q, kv, *lengths, *POSITIONAL, **keywords), expected)
    qkv = torch.stack([q, k, v], 1)
    equal(flashtile.flash_attn_varlen_qkvpacked_func(qkv, offsets, 7, *POSITIONAL, **keywords), expected)


def test_flash_attention_functions_are_attention(tensors, ragged):
    equal(flashtile.flash_attn_func(*tensors, **KEYWORDS), flashtile.attention(*tensors, **KEYWORDS))
    qkv, offsets = ragged
    lengths = dict(zip(LENGTHS, (offsets, offsets, 7, 7), strict=True))
    expected, expected_lse = reference.attention(*qkv, **lengths, causal=True)
    out, lse = flashtile.attention(*qkv, **lengths, causal=True, return_lse=True)
    equal(flashtile.flash_attn_varlen_func(*qkv, **lengths, causal=True, return_lse=True), (out, lse))
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)


def test_packed_grouped_heads(tensors):
    q, k, v = tensors[0], tensors[1][:, :, :2], tensors[2][:, :, :2]
    kv = torch.stack([k, v], 2)
    expected = flashtile.flash_attn_func(q, k, v, causal=True)
    equal(flashtile.flash_attn_kvpacked_func(q, kv, causal=True), expected)


def wanting_gradients(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def test_packed_gradients_are_those_of_the_parts(tensors, ragged):
    def gradients(out, inputs):
        return torch.autograd.grad(out.square().sum(), inputs)

    parts, packed = wanting_gradients(tensors), torch.stack(tensors, 2).requires_grad_()
    (ours,) = gradients(flashtile.flash_attn_qkvpacked_func(packed, causal=True), packed)
    equal(ours, torch.stack(gradients(flashtile.flash_attn_func(*parts, causal=True), parts), 2))

    tensors, offsets = ragged
    parts, packed = wanting_gradients(tensors), torch.stack(tensors, 1).requires_grad_()
    (ours,) = gradients(flashtile.flash_attn_varlen_qkvpacked_func(packed, offsets, 7), packed)
    out = flashtile.flash_attn_varlen_func(*parts, offsets, offsets, 7, 7)
    equal(ours, torch.stack(gradients(out, parts), 1))


def test_return_values(tensors, ragged):
    q, k, v = tensors
    call = partial(flashtile.flash_attn_func, q, k, v)
    out = call()
    assert isinstance(out, torch.Tensor)
    assert out.shape == q.shape
    with_lse = call(return_lse=True)
    assert isinstance(with_lse, tuple)
    assert with_lse[1].shape == (2, 4, 9)
    assert with_lse[1].dtype == torch.float32
    for keywords in ({"return_attn_probs": True}, {"return_attn_probs": True, "return_lse": True}):
        first, lse, probabilities = call(**keywords)
        equal((first, lse), with_lse)
        assert probabilities is None
    (q, k, v), offsets = ragged
    _, lse = flashtile.flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, return_lse=True)
    assert lse.shape == (4, 10)
    doubles = [t.double() for t in tensors]
    assert flashtile.attention(*doubles, return_lse=True)[1].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_head_dim_of_v_is_its_own(dtype):
    q, k, v = (torch.randn(1, 5, 2, d, dtype=dtype) for d in (16, 16, 24))
    out = flashtile.attention(q, k, v)
    assert out.shape == (1, 5, 2, 24)
    assert out.dtype == dtype
    assert out.is_contiguous()


@walk(
    "window_size",
    [
        [3, 1],
        (np.int64(3), np.int32(1)),
        np.array([3, 1]),
        torch.tensor([3, 1]),
        (torch.tensor(3), torch.tensor([1])),
        iter((3, 1)),
    ],
)
def test_window_size_is_any_pair_of_ints(tensors, window_size):
    expected = flashtile.attention(*tensors, window_size=(3, 1))
    assert not torch.equal(expected, flashtile.attention(*tensors))
    equal(flashtile.attention(*tensors, window_size=window_size), expected)


@walk("two", [2, np.float32(2), np.float64(2), np.int64(2), Fraction(2)])
@walk("name", ["softcap", "softmax_scale"])
def test_numbers_are_any_real_ones(tensors, name, two):
    equal(flashtile.attention(*tensors, **{name: two}), flashtile.attention(*tensors, **{name: 2.0}))


@pytest.mark.parametrize("seven", [np.int32(7), torch.tensor(7), torch.tensor([7], dtype=torch.int32)])
def test_lengths_are_any_ints(ragged, seven):
    (q, k, v), offsets = ragged
    call = partial(flashtile.flash_attn_varlen_func, q, k, v, offsets, offsets)
    equal(call(seven, seven), call(7, 7))
    equal(call(100, 8), call(7, 7))


def test_defaults_say_what_they_are(tensors):
    q, k, v = tensors
    expected = flashtile.attention(q, k, v)
    equal(flashtile.attention(q, k, v, softmax_scale=16**-0.5), expected)
    equal(flashtile.attention(q, k, v, window_size=(-1, -1), softcap=0, backend="cpu"), expected)
    uniform = v.mean(1, keepdim=True).expand(v.shape)
    torch.testing.assert_close(flashtile.attention(q, k, v, softmax_scale=0.0), uniform, atol=1e-6, rtol=1e-5)
    causal = flashtile.attention(q, k, v, causal=True)
    for right in (0, 3, -1):
        equal(flashtile.attention(q, k, v, causal=True, window_size=(-1, right)), causal)
    equal(flashtile.attention(q, k, v, window_size=(-1, 0)), causal)
    equal(flashtile.attention(q, k, v, window_size=(2**31 - 1, 2**31 - 1)), expected)


def test_pages_hold_what_ragged_keys_hold(ragged):
    (q, k, v), offsets = ragged
    table = torch.randperm(12)[:9].view(3, 3).int()
    k_pages, v_pages = (torch.full((12, 3, *t.shape[1:]), torch.nan) for t in (k, v))
    for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        for i in range(end - start):
            page = table[b, i // 3]
            k_pages[page, i % 3], v_pages[page, i % 3] = k[start + i], v[start + i]
    expected = flashtile.flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True, return_lse=True)
    got = flashtile.flash_attn_varlen_func(
        q, k_pages, v_pages, offsets, offsets, 7, 7, causal=True, block_table=table, return_lse=True
    )
    torch.testing.assert_close(got, expected)


def test_own_arguments_are_keyword_only(tensors):
    for function in (flashtile.flash_attn_func, flashtile.attention, flashtile.explain):
        positions = 11 if function is flashtile.flash_attn_func else 3
        with pytest.raises(TypeError, match="positional"):
            function(*tensors, *range(positions - 3), True)


def test_inputs_are_left_alone(tensors):
    copies = [t.clone() for t in tensors]
    alibi_slopes = slopes()
    out = flashtile.attention(*(t.requires_grad_() for t in tensors), causal=True, alibi_slopes=alibi_slopes)
    out.sum().backward()
    for tensor, copy in zip((*tensors, alibi_slopes), (*copies, slopes()), strict=True):
        assert torch.equal(tensor, copy)


def test_tokens_after_the_last_sequence(ragged):
    (q, k, v), _ = ragged
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    parts = wanting_gradients((q, k, v))
    out, lse = flashtile.flash_attn_varlen_func(*parts, offsets, offsets, 4, 4, return_lse=True)
    assert (out[7:] == 0).all()
    assert (lse[:, 7:] == -torch.inf).all()
    for gradient in torch.autograd.grad(out.square().sum(), parts):
        assert (gradient[7:] == 0).all()
        assert gradient[:7].abs().sum() > 0


@walk("step", [1, 2])
@walk(("seqlen_q", "seqlen_k", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0), (1, 1, 1), (4, 1, 1)])
def test_nothing_to_attend_to(seqlen_q, seqlen_k, batch, step):
    """Tensors without elements may have any strides."""
    q = torch.randn(batch, seqlen_q, 4, 8 * step)[..., ::step].requires_grad_()
    k, v = (torch.randn(batch, seqlen_k, 2, 8 * step)[..., ::step].requires_grad_() for _ in "kv")
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = reference.attention(*(t.contiguous() for t in (q, k, v)), causal=True)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-5)
    for tensor, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.isfinite().all()


def test_torchs_own_switch_makes_gradients_deterministic():
    assert not make_options(EVERYTHING).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert make_options(EVERYTHING).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert make_options(EVERYTHING, deterministic=True).deterministic


def looks(q_shape, k_shape=None):
    """The warnings that a call on tensors of these shapes gives, and its error if it has one."""
    q, k = torch.zeros(q_shape), torch.zeros(k_shape or q_shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            flashtile.attention(q, k, k)
        except ValueError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((2, 8, 300, 4), None),  # 8 heads of 300 tokens
        ((1, 8, 17, 4), (1, 2, 17, 4)),  # grouped heads: more queries than keys, as many heads
        ((1, 8, 17, 4), (1, 8, 23, 4)),  # cross-attention: heads that do not divide
    ],
)
def test_a_transposed_layout_is_pointed_out(q_shape, k_shape, monkeypatch):
    (message,) = looks(q_shape, k_shape)
    assert "(batch, heads, seqlen, head_dim)" in message
    assert "transpose(1, 2)" in message
    monkeypatch.setenv("FLASHTILE_LAYOUT_HINTS", "0")
    assert "transpose" not in "".join(looks((*q_shape[:-1], 5), k_shape and (*k_shape[:-1], 5)))


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((2, 300, 8, 4), None),
        ((2, 1, 128, 4), (2, 40, 8, 4)),
        ((1, 4, 2, 4), (1, 2, 2, 4)),
        ((1, 3, 64, 4), None),
    ],
)
def test_layouts_that_may_be_meant_are_not(q_shape, k_shape):
    assert looks(q_shape, k_shape) == []
    (message,) = looks((1, 17, 8, 4), (1, 17, 3, 4))  # an error of another kind
    assert "transpose" not in message


def test_the_stride_of_a_single_column_may_be_anything():
    q, k, v = (torch.randn(1, 8, 1, 2).transpose(2, 3) for _ in range(3))  # (1, 8, 2, 1)
    assert q.stride(-1) != 1
    expected = flashtile.attention(*(t.contiguous() for t in (q, k, v)))
    torch.testing.assert_close(flashtile.attention(q, k, v), expected)


@walk("shape", [(), (7,), (5, 1), (5, 7), (4, 1, 1), (2, 1, 5, 1), (2, 4, 5, 7)])
def test_masks_and_biases_broadcast_to_the_scores(shape):
    """With their gradients, which have the shape that was given."""
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 7, 4, 8, dtype=torch.float64).unbind()
    mask = torch.rand(shape) > 0.3 if shape else torch.tensor(True)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    whole = 2, 4, 5, 7
    out, lse = flashtile.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    expected = flashtile.attention(q, k, v, mask=mask.expand(whole), bias=bias.expand(whole))
    assert torch.equal(out, expected)
    weights = flashtile.attention_weights(q, k, lse.detach(), mask=mask, bias=bias.detach())
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, v), out.detach())
    dout = torch.randn_like(out)
    gradient, expected = (torch.autograd.grad(o, bias, dout)[0] for o in (out, expected))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("seqlen_q", [1, 2, 3])
def test_masks_and_biases_of_few_queries(seqlen_q):
    q, k, v = torch.randn(1, seqlen_q, 2, 8), *torch.randn(2, 1, 6, 2, 8).unbind()
    mask = torch.rand(1, 1, seqlen_q, 6) > 0.4
    mask[..., 0] = True
    bias = torch.randn(1, 2, seqlen_q, 6)
    scores = bias.masked_fill(~mask, -torch.inf)
    exact = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scores).transpose(1, 2)
    torch.testing.assert_close(flashtile.attention(q, k, v, mask=mask, bias=bias), exact)


def test_offsets_of_int64_are_cast(ragged):
    """Wherever FlashAttention's callers pass them; cumsum gives them so."""
    (q, k, v), offsets = ragged
    packed = {"max_seqlen_q": 7, "max_seqlen_k": 7, "return_attn_weights": "columns"}
    cache = torch.randn(2, 3, 20, 4, 16).unbind()
    found, expected = (
        [
            flashtile.flash_attn_varlen_func(q, k, v, of, of, 7, 7),
            *flashtile.attention(q, k, v, cu_seqlens_q=of, cu_seqlens_k=of, **packed),
            flashtile.flash_attn_varlen_qkvpacked_func(torch.stack([q] * 3, 1), of, 7),
            _flash_attn_varlen_forward(q, k, v, of, of, 7, 7, 0.0, None, False)[0],
            flashtile.flash_attn_with_kvcache(
                q, *(t.clone() for t in cache), k, v, cache_seqlens=1, cu_seqlens_q=of, max_seqlen_q=7,
                cu_seqlens_k_new=of,
            ),
            fp8.quantize(q.half(), "k", cu_seqlens=of, max_seqlen=7).values.float(),
        ]
        for of in (offsets.long(), offsets)
    )  # fmt: skip
    equal(tuple(found), tuple(expected))
