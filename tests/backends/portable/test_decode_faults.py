"""Lengths and tables that lead out of the cache, in the kernels, which get no checks on a GPU: NaN for the
sequences that have them, nothing written where it does not belong, and no other sequence touched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashtile.backends.portable.decode import (
    configure_decode,
    prepare_append_kvcache,
    prepare_combine,
    prepare_decode,
)
from flashtile.backends.portable.decode.launch import has_pairs
from flashtile.op.operation import signatures
from flashtile.problems.decode import (
    FP8,
    AppendOptions,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CombineProblem,
    DecodeOptions,
    DecodeProblem,
)
from flashtile.problems.masking import Masking

pytestmark = pytest.mark.interpreter

HEADS, HEADS_KV, D = 4, 2, 16
LENGTHS = (40, 90, 17)
BAD = 1
"""The sequence that the faults are in."""
SPLITS = ({"num_splits": 1}, {"num_splits": 3}, {"split_size": 16})
FAULTS = ("negative page", "page beyond the pool", "outgrown", "negative length", "leftpad")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def attend(q, k_cache, v_cache, tensors, **options):
    """By the kernels, without the checks of data that a call on the CPU gets."""
    options = DecodeOptions(backend="portable", **options)
    problem = DecodeProblem.from_tensors(q, k_cache, v_cache, tensors, options)
    return prepare_decode(problem, configure_decode(problem))(q, k_cache, v_cache, tensors)


def make_call(page_size, capacity=96, seqlen_q=2):
    """(q, k_cache, v_cache), tensors beside them; page_size 0 is a dense cache."""
    torch.manual_seed(0)
    q = torch.randn(3, seqlen_q, HEADS, D)
    tensors = CacheTensors(cache_seqlens=int32(*LENGTHS))
    if not page_size:
        caches = torch.randn(2, 3, capacity, HEADS_KV, D)
        return (q, *caches), tensors._replace(cache_batch_idx=int32(2, 0, 1))
    columns = -(-capacity // page_size)
    table = torch.randperm(3 * columns).view(3, columns).int()
    return (q, *torch.randn(2, 3 * columns, page_size, HEADS_KV, D)), tensors._replace(block_table=table)


def with_fault(tensors, fault, k_cache):
    lengths = tensors.cache_seqlens.clone()
    capacity = k_cache.shape[1]
    if tensors.block_table is not None:
        capacity *= tensors.block_table.shape[1]
        table = tensors.block_table.clone()
        last = (LENGTHS[BAD] - 1) // k_cache.shape[1]
        if fault == "negative page":
            table[BAD, last] = -1
        if fault == "page beyond the pool":
            table[BAD, last // 2] = k_cache.shape[0]
        tensors = tensors._replace(block_table=table)
    if fault == "row beyond the cache":
        tensors = tensors._replace(cache_batch_idx=int32(2, 3, 1))
    if fault == "outgrown":
        lengths[BAD] = capacity + 1
    if fault == "negative length":
        lengths[BAD] = -1
    if fault == "leftpad":
        tensors = tensors._replace(cache_leftpad=int32(0, -2, 0))
    return tensors._replace(cache_seqlens=lengths)


def assert_only_bad_is_nan(call, tensors, *faults, **options):
    expected_out, expected_lse = attend(*call, tensors, **options)
    for fault in faults:
        out, lse = attend(*call, with_fault(tensors, fault, call[1]), **options)
        others = [b for b in range(3) if b != BAD]
        assert out[BAD].isnan().all()
        assert lse[BAD].isnan().all()
        torch.testing.assert_close(out[others], expected_out[others])
        torch.testing.assert_close(lse[others], expected_lse[others])


@pytest.mark.parametrize(
    ("fault", "page_size", "splits"),
    [
        *((fault, 4, {}) for fault in FAULTS),
        *(("page beyond the pool", page_size, {}) for page_size in (3, 128)),
        *(("negative page", 128, splits) for splits in SPLITS),
        ("outgrown", 3, SPLITS[1]),
    ],
    ids=str,
)
def test_a_sequence_that_leaves_the_pool_is_nan(fault, page_size, splits):
    """Pages that divide an n_block, that do not, and that hold it."""
    call, tensors = make_call(page_size, 256 if page_size == 128 else 96)
    assert_only_bad_is_nan(call, tensors, fault, **splits)


@pytest.mark.parametrize("page_size", [3, 4, 128])
@pytest.mark.parametrize("cache_dtype", [torch.float16, FP8], ids=str)
def test_so_it_is_where_pages_are_checked_ahead(page_size, cache_dtype):
    """Before the loop over n_blocks, for tiles of more than 16 rows and for FP8 caches."""
    seqlen_q = 2 if cache_dtype == FP8 else 20
    (q, *caches), tensors = make_call(page_size, 256 if page_size == 128 else 96, seqlen_q)
    call = (q.half(), *(cache.to(cache_dtype) for cache in caches))
    assert_only_bad_is_nan(call, tensors, "negative page", "page beyond the pool")


@pytest.mark.parametrize("fault", ["row beyond the cache", "outgrown"])
def test_a_sequence_that_leaves_a_dense_cache_is_nan(fault):
    assert_only_bad_is_nan(*make_call(0), fault)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}], ids=str)
def test_nothing_hides_the_nan(splits):
    """Not a sink, and not what attention over other keys gave; nor does the call hide theirs."""
    call, tensors = make_call(4)
    prior_out, prior_lse = torch.randn(6, HEADS, D), torch.randn(HEADS, 6)
    tensors = tensors._replace(sink=torch.randn(HEADS), prior_out=prior_out, prior_lse=prior_lse)
    assert_only_bad_is_nan(call, tensors, "negative page", **splits)
    prior_out[2:4], prior_lse[:, 2:4] = torch.nan, torch.nan
    out, lse = attend(*call, tensors, **splits)
    assert out.isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert lse.isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert int(out.isnan().sum()) == out[1].numel()


def test_combining_keeps_the_nan():
    out, lse = torch.randn(3, 1, 2, 2, D), torch.randn(3, 1, 2, 2)
    out[1, 0, 0], lse[1, 0, 0] = torch.nan, torch.nan
    problem = CombineProblem(3, 1, 2, 2, D, torch.float32, torch.float32, torch.device("cpu"))
    got, got_lse = prepare_combine(problem, None)(out, lse)
    assert got.isnan().flatten(2).all(2).tolist() == [[True, False]]
    assert got_lse.isnan().all(1).tolist() == [[True, False]]


def test_entries_that_no_key_needs_may_hold_anything():
    call, tensors = make_call(4)
    expected = attend(*call, tensors)
    for b, length in enumerate(LENGTHS):
        tensors.block_table[b, -(-length // 4) :] = 2**30
    torch.testing.assert_close(attend(*call, tensors), expected, rtol=0, atol=0)
    window = Masking(window_left=5)
    expected = attend(*call, tensors, masking=window)
    tensors.block_table[0, :8] = -1  # the first query stands at key 38 and sees from 33 on, of page 8
    torch.testing.assert_close(attend(*call, tensors, masking=window), expected, rtol=0, atol=0)
    # A sequence of nothing but padding has no keys, though its last page has some of its positions.
    out, lse = attend(*call, tensors._replace(cache_leftpad=int32(40, 0, LENGTHS[2])))
    tensors.block_table[2, :] = -1
    got = attend(*call, tensors._replace(cache_leftpad=int32(40, 0, LENGTHS[2])))
    torch.testing.assert_close(got, (out, lse), rtol=0, atol=0)


def test_a_cache_without_pages():
    q, k_cache, tensors = torch.randn(1, 1, 2, D), torch.randn(0, 4, 2, D), CacheTensors(int32(0))
    tensors = tensors._replace(block_table=torch.zeros(1, 2, dtype=torch.int32))
    out, lse = attend(q, k_cache, k_cache, tensors)
    assert (out.count_nonzero(), lse.max()) == (0, -torch.inf)
    out, lse = attend(q, k_cache, k_cache, tensors._replace(cache_seqlens=int32(1)))
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(
    "fault", ["negative page", "page beyond the pool", "outgrown", "row beyond the cache"]
)
def test_tokens_without_a_place_are_not_written(fault):
    new = 3
    (_, k_cache, v_cache), given = make_call(0 if fault == "row beyond the cache" else 4)
    capacity = 96
    lengths = int32(40, capacity - 1 if fault == "outgrown" else 88, 17)
    if given.block_table is not None and fault != "outgrown":
        given.block_table[BAD, 88 // 4] = -1 if fault == "negative page" else k_cache.shape[0]
    if fault == "row beyond the cache":
        given = given._replace(cache_batch_idx=int32(2, 3, 1))
    tensors = AppendTensors(
        cache_seqlens=lengths, cache_batch_idx=given.cache_batch_idx, block_table=given.block_table
    )
    k, v = torch.randn(2, 3, new, HEADS_KV, D)
    expected = [k_cache.clone(), v_cache.clone()]
    for cache, tokens in zip(expected, (k, v), strict=True):
        for b in range(3):
            for i in range(new):
                position = int(lengths[b]) + i
                if b == BAD and (fault != "outgrown" or position >= capacity):
                    continue
                if given.block_table is None:
                    cache[int(given.cache_batch_idx[b]), position] = tokens[b, i]
                else:
                    cache[int(given.block_table[b, position // 4]), position % 4] = tokens[b, i]
    options = AppendOptions(backend="portable")
    problem = AppendProblem.from_tensors(k_cache, v_cache, k, v, tensors, options)
    prepare_append_kvcache(problem, None)(k_cache, v_cache, k, v, tensors)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_what_a_launch_is_prepared_for_is_in_its_signature():
    """A launch serves all tensors of one signature, which knows of an address whether 16 divides it."""
    memory = torch.zeros(4096, dtype=torch.uint8).view(FP8)
    caches = [memory[first : first + 2048].view(2, 16, 2, 32) for first in (16, 32, 1, 2, 8, 15)]
    by_signature: dict[tuple, set[bool]] = {}
    for cache in caches:
        by_signature.setdefault(signatures((cache,)), set()).add(has_pairs(cache))
    assert len(by_signature) == 2
    assert all(len(answers) == 1 for answers in by_signature.values())
    assert has_pairs(caches[0])
