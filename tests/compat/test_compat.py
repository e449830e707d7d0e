"""Code written for FlashAttention runs unchanged if flashtile is installed under its names."""

from __future__ import annotations

import inspect
import pickle
import sys
import types

import numpy as np
import pytest
import torch

import flashtile
from flashtile.api import padding
from flashtile.compat import (
    MODULES,
    flash_attn_interface,
    flex,
    install_as_flash_attn,
    uninstall_as_flash_attn,
)
from flashtile.compat.flash_attn import bert_padding, cute
from flashtile.compat.flash_attn.layers import rotary
from walk import walk

pytestmark = pytest.mark.numerical


@pytest.fixture
def installed():
    install_as_flash_attn()
    yield
    uninstall_as_flash_attn()


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def test_the_names_are_lent_and_given_back():
    assert not set(MODULES) & set(sys.modules)
    install_as_flash_attn()
    install_as_flash_attn()
    import flash_attn
    import flash_attn.bert_padding
    import flash_attn_interface

    assert inspect.unwrap(flash_attn.flash_attn_varlen_func) is flashtile.flash_attn_varlen_func
    assert flash_attn.bert_padding.pad_input.__module__ == "flashtile.compat.flash_attn.bert_padding"
    assert tuple(int(n) for n in flash_attn.__version__.split(".")) >= (2, 8)
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.losses"):
        import flash_attn.losses
    uninstall_as_flash_attn()
    uninstall_as_flash_attn()
    assert not set(MODULES) & set(sys.modules)
    assert flash_attn_interface.flash_attn_func is not flashtile.flash_attn_func


def test_a_package_that_is_imported_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.layers", types.ModuleType("flash_attn.layers"))
    with pytest.raises(RuntimeError, match=r"flash_attn\.layers must not be imported before"):
        install_as_flash_attn()
    assert "flash_attn" not in sys.modules
    uninstall_as_flash_attn()
    assert "flash_attn.layers" in sys.modules


def test_the_functions_below_autograd_make_a_ring(installed):
    """Attention over two shards of keys, merged; backward by shards, from the out and lse of the whole."""
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v = tensors((2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 8))
    expected = flashtile.attention(q, k, v, softmax_scale=0.3)
    dout = torch.randn(expected.shape)
    shards = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    parts = [_flash_attn_forward(q, *shard, 0.0, 0.3, causal=False) for shard in shards]
    assert all(len(part) == 4 and not part[0].requires_grad for part in parts)
    out, lse = flashtile.merge_states(*parts[0][:2], *parts[1][:2])
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    dq = torch.zeros_like(q)
    gradients = []
    for shard in shards:
        buffers = [torch.full_like(t, torch.nan) for t in (q, *shard)]
        _flash_attn_backward(dout, q, *shard, out, lse, *buffers, 0.0, 0.3, False, -1, -1, 0.0, None, False)
        dq += buffers[0]
        gradients.append(buffers[1:])
    found = dq, *(torch.cat(pair, 1) for pair in zip(*gradients, strict=True))
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), dout), atol=1e-5, rtol=1e-4)


def test_the_packed_functions_below_autograd(installed):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    q, k, v = tensors((9, 4, 8), (9, 2, 8), (9, 2, 8))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = offsets, offsets, 5, 5
    expected = flashtile.flash_attn_varlen_func(q, k, v, *lengths, causal=True, window_size=(2, 0))
    dout = torch.randn(expected.shape)
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *lengths, 0.0, None, True, 2, 0)
    buffers = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    _flash_attn_varlen_backward(dout, q, k, v, out, lse, *buffers, *lengths, 0.0, None, True, 2, 0)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, buffers, torch.autograd.grad(expected, (q, k, v), dout)))
    with pytest.raises(ValueError, match=r"lse must have shape \(4, 9\)"):
        _flash_attn_varlen_backward(dout, q, k, v, out, lse.T, *buffers, *lengths, 0.0, None, True)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_below_autograd(installed, packed):
    """The state that the forward pass returns drops the same in the backward pass."""
    from flash_attn import flash_attn_interface as fa2

    q, k, v = tensors((9, 4, 8), (9, 2, 8), (9, 2, 8))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = (offsets, offsets, 5, 5) if packed else ()
    if packed:
        forward, backward = fa2._flash_attn_varlen_forward, fa2._flash_attn_varlen_backward
    else:
        q, k, v = (t.detach()[None].requires_grad_() for t in (q, k, v))
        forward, backward = fa2._flash_attn_forward, fa2._flash_attn_backward
    out, lse, signed, state = forward(q, k, v, *lengths, 0.4, None, True, return_softmax=True)
    assert signed.lt(0).any()
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=False))
    expected = flashtile.attention(q, k, v, **names, causal=True, dropout_p=0.4, rng_state=state)
    assert torch.equal(out, expected)
    buffers, dout = [torch.full_like(t, torch.nan) for t in (q, k, v)], torch.randn(out.shape)
    backward(dout, q, k, v, out, lse, *buffers, *lengths, 0.4, None, True, rng_state=state)
    assert all(map(torch.equal, buffers, torch.autograd.grad(expected, (q, k, v), dout)))


@pytest.mark.parametrize("packed", [False, True])
def test_s_dmask_is_not_normalised_as_flash_attention_2_s(installed, packed):
    """FlashAttention-2's tests split the keys into blocks and multiply by exp(maximum of the block - lse)."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.flash_attn_interface import USE_TRITON_ROCM, _flash_attn_forward, _get_block_size_n

    q, k, v = tensors((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
    named = {"causal": True, "window_size": (4, 0), "return_attn_probs": True}
    torch.manual_seed(0)
    if packed:
        offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7)]
        tokens = [t.flatten(0, 1) for t in (q, k, v)]
        out, lse, s_dmask = flash_attn_varlen_func(*tokens, *offsets, 5, 7, 0.5, **named)
        out, lse = out.view(2, 5, 4, 8), lse.view(4, 2, 5).transpose(0, 1)
    else:
        out, lse, s_dmask = flash_attn_func(q, k, v, 0.5, **named)
    assert _get_block_size_n(q.device, 8, True, True) >= k.shape[1]
    assert not USE_TRITON_ROCM
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    distance = torch.arange(7) - 2 - torch.arange(5)[:, None]
    scores.masked_fill_((distance > 0) | (distance < -4), -torch.inf)
    found = s_dmask.abs() * (scores.amax(-1) - lse)[..., None].exp()
    torch.testing.assert_close(found, scores.softmax(-1))
    kept = torch.where(s_dmask >= 0, found, 0) / 0.5
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", kept, v))
    if not packed:
        torch.manual_seed(0)
        signed = _flash_attn_forward(q, k, v, 0.5, None, True, 4, 0, return_softmax=True)[2]
        assert torch.equal(signed, s_dmask)
        assert (flashtile.flash_attn_func(q, k, v, 0.5, **named)[2].abs().sum(-1) < 1.001).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_s_dmask_is_rounded_once(installed, dtype):
    from flash_attn import flash_attn_func

    q, k, v = (4 * t.detach().to(dtype) for t in tensors((1, 40, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16)))
    out, _, s_dmask = flash_attn_func(q, k, v, 0.5, softmax_scale=0.25, return_attn_probs=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 0.25
    assert s_dmask.dtype == out.dtype
    expected = (scores - scores.amax(-1, keepdim=True)).exp()
    torch.testing.assert_close(s_dmask.abs().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    probabilities = flashtile.flash_attn_func(q, k, v, 0.5, softmax_scale=0.25, return_attn_probs=True)[2]
    torch.testing.assert_close(probabilities.abs(), scores.softmax(-1).float(), rtol=1e-4, atol=1e-6)


def test_s_dmask_of_rows_without_keys_is_zero(installed):
    from flash_attn import flash_attn_func

    q, k, v = tensors((1, 3, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8))
    assert flash_attn_func(q, k, v, 0.5, causal=True, return_attn_probs=True)[2].abs().tolist() == [
        [[[0], [0], [1]]]
    ]
    assert flash_attn_func(q, k[:, :0], v[:, :0], 0.5, return_attn_probs=True)[2].shape == (1, 1, 3, 0)
    assert flash_attn_func(q, k, v, return_attn_probs=True)[2] is None
    assert len(flash_attn_func(q, k, v, return_lse=True)) == 2
    assert pickle.loads(pickle.dumps(flash_attn_func)) is flash_attn_func


def test_splits_below_autograd_are_refused_as_by_flash_attention_2(installed):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    q, pages = torch.randn(2, 2, 8), torch.randn(2, 4, 2, 2, 8).unbind()
    offsets, table = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([[1], [3]], dtype=torch.int32)
    arguments = (q, *pages, offsets, 2 * offsets, 1, 2, 0.0, None, False)
    named = {"block_table": table, "seqused_k": torch.tensor([2, 2], dtype=torch.int32)}
    out = _flash_attn_varlen_forward(*arguments, **named)[0]
    assert torch.equal(_flash_attn_varlen_forward(*arguments, **named, num_splits=0)[0], out)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        _flash_attn_varlen_forward(*arguments, **named, num_splits=2)


def test_bert_padding(installed):
    from flash_attn import bert_padding

    (states,) = tensors((3, 5, 2, 4))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(states, mask)
    assert torch.equal(tokens, states[mask.bool()])
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 8, 10], 5, [3, 5, 2])
    padded = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(padded, states * mask[:, :, None, None])
    (gradient,) = torch.autograd.grad(padded.sum(), states)
    assert torch.equal(gradient, mask[:, :, None, None].expand_as(states).float())
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [1, 0, 0, 0, 0]])
    _, _, cu_seqlens, _, used = bert_padding.unpad_input(states, mask, unused)
    assert (cu_seqlens.tolist(), used.tolist()) == ([0, 4, 9, 12], [3, 5, 2])
    several = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0], [1, 1, 2, 0, 0]])
    tokens, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(
        states, several
    )
    assert (cu_seqlens.tolist(), longest, tokens.shape[0]) == ([0, 2, 3, 8, 9, 10, 12], 5, 12)
    assert torch.equal(bert_padding.index_first_axis(states.flatten(0, 1), indices), tokens)
    assert bert_padding.index_put_first_axis(tokens, indices, 15).shape == (15, 2, 4)
    for wrong, error, text in (
        (indices[None], ValueError, r"^indices must have shape \(total,\)"),
        (indices.to("meta"), (ValueError, NotImplementedError), "^indices is on meta"),
    ):
        with pytest.raises(error, match=text):
            bert_padding.index_first_axis(states.flatten(0, 1), wrong)


def test_rotary_scales_of_xpos_are_1_in_the_middle(installed):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    rotary = RotaryEmbedding(6, scale_base=4.0)
    rotary._update_cos_sin_cache(20, torch.device("cpu"), torch.float32)
    plain = RotaryEmbedding(6)
    plain._update_cos_sin_cache(20, torch.device("cpu"), torch.float32)
    middle, after = 10, 14
    torch.testing.assert_close(rotary._cos_cached[middle], plain._cos_cached[middle])
    scale = (torch.arange(0, 6, 2) + 0.4 * 6) / (1.4 * 6)  # the power is (14 - 10) / 4
    torch.testing.assert_close(rotary._sin_cached[after], plain._sin_cached[after] * scale)
    torch.testing.assert_close(rotary._sin_k_cached[after], plain._sin_cached[after] / scale)
    tables, elsewhere = (plain._cos_cached, plain._sin_cached), torch.ones(1, device="meta").int()
    with pytest.raises((ValueError, NotImplementedError), match=r"^seqlen_offsets is on meta"):
        apply_rotary_emb(torch.ones(1, 2, 1, 6), *tables, seqlen_offsets=elsewhere)


def test_rotary_tables_made_in_another_mode_are_not_used_outside_of_it(installed):
    from flash_attn.layers.rotary import RotaryEmbedding
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(2, 4, 3, 2, 8)
    for mode in (torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True)):
        rotary = RotaryEmbedding(8).eval()
        with mode:
            rotary(x.clone())
        learned = x.clone().requires_grad_()
        rotary(learned * 1).sum().backward()
        assert learned.grad is not None


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_turns_pairs_by_their_positions(installed, interleaved):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_torch

    (x,) = tensors((2, 3, 2, 8))
    rotary = RotaryEmbedding(6, interleaved=interleaved)
    rotary._update_cos_sin_cache(20, x.device, x.dtype)
    cos, sin = rotary._cos_cached, rotary._sin_cached
    offsets = torch.tensor([4, 18])
    turned = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    frequencies = 10000.0 ** -(torch.arange(3) / 3)
    for b, i in ((0, 2), (1, 0), (1, 1)):
        angles = (offsets[b] + i) * frequencies
        pairs = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
        numbers = torch.complex(x[b, i, :, pairs[0]], x[b, i, :, pairs[1]]) * torch.polar(
            torch.ones(3), angles
        )
        torch.testing.assert_close(turned[b, i, :, pairs[0]], numbers.real, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(turned[b, i, :, pairs[1]], numbers.imag, atol=1e-5, rtol=1e-5)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[1, 2], x[1, 2])  # position 20 has no row
    packed = apply_rotary_emb(
        x.flatten(0, 1)[:5], cos, sin, interleaved, seqlen_offsets=offsets,
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32), max_seqlen=3,
    )  # fmt: skip
    torch.testing.assert_close(packed, turned.flatten(0, 1)[:5])
    torch.testing.assert_close(
        apply_rotary_emb_torch(x, cos[4:7], sin[4:7], interleaved)[0], turned[0], atol=1e-6, rtol=1e-6
    )
    with pytest.raises(ValueError, match="at least 21 rows, got 20"):
        apply_rotary_emb(x, cos, sin, seqlen_offsets=18)
    with pytest.raises(TypeError, match="max_seqlen"):
        apply_rotary_emb(x, cos, sin, max_seqlen="x")


def test_rotary_module_turns_queries_and_keys_in_place_and_learns(installed):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    (leaf,) = tensors((2, 5, 3, 2, 8))
    rotary = RotaryEmbedding(8)
    torch.testing.assert_close(rotary.inv_freq, 10000.0 ** -(torch.arange(4) / 4))
    assert rotary.state_dict() == {}
    qkv = leaf * 1
    out = rotary(qkv)
    assert out is qkv
    q = apply_rotary_emb(leaf[:, :, 0], rotary._cos_cached, rotary._sin_cached)
    assert torch.equal(out[:, :, 0], q)
    assert torch.equal(out[:, :, 2], leaf[:, :, 2])
    (gradient,) = torch.autograd.grad((out**2).sum(), leaf)
    torch.testing.assert_close(gradient, 2 * leaf, atol=1e-5, rtol=1e-5)  # a rotation keeps lengths
    by_heads = rotary((leaf * 1).flatten(2, 3), num_heads_q=2)
    torch.testing.assert_close(by_heads.unflatten(2, (3, 2)), out)
    q, kv = rotary(leaf[:, :, 0] * 1, leaf[:, :, 1:] * 1)
    torch.testing.assert_close(torch.cat([q[:, :, None], kv], 2), out)
    offsets = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="max_seqlen must be given if seqlen_offset is a tensor"):
        RotaryEmbedding(8)(leaf * 1, seqlen_offset=offsets)
    RotaryEmbedding(8)(leaf * 1, seqlen_offset=offsets, max_seqlen=7)
    xpos = RotaryEmbedding(8, scale_base=512.0)
    products = [(t[:, i, 0] * t[:, j, 1]).sum(-1) for t in (xpos(leaf[:, :1].expand(2, 5, 3, 2, 8) * 1),)
                for i, j in ((1, 0), (4, 3))]  # fmt: skip
    torch.testing.assert_close(*products)  # scores depend on distances alone


def test_flash_attention_3_s_functions(installed):
    import flash_attn_interface as fa3

    q, k, v = tensors((2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 8))
    out, lse = fa3.flash_attn_func(
        q, k, v, 0.3, True, num_splits=3, pack_gqa=True, sm_margin=4, return_attn_probs=True
    )
    expected = flashtile.attention(q, k, v, softmax_scale=0.3, causal=True, return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    qkv = torch.cat([q, k[:, :6], v[:, :6]], 2)
    packed = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert torch.equal(packed, flashtile.attention(q, k[:, :6], v[:, :6], causal=True))
    packed = fa3.flash_attn_qkvpacked_func(qkv[:, :, :3], num_heads_q=1)
    assert torch.equal(packed, flashtile.attention(*qkv[:, :, :3].split(1, 2)))
    offsets = torch.tensor([0, 4, 12], dtype=torch.int32)
    used = torch.tensor([2, 8], dtype=torch.int32)
    flat = q.flatten(0, 1), k.flatten(0, 1)[:12], v.flatten(0, 1)[:12]
    packed = fa3.flash_attn_varlen_func(*flat, offsets, offsets, 8, 8, None, used, None, True)
    expected = flashtile.flash_attn_varlen_func(*flat, offsets, offsets, 8, 8, causal=True, seqused_k=used)
    assert torch.equal(packed, expected)
    packed = fa3.flash_attn_varlen_func(*flat, offsets, offsets, 8, 8, used, used, attention_chunk=4)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 8, "max_seqlen_k": 8}
    expected = flashtile.attention(*flat, **lengths, seqused_q=used, seqused_k=used, attention_chunk=4)
    assert torch.equal(packed, expected)


def test_flash_attention_3_s_cache(installed):
    import flash_attn_interface as fa3

    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 8, 4, 2, 8, generator=generator).unbind()
    table = torch.tensor([[3, 1], [0, 7], [5, 2]], dtype=torch.int32)
    q = torch.randn(2, 1, 4, 8, generator=generator)
    lengths, rows = torch.tensor([5, 8], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 8, lengths, page_size=4, causal=True)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, cache_batch_idx=rows, page_table=table, causal=True,
        scheduler_metadata=metadata, pack_gqa=False, return_softmax_lse=True,
    )  # fmt: skip
    expected = flashtile.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, block_table=table[rows], causal=True, return_softmax_lse=True
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    out = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, page_table=table[:2], causal=True, attention_chunk=4
    )
    second_chunk = {"cache_seqlens": lengths - 4, "block_table": table[:2, 1:]}
    expected = flashtile.flash_attn_with_kvcache(q, *pages, causal=True, **second_chunk)
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match=r"k_descale must have shape \(batch, heads_kv\)"):
        fa3.flash_attn_with_kvcache(q, *pages, page_table=table[:2], k_descale=torch.ones(2))
    with pytest.raises(ValueError, match="page_table"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table)


@walk("appended", [0, 2])
@walk("scaled", ["qkv", "q", "v", "", "kv"])
def test_flash_attention_3_s_e4m3_over_pages(installed, scaled, appended):
    """Scores and values have the factors of their sequence; new keys are stored as they are."""
    import flash_attn_interface as fa3

    generator = torch.Generator().manual_seed(0)

    def e4m3(*shape):
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    q, pages = e4m3(2, 2, 4, 16), [e4m3(8, 4, 2, 16) for _ in "kv"]
    table = torch.tensor([[3, 1], [5, 7]], dtype=torch.int32)
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    scales = {name: 0.5 + torch.rand(2, 2, generator=generator) for name in scaled}
    new = [e4m3(2, appended, 2, 16) for _ in "kv"] if appended else [None, None]
    got = fa3.flash_attn_with_kvcache(
        q, *pages, *new, cache_seqlens=lengths, page_table=table, causal=True,
        **{f"{name}_descale": scale for name, scale in scales.items()},
    )  # fmt: skip
    assert got.dtype == torch.bfloat16
    for b, length in enumerate((lengths + appended).tolist()):
        q_b = q[b].float()
        k_b, v_b = (page.float()[table[b].long()].flatten(0, 1)[:length] for page in pages)
        for stored, tokens in zip((k_b, v_b), new, strict=True):
            assert tokens is None or torch.equal(stored[length - appended :], tokens[b].float())
        if "q" in scales:
            q_b = q_b * scales["q"][b].repeat_interleave(2)[:, None]
        scaled_back = []
        for name, x in (("k", k_b), ("v", v_b)):
            scaled_back.append(x * scales[name][b][:, None] if name in scales else x)
        expected = flashtile.attention(q_b[None], *(x[None] for x in scaled_back), causal=True)[0]
        torch.testing.assert_close(got[b].float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("interleaved", [False, True])
def test_flash_attention_3_s_e4m3_is_rotated_by_e4m3_tables(installed, interleaved):
    """FlashAttention-3 requires tables in the dtype of q."""
    import flash_attn_interface as fa3
    from flash_attn.layers.rotary import apply_rotary_emb

    generator = torch.Generator().manual_seed(0)

    def e4m3(*shape):
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    q, k, v = e4m3(2, 3, 4, 32), e4m3(2, 3, 2, 32), e4m3(2, 3, 2, 32)
    caches = [e4m3(2, 9, 2, 32) for _ in "kv"]
    cos, sin = e4m3(20, 8), e4m3(20, 8)
    lengths, first = torch.tensor([4, 6], dtype=torch.int32), torch.tensor([2, 11], dtype=torch.int32)
    named = {"cache_seqlens": lengths, "causal": True, "rotary_interleaved": interleaved}
    got = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, rotary_seqlens=first, **named
    )
    rotated = [
        apply_rotary_emb(t.float(), cos.float(), sin.float(), interleaved, False, first) for t in (q, k)
    ]
    for b, length in enumerate(lengths.tolist()):
        stored = caches[0][b, length : length + 3].float()
        torch.testing.assert_close(stored, rotated[1][b], rtol=2**-4, atol=2**-9)
        assert torch.equal(caches[1][b, length : length + 3].float(), v[b].float())
        k_b, v_b = (cache[b : b + 1, : length + 3].float() for cache in caches)
        expected = flashtile.attention(rotated[0][b : b + 1], k_b, v_b, causal=True)[0]
        torch.testing.assert_close(got[b].float(), expected, rtol=2**-5, atol=2**-5)
    with pytest.raises(TypeError, match="rotary_cos"):
        fa3.flash_attn_with_kvcache(
            q, *caches, k, v, rotary_cos=cos.to(torch.float8_e5m2), rotary_sin=sin, **named
        )


def test_flash_attention_3_ignores_rotary_seqlens_without_tables(installed):
    import flash_attn_interface as fa3

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 2, 8, generator=generator) for _ in range(3))
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    for new in ((None, None), (k, v)):
        caches = torch.randn(2, 2, 9, 2, 8, generator=generator).unbind()
        expected = fa3.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths)
        found = fa3.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, rotary_seqlens=lengths)
        assert torch.equal(found, expected)


def test_flash_attention_3_s_packed_e4m3(installed):
    import flash_attn_interface as fa3

    qkv = torch.randn(2, 5, 3, 2, 16, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = [torch.full((2, 2), scale) for scale in (0.5, 2.0, 3.0)]
    packed = fa3.flash_attn_qkvpacked_func(qkv, None, True, *scales)
    names = (f"{name}_descale" for name in "qkv")
    apart = fa3.flash_attn_func(*qkv.unbind(2), causal=True, **dict(zip(names, scales, strict=True)))
    assert torch.equal(packed, apart)


def test_bad_calls_of_flash_attention_3_name_its_arguments(installed):
    import flash_attn_interface as fa3

    pages = torch.randn(2, 8, 4, 2, 8).unbind()
    table, rows = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    q, lengths = torch.randn(2, 1, 4, 8), torch.tensor([5, 8], dtype=torch.int32)
    over_pages = {"cache_seqlens": lengths, "page_table": table}
    with pytest.raises(ValueError, match=r"cache_batch_idx must be from 0 to 2 .*page_table.*got 3"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_batch_idx=rows, **over_pages)
    with pytest.raises(TypeError, match=r"cache_batch_idx must be a torch\.Tensor, got list"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_batch_idx=[1, 2], **over_pages)
    with pytest.raises(TypeError, match="cache_batch_idx must be int32"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_batch_idx=torch.ones(2), **over_pages)
    with pytest.raises(TypeError, match=r"v_descale must be a torch\.Tensor, got float"):
        fa3.flash_attn_with_kvcache(q, *pages, v_descale=1.0, **over_pages)
    with pytest.raises(TypeError, match=r"cache_seqlens must be a torch\.Tensor, got list"):
        fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 8, [5, 8])
    with pytest.raises(TypeError, match="return_attn_probs must be True or False"):
        fa3.flash_attn_func(q, q, q, return_attn_probs=1)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    for name, call, arguments in (
        ("pack_gqa", fa3.flash_attn_func, (q, q, q)),
        ("num_splits", fa3.flash_attn_func, (q, q, q)),
        ("sm_margin", fa3.flash_attn_qkvpacked_func, (torch.randn(1, 4, 3, 2, 8),)),
        ("sm_margin", fa3.flash_attn_varlen_func, (*torch.randn(3, 4, 2, 8), offsets, offsets, 4, 4)),
        ("scheduler_metadata", fa3.flash_attn_with_kvcache, (q, *pages)),
    ):
        with pytest.raises(TypeError, match=name):
            call(*arguments, **{name: "x"})
    for num_heads_q in (4, 6):
        with pytest.raises(ValueError, match="qkv must have shape"):
            fa3.flash_attn_qkvpacked_func(q, num_heads_q=num_heads_q)
    with pytest.raises(TypeError, match=r"qkv must be a torch\.Tensor, got list"):
        fa3.flash_attn_qkvpacked_func([q])


def test_no_gradient_is_written_where_one_has_no_place(installed):
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v = (t.detach() for t in tensors((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)))
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, None, False)
    dq, dk, dv = (torch.full_like(t, 7.0) for t in (q, k, v))
    with pytest.raises(ValueError, match=r"dk must have the shape of k, \(2, 7, 2, 8\), got \(2, 7, 1, 8\)"):
        _flash_attn_backward(out, q, k, v, out, lse, dq, dk[:, :, :1], dv, 0.0, None, False)
    assert all((t == 7.0).all() for t in (dq, dk, dv))
    for buffers in ((dq, dk, dv), (None, None, None), (None, torch.zeros_like(k), None)):
        _flash_attn_backward(out, q, k, v, out, lse, *buffers, 0.0, None, False)
        assert buffers[1] is None or torch.equal(buffers[1], dk)


def test_what_flash_attention_takes_is_taken():
    """Any negative window is unlimited, and a last stride that is not 1 is copied, with its gradient."""
    q, k, v = tensors((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    expected = flashtile.attention(q, k, v)
    assert torch.equal(flashtile.attention(q, k, v, window_size=(-5, -2)), expected)
    cache = k.detach(), v.detach()
    assert torch.equal(
        flashtile.flash_attn_with_kvcache(q.detach(), *cache, window_size=(-7, -3)),
        flashtile.flash_attn_with_kvcache(q.detach(), *cache),
    )
    apart = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    assert all(t.stride(-1) != 1 for t in apart)
    assert not flashtile.flash_attn_func(apart[0], apart[1][:, :0], apart[2][:, :0]).any()
    out = flashtile.flash_attn_func(*apart)
    assert torch.equal(out, expected)
    torch._dynamo.reset()  # other tests may have reached the limit of recompilations
    compiled = torch.compile(flashtile.attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*apart), expected)
    gradients = [torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, expected)]
    assert all(map(torch.equal, *gradients))
    decoded = flashtile.flash_attn_with_kvcache(apart[0].detach(), *cache)
    assert torch.equal(decoded, flashtile.flash_attn_with_kvcache(q.detach(), *cache))


X, ANGLES, QKV = torch.ones(2, 5, 4, 8), torch.ones(10, 4), torch.ones(2, 5, 3, 4, 8)
LEAF = QKV.clone().requires_grad_()


@walk(
    ("call", "error", "says"),
    [
        (lambda: padding.unpad([1], X[..., 0, 0]), TypeError, "padded must be a torch.Tensor, got list"),
        (lambda: padding.unpad(X, None), TypeError, "mask must be a torch.Tensor, got NoneType"),
        (lambda: padding.pad([1], torch.arange(1), 1, 5), TypeError, "tokens must be a torch.Tensor, got"),
        (lambda: padding.pad(X[0], [0, 1], 1, 5), TypeError, "indices must be a torch.Tensor, got list"),
        (lambda: padding.unpad(X, torch.ones(2, 3)), ValueError, r"mask must have shape .*got \(2, 3\)"),
        (lambda: padding.unpad(X, torch.ones(2, 5, device="meta")), ValueError, "mask is on meta, not"),
        (lambda: padding.pad(X[0], torch.arange(3), 1, 5), ValueError, r"indices must have shape \(total,\)"),
        (lambda: padding.pad(X[0], torch.ones(5), 1, 5), TypeError, "indices must be int64, got"),
        (lambda: padding.pad(X[0], torch.arange(5), -1, 5), ValueError, "batch must be from 0"),
        (lambda: padding.pad(X[0], torch.arange(5), 1, 4), ValueError, "indices must be from 0 to 3"),
        (lambda: rotary.apply_rotary_emb(3, ANGLES, ANGLES), TypeError, "x must be a torch.Tensor"),
        (lambda: rotary.apply_rotary_emb(X.long(), ANGLES, ANGLES), TypeError, "x must be float16"),
        (lambda: rotary.apply_rotary_emb(X[0], ANGLES, ANGLES), ValueError, "x must have 4 dimensions"),
        (lambda: rotary.apply_rotary_emb(X, ANGLES, ANGLES, "no"), TypeError, "interleaved must be True or"),
        (
            lambda: rotary.apply_rotary_emb(X, ANGLES, ANGLES, seqlen_offsets=torch.ones(2)),
            TypeError,
            "seqlen_offsets must be int32 or int64",
        ),
        (
            lambda: rotary.apply_rotary_emb(
                X, ANGLES, ANGLES, seqlen_offsets=torch.ones(3, dtype=torch.int32)
            ),
            ValueError,
            r"seqlen_offsets must have shape \(batch,\) = \(2,\), got \(3,\)",
        ),
        (
            lambda: rotary.apply_rotary_emb(X, ANGLES, ANGLES, seqlen_offsets=-1),
            ValueError,
            "seqlen_offsets must",
        ),
        (
            lambda: rotary.apply_rotary_emb(X[0], ANGLES, ANGLES, cu_seqlens=torch.zeros(1, 2).int()),
            ValueError,
            r"cu_seqlens must have shape \(batch \+ 1,\)",
        ),
        (
            lambda: rotary.apply_rotary_emb_torch(X, ANGLES, ANGLES),
            ValueError,
            r"seqlen, rotary_dim / 2\) for x",
        ),
        (
            lambda: rotary.apply_rotary_emb_qkv_(QKV, ANGLES, ANGLES, 3),
            TypeError,
            "cos_k must be a torch.Tensor",
        ),
        (lambda: rotary.apply_rotary_emb_qkv_(QKV.int(), ANGLES, ANGLES), TypeError, "^qkv must be float16"),
        (lambda: rotary.apply_rotary_emb_qkv_(LEAF, ANGLES, ANGLES), ValueError, "qkv must not be a leaf"),
        (lambda: rotary.apply_rotary_emb_kv_(X, ANGLES, ANGLES), ValueError, "kv must have shape"),
        (
            lambda: bert_padding.index_first_axis(X, torch.tensor([2])),
            ValueError,
            "indices must be from 0 to 1",
        ),
        (lambda: bert_padding.index_first_axis(X, X), TypeError, "indices must be int32 or int64"),
        (
            lambda: bert_padding.index_put_first_axis(X, torch.arange(2), "a"),
            TypeError,
            "^first_axis_dim must be an int",
        ),
        (lambda: bert_padding.unpad_input(X, 3), TypeError, "^attention_mask must be a torch.Tensor"),
        (
            lambda: bert_padding.unpad_input(X, X[..., 0, 0], 3),
            TypeError,
            "^unused_mask must be a torch.Tensor",
        ),
        (
            lambda: bert_padding.unpad_input_for_concatenated_sequences(X, X[..., 0, 0]),
            TypeError,
            "^attention_mask_in_length must be uint8",
        ),
        (
            lambda: bert_padding.pad_input(3, torch.arange(2), 1, 2),
            TypeError,
            "^hidden_states must be a torch.",
        ),
        (
            lambda: flash_attn_interface.flash_attn_qkvpacked_func(X, num_heads_q=np.ones(2)),
            TypeError,
            "num_heads_q must be an int",
        ),
    ],
)
def test_wrong_arguments_of_padding_and_rotation_are_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


@walk(
    ("call", "name"),
    [
        (lambda flag: rotary.apply_rotary_emb(X, ANGLES, ANGLES, inplace=flag), "inplace"),
        (lambda flag: rotary.apply_rotary_emb(X, ANGLES, ANGLES, interleaved=flag), "interleaved"),
        (
            lambda flag: flash_attn_interface.flash_attn_func(X, X, X, return_attn_probs=flag),
            "return_attn_probs",
        ),
        (
            lambda flag: flash_attn_interface.flash_attn_varlen_func(*[X] * 5, 5, 5, return_attn_probs=flag),
            "return_attn_probs",
        ),
        (lambda flag: flex.flex_attention(X, X, X, enable_gqa=flag), "enable_gqa"),
        (lambda flag: flex.flex_attention(X, X, X, return_lse=flag), "return_lse"),
        (lambda flag: cute.flash_attn_func(X, X, X, causal=flag), "causal"),
        (lambda flag: cute.flash_attn_func(X, X, X, return_lse=flag), "return_lse"),
    ],
)
@walk("flag", [1, None, "False", torch.tensor([True, False])])
def test_flags_are_bools(call, name, flag):
    with pytest.raises(TypeError, match=f"^{name} must be"):
        call(flag)


def test_fp8_is_padded():
    states = X.to(torch.float8_e4m3fn)
    tokens, indices, *_ = padding.unpad(states, torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 1]]))
    padded = padding.pad(tokens, indices, 2, 5).float()
    assert padded[1, 3].sum() == padded[0, 2:].sum() == 0
    assert padded.sum() == X[0, 0].sum() * 6
