"""Sums over GPUs of one host that reach each other's memory: one kernel, without a barrier.

Every rank writes its part into the memory of all ranks and adds the parts that arrive in its own memory.
Each 64-bit word holds 32 bits of data and the number of the call. It is written atomically, so the number
marks the data as valid. No fence and no separate flag is needed, and a call takes one trip over the link.
NCCL calls this protocol LL (low latency). It doubles the bytes, which hardly matters for small sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from flashtile.backends.common.device import capability
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import CAPABILITY, launch_dependents, wait_for_dependencies

PROGRAMS = 128
"""Programs of a launch. They wait for other ranks, so all of them must be resident at once."""
SUM, FIRST, JOIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Results of a call: the sum of the parts, a copy of the first rank's part, or all parts concatenated."""
WARPS = 4, 16
"""Fewest and most warps of a program. A block has one word per thread, so threads exchange nothing."""


@dataclass(frozen=True)
class AllReduceVariant:
    """Constants of the kernel. A rank's memory holds two slots of ``capacity`` words from each rank."""

    RANKS: int
    SOURCES: int
    """RANKS rounded up to a power of two."""
    PROGRAMS: int
    PAIRS: bool
    """Whether a 32-bit word holds two 16-bit numbers."""
    RESIDUAL: bool
    RESULT: int
    BLOCK: int
    TIMED: bool
    """Whether the kernel traps after ``timeout_ns``; False in the interpreter."""
    DEPENDENT: bool
    """Whether the kernel uses programmatic dependent launch: it may start before its predecessor ends."""


@triton.jit
def unpack_words(words, like, C: tl.constexpr):
    """Unpack each word to (first, second) in float32. The second is meaningful only with PAIRS."""
    if C.PAIRS:
        dtype: tl.constexpr = like.dtype.element_ty
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        return low, (words >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    else:
        number = words.to(tl.float32, bitcast=True)
        return number, number


@triton.jit
def pack_words(first, second, like, C: tl.constexpr):
    """Pack two float32 values into a 32-bit word, in the dtype of ``like``.

    Without PAIRS, the word holds only ``first``, in float32.
    """
    if C.PAIRS:
        dtype: tl.constexpr = like.dtype.element_ty
        low = first.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | (second.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return first.to(tl.uint32, bitcast=True)


@triton.jit
def arrived(message, inside, number, timeout_ns, C: tl.constexpr):
    """Wait until all messages [SOURCES, BLOCK] carry the call's ``number``, then return their data."""
    if C.TIMED:
        began = tl.extra.cuda.globaltimer()
    given = tl.load(message, mask=inside, other=0, volatile=True)
    while tl.max(tl.max((inside & ((given >> 32).to(tl.uint32) != number)).to(tl.int32), 0), 0) > 0:
        if C.TIMED:  # noqa: SIM102 (a constant)
            if tl.extra.cuda.globaltimer() - began > timeout_ns:
                tl.inline_asm_elementwise(
                    "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
        given = tl.load(message, mask=inside, other=0, volatile=True)
    return given.to(tl.uint32)


@kernel(do_not_specialize=("rank", "timeout_ns"))
def all_reduce_kernel(
    part, residual, out, memories, calls, rank, words, columns, capacity, timeout_ns, C: tl.constexpr
):
    """Add the parts of all ranks, in the same order on each rank, plus ``residual``. Grid: (PROGRAMS,).

    part, residual and out have ``words`` words of 32 bits. With RESULT = JOIN, part is (rows, columns) words
    and out is (rows, RANKS, columns). ``memories`` (RANKS,) int64 are the addresses of each rank's
    communication memory. ``calls`` (PROGRAMS,) int64 counts the calls with this memory, including replays of
    a graph.

    Calls alternate between two slots: call n + 2 writes to the slot of call n. A rank starts call n + 2 after
    its own call n + 1 has ended. That call has waited for the parts of all other ranks, so all of them have
    begun call n + 1 and have read what call n wrote. This holds as long as calls run one after another and
    every call sends at least one word.
    """
    pid = tl.program_id(0)
    source = tl.arange(0, C.SOURCES)[:, None]
    memory = tl.load(memories + source, mask=source < C.RANKS, other=0).to(tl.pointer_type(tl.uint64))
    own = tl.load(memories + rank).to(tl.pointer_type(tl.uint64))
    if C.DEPENDENT:
        # The next kernel may start and prefetch its weights while this one waits for other GPUs.
        launch_dependents()
        wait_for_dependencies()
    call = tl.load(calls + pid) + 1
    number = call.to(tl.uint32)
    half = call % 2 * capacity * C.RANKS
    parts = part.to(tl.pointer_type(tl.uint32), bitcast=True)
    results = out.to(tl.pointer_type(tl.uint32), bitcast=True)
    for first in range(pid * C.BLOCK, words, C.PROGRAMS * C.BLOCK):
        at = first + tl.arange(0, C.BLOCK)
        inside = (source < C.RANKS) & (at < words)[None, :]
        message = tl.load(parts + at, mask=at < words, other=0).to(tl.uint64) | (number.to(tl.uint64) << 32)
        slot = memory + half + rank * capacity
        tl.store(slot + at[None, :], message[None, :], mask=inside, cache_modifier=".wt")  # for low latency
    for first in range(pid * C.BLOCK, words, C.PROGRAMS * C.BLOCK):
        at = first + tl.arange(0, C.BLOCK)
        inside = (source < C.RANKS) & (at < words)[None, :]
        if C.RESIDUAL:
            residuals = residual.to(tl.pointer_type(tl.uint32), bitcast=True)
            added = tl.load(residuals + at, mask=at < words, other=0)
        given = arrived(own + half + source * capacity + at[None, :], inside, number, timeout_ns, C)
        if C.RESULT == JOIN:
            joined = at // columns * (C.RANKS * columns) + at % columns
            tl.store(results + joined[None, :] + source * columns, given, mask=inside)
        else:
            if C.RESULT == FIRST:
                result = tl.sum(tl.where(source == 0, given, 0), 0)
            else:
                low, high = unpack_words(given, part, C)
                low, high = tl.sum(low, 0), tl.sum(high, 0)
                if C.RESIDUAL:
                    low_added, high_added = unpack_words(added, part, C)
                    low, high = low + low_added, high + high_added
                result = pack_words(low, high, part, C)
            tl.store(results + at, result, mask=at < words)
    tl.store(calls + pid, call)


def memory_words(ranks: int, capacity: int) -> int:
    """Number of 64-bit words of a rank's communication memory, for parts of ``capacity`` 32-bit words."""
    return 2 * ranks * capacity


def all_reduce_variant(
    ranks: int, words: int, result: int, pairs: bool, residual: bool, dependent: bool
) -> tuple[AllReduceVariant, int]:
    """Return the constants of the kernel and the number of warps of a program."""
    least, most = WARPS
    num_warps = min(max(triton.next_power_of_2(triton.cdiv(words, PROGRAMS * 32)), least), most)
    variant = AllReduceVariant(
        RANKS=ranks,
        SOURCES=triton.next_power_of_2(ranks),
        PROGRAMS=PROGRAMS,
        PAIRS=pairs,
        RESIDUAL=residual,
        RESULT=result,
        BLOCK=32 * num_warps,
        TIMED=not knobs.runtime.interpret,
        DEPENDENT=dependent,
    )
    return variant, num_warps


def all_reduce(
    part: Tensor,
    residual: Tensor | None,
    memories: Tensor,
    calls: Tensor,
    rank: int,
    capacity: int,
    timeout: float,
    result: int = SUM.value,
) -> Tensor:
    """Return the sum of all ranks' parts plus ``residual``, the first rank's part, or all parts joined.

    ``result`` selects SUM, FIRST or JOIN; joined parts are (rows, ranks * columns). All tensors are
    contiguous. Elements to add have 16 or 32 bits. A part, and each row to join, is a multiple of 4 bytes.
    ``timeout`` is in seconds.
    """
    ranks, words = len(memories), part.nbytes // 4
    rows = part.shape[0] if result == JOIN.value else 1
    out = part.new_empty(rows, ranks * part.shape[1]) if result == JOIN.value else torch.empty_like(part)
    dependent = not knobs.runtime.interpret and capability(part.device) >= CAPABILITY
    variant, num_warps = all_reduce_variant(
        ranks, words, result, part.element_size() == 2, residual is not None, dependent
    )
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    scalars = (rank, words, words // rows, capacity, int(min(timeout, 1e9) * 1e9))
    launch = CachedLaunch(
        all_reduce_kernel, PROGRAMS, scalars, (variant,), None, num_warps=num_warps, **options
    )
    launch.once(part, residual, out, memories, calls)
    return out
