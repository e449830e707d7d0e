"""Steps on the CPU: one query per sequence, with keys in several pieces, and rows in several blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cases import BF16, FP32
from decode_cases import CASES, build
from flashtile import flash_attn_with_kvcache
from flashtile.backends.cpu import decode
from flashtile.testing import decode as testing

pytestmark = pytest.mark.numerical

BY_NAME = {case.name: case for case in CASES}
SCALED_PAGES = dataclasses.replace(BY_NAME["fp8-by-block"], name="fp8-by-block without softcap", arguments={})
ONE_QUERY = [
    BY_NAME[name]
    for name in (
        "dense", "empty-cache", "paged", "page-size-5-transposed", "group-of-7", "append-paged", "batch-idx",
        "fp8", "fp8-dense-by-row",
    )
]  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("case", [*ONE_QUERY, SCALED_PAGES], ids=lambda case: case.name)
def test_a_sequence_in_pieces(monkeypatch, case, dtype):
    """Pieces of 7 keys; no sequence goes by the tiles that serve other calls."""
    monkeypatch.setattr(decode, "PIECE_ELEMENTS", 7 * case.heads[1] * case.head_dim)
    monkeypatch.setattr(decode, "attend_tiles", None)
    tensors, arguments = build(case, dtype, "cpu")
    testing.check(*tensors, backend="cpu", **arguments)


def test_what_torchs_kernel_lacks_goes_by_tiles(monkeypatch):
    monkeypatch.setattr(decode, "attend_one_query", None)
    for name in ("sink", "softcap", "negative-scale", "odd-head-dims", "ragged-queries"):
        tensors, arguments = build(BY_NAME[name], FP32, "cpu")
        testing.check(*tensors, backend="cpu", **arguments)


def test_rows_in_several_blocks(monkeypatch):
    monkeypatch.setattr(decode, "BLOCK_ROWS", 4)
    for name in ("window-both", "chunk-both-sides", "alibi", "append-many", "append-ragged", "tree-by-batch"):
        tensors, arguments = build(BY_NAME[name], FP32, "cpu")
        testing.check(*tensors, backend="cpu", **arguments)


@pytest.mark.parametrize("page_size", [4, 16])
def test_neither_neighbours_nor_the_place_of_pages_change_a_bit(page_size):
    """Neighbours of equal length share a call, pages in order are read where they lie."""
    batch, columns = 5, 64 // page_size
    generator = torch.Generator().manual_seed(0)
    shape = (batch * columns, page_size, 2, 32)
    k, v = torch.randn(2, *shape, generator=generator).unbind()
    q = torch.randn(batch, 1, 4, 32, generator=generator)
    in_order = torch.arange(batch * columns, dtype=torch.int32).view(batch, columns)
    lengths = torch.tensor([50, 50, 50, 0, 64], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=in_order)
    place = torch.randperm(batch * columns, generator=generator)
    scattered_k, scattered_v = torch.empty_like(k), torch.empty_like(v)
    scattered_k[place], scattered_v[place] = k, v
    table = place.int()[in_order.long()]
    scattered = flash_attn_with_kvcache(q, scattered_k, scattered_v, cache_seqlens=lengths, block_table=table)
    assert torch.equal(out, scattered)
    for b in range(batch):
        one = slice(b, b + 1)
        alone = flash_attn_with_kvcache(
            q[one], k, v, cache_seqlens=lengths[one], block_table=in_order[one].contiguous()
        )
        assert torch.equal(alone, out[one])
