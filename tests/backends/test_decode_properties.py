"""Batches, splits, layouts and page sizes change no result of decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from cases import BF16, FP16, FP32, FP64
from decode_cases import DecodeCase, build
from flashtile.backends.cpu.decode import TILE_ELEMENTS, attend_tiles
from flashtile.operators import decode as operators
from flashtile.problems.decode import FP8, CacheTensors, DecodeOptions, DecodeProblem
from flashtile.problems.masking import CAUSAL
from flashtile.testing import decode as testing

pytestmark = pytest.mark.numerical


@st.composite
def calls(draw: st.DrawFn) -> DecodeCase:
    """Any valid call of up to four short sequences."""
    batch = draw(st.integers(1, 4))
    page_size = draw(st.none() | st.sampled_from((1, 2, 3, 16, 40)))
    longest = draw(st.integers(1, 60))
    ragged = draw(st.booleans())

    def per_sequence(most: int):
        return tuple(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)))

    new = draw(st.none() | st.integers(0, 7))
    seqlen_q = draw(st.integers(0, 7))
    if ragged:
        seqlen_q = per_sequence(7)
        new = None if new is None else per_sequence(7)
    lengths = per_sequence(longest)
    head_dim = draw(st.integers(1, 40) | st.just(512))
    tree = draw(st.sampled_from((None, None, None, "shared", "batch")))
    rotary = new is not None and head_dim > 1 and tree is None and draw(st.booleans())
    fp8 = draw(st.booleans())
    arguments = {
        "softmax_scale": draw(st.none() | st.floats(-0.5, 0.5)),
        "softcap": draw(st.just(0.0) | st.floats(1, 30)),
    }
    if tree is None:
        side = st.just(-1) | st.integers(0, 70)
        arguments |= {"causal": draw(st.booleans()), "window_size": (draw(side), draw(side))}
        arguments["attention_chunk"] = draw(st.just(0) | st.integers(1, 70))
    if rotary:
        arguments["rotary_interleaved"] = draw(st.booleans())
    rows = draw(st.permutations(range(batch + 2)))[:batch] if page_size is None else None
    return DecodeCase(
        name="any",
        lengths=lengths,
        seqlen_q=seqlen_q,
        new=new,
        heads=draw(st.sampled_from(((1, 1), (2, 2), (3, 1), (6, 2), (5, 5)))),
        head_dim=head_dim,
        head_dim_v=draw(st.none() | st.integers(1, 40)),
        page_size=page_size,
        capacity=longest + 7,
        cache_dtype=FP8 if fp8 else None,
        descale=draw(st.sampled_from((None, "head", "block", "sequence"))) if fp8 else None,
        rotary_dim=2 * draw(st.integers(1, head_dim // 2)) if rotary else None,
        leftpad=per_sequence(longest) if draw(st.booleans()) else None,
        batch_idx=tuple(rows) if rows is not None and draw(st.booleans()) else None,
        alibi=draw(st.sampled_from((None, "head", "batch"))) if tree is None else None,
        sink=draw(st.booleans()),
        tree=tree,
        transposed=draw(st.booleans()),
        arguments=arguments,
    )


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(FP16, id="fp16"),
        pytest.param(BF16, id="bf16", marks=pytest.mark.thorough),
        pytest.param(FP32, id="fp32", marks=pytest.mark.thorough),
        pytest.param(FP64, id="fp64"),
    ],
)
def test_any_call(dtype):
    @settings(max_examples=40)
    @given(calls(), st.integers(0, 9))
    def meets_the_error_rule(case: DecodeCase, seed: int) -> None:
        tensors, arguments = build(case, dtype, "cpu", seed)
        testing.check(*tensors, backend="cpu", **arguments)

    meets_the_error_rule()


LONG = DecodeCase("long", lengths=(700, 3, 1501), capacity=1520, head_dim=32, seqlen_q=2)


@pytest.mark.parametrize("page_size", [None, 16])
def test_no_result_depends_on_the_rest_of_the_batch(page_size):
    """To the bit, each sequence alone and with others."""
    (q, k_cache, v_cache, *_), arguments = build(replace(LONG, page_size=page_size), FP32, "cpu")
    together = flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, num_splits=1, **arguments)
    for b in range(3):
        one = slice(b, b + 1)
        caches = (k_cache, v_cache) if page_size else (k_cache[one], v_cache[one])
        alone = flashtile.flash_attn_with_kvcache(
            q[one], *caches, num_splits=1, **{name: a[one] for name, a in arguments.items()}
        )
        assert torch.equal(alone, together[one])


def test_no_result_depends_on_where_pages_lie():
    (q, k_cache, v_cache, *_), arguments = build(replace(LONG, page_size=16), FP32, "cpu")
    expected = flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    order = torch.randperm(len(k_cache))
    table = arguments["block_table"].long()
    moved = torch.where(table < len(k_cache), order.argsort()[table.clamp(max=len(k_cache) - 1)], table)
    arguments["block_table"] = moved.int()
    got = flashtile.flash_attn_with_kvcache(q, k_cache[order], v_cache[order], **arguments)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("page_size", [1, 7, 256])
def test_no_result_depends_on_the_page_size(page_size):
    (q, k_cache, v_cache, *_), arguments = build(LONG, FP64, "cpu")
    expected = flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **arguments)
    columns = -(-1520 // page_size)
    pages = [
        torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, columns * page_size - 1520)).reshape(
            3 * columns, page_size, *cache.shape[2:]
        )
        for cache in (k_cache, v_cache)
    ]
    table = torch.arange(3 * columns, dtype=torch.int32).view(3, columns)
    got = flashtile.flash_attn_with_kvcache(
        q, *pages, block_table=table, return_softmax_lse=True, **arguments
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most bytes that one new tensor in its scope took; views of ``known`` are not new."""

    nbytes = 0

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known = known.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.known:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("paged", [False, True])
def test_memory_does_not_grow_with_the_scores(paged):
    """32 queries of 4 heads over 100 thousand keys: 51 MB of scores, and no tensor above a few tiles."""
    length, heads = 100_000, 4
    q = torch.randn(1, 32, heads, 16, dtype=FP16)
    k_cache = torch.randn(length // 16, 16, 1, 16, dtype=FP16)
    tensors = CacheTensors(block_table=torch.arange(length // 16, dtype=torch.int32)[None])
    if not paged:
        k_cache, tensors = k_cache.view(1, length, 1, 16), CacheTensors()
    problem = DecodeProblem.from_tensors(q, k_cache, k_cache, tensors, DecodeOptions(masking=CAUSAL))
    with Largest(k_cache) as largest:
        attend_tiles(problem, q, k_cache, k_cache, tensors)
    assert 4 * TILE_ELEMENTS / 2 < largest.nbytes <= 8 * TILE_ELEMENTS


def test_launches_are_kept():
    """A second call of the same signature prepares nothing; another signature does."""
    (q, k_cache, v_cache, k, v), arguments = build(DecodeCase("kept", head_dim=23, new=1), FP32, "cpu")
    caches = (operators.DECODE.launches, operators.APPEND.launches, operators._append_and_decode)

    def prepared():
        flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **arguments)
        return [dict(kept) for kept in caches]

    first = prepared()
    assert prepared() == first
    arguments["causal"] = True
    assert prepared() != first


@pytest.mark.parametrize(
    ("batch", "num_blocks", "columns", "lengths"),
    [(0, 4, 2, 0), (2, 0, 0, 0), (2, 4, 0, 0), (2, 0, 0, None), (0, 0, 0, None)],
)
def test_nothing_in_the_cache_is_valid(target, batch, num_blocks, columns, lengths):
    with torch.device(target.device):
        q, cache = torch.randn(batch, 3, 4, 16), torch.randn(num_blocks, 4, 2, 16)
        table = torch.zeros(batch, columns, dtype=torch.int32)
        cache_seqlens = None if lengths is None else torch.full((batch,), lengths, dtype=torch.int32)
    out, lse = flashtile.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=cache_seqlens, block_table=table, causal=True,
        return_softmax_lse=True, backend=target.backend,
    )  # fmt: skip
    assert out.shape == (batch, 3, 4, 16)
    assert not out.any()
    assert lse.shape == (batch, 4, 3)
    assert (lse == -torch.inf).all()


def test_meta_tensors_give_shapes():
    tensors = [torch.empty(shape, device="meta") for shape in ((2, 3, 4, 16), (9, 4, 2, 16), (9, 4, 2, 8))]
    table = torch.empty(2, 3, dtype=torch.int32, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    out = flashtile.flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, block_table=table)
    assert out.shape == (2, 3, 4, 8)
    assert flashtile.flash_attn_with_shared_prefix(*tensors, table, lengths, 4).shape == (2, 3, 4, 8)


def test_caches_of_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        cache = torch.zeros(2, 8, 2, 16)
    k = torch.randn(2, 1, 2, 16)
    flashtile.append_kvcache(cache, cache.clone(), k, k, 3)
    assert torch.equal(cache[:, 3], k[:, 0])
