"""The tables of the README: each row that says that flashtile has something is a call that runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flashtile
from flashtile import kv_cache, parallel

ROOT = Path(__file__).parents[2]
README, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
CPU = torch.device("cpu")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``heading``, without links."""
    table = re.search(rf"^\| {heading}.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", table[1])
    return [[cell.strip() for cell in line.strip("| ").split(" |")] for line in plain.splitlines()]


def qkv(tokens: int = 12, head_dim: int = 8, **options) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, tokens, 2, head_dim, **options) for _ in range(3))


def gradient(of: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
    learned = [tensor.requires_grad_() for tensor in tensors]
    torch.autograd.grad(of(*learned).sum(), learned)


def packed() -> None:
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = (tensor[0] for tensor in qkv())
    flashtile.flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7)


def sinks() -> None:
    q, k, v = qkv()
    flashtile.attention(q, k, v, sink=torch.zeros(2, requires_grad=True)).sum().backward()


def masks_and_biases() -> None:
    q, k, v = qkv()
    flashtile.attention(q, k, v, mask=torch.ones(1, 1, 12, 12, dtype=torch.bool))
    bias = torch.zeros(1, 2, 12, 12, requires_grad=True)
    flashtile.attention(q, k, v, bias=bias).sum().backward()
    assert bias.grad is not None


def functions() -> None:
    block_mask = flashtile.masks.create_block_mask(flashtile.masks.causal(), None, None, 12, 12)
    flashtile.attention(*qkv(), score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j), block_mask=block_mask)


def second_derivatives() -> None:
    tensors = [tensor.double().requires_grad_() for tensor in qkv(4)]
    (first,) = torch.autograd.grad(flashtile.attention(*tensors).sum(), tensors[:1], create_graph=True)
    first.square().sum().backward()


def pages() -> None:
    cache = kv_cache.PagedKVCache(
        num_layers=1, num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, max_sequences=2,
        max_seqlen=16, dtype=torch.float32, device=CPU,
    )  # fmt: skip
    step = cache.reserve_step(cache.batch([cache.create()]), [3])
    cache.attend(0, *(tensor[0, :3] for tensor in qkv()), step)
    pool = torch.zeros(8, 4, 2, 8)
    angles = torch.zeros(16, 4)
    flashtile.flash_attn_with_kvcache(
        *(tensor[:, :1] for tensor in (qkv()[0],)), pool, pool.clone(), *(t[:, :1] for t in qkv()[1:]),
        cache_seqlens=torch.tensor([5], dtype=torch.int32), causal=True,
        block_table=torch.tensor([[2, 5]], dtype=torch.int32), rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
    )  # fmt: skip


def fp8() -> None:
    q, k, v = (tensor.bfloat16().requires_grad_() for tensor in qkv(16, 16))
    flashtile.fp8.attention(q, k, v).sum().backward()


def weights() -> None:
    q, k, v = qkv()
    _, lse = flashtile.attention(q, k, v, return_lse=True)
    for form in ("full", "columns"):
        flashtile.attention_weights(q, k, lse, form)


def head_sizes() -> None:
    for head_dim in (1, 576):
        flashtile.attention(*qkv(4, head_dim))
    with pytest.raises(NotImplementedError, match="head_dim"):
        flashtile.attention(*qkv(4, 577))


FEATURES: dict[str, Callable[[], object]] = {
    "Causal and sliding-window masks": lambda: flashtile.attention(*qkv(), causal=True, window_size=(4, 0)),
    "Variable lengths without padding": packed,
    "Soft-cap": lambda: flashtile.attention(*qkv(), softcap=30.0),
    "ALiBi": lambda: flashtile.attention(*qkv(), alibi_slopes=torch.ones(2)),
    "Attention sinks with their gradient": sinks,
    "Boolean masks; bias tensors with their gradient": masks_and_biases,
    "Functions of scores, block masks": functions,
    "Dropout": lambda: flashtile.attention(*qkv(), dropout_p=0.1),
    "Gradient of the log-sum-exp": lambda: gradient(
        lambda q, k: flashtile.attention(q, k, torch.ones(1, 12, 2, 8), return_lse=True)[1], *qkv()[:2]
    ),
    "Forward mode in one pass": lambda: torch.func.jvp(flashtile.attention, tuple(qkv()), tuple(qkv())),
    "Second derivatives": second_derivatives,
    "Paged KV cache with appends and rotary embedding": pages,
    "FP8 attention on Hopper": fp8,
    "Attention weights, summed or in full": weights,
    "Several GPUs for one sequence": lambda: parallel.context_parallel_attention,
    "Head sizes": head_sizes,
    "Runs on": lambda: flashtile.attention(*qkv()),
    "Installation": lambda: None,  # test_import.py: nothing is compiled
}
"""What flashtile does for a row of the table "What it has"."""


def test_every_row_of_features_is_tried():
    assert [row[0] for row in rows(README, r"\| flashtile")] == list(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_there(feature):
    torch.manual_seed(0)
    FEATURES[feature]()


NAMES = {
    "llama": "Llama 2 and 3", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen 2", "qwen3": "3",
    "qwen3_moe": "3-MoE", "gemma2": "Gemma 2", "gemma3_text": "3 (text)", "phi3": "Phi-3", "olmo2": "OLMo 2",
    "smollm3": "SmolLM 3", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""What the README calls a family of the engine."""


def test_the_served_models_are_the_engine_s_families():
    from flashtile.engine.families import FAMILIES

    named = re.split(r", | and (?=3)", rows(README, "models")[0][0].replace("Llama 2 and 3", "Llama 2, 3"))
    assert set(NAMES) == set(FAMILIES)
    assert sorted(named) == sorted(re.split(", ", ", ".join(NAMES.values()).replace("2 and 3", "2, 3")))


def test_what_replaces_other_libraries_is_there():
    """The rows of "Use it in place of", except those of servers, which have pages of their own."""
    flashtile.compat.install_as_flash_attn()
    from flash_attn import flash_attn_func

    assert torch.equal(flash_attn_func(*(one := qkv())), flashtile.flash_attn_func(*one))
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv())
    with flashtile.sdpa():
        ours = nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(ours, flashtile.flex_attention(q, k, v))
    theirs = nn.MultiheadAttention(16, 2)
    flashtile.nn.MultiheadAttention(16, 2).load_state_dict(theirs.state_dict())
    pytest.importorskip("transformers")
    flashtile.integrations.transformers.register()
