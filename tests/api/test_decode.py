"""flash_attn_with_kvcache: FlashAttention-2's signature, and every feature against standard attention."""

from __future__ import annotations

import inspect

import pytest

import flashtile
from cases import BF16, FP16, FP32, FP64
from decode_cases import CASES, build
from flashtile.testing import decode as testing

BY_NAME = {case.name: case for case in CASES}
DTYPES = [FP64, FP32, FP16, BF16]

FLASH_ATTENTION_2 = {
    "q": inspect.Parameter.empty, "k_cache": inspect.Parameter.empty, "v_cache": inspect.Parameter.empty,
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
    "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "softmax_scale": None,
    "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
    "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
"""Its parameters in their order, with their defaults (flash_attn 2.8)."""


def test_the_signature_is_flash_attention_2s():
    parameters = inspect.signature(flashtile.flash_attn_with_kvcache).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(FLASH_ATTENTION_2.items())
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name not in FLASH_ATTENTION_2)


def test_every_argument_by_position():
    """What it means by name is tested below."""
    tensors, arguments = build(BY_NAME["everything"], FP32, "cpu")
    named = {name: a for name, a in arguments.items() if name != "sink"}
    by_name = FLASH_ATTENTION_2 | dict(zip(("q", "k_cache", "v_cache", "k", "v"), tensors, strict=True))
    by_name |= named | {"return_softmax_lse": True}
    assert by_name.keys() == FLASH_ATTENTION_2.keys()
    expected = testing.check(*tensors, **named)
    assert expected.holds
    out, lse = flashtile.flash_attn_with_kvcache(*by_name.values())
    again = flashtile.flash_attn_with_kvcache(*tensors, return_softmax_lse=True, **named)
    assert (out == again[0]).all()
    assert (lse == again[1]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_feature(name, dtype):
    tensors, arguments = build(BY_NAME[name], dtype, "cpu")
    testing.check(*tensors, backend="cpu", **arguments)
