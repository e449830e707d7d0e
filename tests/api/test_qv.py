"""Multi-head latent attention with its projections absorbed: queries for the values join the scores."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile
from flashtile import testing
from flashtile.checks.conversions import join_qv
from flashtile.compat import flash_attn_interface as flash_attention_3
from flashtile.io_model import find_card
from flashtile.problems.attention import NO_EXTRAS, Options
from flashtile.reference import attention as reference
from flashtile.reference.decode import attention_with_kvcache
from targets import Target

pytestmark = pytest.mark.numerical

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
    check(target, latent_call(torch.float16, target.device, (70, 100), 70, ROPE, LATENT), num_splits=2)
    call = latent_call(torch.float32, target.device, (33, 70), 2, 24, 40)
    check(target, call | {"softcap": 3.0, "window_size": (20, 0)})


def test_flash_attention_3_s_keyword_and_scale() -> None:
    call = latent_call(torch.float32, "cpu", (5, 19), 1, 16, 24)
    out = flashtile.flash_attn_with_kvcache(**call)
    assert torch.equal(out, flashtile.flash_attn_with_kvcache(**call, softmax_scale=40**-0.5))
    call["page_table"] = call.pop("block_table")
    assert torch.equal(out, flash_attention_3.flash_attn_with_kvcache(**call))


def test_qv_must_be_dense() -> None:
    call = latent_call(torch.float32, "cpu", (5, 19), 1, 16, 24)
    for qv in (call["qv"].to_sparse(), call["qv"].tolist()):
        with pytest.raises((TypeError, NotImplementedError), match=r"^qv must"):
            flashtile.flash_attn_with_kvcache(**call | {"qv": qv})


def test_packed_queries_are_read_at_their_places(target: Target) -> None:
    call = latent_call(torch.float32, target.device, (9, 19), 2, 16, 24)
    expected = flashtile.flash_attn_with_kvcache(**call, backend=target.backend)
    packed = call | {n: call[n].flatten(0, 1) for n in ("q", "qv")}
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32, device=target.device)
    out = flashtile.flash_attn_with_kvcache(
        **packed, cu_seqlens_q=offsets, max_seqlen_q=2, backend=target.backend
    )
    torch.testing.assert_close(out, expected.flatten(0, 1))


def test_prompts_over_pages(target: Target) -> None:
    """A sequence's queries are fewer than its keys, and packed."""
    call = latent_call(torch.float16, target.device, (9, 19), 3, 16, 24)
    expected, lse = flashtile.flash_attn_with_kvcache(**call, return_softmax_lse=True, backend=target.backend)
    q, qv = (call[name].flatten(0, 1) for name in ("q", "qv"))
    pages = call["k_cache"], call["v_cache"]
    offsets, keys = (
        torch.tensor(values, dtype=torch.int32, device=target.device) for values in ([0, 3, 6], [0, 9, 28])
    )
    out, packed_lse = flashtile.flash_attn_varlen_func(
        q, *pages, offsets, keys, 3, 19, causal=True, block_table=call["block_table"], qv=qv,
        return_lse=True, backend=target.backend,
    )  # fmt: skip
    assert torch.equal(out, expected.flatten(0, 1))
    assert torch.equal(packed_lse, lse.transpose(0, 1).flatten(1))


def latent_tensors(dtype: torch.dtype = torch.float64, rope: int = 8, latent: int = 12) -> list[torch.Tensor]:
    """q, k, v and qv of two query heads a key head, transposed so that they are not contiguous."""
    shapes = ((4, 2, 7, rope), (2, 2, 9, rope), (2, 2, 9, latent), (4, 2, 7, latent))
    drawn = (testing.random_tensor(shape, dtype, "cpu", seed=i) for i, shape in enumerate(shapes))
    return [t.permute(1, 2, 0, 3).detach().requires_grad_() for t in drawn]


def by_definition(q, k, v, qv, **more):
    joined = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    return reference.attention(*joined, v, causal=True, **more)


def test_gradients_without_a_cache() -> None:
    tensors = latent_tensors()
    for function in (flashtile.attention, flashtile.flash_attn_func, flash_attention_3.flash_attn_func):
        ours = function(*tensors[:3], qv=tensors[3], causal=True)
        expected, _ = by_definition(*tensors)
        torch.testing.assert_close(ours, expected)
        for own, exact in zip(
            torch.autograd.grad(ours.sin().sum(), tensors),
            torch.autograd.grad(expected.sin().sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(own, exact)


def test_packed_sequences_without_a_cache() -> None:
    tensors = [t.detach()[0] for t in latent_tensors()]
    lengths = {
        "cu_seqlens_q": torch.tensor([0, 3, 7], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 9], dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
    }
    expected, _ = by_definition(*tensors, **lengths)
    for function in (
        flashtile.attention, flashtile.flash_attn_varlen_func, flash_attention_3.flash_attn_varlen_func
    ):  # fmt: skip
        torch.testing.assert_close(function(*tensors[:3], qv=tensors[3], causal=True, **lengths), expected)


def test_compiled_and_autocast_calls_without_a_cache() -> None:
    tensors = latent_tensors(torch.float32)
    call = partial(flashtile.attention, causal=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected = call(*tensors[:3], qv=tensors[3])
    torch.testing.assert_close(compiled(*tensors[:3], qv=tensors[3]), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*tensors[:3], qv=tensors[3])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_weights_are_those_of_the_joined_columns() -> None:
    q, k, v, qv = (t.detach() for t in latent_tensors())
    out, weights = flashtile.attention(q, k, v, qv=qv, return_attn_weights=True)
    torch.testing.assert_close(weights @ v.transpose(1, 2).repeat_interleave(2, 1), out.transpose(1, 2))


def test_what_qv_cannot_be_without_a_cache() -> None:
    q, k, v, qv = latent_tensors()
    wide = [t.detach().repeat(1, 1, 1, 40) for t in (v, qv)]  # 480 columns
    wider = [t.detach().repeat(1, 1, 1, 16) for t in (q, k)]
    e4m3 = [t.detach().to(torch.float8_e4m3fn) for t in (q, k, v)]
    for arguments, error, text in (
        ((q, k, v, q), ValueError, r"qv must have shape \(2, 7, 4, 12\), that of q with the head_dim of v"),
        ((q, k, v, qv.float()), TypeError, r"qv has dtype torch\.float32, but q has torch\.float64"),
        ((q, k, v, qv.tolist()), TypeError, r"qv must be a torch\.Tensor, got list"),
        ((q, k, v, qv.detach().to_sparse()), TypeError, r"qv must be a dense \(strided\) tensor, got layout"),
        ((q, k[:, 1:], v, qv), ValueError, r"v has leading shape \(2, 9\), but k has \(2, 8\)"),
        ((*wider, *wide), NotImplementedError, "qv .* add up to at most 576, got 128 and 480"),
        ((*e4m3, qv), NotImplementedError, "qv must be None for q, k and v of float8_e4m3fn"),
    ):
        with pytest.raises(error, match=text):
            flashtile.attention(*arguments[:3], qv=arguments[3])


def test_a_refused_call_draws_no_random_numbers() -> None:
    q, k, v, _ = latent_tensors()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="qv must have shape"):
        flashtile.attention(q, k, v, qv=q, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_in_a_graph_name_the_argument(monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    _, k, v, qv = latent_tensors()
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got int"):
        join_qv(3, k, v, qv, NO_EXTRAS, Options())  # type: ignore[arg-type]


def test_pages_under_autocast() -> None:
    """Queries of both kinds get the dtype of the pages."""
    call = latent_call(torch.bfloat16, "cpu", (9, 19), 3, 16, 24)
    offsets, keys = (torch.tensor(values, dtype=torch.int32) for values in ([0, 3, 6], [0, 9, 28]))
    q, qv = (call[name].flatten(0, 1) for name in ("q", "qv"))
    attend = partial(
        flashtile.flash_attn_varlen_func, k=call["k_cache"], v=call["v_cache"], cu_seqlens_q=offsets,
        cu_seqlens_k=keys, max_seqlen_q=3, max_seqlen_k=19, block_table=call["block_table"],
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q.float(), qv=qv.float())
    assert torch.equal(out, attend(q, qv=qv))


def test_no_gradient_flows_over_pages() -> None:
    call = latent_call(torch.float32, "cpu", (9, 19), 3, 16, 24)
    qv = call["qv"].flatten(0, 1).requires_grad_()
    offsets, keys = (torch.tensor(values, dtype=torch.int32) for values in ([0, 3, 6], [0, 9, 28]))
    pages = call["k_cache"], call["v_cache"]
    arguments = call["q"].flatten(0, 1), *pages, offsets, keys, 3, 19
    out = flashtile.flash_attn_varlen_func(*arguments, block_table=call["block_table"], qv=qv)
    with pytest.raises(NotImplementedError, match="no backward pass"):
        out.sum().backward()
    with pytest.raises(ValueError, match="that of q with the head_dim of v, got"):
        flashtile.flash_attn_varlen_func(*arguments, block_table=call["block_table"], qv=qv[..., 1:])


@pytest.mark.parametrize("widths", [(64, 512), (512, 64)])
def test_one_wide_head_size_is_not_hoppers(widths: tuple[int, int]) -> None:
    call = latent_call(torch.bfloat16, "cpu", (9,), 1, *widths)
    del call["qv"]
    explanation = flashtile.explain(flashtile.flash_attn_with_kvcache, **call, card=find_card("h200"))
    assert explanation.backend == "portable"


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
