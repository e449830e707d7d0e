"""Multi-head latent attention with its projections absorbed: queries for the values join the scores."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import testing
from flashtile.compat import flash_attn_interface as flash_attention_3
from flashtile.decode.reference import attention_with_kvcache
from targets import Target

HEADS, ROPE, LATENT, PAGE = 4, 64, 512, 8


def latent_call(dtype, device: str, lengths: tuple[int, ...], seqlen_q: int, rope: int, latent: int) -> dict:
    """One key head, as MLA has it, in pages that are not in order; NaN where no sequence has tokens."""
    pages = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    k_cache, v_cache = (
        torch.full((sum(pages) + 1, PAGE, 1, width), torch.nan, dtype=dtype, device=device)
        for width in (rope, latent)
    )
    for b, length in enumerate(lengths):
        for i in range(pages[b]):
            table[b, i] = order.pop()
            used = min(PAGE, length - i * PAGE)
            for j, cache in enumerate((k_cache, v_cache)):
                shape = (used, *cache.shape[2:])
                cache[table[b, i], :used] = testing.random_tensor(
                    shape, dtype, device, seed=9 * b + 2 * i + j
                )
    rows = len(lengths), seqlen_q, HEADS
    q, qv = (
        testing.random_tensor((*rows, width), dtype, device, seed=80 + width) for width in (rope, latent)
    )
    return {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "qv": qv, "causal": True,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "block_table": table.to(device),
    }  # fmt: skip


def check(target: Target, call: dict, **more) -> None:
    out, lse = flashtile.flash_attn_with_kvcache(
        **call, **more, return_softmax_lse=True, backend=target.backend
    )
    exact, exact_lse, *_ = attention_with_kvcache(**call, upcast=torch.float64)
    plain, *_ = attention_with_kvcache(**call)
    allowed = 2 * (plain.double() - exact).abs().max() + 1e-6
    assert (out.double() - exact).abs().max() <= allowed
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-3, rtol=1e-4)


def test_decoding_and_prefill_over_pages(target: Target) -> None:
    """Of one query a sequence, and of more than a tile of rows; a sequence without keys has NaN in none."""
    if target.name == "interpreter":  # takes seconds for more
        check(target, latent_call(torch.float16, target.device, (5, 19), 1, 16, 24))
        return
    check(target, latent_call(torch.float16, target.device, (5, 0, 70), 1, ROPE, LATENT))
    check(target, latent_call(torch.float16, target.device, (70, 100), 40, ROPE, LATENT), num_splits=2)
    call = latent_call(torch.float32, target.device, (33, 70), 2, 24, 40)
    check(target, call | {"softcap": 3.0, "window_size": (20, 0)})


def test_flash_attention_3_s_keyword_and_scale() -> None:
    call = latent_call(torch.float32, "cpu", (5, 19), 1, 16, 24)
    out = flashtile.flash_attn_with_kvcache(**call)
    assert torch.equal(out, flashtile.flash_attn_with_kvcache(**call, softmax_scale=40**-0.5))
    call["page_table"] = call.pop("block_table")
    assert torch.equal(out, flash_attention_3.flash_attn_with_kvcache(**call))


def test_packed_queries_are_read_at_their_places(target: Target) -> None:
    call = latent_call(torch.float32, target.device, (9, 19), 2, 16, 24)
    expected = flashtile.flash_attn_with_kvcache(**call, backend=target.backend)
    packed = call | {n: call[n].flatten(0, 1) for n in ("q", "qv")}
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32, device=target.device)
    out = flashtile.flash_attn_with_kvcache(
        **packed, cu_seqlens_q=offsets, max_seqlen_q=2, backend=target.backend
    )
    torch.testing.assert_close(out, expected.flatten(0, 1))


def test_what_qv_cannot_be() -> None:
    call = latent_call(torch.float32, "cpu", (5, 19), 1, 16, 24)
    for qv, error, text in (
        (call["q"], ValueError, r"qv must have shape \(2, 1, 4, 24\), that of q.*got \(2, 1, 4, 16\)"),
        (call["qv"].half(), TypeError, r"qv has dtype torch\.float16"),
        (3, TypeError, r"qv must be a torch\.Tensor, got int"),
    ):
        with pytest.raises(error, match=text):
            flashtile.flash_attn_with_kvcache(**call | {"qv": qv})
    caches = {n: call[n].nan_to_num().to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
    queries = {n: call[n].half() for n in ("q", "qv")}
    with pytest.raises(NotImplementedError, match=r"qv must be None over a cache of torch\.float8"):
        flashtile.flash_attn_with_kvcache(**call | queries | caches)
    with pytest.raises(NotImplementedError, match="hopper"):
        flashtile.flash_attn_with_kvcache(**call, backend="hopper")
