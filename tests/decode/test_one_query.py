"""Steps of one query a sequence on the CPU, where sequences are longer than what is gathered at a time."""

from __future__ import annotations

import dataclasses

import pytest

from cases import BF16, FP32
from decode_cases import CASES, build
from flashtile.backends.cpu.decode import one_query
from flashtile.backends.cpu.decode.attend import _Sequence
from flashtile.decode import testing

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
    monkeypatch.setattr(one_query, "PIECE_ELEMENTS", 7 * case.heads[1] * case.head_dim)
    monkeypatch.setattr(_Sequence, "attend", None)
    tensors, arguments = build(case, dtype, "cpu")
    testing.check(*tensors, backend="cpu", **arguments)


def test_what_torchs_kernel_lacks_goes_by_tiles(monkeypatch):
    monkeypatch.setattr(one_query, "attend", None)
    for name in ("sink", "softcap", "negative-scale", "odd-head-dims", "ragged-queries"):
        tensors, arguments = build(BY_NAME[name], FP32, "cpu")
        testing.check(*tensors, backend="cpu", **arguments)
