"""flashtile's kernels of torch's flash attention operators, here on the CPU, and torch's registry of them."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile import testing
from flashtile.integrations import sdpa
from flashtile.integrations import torch as door
from flashtile.integrations.torch import KERNELS, Kernels, register, unregister
from small_calls import dense, slopes, varlen

aten = torch.ops.aten
pages = pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="torch is older than 2.13"
)


@pytest.fixture
def on_cpu():
    """The operators have no kernels of torch's own on the CPU."""
    kernels = Kernels("CPU")
    yield
    kernels.remove()


def through_sdpa(q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, return_lse=True):
    tensors = [t.transpose(1, 2) for t in (q, k, v)]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*tensors, dropout_p, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def through_flash(
    q, k, v, *, causal=False, softmax_scale=None, window_size=(None, None), dropout_p=0.0, return_lse=True,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, **others,
):  # fmt: skip
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    left, right = window_size
    named = {"window_size_left": left, "window_size_right": right, "scale": softmax_scale, **others}
    return aten._flash_attention_forward(q, k, v, *lengths, dropout_p, causal, False, **named)[:2]


def check(function, tensors, **arguments):
    """Apply the error rule; torch's operators have no gradient through lse."""
    dout, _ = testing.random_gradients(tensors[0], tensors[2], varlen="cu_seqlens_q" in arguments)
    testing.check(*(t.detach() for t in tensors), dout=dout, function=function, **arguments)


@pytest.mark.parametrize("seqlen_q", [7, 12, 15])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", [through_sdpa, through_flash])
def test_dense_calls_keep_the_error_rule(on_cpu, function, causal, seqlen_q):
    """Causal is aligned to the bottom right, as ``causal_lower_right`` of torch.nn.attention.bias expects."""
    check(function, dense(seqlen_q=seqlen_q), causal=causal, softmax_scale=0.3)


def test_nested_tensors(on_cpu, monkeypatch):
    """torch chooses its flash backend for them on a GPU only, so the choice is made here."""
    inner = pytest.importorskip("torch.nested._internal.sdpa")
    monkeypatch.setattr(inner, "_select_sdp_backend", lambda *_, **__: SDPBackend.FLASH_ATTENTION)
    sequences = [[torch.randn(length, 4, 16) for length in (5, 9, 3)] for _ in range(3)]
    q, k, v = (torch.nested.nested_tensor(t, layout=torch.jagged).transpose(1, 2) for t in sequences)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for got, *parts in zip(out.unbind(), *sequences, strict=True):
        expected = flashtile.flash_attn_func(*(t[None] for t in parts), causal=True)[0]
        torch.testing.assert_close(got.transpose(0, 1), expected)


def test_values_may_have_another_head_size(on_cpu):
    """As in multi-head latent attention, for which torchtitan calls ``varlen_attn`` so."""
    q, k, v = dense()
    check(through_flash, (q, k, v[..., :8]), causal=True)


def test_16_bit_inputs_keep_the_error_rule(on_cpu):
    check(through_sdpa, dense(dtype=torch.bfloat16), causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (-1, 0)}])
def test_packed_calls_keep_the_error_rule(on_cpu, options):
    tensors, lengths = varlen()
    check(through_flash, tensors, **lengths, **options)


def test_arguments_that_only_the_forward_pass_has(on_cpu):
    tensors, lengths = varlen()
    used = torch.tensor([2, 0, 5], dtype=torch.int32)
    for others in ({"seqused_k": used}, {"alibi_slopes": slopes()}):
        got = through_flash(*tensors, **lengths, **others)
        torch.testing.assert_close(got, flashtile.attention(*tensors, **lengths, **others, return_lse=True))
        with pytest.raises(NotImplementedError, match=f"{next(iter(others))} must be None if query"):
            through_flash(tensors[0].detach().requires_grad_(), *tensors[1:], **lengths, **others)


@pytest.mark.parametrize("function", [through_sdpa, through_flash])
def test_dropout_draws_from_torch_s_generator_and_keeps_its_state_for_the_backward_pass(on_cpu, function):
    q, k, v = dense(grad=True)
    results = []
    for attend in (function, flashtile.attention):
        torch.manual_seed(3)
        out, _ = attend(q, k, v, dropout_p=0.25, return_lse=True)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    torch.testing.assert_close(*results, atol=0, rtol=0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_results_have_the_strides_that_torch_promises_to_its_compiler(on_cpu, order):
    given = torch.randn(2, 3, 4, 8).permute(order)
    q, k, v = (given.detach().clone().requires_grad_() for _ in range(3))
    out = aten._scaled_dot_product_flash_attention(q, k, v)[0]  # torch passes no argument that is the default
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=2e-6, rtol=1e-5)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [t.stride() for t in (out, *gradients)] == [given.stride()] * 4
    with_gaps = torch.randn(*given.shape, 2)[..., 0]
    assert aten._scaled_dot_product_flash_attention(with_gaps, k, v)[0].is_contiguous()


def test_fp8_with_scales(on_cpu):
    q, k, v = (t.transpose(1, 2).to(torch.float8_e4m3fn) for t in dense(head_dim=64))
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    out, lse, *_ = aten._scaled_dot_product_flash_attention.quantized(q, k, v, *scales, 0.0, True, scale=0.1)
    names = ("q_descale", "k_descale", "v_descale")
    expected, expected_lse = flashtile.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), causal=True, softmax_scale=0.1, return_lse=True,
        **dict(zip(names, scales, strict=True)),
    )  # fmt: skip
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)


def test_varlen_attn_and_its_gradients_in_a_compiled_graph(on_cpu):
    """torch's public function, with symbolic lengths."""
    from torch.nn.attention.varlen import varlen_attn

    compiled = torch.compile(varlen_attn, backend="aot_eager", dynamic=True, fullgraph=True)
    for lengths_q in ((3, 0, 6), (5, 2, 1)):
        (q, k, v), lengths = varlen(lengths_q=lengths_q, heads_kv=4, grad=True)
        expected = flashtile.attention(q, k, v, **lengths)
        dout = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), dout)
        for attend in (varlen_attn, compiled):
            out = attend(q, k, v, *lengths.values())
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), wanted)


@pages
@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_attn_over_pages_and_into_out(on_cpu, num_splits):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    (q, k, v), lengths = varlen(lengths_q=(1, 3, 2), lengths_k=(5, 9, 2))
    starts = lengths["cu_seqlens_k"]
    table = torch.tensor([[4, 0, 0], [1, 5, 2], [3, 0, 0]], dtype=torch.int32)
    caches = [torch.full((6, 4, 2, 16), torch.nan) for _ in range(2)]
    table[0, 1] = 0
    for cache, packed in zip(caches, (k, v), strict=True):
        for row, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
            for page, rows in zip(table[row].tolist(), packed[start:stop].split(4), strict=False):
                cache[page, : len(rows)] = rows
    expected, expected_lse = flashtile.attention(
        q, k, v, **lengths, causal=True, window_size=(-1, 0), return_lse=True
    )
    arguments = (q, *caches, lengths["cu_seqlens_q"], None, 3, 9)
    named = {
        "return_aux": AuxRequest(lse=True), "window_size": (-1, 0), "enable_gqa": True,
        "seqused_k": starts.diff(), "block_table": table, "num_splits": num_splits,
    }  # fmt: skip
    out = torch.empty_like(q)
    into, lse = varlen_attn_out(out, *arguments, **named)
    assert into is out
    for got in ((out, lse), varlen_attn(*arguments, **named)):
        torch.testing.assert_close(got, (expected, expected_lse))


def test_what_no_kernel_computes_is_refused_by_the_names_of_aten(on_cpu):
    q, k, v = (t.transpose(1, 2) for t in dense())
    says = r"return_debug_mask must be False.*restore_flash_attention_impl"
    with pytest.raises(NotImplementedError, match=says):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.1, False, True)
    with pytest.raises(ValueError, match="key"):
        aten._scaled_dot_product_flash_attention(q, k[..., :8], v)
    tensors, lengths = varlen()
    with pytest.raises(ValueError, match="max_q"):
        through_flash(*tensors, **lengths | {"max_seqlen_q": 1})


def test_activation_replaces_torch_s_kernels_until_it_is_restored():
    def kernels() -> int:
        names = [name for name in KERNELS if hasattr(aten, name.split(".")[0])]
        dumps = [torch._C._dispatch_dump(f"aten::{name}") for name in names]
        return len([d for d in dumps if re.search(r"^CUDA.*integrations/torch\.py", d, re.MULTILINE)])

    attention = torch.nn.attention
    register()
    register()
    assert kernels() == 0
    attention.activate_flash_attention_impl("flashtile")
    assert attention.current_flash_attention_impl() == "flashtile"
    assert kernels() >= 6
    attention.restore_flash_attention_impl()
    assert kernels() == 0
    attention.activate_flash_attention_impl("flashtile")
    unregister()
    assert attention.current_flash_attention_impl() is None
    assert kernels() == 0
    assert "flashtile" not in attention.list_flash_attention_impls()
    assert sdpa.register is register


def test_flashtile_takes_the_place_of_torch_s_own_implementation_until_unregister():
    from torch.nn.attention import _registry

    known = _registry._FLASH_ATTENTION_IMPLS
    before = dict(known)
    register("FA3")
    register("FA3")
    assert known["FA3"] is not before["FA3"]
    torch.nn.attention.activate_flash_attention_impl("FA3")
    assert torch.nn.attention.current_flash_attention_impl() == "FA3"
    unregister()
    unregister()
    assert known == before
    assert torch.nn.attention.current_flash_attention_impl() is None
    with pytest.raises(ValueError, match="name must be one of 'flashtile', 'FA3', 'FA4', got 'FA2'"):
        register("FA2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "is_causal", "gqa"), list(itertools.product([64, 72], [False, True], [False, True]))
)
def test_torch_s_flash_backend_is_flashtile(head_dim, is_causal, gqa, monkeypatch):
    attention = torch.nn.attention
    heads = 2 if gqa else 4
    shapes = (2, 4, 96, head_dim), *[(2, heads, 96, head_dim)] * 2
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes
    )
    calls = []
    original = door._attend
    monkeypatch.setattr(door, "_attend", lambda *a, **o: calls.append(1) or original(*a, **o))
    options = {"is_causal": is_causal, "enable_gqa": gqa}
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options)
    grad = torch.randn_like(q)
    wanted = torch.autograd.grad(expected, (q, k, v), grad.float())
    register()
    attention.activate_flash_attention_impl("flashtile")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, **options)
            gradients = torch.autograd.grad(out, (q, k, v), grad)
            attend = torch.compile(lambda *t: F.scaled_dot_product_attention(*t, **options) * 2)
            torch.testing.assert_close(attend(q, k, v), out * 2)
    finally:
        attention.restore_flash_attention_impl()
    assert calls
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(gradients, wanted, atol=6e-2, rtol=6e-2)
