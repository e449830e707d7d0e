"""Algorithms beside attention's own: the chain of products, two levels of tiles, warps, reservations."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from algorithm_heads import attention, random_head

from flashtile.algorithms import (
    Memory,
    Trace,
    online_softmax,
    product_chain,
    reservation,
    tiled_matmul,
    warp_split,
)
from flashtile.learn.algorithms.warps import Warps


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("order", ["separate", "fused", "reordered"])
@pytest.mark.parametrize(("seqlen", "sram"), [(6, 10_000), (50, 400)])
def test_the_chain_is_one_product_in_any_order(order: str, seqlen: int, sram: int) -> None:
    q, k, v = random(3, seqlen, 8)
    memory = Memory(sram, element_bytes=1)
    torch.testing.assert_close(getattr(product_chain, order)(q, k, v, memory), q @ k.T @ v)
    scores = 0 if order != "separate" else seqlen**2
    assert memory.traffic["S"].written == scores if scores else "S" not in memory.traffic


def test_a_softmax_with_its_average_reads_its_row_once() -> None:
    x, v = 40 * random(3, 100), random(100, 5)
    memory = Memory(64, element_bytes=1)
    torch.testing.assert_close(online_softmax.average(x, v, memory, block_n=7), x.softmax(-1) @ v)
    assert memory.traffic["X"].read == x.numel()
    with pytest.raises(ValueError, match="v must have 100 rows"):
        online_softmax.average(x, v[:-1], memory)


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "warp"),
    [(64, 64, 32, (32, 32), (16, 8)), (50, 70, 33, (32, 16), (8, 16)), (8, 8, 8, (1, 1), (1, 1))],
)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_two_levels_of_tiles(m, n, k, block, warp, beta) -> None:
    a, b, c = random(m, k), random(k, n), random(m, n)
    memory = Memory(element_bytes=1)
    given = c.clone()
    out, warps = tiled_matmul.two_levels(
        a, b, memory, c=c, alpha=2.0, beta=beta, block_m=block[0], block_n=block[1], block_k=7,
        warp_m=warp[0], warp_n=warp[1],
    )  # fmt: skip
    torch.testing.assert_close(out, 2 * a @ b + beta * c)
    assert torch.equal(c, given)
    blocks = math.ceil(m / block[0]) * math.ceil(n / block[1])
    assert memory.traffic["A"].read == m * k * math.ceil(n / block[1])
    assert memory.traffic["B"].read == k * n * math.ceil(m / block[0])
    assert memory.hbm_written == m * n
    assert memory.hbm_read == memory.traffic["A"].read + memory.traffic["B"].read + (m * n if beta else 0)
    assert warps.barriers == 2 * blocks * math.ceil(k / 7)
    if m % block[0] == 0 and n % block[1] == 0:
        assert warps.read_bytes == m * n * k * (1 / warp[0] + 1 / warp[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.0}, r"c must have shape \(8, 8\).*got None"),
        ({"warp_m": 3}, r"warp_m must divide block_m \(64\), got 3"),
        ({"block_k": 0}, "block_k must be at least 1"),
    ],
)
def test_two_levels_refuse(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        tiled_matmul.two_levels(random(8, 8), random(8, 8), Memory(), **change)


SPLITS = (warp_split.split_q, warp_split.split_k)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "warps"), [(64, 128, 4), (33, 75, 8), (5, 3, 2)])
def test_warps_share_attention(split, seqlen_q: int, seqlen_k: int, warps: int) -> None:
    head = random_head(seqlen_q, seqlen_k, 16, 8)
    out, lse, _ = split(*head[:3], Memory(), num_warps=warps, block_m=32, block_n=16)
    exact = attention(head)
    torch.testing.assert_close(out, exact.out)
    torch.testing.assert_close(lse, exact.lse)


def test_what_crosses_shared_memory() -> None:
    """Of whole tiles, by hand: element bytes 2, statistics and accumulators 4."""
    w, rows, keys, d, tiles, programs = 4, 64, 64, 32, 3, 2
    q, k, v = (random(n, d) for n in (programs * rows, tiles * keys, tiles * keys))
    by_rows, by_keys = (split(q, k, v, Memory(), num_warps=w)[2] for split in SPLITS)
    assert by_rows.read_bytes == programs * (rows * d * 2 + tiles * w * 2 * keys * d * 2)
    assert by_rows.written_bytes == 0
    maxima, sums, outputs = w * rows * 4, w * rows * 4, w * rows * d * 4
    assert by_keys.written_bytes == programs * tiles * (maxima + sums + outputs)
    read = w * rows * d * 2 + tiles * (2 * keys * d * 2 + w * maxima + sums + outputs)
    assert by_keys.read_bytes == programs * read
    assert by_rows.barriers == programs * (1 + 2 * tiles)
    assert by_keys.barriers == programs * (1 + 4 * tiles)
    assert by_keys.read_bytes + by_keys.written_bytes > 2 * by_rows.read_bytes


@pytest.mark.parametrize(("keys", "fewer"), [(160, "split_q"), (176, "split_k")])
def test_the_better_split_depends_on_the_tile(keys: int, fewer: str) -> None:
    """Bc = 2 w / (w - 1) Br = 171 for 64 rows, but for the maxima and sums."""
    q, k, v = random(64, 256), random(keys, 256), random(keys, 256)
    moved = {}
    for split in SPLITS:
        _, _, warps = split(q, k, v, Memory(10**6), num_warps=4, block_m=64, block_n=keys)
        moved[split.__name__] = (
            warps.read_bytes + warps.written_bytes - 64 * 256 * 2 * (1 if "q" in split.__name__ else 4)
        )
    assert min(moved, key=moved.__getitem__) == fewer, moved


@pytest.mark.parametrize("split", SPLITS)
def test_the_timeline_does_everything_once_and_one_thing_at_a_time(split) -> None:
    trace = Trace()
    q, k, v = random(3, 128, 32)
    memory = Memory(trace=trace)
    _, _, warps = split(q, k, v, memory)
    spans = warp_split.timeline(trace.events)
    for one, other in itertools.combinations(spans, 2):
        apart = one.end <= other.start or other.end <= one.start
        if one.worker == other.worker or one.unit == other.unit == warp_split.SHARED_MEMORY:
            assert apart, (one, other)
    busy = Counter()
    for span in spans:
        busy[span.unit] += span.end - span.start
    moved = warps.read_bytes + warps.written_bytes
    assert busy[warp_split.SHARED_MEMORY] * warp_split.SHARED_RATE == pytest.approx(moved)
    assert busy[warp_split.TENSOR_CORE] * warp_split.MATMUL_RATE == pytest.approx(memory.matmul_flops)


def test_warps_must_divide_their_tile() -> None:
    for split, name in zip(SPLITS, ("block_m", "block_n"), strict=True):
        with pytest.raises(ValueError, match=rf"num_warps must divide {name} \(64\), got 3"):
            split(*random(3, 64, 8), Memory(), num_warps=3)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        Warps(Memory(), 0)


REQUESTS = reservation.random_requests(64, seed=3)


def test_regions_take_the_lowest_gap_that_fits() -> None:
    room = reservation.Contiguous(100, lambda request: request.final)
    request = reservation.Request
    assert [room.admit(i, request(10, n)) for i, n in enumerate((20, 30, 25))] == [True, True, False]
    room.free(0)
    assert room.admit(3, request(10, 10))
    assert not room.admit(4, request(10, 30))
    assert room.admit(5, request(5, 5))
    assert [room.places(i) for i in (3, 5, 1)] == [[0, 20], [20, 10], [30, 40]]
    with pytest.raises(ValueError, match="at least 30 slots, got 5"):
        reservation.Contiguous(100, lambda request: 5).admit(0, request(10, 20))


def test_pages_count_as_the_cache_does() -> None:
    """Waste per sequence, as here, and over the pool, as the cache's books have it."""
    room = reservation.Pages(4096)
    for number, request in enumerate(REQUESTS[:6]):
        assert room.admit(number, request)
    lengths = {number: request.prompt for number, request in enumerate(REQUESTS[:6])}
    usage = room.manager.usage()
    assert usage.tokens == sum(lengths.values())
    assert sum(map(room.held, lengths)) == usage.blocks * usage.block_size
    assert all(0 <= room.held(number) - length < 16 for number, length in lengths.items())


def test_reservations_waste_most_and_pages_little() -> None:
    """60 to 80 % and under 4 % (Kwon et al. 2023, Figure 2), and several times as many sequences."""
    slots = 15728
    whole = reservation.serve(REQUESTS, reservation.Contiguous(slots, reservation.for_the_longest))
    pages = reservation.serve(REQUESTS, reservation.Pages(slots))
    assert 0.6 < whole.waste < 0.8
    assert pages.waste < 0.04
    assert whole.most_sequences == slots // reservation.LONGEST
    assert pages.most_sequences > 5 * whole.most_sequences
    assert pages.crowded == 0  # all of them fit at once
    assert pages.steps < whole.steps


@pytest.mark.parametrize("spare", [0.0, 0.01])
def test_every_request_is_answered(spare: float) -> None:
    """In a memory in which sequences have to give way: each token once, and nothing left behind."""
    room, trace, requests = reservation.Pages(2048, spare=spare), Trace(), REQUESTS[:24]
    served = reservation.serve(requests, room, trace, every=1)
    assert served.preempted > 0
    assert room.manager.usage().blocks == 0
    last = {}
    for event in trace.events:
        assert event.data is not None
        assert event.data["held"] <= room.slots
        running = [number for number, *_ in event.data["sequences"]]
        assert max(running) < len(requests) - event.data["waiting"]  # who came first is never behind
        last |= {number: (length, final) for number, length, final, *_ in event.data["sequences"]}
    assert set(last) == set(range(len(requests)))
    assert all(length == final - 1 for length, final in last.values())
    with pytest.raises(ValueError, match="requests must fit into 64 slots"):
        reservation.serve([reservation.Request(100, 1)], reservation.Pages(64))
