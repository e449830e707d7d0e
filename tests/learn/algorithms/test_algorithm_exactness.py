"""Every algorithm computes attention: held to standard attention in float64 by the error rule."""

from __future__ import annotations

import pytest
import torch
from algorithm_heads import attention, random_head
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.algorithms import Memory, flash1, flash2, flash3, flash_decoding, paged, standard, unified_max
from flashtile.learn.algorithms.call import log_sum_exp
from flashtile.testing import FACTORS, compare

SMALL_SRAM = 2000  # numbers: several blocks a side at the lengths below


def run_flash1(q, k, v, memory, **arguments):
    out, m, l = flash1.forward(q, k, v, memory, **arguments)
    return out, log_sum_exp(m, l)


def run_unified_max(q, k, v, memory, **arguments):
    return unified_max.forward(q, k, v, memory, phi=2.0, **arguments)[:2]


def run_unified_max_falling_back(q, k, v, memory, **arguments):
    return unified_max.forward(q, k, v, memory, phi=0.5, bounds=(-1.0, 1.0), block_m=8, **arguments)[:2]


def run_more_splits_than_blocks(q, k, v, memory, **arguments):
    return flash_decoding.forward(q, k, v, memory, num_splits=50, **arguments)


ALGORITHMS = {
    "flash1": run_flash1,
    "flash2": flash2.forward,
    "flash3": flash3.forward,
    "flash_decoding": flash_decoding.forward,
    "flash_decoding, 50 splits": run_more_splits_than_blocks,
    "unified_max": run_unified_max,
    "unified_max, falling back": run_unified_max_falling_back,
}
SHAPES = ((70, 70, 16, 16), (50, 77, 8, 12), (77, 50, 12, 8), (1, 90, 16, 16), (5, 3, 1, 1))
MASKS = ({}, {"causal": True}, {"window_size": (9, 4)}, {"causal": True, "window_size": (3, -1)})


def check(head, results, mask, names, dtype):
    exact, plain = attention(head, **mask), attention(head, dtype, **mask)
    for name, actual in zip(names, results, strict=True):
        noise = 4 * torch.finfo(dtype).eps  # a few roundings of a score
        comparison = compare(
            name,
            actual,
            getattr(exact, name),
            getattr(plain, name),
            factor=FACTORS[name],
            noise=(noise, noise),
        )
        assert comparison.holds, comparison


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forward(algorithm, shape, mask, dtype):
    head = random_head(*shape, dtype=dtype)
    memory = Memory(SMALL_SRAM, element_bytes=1)
    results = ALGORITHMS[algorithm](*head[:3], memory, **mask)
    check(head, results, mask, ("out", "lse"), dtype)
    assert memory.sram_used == 0
    assert 0 < memory.sram_peak <= SMALL_SRAM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_standard_attention(shape, mask, dtype):
    head = random_head(*shape, dtype=dtype)
    memory = Memory(SMALL_SRAM, element_bytes=1)
    out, p = standard.forward(*head[:3], memory, **mask)
    check(head, (out,), mask, ("out",), dtype)
    gradients = standard.backward(*head[:3], p, head.dout, memory)
    check(head, gradients, mask, ("dq", "dk", "dv"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("algorithm", [flash1, flash2])
def test_backward(algorithm, shape, mask, dtype):
    head = random_head(*shape, dtype=dtype)
    memory = Memory(SMALL_SRAM, element_bytes=1)
    kept = algorithm.forward(*head[:3], memory, **mask)
    gradients = algorithm.backward(*head[:3], *kept, head.dout, memory, **mask)
    check(head, gradients, mask, ("dq", "dk", "dv"), dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_softmax_scale_and_large_scores(algorithm):
    head = random_head(40, 40, 8)
    head = head._replace(q=30 * head.q)
    results = ALGORITHMS[algorithm](*head[:3], Memory(SMALL_SRAM, 1), softmax_scale=1.5)
    check(head, results, {"softmax_scale": 1.5}, ("out", "lse"), torch.float64)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to(algorithm, seqlen_q, seqlen_k):
    head = random_head(seqlen_q, seqlen_k, 8)
    out, lse = ALGORITHMS[algorithm](*head[:3], Memory(SMALL_SRAM, 1))
    assert out.equal(torch.zeros(seqlen_q, 8))
    assert lse.equal(torch.full((seqlen_q, 1), -torch.inf, dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    seqlen_q=st.integers(1, 40),
    seqlen_k=st.integers(1, 40),
    head_dim=st.integers(1, 12),
    block_m=st.integers(1, 45),
    block_n=st.integers(1, 45),
    window=st.tuples(st.integers(-1, 45), st.integers(-1, 45)),
)
def test_any_shape_block_and_window(algorithm, seqlen_q, seqlen_k, head_dim, block_m, block_n, window):
    head = random_head(seqlen_q, seqlen_k, head_dim)
    blocks = {"block_n": block_n}
    if algorithm != "unified_max, falling back":
        blocks["block_m"] = block_m
    results = ALGORITHMS[algorithm](*head[:3], Memory(1 << 20, 1), window_size=window, **blocks)
    check(head, results, {"window_size": window}, ("out", "lse"), torch.float64)


@pytest.mark.parametrize("page_size", [1, 3, 16, 100])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 37), (5, 37), (37, 37), (48, 37)])
def test_paged_attention(page_size, seqlen_q, seqlen_k):
    head = random_head(seqlen_q, seqlen_k, 8, 6)
    results = paged.forward(*head[:3], Memory(1 << 20, 1), page_size=page_size)
    check(head, results, {"causal": True}, ("out", "lse"), torch.float64)


def test_inputs_are_checked_before_anything_moves():
    q, k, v, _ = random_head(4, 4, 8)
    memory = Memory()
    with pytest.raises(ValueError, match="q must have 2 dimensions"):
        flash1.forward(q[None], k, v, memory)
    with pytest.raises(TypeError, match="k must be float32 or float64"):
        flash2.forward(q, k.half(), v, memory)
    with pytest.raises(TypeError, match=r"v must be a torch.Tensor, got list"):
        standard.forward(q, k, v.tolist(), memory)
    with pytest.raises(ValueError, match="k has head_dim 3"):
        flash3.forward(q, k[:, :3].contiguous(), v, memory)
    with pytest.raises(ValueError, match=r"window_size\[0\]"):
        flash2.forward(q, k, v, memory, window_size=(-2, 0))
    with pytest.raises(ValueError, match="num_splits must be at least 1, got 0"):
        flash_decoding.forward(q, k, v, memory, num_splits=0)
    with pytest.raises(ValueError, match="block_m must be at least 1, got 0"):
        flash2.forward(q, k, v, memory, block_m=0)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        paged.forward(q, k, v, memory, page_size=0)
    assert memory.hbm_read == memory.hbm_written == 0


@pytest.mark.parametrize("algorithm", [flash1, flash2, flash3, flash_decoding, paged])
def test_too_small_an_sram_is_refused(algorithm):
    head = random_head(4, 4, 64)
    with pytest.raises(MemoryError, match="sram_bytes"):
        algorithm.forward(*head[:3], Memory(32, element_bytes=2))


def test_standard_attention_needs_room_for_three_numbers():
    head = random_head(3, 4, 5)
    out, _ = standard.forward(*head[:3], Memory(3, element_bytes=1))
    check(head, (out,), {}, ("out",), torch.float64)
    with pytest.raises(MemoryError, match="sram_bytes must be at least 3, got 2"):
        standard.forward(*head[:3], Memory(2, element_bytes=1))
