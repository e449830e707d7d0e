"""Appends and rotary embedding against loops and complex numbers, which share no code with the library."""

from __future__ import annotations

import pytest
import torch

import flashtile

HEADS, HEADS_KV, D = 4, 2, 16
LENGTHS, NEW = (5, 0, 11), (2, 4, 1)


@pytest.fixture
def on(target):
    with torch.device(target.device):
        torch.manual_seed(0)
        yield {"backend": target.backend}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def spun(x, angles):
    """x (tokens, heads, D) with its first pairs, as complex numbers, turned by angles (tokens, pairs)."""
    turned = 2 * angles.shape[1]
    pairs = torch.view_as_complex(x[..., :turned].double().unflatten(-1, (-1, 2)).contiguous())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None].to(pairs.dtype)
    return torch.cat([torch.view_as_real(pairs).flatten(-2).to(x.dtype), x[..., turned:]], -1)


def spun_halves(x, angles):
    """The same for pairs half of the turned elements apart."""
    turned = 2 * angles.shape[1]
    order = torch.arange(turned).view(2, -1).T.flatten()
    neighbours = torch.cat([x[..., order], x[..., turned:]], -1)
    turned_neighbours = spun(neighbours, angles)
    back = torch.cat([order.argsort(), torch.arange(turned, x.shape[-1])])
    return turned_neighbours[..., back]


def caches(rows, width):
    return tuple(torch.randn(rows, width, HEADS_KV, D) for _ in "kv")


@pytest.mark.parametrize("layout", ["dense", "batch_idx", "paged"])
@pytest.mark.parametrize("ragged", [False, True])
def test_every_token_goes_to_its_place(on, layout, ragged):
    counts = NEW if ragged else (3, 3, 3)
    k_cache, v_cache = caches(12, 4) if layout == "paged" else caches(3 if layout == "dense" else 5, 16)
    new = [tuple(torch.randn(count, HEADS_KV, D) for _ in "kv") for count in counts]
    arguments = {"cache_seqlens": int32(*LENGTHS)}
    if layout == "paged":
        table = torch.randperm(12).view(3, 4).int()
        arguments["block_table"] = table
    if layout == "batch_idx":
        arguments["cache_batch_idx"] = int32(4, 0, 3)
    expected = k_cache.clone(), v_cache.clone()
    for b, parts in enumerate(new):
        for i in range(counts[b]):
            position = LENGTHS[b] + i
            place = {
                "dense": (b, position),
                "batch_idx": ((4, 0, 3)[b], position),
                "paged": (int(table[b, position // 4]) if layout == "paged" else 0, position % 4),
            }[layout]
            for cache, part in zip(expected, parts, strict=True):
                cache[place] = part[i]
    k, v = (torch.cat(parts) if ragged else torch.stack(parts) for parts in zip(*new, strict=True))
    if ragged:
        arguments["cu_seqlens_k_new"] = int32(0, 2, 6, 7)
    flashtile.append_kvcache(k_cache, v_cache, k, v, **arguments, **on)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_many_short_sequences_beside_a_long_one(on):
    """More sequences than the kernel looks at together; some have no token, a block of tokens has several."""
    counts = [i % 3 for i in range(131)]
    counts[7] = 37
    lengths = torch.arange(131, dtype=torch.int32) % 5
    angles = torch.rand(48, 4) * 6.28
    k_cache, v_cache = caches(131, 48)
    k, v = (torch.randn(sum(counts) + 2, HEADS_KV, D) for _ in "kv")  # two tokens of no sequence behind them
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    expected = k_cache.clone(), v_cache.clone()
    for b, length in enumerate(lengths.tolist()):
        first, end = ends[b], ends[b + 1]
        there = slice(length, length + counts[b])
        expected[0][b, there] = spun(k[first:end], angles[there])
        expected[1][b, there] = v[first:end]
    flashtile.append_kvcache(
        k_cache, v_cache, k, v, lengths, cu_seqlens_k_new=ends, rotary_cos=angles.cos(),
        rotary_sin=angles.sin(), **on,
    )  # fmt: skip
    torch.testing.assert_close(k_cache, expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [8, 3])
@pytest.mark.parametrize("by_token", [True, False])
def test_keys_and_queries_are_turned(on, interleaved, pairs, by_token):
    """Against attention over keys and queries that were turned beforehand."""
    turn = spun if interleaved else spun_halves
    angles = torch.rand(20, pairs) * 6.28
    q, k = torch.randn(3, 2, HEADS, D), torch.randn(3, 2, HEADS_KV, D)
    v = torch.randn(3, 2, HEADS_KV, D)
    k_cache, v_cache = caches(3, 16)
    arguments = {"cache_seqlens": int32(*LENGTHS), "causal": by_token, **on}
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    turned_q = torch.empty_like(q)
    for b, length in enumerate(LENGTHS):
        own = angles[length : length + 2]
        turned_q[b] = turn(q[b], own if by_token else own[:1].expand(2, -1))
        expected_k[b, length : length + 2] = turn(k[b], own)
        expected_v[b, length : length + 2] = v[b]
    expected = flashtile.flash_attn_with_kvcache(
        turned_q, expected_k, expected_v, **(arguments | {"cache_seqlens": int32(*LENGTHS) + 2})
    )
    got = flashtile.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), rotary_interleaved=interleaved, **arguments
    )
    torch.testing.assert_close(k_cache, expected_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(v_cache, expected_v)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rotary_positions_may_start_elsewhere(on):
    angles = torch.rand(20, 8) * 6.28
    k_cache, v_cache = caches(2, 16)
    k, v = torch.randn(2, 3, HEADS_KV, D), torch.randn(2, 3, HEADS_KV, D)
    flashtile.append_kvcache(
        k_cache, v_cache, k, v, int32(4, 0), rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        rotary_seqlens=int32(11, 2), **on,
    )  # fmt: skip
    torch.testing.assert_close(k_cache[0, 4:7], spun(k[0], angles[11:14]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k_cache[1, :3], spun(k[1], angles[2:5]), rtol=1e-5, atol=1e-5)


def test_rotary_tables_without_a_position_are_refused(on):
    k_cache, v_cache = caches(2, 16)
    k = torch.randn(2, 1, HEADS_KV, D)
    tables = {"rotary_cos": torch.zeros(0, 8), "rotary_sin": torch.zeros(0, 8)}
    with pytest.raises(ValueError, match=r"rotary_cos must have shape .* at least one position"):
        flashtile.append_kvcache(k_cache, v_cache, k, k, int32(0, 0), **tables, **on)


def test_keys_of_a_quantised_cache_are_rounded_twice(on):
    """To the dtype of the new tokens, as a rotation without an append leaves them, and then to e4m3."""
    k_cache, v_cache = (torch.zeros(1, 4, 1, D, dtype=torch.float8_e4m3fn) for _ in "kv")
    middle, one = torch.full((1, 2, 1, D), 17 / 16, dtype=torch.float16), torch.ones(1, 2, 1, D)
    k = torch.where(torch.arange(D) % 2 == 0, middle, one).half()  # 17 / 16 is between two numbers of e4m3
    cos, sin = torch.ones(4, D // 2), torch.full((4, D // 2), -(2.0**-13))
    flashtile.append_kvcache(k_cache, v_cache, k, k, int32(1), rotary_cos=cos, rotary_sin=sin, **on)
    assert bool((k_cache[:, 1:3].float() == 1).all())
    assert bool((v_cache[:, 1:3].float() == 1).all())


def test_autocast_follows_the_cache():
    """float32 queries and keys beside a 16-bit cache, as layers hand them over under autocast."""
    k_cache, v_cache = (torch.zeros(2, 8, HEADS_KV, D, dtype=torch.bfloat16) for _ in "kv")
    q, k, v = (torch.randn(2, 1, h, D) for h in (HEADS, HEADS_KV, HEADS_KV))
    with pytest.raises(TypeError, match="k_cache has dtype"):
        flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
    with torch.autocast("cpu", torch.bfloat16):
        out = flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
        flashtile.append_kvcache(k_cache, v_cache, k + 1, v, cache_seqlens=4)
        pages, lengths = int32(0, 1).view(2, 1), int32(4, 4)
        shared = flashtile.flash_attn_with_shared_prefix(q, k_cache, v_cache, pages, lengths, 0)
    assert torch.equal(
        out, flashtile.flash_attn_with_kvcache(q.bfloat16(), k_cache, v_cache, cache_seqlens=4)
    )
    assert torch.equal(k_cache[:, 3], k[:, 0].bfloat16())
    assert torch.equal(k_cache[:, 4], (k[:, 0] + 1).bfloat16())
    torch.testing.assert_close(shared, out)


def test_writes_raise_the_version_of_a_cache(on):
    """A graph that saved the cache before would otherwise compute gradients from what is there now."""
    k_cache, v_cache = caches(2, 8)
    q, k, v = torch.randn(2, 1, HEADS, D), *(torch.randn(2, 1, HEADS_KV, D) for _ in "kv")
    pairs = torch.tensor([[0, 1]])
    for write in (
        lambda: flashtile.append_kvcache(k_cache, v_cache, k, v, cache_seqlens=3, **on),
        lambda: flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=4, **on),
        lambda: flashtile.copy_blocks(k_cache, v_cache, pairs, **on),
    ):
        before = [cache._version for cache in (k_cache, v_cache)]
        write()
        after = [cache._version for cache in (k_cache, v_cache)]
        assert all(new > old for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("place", ["cache_batch_idx", "block_table"])
def test_padding_without_a_sequence_writes_nothing(on, place, attends, rotary):
    """Tensors with an entry per sequence have no memory then, so a kernel must not read them."""
    k_cache, v_cache = caches(3, 16)
    before = k_cache.clone(), v_cache.clone()
    k, v = torch.randn(2, 3, HEADS_KV, D).unbind()
    none, lengths = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    arguments = {
        "cu_seqlens_k_new": none,
        place: lengths if place == "cache_batch_idx" else lengths.view(0, 2),
    }
    if rotary:
        arguments |= dict(zip(("rotary_cos", "rotary_sin"), torch.randn(2, 8, D // 2), strict=True))
    if attends:
        q = torch.randn(3, HEADS, D)
        out = flashtile.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cache_seqlens=lengths,
            cu_seqlens_q=none,
            max_seqlen_q=3,
            **arguments,
            **on,
        )
        assert not out.any()
    else:
        flashtile.append_kvcache(k_cache, v_cache, k, v, lengths, **arguments, **on)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
