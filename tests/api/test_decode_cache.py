"""Functions around decoding: appends by slot, block copies, combined splits, shared prefixes, prefill.

On every target: ``on`` says which backend a call is to use, and tensors are made on its device.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import flashtile
from cases import BF16, FP16, FP32, FP64
from flashtile import testing
from flashtile.checks.conversions import as_masking
from flashtile.operators.decode import SharedKeys, attend_shared, decode
from flashtile.problems.decode import FP8, CacheTensors, DecodeOptions
from flashtile.problems.masking import CAUSAL, EVERYTHING
from flashtile.reference import decode as reference
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

HEADS, HEADS_KV, D, D_V = 6, 2, 16, 8


@pytest.fixture
def on(target):
    with torch.device(target.device):
        yield {"backend": target.backend}


def widest(target):
    """(the widest dtype that the target takes, how near its results must be)."""
    return (FP64, 1e-12) if FP64 in target.dtypes else (FP32, 1e-5)


def skip_unless_taken(target, dtype):
    if dtype not in (*target.dtypes, FP8):
        pytest.skip(f"{target.name} does not take {dtype}")


def pool(num_blocks, page_size, dtype=FP32, seed=0):
    """Random (k_cache, v_cache)."""
    return tuple(
        testing.random_tensor(
            (num_blocks, page_size, HEADS_KV, dim), dtype, torch.get_default_device(), seed=seed + i
        )
        for i, dim in enumerate((D, D_V))
    )


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def near(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_slots_say_where_tokens_go(on):
    k_cache, v_cache = pool(5, 4)
    before = k_cache.clone(), v_cache.clone()
    k, v = torch.randn(4, HEADS_KV, D), torch.randn(4, HEADS_KV, D_V)
    flashtile.append_kvcache(k_cache, v_cache, k, v, slot_mapping=torch.tensor([6, -1, 19, 0]), **on)
    for cache, new, old in ((k_cache, k, before[0]), (v_cache, v, before[1])):
        expected = old.flatten(0, 1)
        expected[[6, 19, 0]] = new[[0, 2, 3]]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_slots_of_scaled_pages(on):
    torch.manual_seed(0)
    k_cache, v_cache = (t.to(FP8) for t in pool(3, 2))
    k_descale, v_descale = torch.rand(3, HEADS_KV) + 0.5, torch.rand(3, HEADS_KV) + 0.5
    k, v = 100 * torch.randn(2, HEADS_KV, D), 2000 * torch.randn(2, HEADS_KV, D_V)
    flashtile.append_kvcache(
        k_cache,
        v_cache,
        k,
        v,
        slot_mapping=torch.tensor([5, 2]),
        k_descale=k_descale,
        v_descale=v_descale,
        **on,
    )
    got = k_cache[2, 1].float() * k_descale[2][:, None], v_cache[1, 0].float() * v_descale[1][:, None]
    half_a_step = 2**-4 * 1.001  # of e4m3's three bits, and float32's own rounding
    torch.testing.assert_close(got[0], k[0], rtol=half_a_step, atol=1e-3)
    limit = 448 * v_descale[1][:, None]
    torch.testing.assert_close(got[1], v[1].clamp(-limit, limit), rtol=half_a_step, atol=1e-3)
    assert (got[1].abs() == limit).any(), "nothing saturates: the values are too small to test it"


@walk("dtype", [FP32, BF16, FP8])
@walk("layers", [None, 3])
def test_blocks_are_copied_in_all_layers(on, layers, dtype):
    shape = (7, 4, HEADS_KV) if layers is None else (layers, 7, 4, HEADS_KV)
    caches = [torch.randn(*shape, dim).to(dtype) for dim in (D, D_V)]
    descales = [torch.rand(*shape[:-2], HEADS_KV) for _ in "kv"] if dtype == FP8 else [None, None]
    before = [t if t is None else t.clone() for t in (*caches, *descales)]
    pairs = torch.tensor([[0, 5], [-1, 3], [0, 2], [4, 6]])
    flashtile.copy_blocks(*caches, pairs, k_descale=descales[0], v_descale=descales[1], **on)
    for tensor, old, axis in zip((*caches, *descales), before, (-4, -4, -2, -2), strict=True):
        if tensor is not None:
            expected = old.float().index_select(axis % old.dim(), torch.tensor([0, 1, 0, 3, 4, 0, 4]))
            assert torch.equal(tensor.float(), expected)


def test_copying_nothing(on):
    caches = pool(3, 4)
    before = [cache.clone() for cache in caches]
    flashtile.copy_blocks(*caches, torch.empty(0, 2, dtype=torch.int64), **on)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old)


def partials(num_splits, rows, dtype=FP32):
    device = torch.get_default_device()
    out = testing.random_tensor((num_splits, *rows, HEADS, D_V), FP32, device, seed=1).to(dtype)
    lse = testing.random_tensor((num_splits, *rows, HEADS), FP32, device, seed=2) * 3
    return out, lse.double() if dtype == FP64 else lse


@pytest.mark.parametrize("rows", [(3, 5), (7,), (0, 5), (2, 0)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 33])
def test_splits_are_combined(target, on, num_splits, rows):
    dtype, tolerance = widest(target)
    out_partial, lse_partial = partials(num_splits, rows, dtype)
    out, lse = flashtile.flash_attn_combine(out_partial, lse_partial, **on)
    near(lse, lse_partial.logsumexp(0), tolerance)
    near(out, (out_partial * (lse_partial - lse).exp().unsqueeze(-1)).sum(0), tolerance)


def test_combined_splits_with_empty_ones(target, on):
    dtype, tolerance = widest(target)
    out_partial, lse_partial = partials(4, (3, 5), dtype)
    lse_partial[1:3, :2] = -torch.inf
    lse_partial[:, 0, 0] = torch.tensor([-torch.inf, torch.inf, -torch.inf, torch.inf])[:, None]
    out_partial[lse_partial.isinf()] = torch.nan  # which nobody has written
    out, lse = flashtile.flash_attn_combine(out_partial, lse_partial, **on)
    assert not out[0, 0].any()
    assert (lse[0, 0] == -torch.inf).all()
    near(lse[0, 1:], lse_partial[[0, 3], 0, 1:].logsumexp(0), tolerance)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_combined_splits_are_rounded_once(target, on, dtype):
    skip_unless_taken(target, dtype)
    out_partial, lse_partial = partials(8, (3, 5))
    lse_exact = lse_partial.double().logsumexp(0)
    exact = (out_partial.double() * (lse_partial.double() - lse_exact).exp().unsqueeze(-1)).sum(0)
    out, lse = flashtile.flash_attn_combine(out_partial, lse_partial, out_dtype=dtype, **on)
    assert (out.dtype, lse.dtype) == (dtype, FP32)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=5e-7)


def test_combined_splits_go_where_they_are_wanted(on):
    out_partial, lse_partial = partials(3, (2, 5))
    strided = out_partial.transpose(1, 2).contiguous().transpose(1, 2), lse_partial.mT.contiguous().mT
    given = torch.empty(2, HEADS, 5, D_V, dtype=FP16).transpose(1, 2)
    out, _ = flashtile.flash_attn_combine(*strided, out=given, **on)
    assert out is given
    expected, _ = flashtile.flash_attn_combine(out_partial, lse_partial, out_dtype=FP16, **on)
    assert torch.equal(out, expected)


PREFIXES = {
    "one group": (13, None),
    "one group by a tensor": ((13,), None),
    "nothing shared": (0, None),
    "whole pages": (12, None),
    "two groups": ((14, 9), (0, 3, 4)),
    "an empty group": ((14, 9, 6), (0, 3, 3, 4)),
    "empty groups at both ends": ((6, 14, 9, 3), (0, 0, 3, 4, 4)),
}


@pytest.mark.parametrize(("dtype", "seqlen_q"), [(FP64, 3), (FP32, 3), (FP16, 1), (BF16, 1)], ids=str)
@pytest.mark.parametrize("name", PREFIXES)
def test_a_shared_prefix_changes_no_result(target, on, name, seqlen_q, dtype):
    skip_unless_taken(target, dtype)
    prefix, groups = PREFIXES[name]
    page_size, lengths = 4, (19, 25, 16, 30)
    k_cache, v_cache = pool(40, page_size, dtype)
    torch.manual_seed(0)
    table = torch.randperm(32).view(4, 8).int()
    for first, last in itertools.pairwise(groups or (0, 4)):
        table[first:last, :4] = table[first:first + 1, :4]  # fmt: skip
    q = testing.random_tensor((4, seqlen_q, HEADS, D), dtype, target.device, seed=9)
    arguments = {"cache_seqlens": int32(*lengths), "block_table": table, "causal": True, "softcap": 4.0,
                 "sink": torch.randn(HEADS)}  # fmt: skip
    out, lse = flashtile.flash_attn_with_shared_prefix(
        q,
        k_cache,
        v_cache,
        prefix_seqlens=prefix if isinstance(prefix, int) else int32(*prefix),
        cu_prefix_groups=None if groups is None else int32(*groups),
        return_softmax_lse=True,
        **arguments,
        **on,
    )
    exact = reference.attention_with_kvcache(q, k_cache, v_cache, upcast=FP64, **arguments)
    plain = reference.attention_with_kvcache(q, k_cache, v_cache, **arguments)
    # As in flashtile.testing.decode: values that cancel keep the rounding of their sum.
    sums = torch.finfo(lse.dtype).eps * float(v_cache.nan_to_num(0.0).abs().max())
    comparison = testing.compare("out", out, exact[0], plain[0], noise=(sums, sums))
    assert comparison.holds, str(comparison)
    near(lse.double(), exact[1], 1e-12 if dtype == FP64 else 2e-5)


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_levels_of_shared_keys_change_no_result(target, on, tree, ragged, dtype):
    """Groups within groups, sequences in none, groups without sequences, and keys that end within a page."""
    skip_unless_taken(target, dtype)
    k_cache, v_cache = pool(40, 4, dtype)
    torch.manual_seed(0)
    table = torch.randperm(40).view(5, 8).int()
    table[1:4, :2], table[2:4, 2:4] = table[1, :2].clone(), table[2, 2:4].clone()
    lengths, counts = int32(19, 14, 27, 30, 9), (1, 3, 2, 0, 4) if ragged else (3,) * 5
    offsets = int32(0, *itertools.accumulate(counts))
    packed = offsets if ragged else None
    q = testing.random_tensor((sum(counts), HEADS, D), dtype, target.device, seed=9)
    arguments = {"cache_seqlens": lengths, "block_table": table, "softcap": 4.0, "sink": torch.randn(HEADS)}
    arguments |= {"tree_mask": torch.rand(5, max(counts), max(counts)) < 0.6} if tree else {"causal": True}
    if ragged:
        arguments |= {"cu_seqlens_q": offsets, "max_seqlen_q": max(counts)}
    else:
        q = q.view(5, 3, HEADS, D)
    groups = int32(0, 1, 4, 5, 5, 5), int32(0, 1, 2, 4, 5, 5)
    ends = int32(0, 8, 0, 0, 0), int32(0, 0, 15, 0, 0)
    firsts = None, int32(0, 0, 8, 0, 0)
    levels = [
        SharedKeys(table[of[:-1].clamp(max=4)], end, first, offsets[of].contiguous(), sum(counts))
        for of, end, first in zip(groups, ends, firsts, strict=True)
    ]
    own = CacheTensors(
        **{name: arguments[name] for name in ("cache_seqlens", "block_table", "sink")},
        cache_leftpad=int32(0, 8, 15, 15, 0), cu_seqlens_q=packed, tree_mask=arguments.get("tree_mask"),
    )  # fmt: skip
    options = DecodeOptions(
        max_seqlen_q=max(counts) if ragged else None, softcap=4.0, backend=on["backend"],
        masking=EVERYTHING if tree else CAUSAL,
    )  # fmt: skip
    cache = q, k_cache, v_cache
    out, lse = decode(cache, attend_shared(cache, own, options, levels), options, ())
    exact = reference.attention_with_kvcache(*cache, upcast=FP64, **arguments)
    plain = reference.attention_with_kvcache(*cache, **arguments)
    sums = torch.finfo(lse.dtype).eps * float(v_cache.nan_to_num(0.0).abs().max())
    comparison = testing.compare("out", out, exact[0], plain[0], noise=(sums, sums))
    assert comparison.holds, str(comparison)
    near(lse.double(), exact[1], 1e-12 if dtype == FP64 else 2e-5)


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
def test_shared_keys_begin_where_a_window_begins(target, on, dtype):
    """The first level has a first key, and the sequences' own keys are within the window as well."""
    skip_unless_taken(target, dtype)
    k_cache, v_cache = pool(30, 4, dtype)
    table = torch.randperm(30)[:24].view(3, 8).int()
    table[:2, :4] = table[0, :4].clone()
    q = testing.random_tensor((3, 1, HEADS, D), dtype, target.device, seed=9)
    arguments = {
        "cache_seqlens": int32(27, 27, 31), "block_table": table, "causal": True, "window_size": (20, -1),
        "sink": torch.randn(HEADS),
    }  # fmt: skip
    level = SharedKeys(table[int32(0, 2, 2)], int32(16, 0, 0), int32(6, 0, 0), int32(0, 2, 3, 3), 3)
    own = CacheTensors(
        **{name: arguments[name] for name in ("cache_seqlens", "block_table", "sink")},
        cache_leftpad=int32(16, 16, 0),
    )
    options = DecodeOptions(backend=on["backend"], masking=as_masking(True, (20, -1)))
    cache = q, k_cache, v_cache
    out, lse = decode(cache, attend_shared(cache, own, options, [level]), options, ())
    exact = reference.attention_with_kvcache(*cache, upcast=FP64, **arguments)
    plain = reference.attention_with_kvcache(*cache, **arguments)
    comparison = testing.compare("out", out, exact[0], plain[0])
    assert comparison.holds, str(comparison)
    near(lse.double(), exact[1], 1e-12 if dtype == FP64 else 2e-5)


def test_a_shared_prefix_of_more_queries_than_a_tile_of_the_cpu():
    k_cache, v_cache = pool(90, 4, FP64)
    table = torch.randperm(90)[:80].view(2, 40).int()
    table[1, :2] = table[0, :2]
    q, lengths = torch.randn(2, 140, HEADS, D, dtype=FP64), int32(160, 155)
    out = flashtile.flash_attn_with_shared_prefix(q, k_cache, v_cache, table, lengths, 8, causal=True)
    alone = flashtile.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True
    )
    near(out, alone, 1e-12)


def test_a_shared_prefix_without_sequences(on):
    k_cache, v_cache = pool(4, 4)
    q, table = torch.empty(0, 1, HEADS, D), torch.empty(0, 3, dtype=torch.int32)
    out = flashtile.flash_attn_with_shared_prefix(q, k_cache, v_cache, table, int32(), 5, **on)
    assert out.shape == (0, 1, HEADS, D_V)


@pytest.mark.parametrize("groups", [None, (0, 1, 2), (0, 2, 2)])
def test_a_shared_prefix_without_queries(on, groups):
    k_cache, v_cache = pool(4, 4)
    q, table = torch.empty(2, 0, HEADS, D), int32([0, 1, 2], [0, 1, 3])
    out, lse = flashtile.flash_attn_with_shared_prefix(
        q,
        k_cache,
        v_cache,
        table,
        int32(12, 11),
        5 if groups is None else int32(*(5 for _ in groups[1:])),
        None if groups is None else int32(*groups),
        return_softmax_lse=True,
        **on,
    )
    assert (out.shape, lse.shape) == ((2, 0, HEADS, D_V), (2, HEADS, 0))


def test_prefill_in_chunks_equals_prefill_at_once(on):
    """A prompt appended in chunks, a token at a time at last, against attention over all of it."""
    torch.manual_seed(0)
    length, page_size = 22, 4
    q, k, v = (torch.randn(2, length, h, d) for h, d in ((HEADS, D), (HEADS_KV, D), (HEADS_KV, D_V)))
    expected = flashtile.attention(q, k, v, causal=True, window_size=(9, 0), **on)
    k_cache, v_cache = (torch.full((14, page_size, HEADS_KV, d), torch.nan) for d in (D, D_V))
    table = torch.randperm(14)[:12].view(2, 6).int()
    outs = []
    for start, stop in itertools.pairwise([0, 13, 18, 21, 22]):
        part = slice(start, stop)
        out = flashtile.flash_attn_with_kvcache(
            q[:, part], k_cache, v_cache, k[:, part], v[:, part], cache_seqlens=start, block_table=table,
            causal=True, window_size=(9, 0), **on,
        )  # fmt: skip
        outs.append(out)
    near(torch.cat(outs, 1), expected)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_paged_prefill(target, on, page_size):
    lengths_q, lengths_k = (5, 0, 9), (12, 4, 9)
    columns = -(-12 // page_size)
    k_cache, v_cache = pool(3 * columns, page_size)
    table = torch.randperm(3 * columns).view(3, columns).int()
    q = torch.randn(15, HEADS, D)  # the last token is nobody's
    cu_q, cu_k = (testing.cu_seqlens(n, target.device) for n in (lengths_q, lengths_k))
    rows = [
        tuple(cache[table[b].long()].flatten(0, 1)[:n] for cache in (k_cache, v_cache))
        for b, n in enumerate(lengths_k)
    ]
    k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    arguments = {"causal": True, "softcap": 3.0, "return_lse": True, **on}
    expected = flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 12, **arguments)
    got = flashtile.flash_attn_varlen_func(
        q, k_cache, v_cache, cu_q, cu_k, 9, 12, block_table=table, **arguments
    )
    near(got, expected)
    used = flashtile.flash_attn_varlen_func(
        q, k_cache, v_cache, cu_q, None, 9, 12, block_table=table, seqused_k=int32(*lengths_k), **arguments
    )
    assert torch.equal(used[0], got[0])


def test_paged_prefill_names_the_callers_arguments():
    k_cache, v_cache = pool(3, 4)
    q, offsets, table = torch.randn(4, HEADS, D), int32(0, 4), int32([0, 1, 2])
    call = (q, k_cache, v_cache, offsets, int32(0, 13), 4, 13)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k must be from 0 to 12 .* got 13"):
        flashtile.flash_attn_varlen_func(*call, block_table=table)
    with pytest.raises(TypeError, match=r"^v has dtype torch"):
        flashtile.flash_attn_varlen_func(q, k_cache, v_cache.half(), *call[3:], block_table=table)
    with pytest.raises(TypeError, match="cu_seqlens_k must be an int32"):
        flashtile.flash_attn_varlen_func(*call[:4], None, 4, 13, block_table=table)
    call = (q.requires_grad_(), k_cache, v_cache, offsets, int32(0, 12), 4, 12)
    loss = flashtile.flash_attn_varlen_func(*call, block_table=table).sum()
    with pytest.raises(NotImplementedError, match="no backward pass"):
        loss.backward()
