"""Worked numbers of the articles (docs/articles.md), from our code; others are tested where it links to."""

from __future__ import annotations

import math

import torch

from flashtile.algorithms import Memory, Trace, flash1, flash2, flash_decoding, standard
from flashtile.hardware.cards import KIB
from flashtile.io_model import Call, estimates, find_card, find_model
from flashtile.learn.io_model.estimate import DECODING, FLASH1, FLASH2, STANDARD


def head(N: int, d: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, N, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


def tiles(trace: Trace) -> int:
    return sum(event.kind == "compute" and event.op == "S = Q K^T" for event in trace.events)


def test_003_the_papers_block_rule_on_an_a100():
    """M = 192 KiB, counted as so many numbers, N 1024, d 64: Bc 768, Br 64, Tc 2, Tr 16."""
    M, N, d = find_card("a100").l1_bytes, 1024, 64
    assert M == 196608
    Bc, Br = math.ceil(M / (4 * d)), min(math.ceil(M / (4 * d)), d)
    assert (Bc, Br) == (768, 64)
    assert (math.ceil(N / Bc), math.ceil(N / Br)) == (2, 16)
    memory = Memory(2 * M, element_bytes=1, trace=(trace := Trace()))  # S and the statistics need room, too
    flash1.forward(*(t.float() for t in head(N, d)), memory, block_m=Br, block_n=Bc)
    assert tiles(trace) == 2 * 16


def test_003_n_12_in_blocks_of_3_and_2():
    """Tr 4, Tc 6, keys outside: 24 tiles, each block of keys loaded once."""
    q, k, v = head(12, 4)
    trace = Trace()
    out, _, _ = flash1.forward(q, k, v, Memory(trace=trace), block_m=3, block_n=2)
    assert tiles(trace) == 4 * 6
    loads = [event for event in trace.events if event.kind == "load"]
    assert [sum(event.name == name for event in loads) for name in ("K", "V", "Q", "O")] == [6, 6, 24, 24]
    torch.testing.assert_close(out, torch.softmax(q @ k.T / 2, -1) @ v)


def test_004_its_page_holds_one_tile_of_8_by_8():
    """16 tiles. It says 8 scores held and 87.5 % saved; a tile of 2 by 2 is 4, and 93.75 %."""
    trace = Trace()
    flash2.forward(*head(8, 4), Memory(trace=trace), block_m=2, block_n=2)
    scores = [event for event in trace.events if event.kind == "compute" and event.op == "S = Q K^T"]
    assert len(scores) == 16
    assert {len(range(*event.rows)) * len(range(*event.cols)) for event in scores} == {4}
    assert 1 - 4 / 64 == 0.9375


def test_003_standard_attention_touches_hbm_for_eight_matrices():
    """Q, K read and S written; S read and P written; P, V read and O written."""
    q, k, v = head(64, 16)
    trace = Trace()
    standard.forward(q, k, v, Memory(sram_bytes=10**6, trace=trace))
    moved = {(event.kind, event.name) for event in trace.events if event.kind in ("load", "store")}
    expected = {("load", name) for name in ("Q", "K", "S", "P", "V")} | {
        ("store", name) for name in ("S", "P", "O")
    }
    assert moved == expected
    assert len(moved) == 8


def test_003_the_memories_of_an_a100():
    card = find_card("a100-40gb")
    assert card.sm_count * card.l1_bytes / KIB == 20736  # KB: "20 MB"
    assert card.memory_bytes == 40 * 2**30
    assert card.bandwidth_gbps < card.sram_gbps / 10  # 1.5 of 19 TB/s
    assert card.tflops["float16"] / card.tflops["float32"] == 16  # a product's FLOP against another


def test_003_one_program_of_flash_attention_1_a_head():
    """batch * heads programs; from 80 on most of 108 SMs work. FlashAttention-2 adds blocks of rows."""
    card = find_card("a100")
    few = {row.algorithm: row for row in estimates(Call(1, 8192, 8192, 16, 16, 64), card)}
    many = {row.algorithm: row for row in estimates(Call(8, 8192, 8192, 16, 16, 64), card)}
    assert (few[FLASH1].programs, few[FLASH1].busy, many[FLASH1].busy) == (16, 16, 108)
    assert few[FLASH2].busy == 108
    assert few[FLASH1].floor_seconds > few[STANDARD].floor_seconds > few[FLASH2].floor_seconds
    assert many[FLASH1].floor_seconds < many[STANDARD].floor_seconds


def test_003_decoding_of_one_head_uses_less_than_a_hundredth_of_an_a100():
    card = find_card("a100")
    found = {row.algorithm: row for row in estimates(Call(1, 1, 65536, 1, 1, 128), card)}
    assert found[FLASH2].busy / card.sm_count < 0.01
    assert found[DECODING].busy == card.sm_count
    q, k, v = head(256, 16)
    memory = Memory()
    out, _ = flash_decoding.forward(q[:1], k, v, memory, num_splits=8)
    torch.testing.assert_close(out, torch.softmax(q[:1] @ k.T / 4, -1) @ v)


def test_003_shapes_of_llama_2_7b_s_products():
    """[12288, 4096], [4096, 4096], [11008, 4096], [4096, 11008]; ours have gate and up in one."""
    qkv, out, gate_up, down = find_model("llama-2-7b").products
    assert (qkv, out, down) == ((12288, 4096), (4096, 4096), (4096, 11008))
    assert gate_up == (2 * 11008, 4096)


def test_004_a_hundred_thousand_tokens_have_ten_thousand_million_scores():
    assert Call(1, 100_000, 100_000, 1, 1, 64).score_pairs == 10**10
