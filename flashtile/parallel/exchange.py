"""Exchanges and merges the ranks' float32 results over different keys, in one kernel on peer memory.

This is a one-shot exchange of small tensors between GPUs of one host. Each rank writes its results into the
memory of all ranks, and reads the results of all ranks from its own memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from flashtile.backends.common.config import padded
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import LN_2
from flashtile.backends.portable.decode.combine import Slots, sum_splits
from flashtile.backends.portable.decode.schedule import normalised, store_rows

MAX_PROGRAMS = 128
"""Maximum programs of a launch. They wait for other ranks, so all of them must be resident at once."""
MAX_ROWS = 8


@dataclass(frozen=True)
class ExchangeVariant:
    """Constants of the kernel. A rank's memory holds RANKS * PROGRAMS flags of 64 bits, then 2 * RANKS slots
    for ``capacity`` rows of out (HEAD_DIM_V words each) and their lse."""

    RANKS: int
    PROGRAMS: int
    SLOT: int
    """Words of a slot."""
    HEAD_DIM_V: int
    BLOCK_DV: int
    ROWS: int
    """Rows that a program sends or merges at a time."""
    SPLITS: int
    TIMED: bool
    """Whether the kernel traps after ``timeout_ns``; False in the interpreter."""


@kernel(do_not_specialize=("rank", "rows", "heads", "seqlen", "timeout_ns"))
def exchange_kernel(
    out, lse, result, result_lse, memories, calls, rank, rows, heads, seqlen, timeout_ns, C: tl.constexpr
):
    """Merge each row over the keys of all ranks, on every rank. Grid: (PROGRAMS,).

    out (batch, seqlen, heads, HEAD_DIM_V), float32, and lse (batch, seqlen, heads), natural log, are the
    results over the keys of this rank. result has the shape of out; result_lse is (batch, heads, seqlen).
    ``memories`` (RANKS,) int64 are the addresses of each rank's communication memory. ``calls`` (PROGRAMS,)
    int64 counts the calls with this memory.

    The number of the call selects one of two slots. A program sets its flag on each rank to this number when
    its results are complete. The count is in device memory, so it also advances in replays of a CUDA graph.
    With two slots, one wait per call is enough. A rank reuses a slot only after all ranks have flagged the
    call in between, and they flag it only after they have read the slot. Program i has the same rows on all
    ranks and in all calls, so it waits only for the programs i of the other ranks.
    """
    pid = tl.program_id(0)
    call = tl.load(calls + pid) + 1
    half = C.RANKS * C.PROGRAMS * 2 + call % 2 * (C.RANKS * C.SLOT)
    capacity_words: tl.constexpr = C.SLOT // (C.HEAD_DIM_V + 1) * C.HEAD_DIM_V
    columns = tl.arange(0, C.BLOCK_DV)
    for first in range(pid * C.ROWS, rows, C.PROGRAMS * C.ROWS):
        row = first + tl.arange(0, C.ROWS)
        exists = row < rows
        inside = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
        elements = row.to(tl.int64) * C.HEAD_DIM_V
        own = tl.load(out + elements[:, None] + columns[None, :], mask=inside)
        own_lse = tl.load(lse + row, mask=exists)
        for peer in range(C.RANKS):
            slot = tl.load(memories + peer).to(tl.pointer_type(tl.float32)) + half + rank * C.SLOT
            store_rows(slot, elements, exists, own, C.HEAD_DIM_V, C.BLOCK_DV)
            tl.store(slot + capacity_words + row, own_lse, mask=exists)
    # All threads must have written before one of them sets the flags.
    tl.debug_barrier()
    for peer in range(C.RANKS):
        flags = tl.load(memories + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags + rank * C.PROGRAMS + pid, call, sem="release", scope="sys")
    flags = tl.load(memories + rank).to(tl.pointer_type(tl.int64))
    if C.TIMED:
        began = tl.extra.cuda.globaltimer()
    for peer in range(C.RANKS):
        # A peer may have flagged the next call already.
        while tl.atomic_add(flags + peer * C.PROGRAMS + pid, 0, sem="acquire", scope="sys") < call:
            if C.TIMED:  # noqa: SIM102 (a constant)
                if tl.extra.cuda.globaltimer() - began > timeout_ns:
                    tl.inline_asm_elementwise(
                        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                    )
    tl.debug_barrier()  # no thread may read before all flags are seen
    given = flags.to(tl.pointer_type(tl.float32)) + half
    for first in range(pid * C.ROWS, rows, C.PROGRAMS * C.ROWS):
        row = first + tl.arange(0, C.ROWS)
        exists = row < rows
        elements = row.to(tl.int64) * C.HEAD_DIM_V
        acc, row_max, row_sum = sum_splits(
            given + elements, given + capacity_words + row, exists, C.RANKS,
            Slots(0, 1, 0, C.SLOT, C.SLOT), True, C,
        )  # fmt: skip
        merged, merged_lse = normalised(acc, row_max, row_sum)
        store_rows(result, elements, exists, merged, C.HEAD_DIM_V, C.BLOCK_DV)
        token = row // heads
        by_head = (token // seqlen * heads + row % heads) * seqlen + token % seqlen
        tl.store(result_lse + by_head, merged_lse * LN_2, mask=exists)
    tl.store(calls + pid, call)


def exchange_variant(ranks: int, capacity: int, head_dim: int) -> ExchangeVariant:
    """Return the constants of a kernel for up to ``capacity`` rows. ``capacity`` is a power of two."""
    ROWS = min(max(capacity // MAX_PROGRAMS, 1), MAX_ROWS)
    return ExchangeVariant(
        RANKS=ranks,
        PROGRAMS=min(capacity // ROWS, MAX_PROGRAMS),
        SLOT=capacity * (head_dim + 1),
        HEAD_DIM_V=head_dim,
        BLOCK_DV=padded(head_dim),
        ROWS=ROWS,
        SPLITS=min(triton.next_power_of_2(ranks), 8),
        TIMED=not knobs.runtime.interpret,
    )


def memory_words(variant: ExchangeVariant) -> int:
    """Number of 32-bit words of a rank's communication memory."""
    return 2 * variant.RANKS * (variant.PROGRAMS + variant.SLOT)


def exchange(
    out: Tensor,
    lse: Tensor,
    memories: Tensor,
    calls: Tensor,
    rank: int,
    variant: ExchangeVariant,
    dtype: torch.dtype,
    timeout: float,
) -> tuple[Tensor, Tensor]:
    """Return (out in ``dtype``, lse (batch, heads, seqlen)) over the keys of all ranks.

    out (batch, seqlen, heads, head_dim) and lse (batch, seqlen, heads) are contiguous and float32.
    ``timeout`` is in seconds.
    """
    batch, seqlen, heads, _ = out.shape
    result = torch.empty_like(out, dtype=dtype)
    result_lse = lse.new_empty(batch, heads, seqlen)
    scalars = (rank, batch * seqlen * heads, heads, seqlen, int(min(timeout, 1e9) * 1e9))
    launch = CachedLaunch(exchange_kernel, variant.PROGRAMS, scalars, (variant,), None)
    launch.once(out, lse, result, result_lse, memories, calls)
    return result, result_lse
