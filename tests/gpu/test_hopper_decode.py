"""Attention over a cache by Hopper's kernel: every feature it has, every tile, and what it promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import captured
from torch import Tensor

import flashtile
from cases import BF16, FP16
from decode_cases import CASES, DecodeCase, build, paged
from flashtile.operators.decode import SharedKeys, attend_shared
from flashtile.problems.decode import CacheTensors, DecodeOptions
from flashtile.testing import decode as testing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def attend(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return flashtile.flash_attn_with_kvcache(*tensors, return_softmax_lse=True, backend="hopper", **arguments)


def check(tensors: tuple[Tensor, ...], arguments: dict[str, Any], **more: Any) -> None:
    testing.check(*tensors, backend="hopper", **arguments, **more)


def assert_same_bits(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def adapted(case: DecodeCase) -> DecodeCase | None:
    """The case if the kernel has its features; what it appends is in the cache beforehand."""
    if case.cache_dtype or case.rotary_dim or case.head_dim % 8 or (case.head_dim_v or 8) % 8:
        return None
    if case.new is not None:
        new = case.new if isinstance(case.new, tuple) else (case.new,) * len(case.lengths)
        lengths = tuple(map(sum, zip(case.lengths, new, strict=True)))
        return replace(case, new=None, lengths=lengths, cache_dtype=None)
    return case


SERVED = {case.name: adapted(case) for case in CASES if adapted(case)}


@pytest.mark.parametrize("name", SERVED)
def test_every_feature(name: str) -> None:
    tensors, arguments = build(SERVED[name], BF16, "cuda")
    check(tensors, arguments)


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window_size": (100, 20)},
    "left": {"window_size": (300, -1)},
    "softcap": {"softcap": 5.0, "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "sink": {"sink": True, "causal": True},
    "negative-scale": {"softmax_scale": -0.1},
    "tree": {"tree": True},
    "leftpad": {"leftpad": True, "causal": True},
    "leftpad-window": {"leftpad": True, "window_size": (100, 0)},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("seqlen_q", [9, 90])
def test_features_in_both_tiles(feature: str, seqlen_q: int) -> None:
    tensors, arguments = paged([1000, 130, 64, 2222], seqlen_q=seqlen_q)
    given = dict(FEATURES[feature])
    if given.pop("alibi", False):
        given["alibi_slopes"] = torch.rand(8, device="cuda") / 8
    if given.pop("sink", False):
        given["sink"] = torch.randn(8, device="cuda")
    if given.pop("tree", False):
        given["tree_mask"] = torch.rand(seqlen_q, seqlen_q, device="cuda") < 0.5
    if given.pop("leftpad", False):
        given["cache_leftpad"] = torch.tensor([130, 0, 63, 2000], dtype=torch.int32, device="cuda")
    for splits in ({}, {"num_splits": 1}, {"num_splits": 3}):
        check(tensors, arguments, **given, **splits)


def test_what_lies_before_padding_on_the_left_may_be_nan() -> None:
    (q, k_cache, v_cache), arguments = paged([300, 5], page_size=0, seqlen_q=8)
    pads = [150, 3]
    for row, pad in zip(arguments["cache_batch_idx"].tolist(), pads, strict=True):
        k_cache[row, :pad] = v_cache[row, :pad] = torch.nan
    leftpad = torch.tensor(pads, dtype=torch.int32, device="cuda")
    out, lse = attend((q, k_cache, v_cache), arguments | {"cache_leftpad": leftpad})
    expected = flashtile.flash_attn_with_kvcache(
        q, k_cache, v_cache, return_softmax_lse=True, cache_leftpad=leftpad, backend="portable", **arguments
    )
    torch.testing.assert_close((out, lse), expected, rtol=1.6e-2, atol=2e-3)


@pytest.mark.parametrize("page_size", [0, 1, 3, 8, 16, 24, 100, 256])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}, {"split_size": 256}], ids=str)
def test_page_sizes(page_size: int, splits: dict[str, int]) -> None:
    for seqlen_q in (8, 50):
        tensors, arguments = paged([1000, 1, 0, 777, 4096], page_size=page_size, seqlen_q=seqlen_q)
        check(tensors, arguments, causal=True, **splits)


@pytest.mark.parametrize("heads", [(1, 1), (32, 32), (14, 2), (24, 4), (128, 1)], ids=str)
def test_groups_and_tokens(heads: tuple[int, int]) -> None:
    for seqlen_q in (1, 3, 16, 64, 300):
        tensors, arguments = paged([900, 64, 333], heads, 64, seqlen_q=seqlen_q)
        check(tensors, arguments, causal=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128), (128, 64), (40, 24), (128, 256)],
)
def test_head_dims(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    for seqlen_q in (12, 40):
        tensors, arguments = paged([700, 65], (8, 2), head_dim, head_dim_v, seqlen_q=seqlen_q, dtype=dtype)
        check(tensors, arguments, causal=True)
        check(tensors, arguments, window_size=(50, 3), num_splits=2)


@pytest.mark.parametrize("page_size", [0, 16])
def test_ragged_queries(page_size: int) -> None:
    """Decoding rows, prefills and sequences without queries in one call."""
    lengths, contexts = (1, 700, 0, 1, 33, 1), [2000, 900, 300, 5, 33, 4097]
    tensors, arguments = paged(contexts, (8, 2), seqlen_q=lengths, page_size=page_size)
    for splits in ({}, {"num_splits": 1}, {"num_splits": 4}):
        check(tensors, arguments, causal=True, **splits)


def test_a_long_chunk_and_many_sequences() -> None:
    """More m_blocks than a program reads at a time, and more work tiles than there are programs."""
    check(*paged([3000, 2048], (16, 2), seqlen_q=1024), causal=True)
    check(*paged([1 + 37 * i % 900 for i in range(700)], (4, 1), 64, seqlen_q=5), causal=True)


@pytest.mark.parametrize("seqlen_q", [8, 80])
@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 4}, {"split_size": 512}], ids=str)
def test_results_do_not_depend_on_the_batch(splits: dict[str, int], seqlen_q: int) -> None:
    (q, k_cache, v_cache), arguments = paged([5000, 77, 1200, 3001, 640], seqlen_q=seqlen_q)
    together = attend((q, k_cache, v_cache), arguments | splits)
    for b in range(5):
        alone = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        expected = tuple(result[b : b + 1] for result in together)
        assert_same_bits(attend((q[b : b + 1], k_cache, v_cache), alone | splits), expected)


@pytest.mark.parametrize("seqlen_q", [8, 80])
def test_splits_of_a_size_under_a_block_table_of_far_more(seqlen_q: int) -> None:
    tensors, arguments = paged([5000, 0, 77], seqlen_q=seqlen_q)
    expected = attend(tensors, arguments | {"split_size": 512})
    more = torch.full((3, 4000), 2**31 - 1, dtype=torch.int32, device="cuda")
    arguments["block_table"] = torch.cat([arguments["block_table"], more], 1)
    assert_same_bits(attend(tensors, arguments | {"split_size": 512}), expected)


def test_decoding_rows_among_chunks_of_prompts() -> None:
    """The queue of whole work tiles, in which rows of few tokens are spread among the others."""
    lengths = (1, 900, 1, 1, 2, 1, 600, 1)
    tensors, arguments = paged([4000, 900, 300, 5, 33, 4097, 2000, 1], (32, 8), seqlen_q=lengths)
    check(tensors, arguments, causal=True)
    check(tensors, arguments, causal=True, num_splits=1)


ALIKE: dict[str, tuple[list[int], int]] = {
    "halves of few rows": ([2048 - 9 * b for b in range(8)], 16),
    "many parts of few rows": ([30000], 8),
    "halves of many rows": ([9001], 256),
    "whole": ([1500 + b for b in range(16)], 8),
    "other lengths": ([9000, *[300] * 7], 16),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("page_size", [16, 256, 0])
def test_work_tiles_of_similar_lengths(name: str, page_size: int) -> None:
    """They are divided alike, unless lengths differ much; repeats have the same bits."""
    lengths, seqlen_q = ALIKE[name]
    tensors, arguments = paged(lengths, (32, 8), page_size=page_size, seqlen_q=seqlen_q)
    check(tensors, arguments, causal=True)
    expected = attend(tensors, arguments)
    for _ in range(20):
        assert_same_bits(attend(tensors, arguments), expected)


def test_four_tokens_of_many_sequences_take_the_kernel() -> None:
    tensors, arguments = paged([1000 + b for b in range(32)], (32, 8), seqlen_q=4)
    call = (flashtile.flash_attn_with_kvcache, *tensors)
    assert flashtile.explain(*call, causal=True, **arguments).backend == "hopper"
    testing.check(*tensors, causal=True, **arguments)
    assert flashtile.explain(*call, causal=True, num_splits=1, **arguments).backend == "portable"


@pytest.mark.parametrize("seqlen_q", [8, 700])
def test_repeats_are_bitwise_equal(seqlen_q: int) -> None:
    tensors, arguments = paged([8192, 800, 4000], seqlen_q=seqlen_q)
    expected = attend(tensors, arguments)
    for _ in range(300):
        assert_same_bits(attend(tensors, arguments), expected)


@pytest.mark.parametrize("seqlen_q", [8, 600])
def test_one_graph_serves_growing_sequences(seqlen_q: int) -> None:
    (q, k_cache, v_cache), arguments = paged([3000, 600, 5000], page_size=64, seqlen_q=seqlen_q)
    lengths = arguments["cache_seqlens"]
    longest = lengths.clone()
    lengths.fill_(1)
    attend((q, k_cache, v_cache), arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend((q, k_cache, v_cache), arguments)
    for grown in ([1, 1, 1], [129, 600, 4999], [3000, 0, 77], longest.tolist()):
        lengths.copy_(torch.tensor(grown, dtype=torch.int32))
        graph.replay()
        assert_same_bits(captured, attend((q, k_cache, v_cache), arguments))
        check((q, k_cache, v_cache), arguments, causal=True)


def test_layers_of_a_captured_step_share_a_table() -> None:
    """The first layer of each replay fills it, from the lengths of the replay.

    The kernel before attention in the other layers is that of a product. Attention starts while it runs.
    """
    layers = [
        (
            torch.randn(4096, 4096, device="cuda", dtype=BF16) / 64,
            *torch.randn(2, 900, 16, 8, 128, device="cuda", dtype=BF16),
        )
        for _ in range(3)
    ]
    x, residual = torch.randn(2, 64, 4096, device="cuda", dtype=BF16)
    table = torch.randint(900, (64, 256), device="cuda", dtype=torch.int32)
    offsets, end = (torch.zeros(size, device="cuda", dtype=torch.int32) for size in (65, 64))

    def step(tables: dict | None) -> list[tuple[Tensor | None, Tensor | None]]:
        level = SharedKeys(table, end, None, offsets, 8, tables)
        found = []
        for weight, k, v in layers:
            q = flashtile.linear.linear(x, weight, residual=residual).view(64, 32, 128)
            own = attend_shared((q, k, v), CacheTensors(), DecodeOptions(backend="hopper"), [level])
            assert own.prior_out is not None
            assert own.prior_lse is not None
            found.append((own.prior_out.clone(), own.prior_lse.clone()))
        return found

    with torch.no_grad():
        graph, shared = captured(lambda: step({}))
        for width, lengths in ((8, [4000, 90, 0, 1500]), (4, [700] * 7), (1, [4096, *[9] * 49])):
            ends = torch.arange(65, dtype=torch.int32) * width
            offsets.copy_(ends.clamp(max=width * len(lengths)))  # also tokens of no sequence
            end.zero_()[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
            graph.replay()
            assert_same_bits(shared, step(None))


def test_no_synchronisation_and_the_same_without_lse() -> None:
    for seqlen_q in (8, 300):
        tensors, arguments = paged([300, 40], seqlen_q=seqlen_q)
        out, _ = attend(tensors, arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):  # the first call of a signature compiles, the others go by address
                alone = flashtile.flash_attn_with_kvcache(*tensors, backend="hopper", **arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same_bits(alone, out)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("page_size", [5, 16, 256])
@pytest.mark.parametrize("seqlen_q", [8, 40])
def test_sequences_that_leave_the_cache_are_nan(
    seqlen_q: int, page_size: int, splits: dict[str, int]
) -> None:
    """A page beyond the pool, a negative one, an outgrown table: no fault, and no other sequence touched."""
    tensors, arguments = paged([300, 40, 500, 700], page_size=page_size, seqlen_q=seqlen_q)
    expected = attend(tensors, arguments | splits)
    wrong = {name: argument.clone() for name, argument in arguments.items()}
    wrong["block_table"][0, -(-300 // page_size) - 1] = tensors[1].shape[0]
    wrong["block_table"][1, 0] = -5
    wrong["cache_seqlens"][3] = wrong["block_table"].shape[1] * page_size + 1
    for got, right in zip(attend(tensors, wrong | splits), expected, strict=True):
        assert got[[0, 1, 3]].isnan().all()
        torch.testing.assert_close(got[2], right[2], rtol=1.6e-2, atol=1e-3)


def test_rows_outside_of_a_dense_cache_are_nan() -> None:
    tensors, arguments = paged([300, 40, 500], page_size=0, seqlen_q=8)
    arguments["cache_batch_idx"][1] = tensors[1].shape[0]
    out, lse = attend(tensors, arguments)
    for result in (out, lse):
        assert result.isnan().flatten(1).all(1).tolist() == [False, True, False]


def test_prefill_over_pages_takes_the_kernel() -> None:
    (q, k, v), arguments = paged([600, 200], seqlen_q=(600, 150))
    offsets = arguments["cu_seqlens_q"]
    keys = torch.tensor([0, 600, 800], dtype=torch.int32, device="cuda")
    call = (q, k, v, offsets, keys, 600, 600)
    more = {"causal": True, "block_table": arguments["block_table"]}
    assert flashtile.explain(flashtile.flash_attn_varlen_func, *call, **more).backend == "hopper"
    got = flashtile.flash_attn_varlen_func(*call, **more)
    expected = flashtile.flash_attn_varlen_func(*call, **more, backend="portable")
    torch.testing.assert_close(got, expected, rtol=1.6e-2, atol=2e-3)
