"""Dropout: its generator, statistics, what it is reproducible by, and what FlashAttention's tests read."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import dropout, testing
from flashtile.problems.attention import Problem
from small_calls import dense, varlen
from targets import Target

STATE = torch.tensor([0x123456789ABCDEF, 2**33 + 5])


def test_philox_makes_the_words_that_its_authors_published():
    """Random123's known answers: counter and key of zeros, and of ones."""
    for word, expected in (
        (0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**32 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ):
        whole = torch.tensor(word)
        words = dropout.philox((whole, whole), (whole,) * 4)
        assert " ".join(f"{w.item():08x}" for w in words) == expected
    for word, expected in ((0, "257a3673 cd26be2a"), (2**32 - 1, "ab302c4d 3dc9d239")):
        whole = torch.tensor(word)
        words = dropout.small_philox(whole, (whole, whole))
        assert " ".join(f"{w.item():08x}" for w in words) == expected


@pytest.mark.parametrize("dropout_p", [0.02, 0.1, 0.5])
def test_each_probability_is_dropped_as_often_as_it_is_asked_for(dropout_p):
    """Over all, in each row, column and head, and two neighbours without regard to each other."""
    mask = dropout.kept(STATE, dropout_p, 4, range(2), range(4), range(256), range(256)).double()
    keep = dropout.keep_share(dropout_p)
    deviation = (keep * (1 - keep)) ** 0.5
    for dims in ((0, 1, 2, 3), (3,), (2,), (2, 3)):
        count = torch.Size(mask.shape[i] for i in dims).numel()
        assert (mask.mean(dims) - keep).abs().max() < 6 * deviation / count**0.5
    for dim in range(4):
        ahead, behind = mask.narrow(dim, 0, mask.shape[dim] - 1), mask.narrow(dim, 1, mask.shape[dim] - 1)
        correlation = ((ahead - keep) * (behind - keep)).mean() / deviation**2
        assert correlation.abs() < 6 / ahead.numel() ** 0.5
    # Of 16 x 16 probabilities, which share words in one way or another, any two.
    squares = mask.unflatten(3, (16, 16)).unflatten(2, (16, 16)).transpose(3, 4).flatten(4).flatten(0, 3)
    correlations = torch.corrcoef(squares.T).fill_diagonal_(0)
    assert correlations.abs().max() < 10 / len(squares) ** 0.5


def test_the_share_is_exact_and_shared_bits_hardly_correlate():
    """Over all 2^16 half words, for every threshold: the share that is dropped, and by two keys at once."""
    words = torch.arange(2**16).view(1, 1, 8, -1)
    numbers = dropout.numbers_of((words, words + 2**31)).view(2, 8, -1, 2, 4, 2).long()
    # Of the first word's low half: the numbers of keys j and j + 8.
    own, behind = numbers[0, ..., 0].unbind(2)
    for number in (own, behind):
        assert number.flatten().bincount().equal(torch.full((dropout.UNITS,), 2))
    p = torch.arange(1, dropout.UNITS).double() / dropout.UNITS
    both = torch.maximum(own, behind).flatten().bincount().cumsum(0)[:-1] / 2**16
    correlation = (both - p**2) / (p * (1 - p))
    assert correlation.max() <= 0.5
    rare = torch.minimum(p, 1 - p)
    for smallest, bound in ((1 / 2048, 0.031), (1 / 128, 0.01)):
        assert correlation[rare >= smallest].abs().max() < bound


def test_the_threshold_differs_from_what_is_asked_for_by_half_a_unit_at_most():
    shares = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    for dropout_p in (1e-9, 2**-16, 0.003, 0.1, 0.17, 0.5, 0.999, 1 - 1e-9, *shares):
        bound = 2**-16 if 2**-16 <= dropout_p <= 1 - 2**-16 else 2**-15
        dropped = dropout.threshold(dropout_p) / dropout.UNITS
        assert abs(dropped - dropout_p) <= bound
        assert 0 < dropped < 1
        assert dropout.keep_share(dropout_p) == 1 - dropout_p


@pytest.mark.parametrize("dropout_p", [0.003, 0.1, 0.17, 0.5])
def test_the_share_over_millions_is_what_is_asked_for(dropout_p):
    mask = dropout.kept(STATE, dropout_p, 4, range(1), range(4), range(1024), range(1024))
    dropped = 1 - mask.count_nonzero().item() / mask.numel()
    # Two probabilities that share bits have a correlation of at most 0.01.
    deviation = (1.01 * dropout_p * (1 - dropout_p) / mask.numel()) ** 0.5
    assert abs(dropped - dropout_p) < 5 * deviation + 2**-16


def test_the_share_is_one_of_probabilities():
    for wrong in (3, 1.0, -0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="dropout_p must be from 0 to below 1"):
            dropout.keep_share(wrong)
    with pytest.raises(TypeError, match="dropout_p must be a number"):
        dropout.keep_share("a")
    with pytest.raises(ValueError, match="rng_state must be int64 of shape"):
        dropout.kept(torch.zeros(3), 0.5, 1, range(1), range(1), range(4), range(4))


def test_what_hopper_compares_are_numbers_in_fp16():
    pytest.importorskip("triton")
    from flashtile.backends.hopper.refusals import MAX_DROPPED, reason_against_dropout

    sizes = "batch seqlen_q seqlen_k total_q total_k num_heads_q num_heads_kv head_dim head_dim_v"
    numbers = dict.fromkeys(sizes.split(), 64)
    problem = Problem(**numbers, dtype=torch.bfloat16, device=torch.device("meta"), softmax_scale=1.0)
    for dropout_p in (MAX_DROPPED - 2**-15, MAX_DROPPED - 1e-9, MAX_DROPPED, MAX_DROPPED + 0.001):
        served = reason_against_dropout(replace(problem, dropout_p=dropout_p)) is None
        limit = torch.tensor(dropout.threshold(dropout_p), dtype=torch.int16).view(torch.float16)
        assert served == (not limit.isnan()) == (dropout_p <= MAX_DROPPED)


def test_every_word_of_a_state_counts():
    base = dropout.kept(STATE, 0.5, 1, range(1), range(1), range(32), range(32))
    for change in ([1, 0], [2**40, 0], [0, 1]):
        other = dropout.kept(STATE + torch.tensor(change), 0.5, 1, range(1), range(1), range(32), range(32))
        assert 0.3 < (base == other).double().mean() < 0.7


def test_no_operation_of_the_generator_starts_threads(monkeypatch):
    """And the pieces are put together in order."""
    ranges = range(1, 3), range(3), range(5, 400), range(9, 300)
    whole = dropout.kept(STATE, 0.5, 4, *ranges)
    sizes = []

    def small_philox(key, counter, made_by=dropout.small_philox):
        words = made_by(key, counter)
        sizes.append(words[0].numel())
        return words

    monkeypatch.setattr(dropout, "small_philox", small_philox)
    for limit in (dropout.SERIAL_ELEMENTS, 1):
        monkeypatch.setattr(dropout, "SERIAL_ELEMENTS", limit)
        sizes.clear()
        assert torch.equal(dropout.kept(STATE, 0.5, 4, *ranges), whole)
        assert len(sizes) > 1
        assert max(sizes) <= max(limit, sum(sizes) // 6)  # at least one sequence and head at a time


@pytest.mark.parametrize("dropout_p", [0.3, 0.03, 0.003])
def test_kernels_keep_what_the_definition_keeps(target: Target, dropout_p):
    """Bit by bit: with one value for each key, out says which probabilities were kept."""
    seqlen = 48
    q = torch.zeros(1, seqlen, 2, 16, dtype=target.dtypes[0], device=target.device)
    v = torch.eye(seqlen, dtype=q.dtype, device=q.device)[None, :, None].expand(1, -1, 2, -1).contiguous()
    state = STATE.to(target.device)
    out = flashtile.attention(q, q, v, dropout_p=dropout_p, rng_state=state, backend=target.backend)
    mask = dropout.kept(state, dropout_p, 2, range(1), range(2), range(seqlen), range(seqlen))
    assert torch.equal(out.transpose(1, 2) != 0, mask)


def test_the_generator_of_torch_decides():
    q, k, v = dense()
    torch.manual_seed(5)
    first, second = (flashtile.attention(q, k, v, dropout_p=0.4) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(flashtile.flash_attn_func(q, k, v, 0.4), first)
    assert not torch.equal(first, second)


def test_checkpointing_drops_the_same_again():
    q, k, v = dense(grad=True)
    gradients = []
    for run in (
        lambda *call: checkpoint(*call, use_reentrant=False),
        lambda function, *call: function(*call),
    ):
        torch.manual_seed(1)
        out = run(lambda *qkv: flashtile.attention(*qkv, dropout_p=0.4), q, k, v)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for recomputed, kept in zip(*gradients, strict=True):
        assert torch.equal(recomputed, kept)


def test_compiled_calls_draw_anew_and_have_gradients():
    q, k, v = dense(grad=True)
    compiled = torch.compile(
        lambda *qkv: flashtile.attention(*qkv, dropout_p=0.4), backend="aot_eager", fullgraph=True
    )
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    assert torch.autograd.grad(first.sum(), q)[0].isfinite().all()
    torch._dynamo.reset()


def compiled_with_budget(budget, **options):
    """Dropout between operations that are cheap to compute again."""

    def call(q, k, v, **options):
        return flashtile.attention(q.sin() * 0, k.cos() * 0, v * 1.0, dropout_p=0.4, **options) * 1.0

    seqlen = 24
    q = torch.zeros(1, seqlen, 1, 8, requires_grad=True)
    v = torch.eye(seqlen)[None, :, None].requires_grad_()
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        return v, torch.compile(call, backend="aot_eager", fullgraph=True)(q, q, v, **options)


def test_a_compiled_backward_pass_with_little_memory_drops_the_same():
    """out are the probabilities, and so is the gradient of v, transposed."""
    v, out = compiled_with_budget(0.1)
    out.backward(v.detach())
    assert torch.equal(v.grad.squeeze(2), out.squeeze(2).mT)


def test_a_compiled_backward_pass_without_memory_needs_a_state():
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="rng_state must be given"):
        compiled_with_budget(0)
    with torch.no_grad():
        compiled_with_budget(0)
    v, out = compiled_with_budget(0, rng_state=STATE)
    out.backward(v.detach())
    assert torch.equal(v.grad.squeeze(2), out.squeeze(2).mT)


@pytest.mark.parametrize("packed", [False, True])
def test_the_signed_probabilities_are_what_out_is_made_of(packed):
    """FlashAttention-2's S_dmask, by which its tests know what was dropped."""
    if packed:
        (q, k, v), lengths = varlen()
        out, _, signed = flashtile.flash_attn_varlen_func(
            q, k, v, **lengths, dropout_p=0.3, return_attn_probs=True
        )
        bounds = lengths["cu_seqlens_q"].tolist()
        spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    else:
        q, k, v = dense()
        out, _, signed = flashtile.flash_attn_func(
            q, k, v, dropout_p=0.3, causal=True, return_attn_probs=True
        )
        spans = list(range(len(q)))
    for b, span in enumerate(spans):
        keys = slice(*(lengths["cu_seqlens_k"][b : b + 2].tolist())) if packed else span
        own_v = v[keys].repeat_interleave(q.shape[-2] // v.shape[-2], 1).transpose(0, 1)
        p = signed[b][:, : out[span].shape[0], : own_v.shape[1]]
        expected = (p.clamp_min(0) / dropout.keep_share(0.3)) @ own_v
        torch.testing.assert_close(out[span].transpose(0, 1), expected, atol=1e-5, rtol=1e-4)
        seen = p != 0
        torch.testing.assert_close(p.abs().sum(-1), seen.any(-1).to(p.dtype))


def test_the_mean_over_states_is_attention_without_dropout():
    q, k, v = (testing.random_tensor((1, 4, 2, 16), torch.float32, "cpu", seed=i) for i in range(3))
    states = range(60)
    outs = [flashtile.attention(q, k, v, dropout_p=0.2, rng_state=torch.tensor([7, i])) for i in states]
    difference = torch.stack(outs).mean(0) - flashtile.attention(q, k, v)
    assert difference.abs().max() < 6 * torch.stack(outs).std(0).max() / len(states) ** 0.5
