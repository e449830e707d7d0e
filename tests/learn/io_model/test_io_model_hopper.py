"""flashtile.io_model of the Hopper forward kernel: its items, what they walk, and what L2 keeps of it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from flashtile.io_model import Call, estimates, find_card, hopper, kernels
from flashtile.learn.io_model.estimate import HOPPER, portable_config
from flashtile.learn.io_model.l2 import WAVES

pytest.importorskip("triton")
H100 = find_card("h100")
CALLS = {
    "full": Call(3, 300, 520, 4, 2, 64),
    "causal": Call(3, 700, 520, 4, 2, 128, window_right=0),
    "long causal": Call(1, 1000, 20000, 2, 2, 128, window_right=0),
    "window": Call(2, 900, 1500, 6, 3, 256, window_left=300, window_right=20),
    "packed": Call(2, 3, 1000, 32, 4, 128, window_right=0),
    "unequal widths": Call(2, 200, 300, 2, 1, 72, head_dim_v=128),
    "lengths": Call(4, 500, 900, 4, 2, 64, lengths=((500, 500), (0, 7), (1, 900), (130, 40)), window_right=0),
}


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def call(request) -> Call:
    return request.param


def sees(call: Call, seqlen_q: int, seqlen_k: int, row: int, key: int) -> bool:
    distance = key - (row + seqlen_k - seqlen_q)
    ahead, back = call.window_right, call.window_left
    return (ahead == -1 or distance <= ahead) and (back == -1 or -distance <= back)


def test_every_block_of_rows_is_computed_once(call):
    """Over the programs of the card and of one with few SMs, each once."""
    work = hopper.WorkTiles.of(call, H100)
    expected = Counter(
        (sequence, head, tuple(walk))
        for sequence, walks in enumerate(work.walks)
        for head in range(work.heads)
        for walk in walks
    )
    found = Counter()
    for index in range(work.count):
        sequence, head, walks = work.tile(index)
        found.update((sequence, head, tuple(walk)) for walk in walks)
    assert found == expected
    key_blocks = [-(-seqlen_k // work.variant.BLOCK_N) for _, seqlen_k in call.sequences]
    for programs in (5, min(H100.sm_count, work.count)):
        queues = [list(tiles) for tiles in work.by_program(programs)]
        assert sorted(index for tiles in queues for index in tiles) == list(range(work.count))
        paths = [path for tiles in queues for path in hopper.paths_of(work, tiles, key_blocks, 1)]
        assert len(paths) == work.count


def test_programs_that_take_from_a_queue_end_together():
    """Whatever work tiles cost, no program ends later than another by more than the longest."""
    costs = [1 + index * 37 % 101 for index in range(1000)]
    queues = hopper.by_program(1000, 132, costs.__getitem__)
    ends = [sum(costs[index] for index in tiles) for tiles in queues]
    assert sum(ends) == sum(costs)
    assert max(ends) - min(ends) <= max(costs)


def test_loads_are_the_blocks_that_some_row_sees(call):
    found = hopper.forward(call, H100)
    work = hopper.WorkTiles.of(call, H100)
    rows, keys = work.variant.BLOCK_M // work.variant.PACK, work.variant.BLOCK_N
    loaded = blocks = 0
    for seqlen_q, seqlen_k in call.sequences:
        blocks += -(-seqlen_k // keys)
        for first, start in itertools.product(range(0, seqlen_q, rows), range(0, seqlen_k, keys)):
            last, end = min(first + rows, seqlen_q), min(start + keys, seqlen_k)
            corners = itertools.product(range(first, last), range(start, end))
            loaded += any(sees(call, seqlen_q, seqlen_k, row, key) for row, key in corners)
    # The model takes the mean size of a block, so that short ones count alike.
    mean = (call.k_bytes + call.v_bytes) / (blocks * call.num_heads_kv)
    assert found.sm_read == pytest.approx(call.q_bytes + loaded * work.heads * mean)
    assert round(found.dram_read) == found.compulsory_read <= call.q_bytes + call.k_bytes + call.v_bytes
    assert found.written == call.out_bytes + call.lse_bytes


def test_blocks_are_those_of_the_schedule():
    from flashtile.backends.hopper.masking import key_range

    for call in CALLS.values():
        work = hopper.WorkTiles.of(call, H100)
        variant, rows = work.variant, work.variant.BLOCK_M // work.variant.PACK
        for (seqlen_q, seqlen_k), walks in zip(call.sequences, work.walks, strict=True):
            for number, walk in enumerate(walks):
                last = min((number + 1) * rows, seqlen_q) - 1
                begin, end, _, _ = key_range.fn(variant, number * rows, last, seqlen_q, seqlen_k, call)
                block = variant.BLOCK_N
                assert list(walk) == (list(range(begin // block, -(-end // block))) if begin < end else [])


def test_packed_heads_read_their_keys_once():
    found = hopper.forward(CALLS["packed"], H100)
    assert found.sm_read == found.compulsory_read
    assert kernels.forward(
        CALLS["packed"], portable_config(CALLS["packed"], H100).forward, H100
    ).sm_read > 7 * (found.sm_read - CALLS["packed"].q_bytes)


@pytest.mark.parametrize("seqlen", [2**16, 2**17, 2**18])
def test_full_attention_reads_keys_again_as_the_portable_kernel_does(seqlen):
    """Both have 128 rows and one program an SM; that keys come last to first makes no difference."""
    call = Call(1, seqlen, seqlen, 1, 1, 128)
    portable = kernels.forward(call, portable_config(call, H100).forward, H100)
    found = hopper.forward(call, H100)
    assert found.sm_read == pytest.approx(portable.sm_read)
    assert found.dram_read == pytest.approx(portable.dram_read, rel=0.05)
    assert found.dram_read >= 3 * found.compulsory_read


def test_a_large_l2_keeps_everything():
    call = Call(1, 2**16, 2**16, 2, 2, 128, window_right=0)
    sizes = [2**20 * mebibytes for mebibytes in (20, 50, 100, 200)]
    reads = [hopper.forward(call, replace(H100, l2_bytes=size)).dram_read for size in sizes]
    assert reads == sorted(reads, reverse=True)
    assert reads[0] > 2 * reads[-1]
    assert reads[-1] == call.q_bytes + call.k_bytes + call.v_bytes


def test_large_grids_go_on_as_they_began(monkeypatch):
    call = Call(1, 2**16, 2**16, 8, 8, 128, window_right=0)
    monkeypatch.setattr(hopper, "VISITS", 2**30)
    whole = hopper.forward(call, H100)
    assert whole.programs > WAVES * H100.sm_count
    monkeypatch.setattr(hopper, "VISITS", 2**19)
    assert hopper.forward(call, H100).dram_read == pytest.approx(whole.dram_read, rel=0.1)


def test_estimates_name_it_where_it_serves():
    call = Call(4, 4096, 4096, 16, 16, 128)
    found = {row.algorithm: row for row in estimates(call, H100)}
    assert found[HOPPER].bound == "compute"
    assert found[HOPPER].programs == 4 * 16 * 32
    others = (
        (replace(call, dtype="float32"), H100),
        (replace(call, head_dim=100), H100),
        (replace(call, head_dim_v=264), H100),
        (replace(call, seqlen_k=0), H100),
        (call, find_card("a100")),
    )
    for other, card in others:
        assert not hopper.serves(other, card)
        assert HOPPER not in {row.algorithm for row in estimates(other, card)}
    assert HOPPER not in {row.algorithm for row in estimates(call, H100, "backward")}


def test_estimates_go_without_triton(monkeypatch):
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda name: None)
    assert HOPPER not in {row.algorithm for row in estimates(Call(4, 4096, 4096, 16, 16, 128), H100)}
