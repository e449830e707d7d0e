"""What the algorithms move and compute, against the papers' formulas over many (N, d, M).

Everything is counted in numbers (``element_bytes=1``), as the papers do.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from algorithm_heads import random_head

from flashtile.algorithms import (
    Memory,
    Trace,
    flash1,
    flash2,
    flash3,
    flash_decoding,
    online_softmax,
    paged,
    standard,
    tiled_matmul,
    unified_max,
)

GRID = [
    (N, d, M)
    for N, d, M in itertools.product((64, 100), (4, 8, 16), (400, 1000, 4000))
    if 4 * d <= M <= 16 * N * d
]


def numbers(sram: int, trace: Trace | None = None) -> Memory:
    return Memory(sram, element_bytes=1, trace=trace)


def run(algorithm, N: int, d: int, M: int, **arguments) -> Memory:
    memory = numbers(M)
    algorithm.forward(*random_head(N, N, d, dtype=torch.float32)[:3], memory, **arguments)
    return memory


def run_backward(algorithm, N: int, d: int, M: int, **arguments) -> Memory:
    head = random_head(N, N, d, dtype=torch.float32)
    kept = algorithm.forward(*head[:3], numbers(1 << 20), **arguments)
    if algorithm is standard:
        kept = (kept[1],)
    memory = numbers(M)
    algorithm.backward(*head[:3], *kept, head.dout, memory, **arguments)
    return memory


def moved(memory: Memory) -> int:
    return memory.hbm_read + memory.hbm_written


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@pytest.mark.parametrize(("m", "n", "k"), [(20, 15, 10), (7, 32, 33), (1, 5, 1)])
@pytest.mark.parametrize("block", [(1, 1), (8, 8), (5, 16), (64, 64)])
def test_tiled_product_reads_what_its_tiles_say(m, n, k, block):
    a, b = torch.randn(m, k), torch.randn(k, n)
    memory = numbers(1 << 16)
    result = tiled_matmul.matmul(a, b, memory, block_m=block[0], block_n=block[1])
    torch.testing.assert_close(result, a @ b)
    assert memory.traffic["A"].read == m * k * ceil(n, block[1])
    assert memory.traffic["B"].read == k * n * ceil(m, block[0])
    assert memory.hbm_written == m * n
    assert memory.matmul_flops == 2 * m * n * k
    if block == (1, 1):
        assert memory.hbm_read == 2 * m * n * k  # the product without tiles


@pytest.mark.parametrize("M", [500, 1000, 4000])
def test_tiled_product_is_near_the_lower_bound(M):
    """Hong and Kung 1981: at least of the order of m n k / sqrt(M)."""
    n = 128
    memory = numbers(M)
    tiled_matmul.matmul(torch.randn(n, n), torch.randn(n, n), memory)
    assert memory.sram_peak <= M
    assert 1.0 <= memory.hbm_read / (2 * n**3 / math.sqrt(M)) <= 2.2


@pytest.mark.parametrize(("softmax", "accesses"), [("naive", 3), ("safe", 4), ("online", 3)])
@pytest.mark.parametrize("length", [10, 16, 1000])
def test_softmaxes_access_each_number_as_often_as_milakov_and_gimelshein_say(softmax, accesses, length):
    x = torch.randn(5, length, dtype=torch.float64)
    memory = numbers(64)
    result = getattr(online_softmax, softmax)(x, memory, block_m=2, block_n=16)
    torch.testing.assert_close(result, torch.softmax(x, -1))
    assert moved(memory) == accesses * x.numel()
    assert memory.hbm_written == x.numel()


def test_only_the_naive_softmax_overflows():
    x = torch.full((2, 100), 1000.0)
    assert online_softmax.naive(x, Memory()).isnan().all()
    for softmax in (online_softmax.safe, online_softmax.online):
        torch.testing.assert_close(softmax(x, Memory()), torch.full((2, 100), 0.01))


@pytest.mark.parametrize(("N", "d", "M"), GRID)
def test_standard_attention_moves_nd_and_n_squared(N, d, M):
    memory = run(standard, N, d, M)
    of_s, of_o = (tiled_matmul.block_sizes(memory, cols) for cols in (N, d))
    softmax_reads = 1 if M >= N + 2 else 2
    assert memory.traffic["Q"].read == N * d * ceil(N, of_s[1])
    assert memory.traffic["K"].read == N * d * ceil(N, of_s[0])
    assert memory.traffic["S"].written == memory.traffic["P"].written == N * N
    assert memory.traffic["S"].read == softmax_reads * N * N
    assert memory.traffic["P"].read == N * N * ceil(d, of_o[1])
    assert memory.traffic["V"].read == N * d * ceil(N, of_o[0])
    assert memory.hbm_written == N * d + 2 * N * N
    if d * d <= M:  # what the paper takes for granted: then the tiles re-read no more than N^2
        assert 2 <= moved(memory) / (N * d + N * N) <= 9
    assert memory.matmul_flops == 4 * N * N * d
    assert memory.hbm_peak == 4 * N * d + N * N + (
        0 if 4 * N * d + N * N >= 3 * N * d + 2 * N * N else N * N - N * d
    )


def test_standard_attention_moves_each_matrix_once_if_sram_is_large():
    N, d = 64, 16
    memory = run(standard, N, d, 1 << 20)
    assert moved(memory) == 4 * N * d + 4 * N * N


@pytest.mark.parametrize(("N", "d", "M"), GRID)
def test_flash1_moves_what_theorem_2_says(N, d, M):
    memory = run(flash1, N, d, M)
    Br, Bc = flash1.block_sizes(memory, d, d)
    Tc = ceil(N, Bc)
    assert memory.hbm_read == 2 * N * d + Tc * (2 * N * d + 2 * N)
    assert memory.hbm_written == (Tc + 1) * (N * d + 2 * N)  # lines 2, 12 and 13
    assert memory.matmul_flops == 4 * N * N * d
    assert memory.hbm_peak == 4 * N * d + 2 * N  # Theorem 1: O(N) beyond inputs and output
    assert Br * Bc <= M
    # Theta(N^2 d^2 / M), where blocks are smaller than the sequence.
    if Tc >= 4:
        assert 10 <= moved(memory) / (N * N * d * d / M) <= 40


@pytest.mark.parametrize(("N", "d", "M"), GRID)
def test_flash2_reads_less_and_writes_its_result_once(N, d, M):
    memory, first = run(flash2, N, d, M), run(flash1, N, d, M)
    Br, _ = flash2.block_sizes(memory, d, d)
    Tr = ceil(N, Br)
    assert memory.hbm_read == N * d + Tr * 2 * N * d
    assert memory.hbm_written == N * d + N
    assert memory.hbm_peak == 4 * N * d + N
    assert memory.matmul_flops == first.matmul_flops
    assert memory.hbm_written < first.hbm_written
    assert moved(memory) < moved(first)


@pytest.mark.parametrize("algorithm", [flash1, flash2])
def test_traffic_scales_as_n_squared_d_squared_over_m(algorithm):
    N, d, M = 128, 8, 368
    base = moved(run(algorithm, N, d, M))
    assert moved(run(algorithm, 2 * N, d, M)) / base == pytest.approx(4, rel=0.1)
    assert moved(run(algorithm, N, 2 * d, M)) / base == pytest.approx(4, rel=0.2)  # 5 d + 6 is not quite 5 d
    assert moved(run(algorithm, N, d, 2 * M)) / base == pytest.approx(1 / 2, rel=0.1)


@pytest.mark.parametrize("d", [8, 12, 16])
def test_crossover_with_standard_attention(d):
    """Theorem 2: N^2 d^2 / M against N d + N^2. Flash moves less exactly where M is large beside d^2."""
    N = 96
    sizes = [round(d * d * 2 ** (i / 2)) for i in range(3, 14)]
    first, plain = ([moved(run(algorithm, N, d, M)) for M in sizes] for algorithm in (flash1, standard))
    wins = [ours < theirs for ours, theirs in zip(first, plain, strict=True)]
    assert wins == sorted(wins), "one crossover"
    assert first[0] > plain[0], "SRAM of about 3 d^2: Algorithm 1 moves more"
    assert first[-1] < 0.4 * plain[-1], "SRAM of 90 d^2: it moves much less"
    crossover = sizes[wins.index(True)]
    assert 2 <= crossover / (d * d) <= 16


@pytest.mark.parametrize(("N", "d", "M"), [(128, 8, 1000), (256, 16, 4000)])
def test_backward_recomputes_rather_than_reads(N, d, M):
    plain, first, second = (run_backward(algorithm, N, d, M) for algorithm in (standard, flash1, flash2))
    # Five products instead of four, since S is computed again.
    assert plain.matmul_flops == 8 * N * N * d
    assert first.matmul_flops == second.matmul_flops == 10 * N * N * d
    assert moved(first) < moved(plain)
    assert moved(second) < moved(first)  # O and m, l are not read again for each block
    Tc = ceil(N, flash1.backward_block_sizes(first, d, d)[1])
    assert first.hbm_read == 2 * N * d + Tc * (4 * N * d + 2 * N)
    assert first.hbm_written == N * d + Tc * N * d + 2 * N * d
    Tc = ceil(N, flash2.backward_block_sizes(second, d, d)[1])
    assert second.hbm_read == 2 * N * d + 2 * N * d + Tc * (3 * N * d + 2 * N)
    assert second.hbm_written == N + N * d + Tc * N * d + 2 * N * d
    assert plain.hbm_peak >= 2 * N * N
    assert first.hbm_peak == 8 * N * d + 2 * N
    assert second.hbm_peak == 8 * N * d + 2 * N


def test_flash2_computes_less_beside_its_products():
    """FlashAttention-2, section 3.1.1: the same products, fewer other operations."""
    for N, d, block in itertools.product((64, 128), (8, 32), (8, 32)):
        blocks = {"block_m": block, "block_n": block}
        first, second = (run(algorithm, N, d, 1 << 20, **blocks) for algorithm in (flash1, flash2))
        assert first.matmul_flops == second.matmul_flops
        tiles = (N // block) ** 2
        # A tile saves the division of O and of the product's correction: at least 2 Br d operations.
        assert first.other_flops - second.other_flops >= tiles * 2 * block * d - N * d


@pytest.mark.parametrize("algorithm", [flash2, flash3, flash_decoding])
@pytest.mark.parametrize("blocks_a_side", [1, 2, 8])
def test_causal_attention_does_half_the_work(algorithm, blocks_a_side):
    block, d = 8, 4
    N = 2 * block * blocks_a_side
    rows = block if algorithm is flash3 else 2 * block  # two warpgroups of block rows
    blocks = {"block_m": rows, "block_n": 2 * block}
    full, causal = (
        run(algorithm, N, d, 1 << 20, **blocks),
        run(algorithm, N, d, 1 << 20, causal=True, **blocks),
    )
    T = blocks_a_side
    assert causal.matmul_flops / full.matmul_flops == (T + 1) / (2 * T)
    assert causal.traffic["K"].read / full.traffic["K"].read == (T + 1) / (2 * T)


def test_flash1_and_standard_attention_skip_nothing():
    for algorithm in (flash1, standard):
        full, causal = run(algorithm, 64, 8, 1000), run(algorithm, 64, 8, 1000, causal=True)
        assert moved(full) == moved(causal)
        assert full.matmul_flops == causal.matmul_flops


def test_a_window_costs_what_it_shows():
    """Traffic and work of a sliding window grow with N alone."""
    small, large = (
        run(flash2, N, 8, 1 << 20, window_size=(15, 0), block_m=16, block_n=16) for N in (256, 512)
    )
    assert large.matmul_flops == pytest.approx(2 * small.matmul_flops, rel=0.05)
    assert moved(large) == pytest.approx(2 * moved(small), rel=0.05)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 8])
def test_splits_add_programs_and_little_traffic(num_splits):
    N, d, block = 256, 16, 16
    head = random_head(1, N, d)
    trace = Trace()
    memory = numbers(2000, trace)
    flash_decoding.forward(*head[:3], memory, num_splits=num_splits, block_n=block)
    assert memory.traffic["K"].read + memory.traffic["V"].read == 2 * N * d  # once, however many splits
    assert memory.hbm_read == 2 * N * d + num_splits * (d + d + 1)  # Q, O_s and lse_s
    assert memory.hbm_written == (num_splits + 1) * (d + 1)
    assert {e.program for e in trace.events if e.kernel == "split"} == set(range(num_splits))
    steps = [
        sum(
            e.kernel == "split" and e.program == split and e.name == "K" and e.kind == "load"
            for e in trace.events
        )
        for split in range(num_splits)
    ]
    assert max(steps) == ceil(N // block, num_splits)  # what one program has to walk through


def test_a_unified_maximum_saves_the_corrections():
    head = random_head(1, 256, 16)
    blocks = {"num_splits": 4, "block_n": 16}
    online, unified = numbers(2000), numbers(2000)
    flash_decoding.forward(*head[:3], online, **blocks)
    *_, recomputed = unified_max.forward(*head[:3], unified, **blocks)
    assert recomputed == []
    assert unified.matmul_flops == online.matmul_flops
    assert unified.other_flops < 0.8 * online.other_flops
    assert moved(unified) == moved(online)


def test_a_score_outside_of_the_window_is_computed_again():
    head = random_head(32, 64, 8)
    head.q[:, 0] = 0.0
    head.q[20, 0] = 1.0
    head.k[40, 0] = 1000.0  # one score far above phi, in the third block of rows
    memory, safe = numbers(1 << 16), numbers(1 << 16)
    blocks = {"num_splits": 2, "block_m": 8, "block_n": 8}
    out, lse, recomputed = unified_max.forward(*head[:3], memory, bounds=(-80, 80), **blocks)
    assert recomputed == [range(16, 24)]
    expected_out, expected_lse = flash_decoding.forward(*head[:3], safe, **blocks)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    assert memory.matmul_flops == safe.matmul_flops * 5 / 4


def test_pages_cost_their_table():
    N, d, page_size = 100, 8, 16
    head = random_head(1, N, d)
    memory = Memory(1 << 16, element_bytes=2)
    paged.forward(*head[:3], memory, page_size=page_size)
    pages = ceil(N, page_size)
    assert memory.traffic["table.A"].read == 4 * pages
    assert memory.traffic["K"].read == memory.traffic["V"].read == 2 * N * d
    assert memory.traffic["K"].written == 2 * N * d  # when they were appended


@pytest.mark.parametrize("algorithm", [standard, flash1, flash2, flash3, flash_decoding, unified_max, paged])
def test_traces_add_up_and_show_every_tile_of_scores(algorithm):
    trace = Trace(watch_rows=(0, 20))
    memory = numbers(1000, trace)
    out, lse, *_ = algorithm.forward(*random_head(32, 48, 8)[:3], memory)
    assert trace.totals() == memory.totals()
    seen = torch.zeros(32, 48, dtype=torch.int)
    for event in trace.events:
        scores = event.kind == "skip" or (event.kind == "compute" and event.op.startswith("S "))
        if event.name.split(".")[0] == "S" and scores:
            (r0, r1), (c0, c1) = event.rows, event.cols
            seen[r0:r1, c0:c1] += 1
    if algorithm is standard:  # its products take several steps
        assert seen.min() >= 1
    else:
        assert seen.eq(1).all()
    if algorithm in (flash1, flash2):
        last = {
            e.name: e.values[20] for e in trace.events if e.name in ("m", "l") and e.values and 20 in e.values
        }
        expected = lse[20] if algorithm is flash2 else out.new_tensor([last["m"]]) + math.log(last["l"])
        assert last["m"] + math.log(last["l"]) == pytest.approx(expected.item())
