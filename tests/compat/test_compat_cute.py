"""FlashAttention-4's functions, ``flash_attn.cute``, compared with plain torch."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.compat.flash_attn import cute
from flashtile.compat.flash_attn.cute import interface
from walk import walk

pytestmark = pytest.mark.numerical


def tensors(*shapes, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=grad) for shape in shapes
    ]


def reference(q, k, v, sink=None, left=None, right=None, scale=None):
    """Return (out, lse) of one sequence (seqlen, heads, head_dim), with FlashAttention-4's window."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(*scores.shape[:2], 1)], -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v), lse


WINDOWS = {
    (False, None, None): (None, None),
    (True, None, None): (None, 0),
    (True, 2, 5): (2, 0),
    (False, 1, 2): (1, 2),
    (False, None, -2): (None, -2),
    (False, 4, -1): (4, -1),
    (False, -1, None): (-1, None),
    (False, -2, 1): (None, None),
    (False, -1, -1): (None, None),
}
"""The window that FlashAttention-4 computes for (causal, left, right)."""


@walk(("given", "expected"), WINDOWS.items())
def test_windows_sinks_and_gradients(given, expected):
    causal, *window = given
    q, k, v, sink = tensors((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4,))
    out, lse = cute.flash_attn_func(
        q, k, v, causal=causal, window_size=tuple(window), learnable_sink=sink, return_lse=True
    )
    outs, lses = zip(*(reference(*one, sink, *expected) for one in zip(q, k, v, strict=True)), strict=True)
    torch.testing.assert_close(out, torch.stack(outs))
    torch.testing.assert_close(lse, torch.stack(lses))
    weights = tensors(out.shape, lse.shape, grad=False, seed=1)
    found = torch.autograd.grad((out, lse), (q, k, v, sink), weights)
    wanted = torch.autograd.grad((torch.stack(outs), torch.stack(lses)), (q, k, v, sink), weights)
    torch.testing.assert_close(found, wanted)


@walk("window", [(None, None), (2, 1), (None, -1)])
@walk("packed_k", [False, True])
@walk("packed_q", [False, True])
def test_each_side_is_packed_or_padded(packed_q, packed_k, window):
    q, k, v = tensors((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    lengths_q, lengths_k = [3, 5], [7, 4]

    def side(lengths, packed, *padded):
        lengths = torch.tensor(lengths, dtype=torch.int32)
        if not packed:
            return None, lengths, padded
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return offsets, None, [torch.cat([t[b, :n] for b, n in enumerate(lengths)]) for t in padded]

    of_q, used_q, (q_given,) = side(lengths_q, packed_q, q)
    of_k, used_k, (k_given, v_given) = side(lengths_k, packed_k, k, v)
    out, lse = cute.flash_attn_varlen_func(
        q_given, k_given, v_given, cu_seqlens_q=of_q, cu_seqlens_k=of_k, seqused_q=used_q, seqused_k=used_k,
        window_size=window, return_lse=True,
    )  # fmt: skip
    if packed_q:
        outs, lses = out.split(lengths_q), lse.split(lengths_q, 1)
    else:
        assert (out.shape, lse.shape) == ((2, 5, 4, 8), (2, 4, 5))
        outs = [out[b, :n] for b, n in enumerate(lengths_q)]
        lses = [lse[b, :, :n] for b, n in enumerate(lengths_q)]
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        expected = reference(q[b, :n_q], k[b, :n_k], v[b, :n_k], None, *window)
        torch.testing.assert_close((outs[b], lses[b]), expected)


def test_pages_without_gradients():
    q, pages_k, pages_v, sink = tensors((2, 2, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8), (4,), grad=False)
    table, lengths = (
        torch.tensor([[3, 1], [0, 5]], dtype=torch.int32),
        torch.tensor([5, 8], dtype=torch.int32),
    )
    named = {"page_table": table, "seqused_k": lengths, "causal": True, "learnable_sink": sink}
    out, lse = cute.flash_attn_varlen_func(q, pages_k, pages_v, **named, num_splits=2)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    packed = cute.flash_attn_varlen_func(q.flatten(0, 1), pages_k, pages_v, cu_seqlens_q=offsets, **named)
    for b, length in enumerate(lengths):
        k, v = (pages[table[b]].flatten(0, 1)[:length] for pages in (pages_k, pages_v))
        expected = reference(q[b], k, v, sink, None, 0)
        torch.testing.assert_close((out[b], lse[b]), expected)
        rows = slice(2 * b, 2 * b + 2)
        torch.testing.assert_close((packed[0][rows], packed[1][:, rows]), expected)


def test_latent_attention_has_heads_last_in_lse():
    q, k, v, qv = tensors((1, 3, 4, 8), (1, 6, 1, 8), (1, 6, 1, 16), (1, 3, 4, 16))
    out, lse = cute.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    joined = reference(torch.cat([q, qv], -1)[0], torch.cat([k, v], -1)[0], v[0], None, None, 0, 24**-0.5)
    torch.testing.assert_close((out[0], lse[0].T), joined)
    latent = cute.flash_attn_varlen_func(None, None, v, qv, return_lse=True)
    torch.testing.assert_close((latent[0][0], latent[1][0].T), reference(qv[0], v[0], v[0]))
    wide_q, wide = tensors((1, 3, 2, 512), (1, 4, 1, 512), grad=False)
    out, lse = cute.flash_attn_func(wide_q, wide, wide)
    torch.testing.assert_close((out[0], lse[0].T), reference(wide_q[0], wide[0], wide[0]))


def test_functions_of_scores_are_those_of_flex_attention():
    q, k, v = tensors((2, 5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8))

    def bias(score, b, h, q_idx, kv_idx):
        return score + 0.1 * (q_idx - kv_idx)

    def even(b, h, q_idx, kv_idx):
        return kv_idx % 2 == 0

    found = cute.flash_attn_func(q, k, v, score_mod=bias, causal=True)[0]
    torch.testing.assert_close(found, flashtile.attention(q, k, v, score_mod=bias, causal=True))
    found = cute.flash_attn_func(q, k, v, mask_mod=even, causal=True)[0]  # causal is ignored
    torch.testing.assert_close(found, flashtile.attention(q, k, v, mask_mod=even))
    with pytest.raises(NotImplementedError, match=r"window_size must not be negative with score_mod"):
        cute.flash_attn_func(q, k, v, score_mod=bias, window_size=(None, -1))
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"window_size must not be negative with page_table"):
        cute.flash_attn_varlen_func(q, k, v, page_table=table, window_size=(None, -1))


def test_lse_has_a_gradient_only_if_it_is_returned():
    q, k, v = tensors((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8))
    out, lse = cute.flash_attn_func(q, k, v)
    assert out.requires_grad
    assert not lse.requires_grad
    assert cute.flash_attn_func(q, k, v, return_lse=True)[1].requires_grad
    assert interface.get_scheduler_metadata(3, 3, 2, 2, 8, 1) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sink_may_have_another_dtype_and_keeps_it_in_its_gradient(dtype):
    q, k, v = (t.to(torch.bfloat16) for t in tensors((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8), grad=False))
    sink = torch.zeros(2, dtype=dtype, requires_grad=True)
    cute.flash_attn_func(q, k, v, learnable_sink=sink)[0].sum().backward()
    assert sink.grad.dtype == dtype


def seven(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score


@walk(
    ("named", "match"),
    [
        ({"score_mod": seven}, r"score_mod must be a function of 5 arguments"),
        ({"mask_mod": seven}, r"mask_mod must be a function of 4 arguments"),
        ({"aux_tensors": [torch.ones(1)]}, "aux_tensors must be None, got list"),
        ({"gather_kv_indices": torch.zeros(1, 3, 1)}, "gather_kv_indices must be None"),
        ({"block_sparse_tensors_bwd": (1,)}, "block_sparse_tensors must be None"),
        ({"learnable_sink": torch.ones(3)}, "learnable_sink"),
        ({"learnable_sink": [1.0, 2.0]}, "learnable_sink must be a torch.Tensor"),
        ({"window_size": (1.5, None)}, "window_size"),
        ({"window_size": None}, "window_size must be"),
        ({"v": None}, "v must be a torch.Tensor"),
        ({"causal": 2}, "causal"),
        ({"return_lse": 1}, "return_lse"),
        ({"num_splits": "x"}, "num_splits"),
        ({"pack_gqa": "x"}, "pack_gqa"),
    ],
)
def test_what_is_refused_is_named(named, match):
    q, k, v = tensors((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8), grad=False)
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=match):
        cute.flash_attn_func(**{"q": q, "k": k, "v": v, **named})


@walk("name", ["min_seqlen_k", "seqlen_k_per_split", "disable_scheduler_metadata"])
def test_arguments_that_only_tune_have_a_type(name):
    q = torch.randn(3, 2, 8)
    with pytest.raises(TypeError, match=name):
        cute.flash_attn_varlen_func(q, q, q, **{name: "x"})


def test_a_longest_length_that_is_no_int_is_named():
    q, k, v = tensors((3, 2, 8), (3, 2, 8), (3, 2, 8), grad=False)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(TypeError, match=name):
            cute.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **{name: torch.tensor([1, 2])}
            )


class TestCombine:
    def parts(self, *shape):
        out_partial, lse = tensors((2, *shape, 3, 8), (2, *shape, 3), grad=False)
        weights = lse.softmax(0)[..., None]
        return out_partial, lse, (weights * out_partial).sum(0), lse.logsumexp(0)

    @pytest.mark.parametrize("given", [False, True])
    def test_rows_that_are_not_used_keep_what_out_had(self, given):
        out_partial, lse_partial, expected, expected_lse = self.parts(3, 5)
        used = torch.tensor([5, 2, 0], dtype=torch.int32)
        hidden = torch.arange(5) >= used[:, None]
        out_partial[:, hidden] = torch.nan
        out = torch.full_like(expected, 7.0) if given else None
        result, lse = interface.flash_attn_combine(out_partial, lse_partial, out, seqused=used)
        assert out is None or result is out
        expected[hidden], expected_lse[hidden] = 7.0 if given else 0.0, -torch.inf
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(lse, expected_lse)

    @pytest.mark.parametrize("seqused", [None, (1, 9, 2)])
    def test_packed_sequences(self, seqused):
        out_partial, lse_partial, expected, expected_lse = self.parts(9)
        offsets = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
        used = None if seqused is None else torch.tensor(seqused, dtype=torch.int32)
        hidden = [7, 8] if seqused is None else [1, 2, 3, 6, 7, 8]
        named = {"cu_seqlens": offsets, "seqused": used}
        result, lse = interface.flash_attn_combine(out_partial, lse_partial, **named)
        expected[hidden], expected_lse[hidden] = 0.0, -torch.inf
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(lse, expected_lse)

    def test_without_lse_and_with_an_order_of_work(self):
        out_partial, lse_partial, expected, _ = self.parts(3, 5)
        out = torch.empty_like(expected)
        order = torch.tensor([2, 0, 1], dtype=torch.int32)
        named = {"out": out, "virtual_batch_idx": order, "return_lse": False}
        result, lse = interface.flash_attn_combine(out_partial, lse_partial, **named)
        assert result is out
        assert lse is None
        torch.testing.assert_close(result, expected)

    @walk(
        ("named", "match"),
        [
            ({"seqused": torch.ones(2, dtype=torch.int32)}, r"seqused must have shape \(batch,\)"),
            ({"seqused": torch.ones(3, dtype=torch.int64)}, "seqused must"),
            ({"cu_seqlens": torch.zeros(4, dtype=torch.int32)}, "cu_seqlens and out_partial of 4 dimensions"),
            ({"return_lse": 1}, "return_lse"),
            ({"virtual_batch_idx": [0]}, "virtual_batch_idx must"),
            ({"seqused": torch.ones(3, dtype=torch.int32), "out_partial": torch.ones(3)}, "out_partial must"),
            ({"seqused": torch.ones(3, dtype=torch.int32), "out": torch.empty(3, 5, 3, 8)}, "out has dtype"),
            ({"seqused": torch.ones(3, dtype=torch.int32), "out": [0.0]}, "out must be a torch.Tensor"),
        ],
    )
    def test_what_is_refused_is_named(self, named, match):
        out_partial, lse_partial, *_ = self.parts(3, 5)
        if match == "out has dtype":
            named = named | {"out_dtype": torch.float64}
        with pytest.raises((ValueError, TypeError), match=match):
            interface.flash_attn_combine(**{"out_partial": out_partial, "lse_partial": lse_partial} | named)
