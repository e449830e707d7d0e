"""Host work of a repeated call, as the number of Python and C functions that it calls.

``python -m benchmarks`` measures the time. Checking arguments, describing the problem or asking backends
again takes hundreds of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import called
import flashtile

BATCH, HEADS, HEADS_KV, HEAD_DIM, PAGE = 4, 8, 2, 64, 16


def functions_called(call: Callable[[], Any]) -> int:
    """By the third call, which has nothing left to keep."""
    with torch.no_grad():
        call(), call()
        return called.functions_called(call)


def decoding(append: bool = False, rotary: bool = False) -> dict[str, Any]:
    """Arguments of a step over four sequences in pages."""
    arguments = {
        "q": torch.randn(BATCH, 1, HEADS, HEAD_DIM),
        "k_cache": torch.randn(40, PAGE, HEADS_KV, HEAD_DIM),
        "v_cache": torch.randn(40, PAGE, HEADS_KV, HEAD_DIM),
        "cache_seqlens": torch.tensor([5, 70, 0, 130], dtype=torch.int32),
        "block_table": torch.arange(40, dtype=torch.int32).view(BATCH, 10),
        "causal": True,
    }
    if append:
        arguments |= {name: torch.randn(BATCH, 1, HEADS_KV, HEAD_DIM) for name in ("k", "v")}
    if rotary:
        arguments |= {f"rotary_{name}": torch.randn(256, HEAD_DIM // 2) for name in ("cos", "sin")}
    return arguments


def test_attention() -> None:
    q = torch.randn(1, 64, 2, 64)
    assert functions_called(lambda: flashtile.attention(q, q, q, causal=True)) < 58


@pytest.mark.parametrize(
    ("append", "rotary", "most"), [(False, False, 380), (True, False, 510), (True, True, 610)], ids=str
)
def test_decoding(append: bool, rotary: bool, most: int) -> None:
    arguments = decoding(append, rotary)
    assert functions_called(lambda: flashtile.flash_attn_with_kvcache(**arguments)) < most


def test_buffers_cost_no_more_than_their_checks() -> None:
    arguments = decoding()
    out = torch.empty_like(arguments["q"])
    without = functions_called(lambda: flashtile.flash_attn_with_kvcache(**arguments))
    assert functions_called(lambda: flashtile.flash_attn_with_kvcache(**arguments, out=out)) < without + 50
