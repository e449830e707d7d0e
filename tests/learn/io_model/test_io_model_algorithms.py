"""The closed forms of flashtile.io_model equal what flashtile.algorithms count as they run, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from flashtile.algorithms import flash1, flash2, flash_decoding, paged, standard
from flashtile.io_model import Call, closed_forms
from flashtile.learn.algorithms.memory import Memory
from walk import walk


@dataclass(frozen=True)
class Case:
    """One head; numbers of 4 bytes, as the statistics are."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    kib: int
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)

    @property
    def call(self) -> Call:
        left, right = self.window_size
        right = 0 if self.causal else right
        sizes = self.seqlen_q, self.seqlen_k, 1, 1, self.head_dim, self.head_dim_v
        return Call(1, *sizes, "float32", window_left=left, window_right=right)

    @property
    def mask(self) -> dict:
        return {"causal": self.causal, "window_size": self.window_size}

    def memory(self) -> Memory:
        return Memory(self.kib * 1024, element_bytes=4)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        shapes = (
            (self.seqlen_q, self.head_dim),
            (self.seqlen_k, self.head_dim),
            (self.seqlen_k, self.head_dim_v),
        )
        return tuple(torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes)


CASES = (
    Case(64, 64, 16, 16, 8),
    Case(100, 70, 16, 16, 4),
    Case(130, 257, 32, 32, 16, causal=True),
    Case(257, 130, 16, 32, 8, causal=True),
    Case(200, 200, 16, 16, 8, window_size=(20, 5)),
    Case(150, 90, 24, 8, 6, window_size=(-1, 13)),
    Case(90, 150, 16, 16, 8, window_size=(0, 0)),
    Case(1, 300, 32, 32, 16),
    Case(33, 1, 16, 16, 8, causal=True),
    Case(300, 300, 64, 64, 100),
    Case(8, 1022, 16, 16, 4),  # a row of scores and its two statistics just fit
)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def assert_counted(memory: Memory, cost: closed_forms.Cost) -> None:
    counted = (memory.hbm_read, memory.hbm_written, memory.matmul_flops)
    assert (cost.hbm_read, cost.hbm_written, cost.matmul_flops) == counted


@each_case
def test_standard(case):
    memory = case.memory()
    tensors = case.tensors()
    out, p = standard.forward(*tensors, memory, **case.mask)
    assert_counted(memory, closed_forms.standard_forward(case.call, case.kib * 1024))
    memory = case.memory()
    standard.backward(*tensors, p, torch.ones_like(out), memory)
    assert_counted(memory, closed_forms.standard_backward(case.call, case.kib * 1024))


@each_case
def test_flash1(case):
    memory, call = case.memory(), case.call
    tensors = case.tensors()
    out, m, row_sum = flash1.forward(*tensors, memory, **case.mask)
    blocks = flash1.block_sizes(memory, case.head_dim, case.head_dim_v)
    cost = closed_forms.flash1_forward(call, blocks)
    assert_counted(memory, cost)
    assert memory.hbm_peak == call.q_bytes + call.k_bytes + call.v_bytes + call.out_bytes + cost.extra_bytes
    memory = case.memory()
    flash1.backward(*tensors, out, m, row_sum, torch.ones_like(out), memory, **case.mask)
    blocks = flash1.backward_block_sizes(memory, case.head_dim, case.head_dim_v)
    assert_counted(memory, closed_forms.flash1_backward(call, blocks))


@each_case
def test_flash2(case):
    memory, call = case.memory(), case.call
    tensors = case.tensors()
    out, lse = flash2.forward(*tensors, memory, **case.mask)
    blocks = flash2.block_sizes(memory, case.head_dim, case.head_dim_v)
    cost = closed_forms.flash2_forward(call, blocks)
    assert_counted(memory, cost)
    assert memory.hbm_peak == call.q_bytes + call.k_bytes + call.v_bytes + call.out_bytes + cost.extra_bytes
    memory = case.memory()
    flash2.backward(*tensors, out, lse, torch.ones_like(out), memory, **case.mask)
    blocks = flash2.backward_block_sizes(memory, case.head_dim, case.head_dim_v)
    assert_counted(memory, closed_forms.flash2_backward(call, blocks))


@walk("blocks", [(32, 16), (16, 48), (7, 30), (64, 64)])
@walk("window", [(-1, -1), (-1, 0), (30, -1), (9, 4)])
def test_flash2_with_any_blocks(blocks, window):
    case = Case(70, 90, 16, 16, 100, window_size=window)
    tensors = case.tensors()
    named = dict(zip(("block_m", "block_n"), blocks, strict=True))
    memory = case.memory()
    out, lse = flash2.forward(*tensors, memory, **case.mask, **named)
    assert_counted(memory, closed_forms.flash2_forward(case.call, blocks))
    memory = case.memory()
    flash2.backward(*tensors, out, lse, torch.ones_like(out), memory, **case.mask, **named)
    assert_counted(memory, closed_forms.flash2_backward(case.call, blocks))


@walk("splits", [1, 2, 5])
@walk("seqlen_q", [1, 3])
def test_flash_decoding(splits, seqlen_q):
    case = Case(seqlen_q, 320, 32, 16, 16)
    memory = case.memory()
    flash_decoding.forward(*case.tensors(), memory, num_splits=splits, block_n=32)
    assert_counted(memory, closed_forms.flash_decoding(case.call, splits))


@walk("page_size", [1, 16, 100])
@walk("seqlen_q", [1, 4])
def test_paged(page_size, seqlen_q):
    case = Case(seqlen_q, 130, 16, 16, 100, causal=True)
    q, k, v = case.tensors()
    memory = case.memory()
    cache = paged.PagedCache(memory, -(-130 // page_size), page_size, 16, 16, like=k)
    for token in range(130):
        cache.append("A", k[token : token + 1], v[token : token + 1])
    before = memory.totals()
    cache.attend("A", q)
    cost = closed_forms.paged(case.call, page_size)
    after = memory.totals()
    counted = tuple(after[name] - before[name] for name in ("hbm_read", "hbm_written", "matmul_flops"))
    assert (cost.hbm_read, cost.hbm_written, cost.matmul_flops) == counted
    held = cache.K.bytes + cache.V.bytes + case.call.q_bytes + case.call.out_bytes
    assert memory.hbm_peak == held + cost.extra_bytes
