"""FP8 caches in Hopper's kernel: every tile, scale and way of loading, and what it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from cases import BF16, FP16
from decode_cases import paged
from flashtile.problems.decode import FP8
from flashtile.testing import decode as testing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def scaled(
    contexts: list[int], descale: str | None, **call: Any
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """A call over an FP8 cache, with scales of its heads, of its blocks or of sequences."""
    tensors, arguments = paged(contexts, cache_dtype=FP8, **call)
    if descale is not None:
        blocks, _, heads, _ = tensors[1].shape
        by = {"head": (heads,), "block": (blocks, heads), "sequence": (len(contexts), 1, heads)}
        for name in ("k_descale", "v_descale"):
            arguments[name] = 0.25 + torch.rand(by[descale], device="cuda")
    return tensors, arguments


def attend(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return flashtile.flash_attn_with_kvcache(*tensors, return_softmax_lse=True, backend="hopper", **arguments)


def assert_same_bits(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descale", [None, "head", "block", "sequence"])
@pytest.mark.parametrize("page_size", [0, 1, 3, 8, 16, 64, 256])
def test_page_sizes(page_size: int, descale: str | None) -> None:
    for seqlen_q in (8, 50):
        tensors, arguments = scaled([1000, 1, 0, 777, 4096], descale, page_size=page_size, seqlen_q=seqlen_q)
        for splits in ({}, {"num_splits": 1}, {"split_size": 256}):
            testing.check(*tensors, backend="hopper", causal=True, **arguments, **splits)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("descale", [None, "head", "block"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128), (128, 64), (48, 16), (128, 256)],
)
def test_head_dims(head_dim: int, head_dim_v: int, descale: str | None, dtype: torch.dtype) -> None:
    for seqlen_q in (12, 40):
        tensors, arguments = scaled(
            [700, 65], descale, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q, dtype=dtype
        )
        testing.check(*tensors, backend="hopper", causal=True, **arguments)
        testing.check(*tensors, backend="hopper", window_size=(50, 3), num_splits=2, **arguments)


@pytest.mark.parametrize("descale", ["head", "block"])
def test_features(descale: str) -> None:
    tensors, arguments = scaled([1000, 130, 64, 2222], descale, seqlen_q=9)
    leftpad = torch.tensor([130, 0, 63, 2000], dtype=torch.int32, device="cuda")
    for more in (
        {"window_size": (100, 20), "softcap": 5.0, "sink": torch.randn(8, device="cuda")},
        {"causal": True, "alibi_slopes": torch.rand(8, device="cuda") / 8},
        {"tree_mask": torch.rand(9, 9, device="cuda") < 0.5},
        {"softmax_scale": -0.1},
        {"causal": True, "cache_leftpad": leftpad},
    ):
        testing.check(*tensors, backend="hopper", **arguments, **more)


def test_rows_of_any_size() -> None:
    """Queries of 1e30 and of 1e-30 beside others, and of 0: each row has a scale of its own."""
    tensors, arguments = scaled([300, 50, 130], "head", seqlen_q=9)
    tensors[0][0] *= 1e30
    tensors[0][1] *= 1e-30
    tensors[0][2, 3] = 0.0
    testing.check(*tensors, backend="hopper", causal=True, **arguments)


def test_a_long_chunk_ragged_queries_and_many_sequences() -> None:
    tensors, arguments = scaled([3000, 2048], "head", heads=(16, 2), seqlen_q=1024)
    testing.check(*tensors, backend="hopper", causal=True, **arguments)
    for page_size in (0, 16):
        lengths = (1, 700, 0, 1, 33, 1)
        tensors, arguments = scaled(
            [2000, 900, 300, 5, 33, 4097], "block", seqlen_q=lengths, page_size=page_size
        )
        testing.check(*tensors, backend="hopper", causal=True, **arguments)
    contexts = [1 + 37 * i % 900 for i in range(700)]
    tensors, arguments = scaled(contexts, "head", heads=(4, 1), head_dim=64, seqlen_q=5)
    testing.check(*tensors, backend="hopper", causal=True, **arguments)


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 4}, {"split_size": 512}], ids=str)
def test_results_do_not_depend_on_the_batch(splits: dict[str, int]) -> None:
    (q, k_cache, v_cache), arguments = scaled([5000, 77, 1200, 3001, 640], "block", seqlen_q=8)
    together = attend((q, k_cache, v_cache), arguments | splits)
    for b in range(5):
        alone = {
            name: tensor if "descale" in name else tensor[b : b + 1] for name, tensor in arguments.items()
        }
        expected = tuple(result[b : b + 1] for result in together)
        assert_same_bits(attend((q[b : b + 1], k_cache, v_cache), alone | splits), expected)


@pytest.mark.parametrize("descale", [None, "block"])
def test_repeats_are_bitwise_equal_and_a_graph_serves_growing_sequences(descale: str | None) -> None:
    tensors, arguments = scaled([8192, 800, 4000], descale, seqlen_q=8)
    expected = attend(tensors, arguments)
    for _ in range(300):
        assert_same_bits(attend(tensors, arguments), expected)
    lengths = arguments["cache_seqlens"]
    longest = lengths.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(tensors, arguments)
    for grown in ([1, 1, 1], [129, 600, 3999], [3000, 0, 77], longest.tolist()):
        lengths.copy_(torch.tensor(grown, dtype=torch.int32))
        graph.replay()
        assert_same_bits(captured, attend(tensors, arguments))


@pytest.mark.parametrize("descale", [None, "head", "block"])
@pytest.mark.parametrize("page_size", [5, 16, 256])
def test_sequences_that_leave_the_cache_are_nan(page_size: int, descale: str | None) -> None:
    tensors, arguments = scaled([300, 40, 500, 700], descale, page_size=page_size, seqlen_q=8)
    expected = attend(tensors, arguments)
    wrong = {name: argument.clone() for name, argument in arguments.items()}
    wrong["block_table"][0, -(-300 // page_size) - 1] = tensors[1].shape[0]
    wrong["block_table"][1, 0] = -5
    wrong["cache_seqlens"][3] = wrong["block_table"].shape[1] * page_size + 1
    for got, right in zip(attend(tensors, wrong), expected, strict=True):
        assert got[[0, 1, 3]].isnan().all()
        torch.testing.assert_close(got[2], right[2], rtol=1.6e-2, atol=1e-3)


def test_appended_tokens_are_quantised_before_they_are_read() -> None:
    (q, k_cache, v_cache), arguments = scaled([300, 40], "head", seqlen_q=8)
    new = torch.randn(2, 2, 4, 2, 128, device="cuda", dtype=BF16).unbind()
    arguments["cache_seqlens"] -= 4
    testing.check(q, k_cache, v_cache, *new, causal=True, **arguments)
