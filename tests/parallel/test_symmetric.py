"""Decoding's results exchanged over symmetric memory: the kernel in an interpreter, and what is refused. Two
GPUs run it in ``tests/gpu``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

import flashtile
from flashtile.parallel import context_parallel_decode, symmetric

pytestmark = pytest.mark.numerical


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", [16, 24])
def test_ranks_merge_what_all_have_written(head_dim):
    """Three ranks take turns here. So that none waits for one that comes later, each call is made twice: at
    first all flags are up and results are of no use, and then all is there. What the call before was given
    must stay."""
    from flashtile.parallel.exchange import exchange, exchange_variant, memory_words

    torch.manual_seed(0)
    ranks, batch, seqlen, heads = 3, 2, 3, 4
    rows = batch * seqlen * heads
    # Each program has two blocks of rows.
    variant = replace(exchange_variant(ranks, 32, head_dim), PROGRAMS=3, ROWS=4)
    memory = torch.full((ranks, memory_words(variant)), torch.nan)
    flags = memory[:, : 2 * ranks * variant.PROGRAMS].view(torch.int64)
    slots = memory[:, 2 * ranks * variant.PROGRAMS :].view(ranks, 2, ranks, variant.SLOT)
    memories = torch.tensor([part.data_ptr() for part in memory])
    calls = torch.zeros(ranks, variant.PROGRAMS, dtype=torch.int64)
    for call in (1, 2, 3):
        outs = torch.randn(ranks, batch, seqlen, heads, head_dim)
        lses = 4 * torch.randn(ranks, batch, seqlen, heads)
        lses[:2, 0, 0], lses[:, 1, 1] = -torch.inf, -torch.inf
        outs[:2, 0, 0] = torch.nan
        right, right_lse = flashtile.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
        before = slots[:, (call + 1) % 2].clone()
        flags.fill_(call + 1)
        for attempt in range(2):
            for rank in range(ranks):
                out, lse = exchange(
                    outs[rank], lses[rank], memories, calls[rank], rank, variant, torch.bfloat16, 1.0
                )
                if attempt == 1:
                    torch.testing.assert_close(out, right)
                    torch.testing.assert_close(lse, right_lse.transpose(1, 2))
            assert bool((calls == call).all())
            assert bool((flags == call).all())
            calls -= 1 - attempt
        torch.testing.assert_close(slots[:, (call + 1) % 2], before, rtol=0, atol=0, equal_nan=True)
        # Rows beyond the last are not written.
        assert bool(slots[:, call % 2, :, rows * head_dim : 32 * head_dim].isnan().all())


@pytest.mark.parametrize(
    ("ranks", "capacity", "programs", "rows", "splits"),
    [(2, 1, 1, 1, 2), (3, 128, 128, 1, 4), (8, 256, 128, 2, 8), (9, 1024, 128, 8, 8), (64, 4096, 128, 8, 8)],
)
def test_sizes_of_an_exchange(ranks, capacity, programs, rows, splits):
    """At most 128 programs wait for each other, and results of at most 8 ranks are loaded at a time."""
    pytest.importorskip("triton")
    from flashtile.parallel.exchange import exchange_variant, memory_words

    variant = exchange_variant(ranks, capacity, 24)
    expected = {"RANKS": ranks, "PROGRAMS": programs, "SLOT": capacity * 25, "HEAD_DIM_V": 24, "BLOCK_DV": 32}
    assert asdict(variant).items() >= (expected | {"ROWS": rows, "SPLITS": splits}).items()
    # Two slots for the results of each rank, and a flag of two words for each program of each rank.
    assert memory_words(variant) == ranks * 2 * capacity * 25 + ranks * programs * 2


def test_tensors_on_a_cpu_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        q, cache = torch.randn(1, 1, 2, 16), torch.zeros(1, 8, 2, 16)
        lengths = torch.tensor([3], dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="must be on an NVIDIA GPU with merge='symmetric', got"):
            context_parallel_decode(q, cache, cache, cache_seqlens=lengths, merge="symmetric")
    finally:
        dist.destroy_process_group()


class TwoRanks:
    """As ``Ranks``, which needs a process group."""

    group, rank, size = None, 0, 2


def test_the_first_call_is_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must be called once before a CUDA graph is captured"):
        symmetric.shared_memory(TwoRanks(), 5, 16, torch.device("cuda", 0))


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch):
    """Here because there is no GPU, or no such memory."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    with pytest.raises(NotImplementedError, match="needs GPUs that reach each other's memory"):
        symmetric.shared_memory(TwoRanks(), 5, 16, torch.device("cuda", 0))
