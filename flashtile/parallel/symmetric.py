"""Memory that all ranks of a group can write to, allocated with torch's symmetric memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flashtile.backends.common.device import is_capturing
from flashtile.parallel.ranks import Ranks
from flashtile.torch_private import symmetric_memory

if TYPE_CHECKING:
    from flashtile.parallel.exchange import ExchangeVariant


class Shared(NamedTuple):
    """Arguments of :func:`flashtile.parallel.exchange.exchange` other than rows, dtype and timeout.

    Attributes:
        memories: (ranks,) int64, the address of each rank's memory.
        calls: counters of calls, int64, one for each program of the kernel.
        rank: this rank's number.
        variant: constants of the kernel.
    """

    memories: Tensor
    calls: Tensor
    rank: int
    variant: ExchangeVariant


_shared: WeakKeyDictionary[Ranks, dict[tuple[int, int, int | None], tuple[Shared, Any]]] = WeakKeyDictionary()
"""Shared memory by group. Captured graphs contain its addresses, so it lives as long as the group."""


def check_symmetric(q: Tensor) -> None:
    """Raise NotImplementedError if q's device or dtype does not support symmetric memory."""
    if not q.is_cuda or torch.version.hip is not None:
        where = "an AMD GPU" if q.is_cuda else q.device
        raise NotImplementedError(
            f"q must be on an NVIDIA GPU with merge='symmetric', got q on {where}: use merge='allgather'"
        )
    if q.dtype == torch.float64:
        raise NotImplementedError(
            "q must not be float64 with merge='symmetric', got torch.float64: use merge='allgather'"
        )


def shared_memory(ranks: Ranks, rows: int, head_dim: int, device: torch.device) -> Shared:
    """Return shared memory for ``rows`` rows of ``head_dim`` float32 numbers and one lse per row.

    All ranks must call this with equal arguments.

    The capacity is ``rows`` rounded up to a power of two. The first call with a new capacity synchronises the
    ranks on the host.

    Raises:
        NotImplementedError: torch has no symmetric memory, or these GPUs cannot map each other's memory.
        RuntimeError: the first call with a new capacity is within the capture of a CUDA graph.
    """
    capacity = 1 << max(rows - 1, 0).bit_length()
    known, key = _shared.setdefault(ranks, {}), (capacity, head_dim, device.index)
    if key not in known:
        if is_capturing(device):
            raise RuntimeError(
                "merge='symmetric' must be called once before a CUDA graph is captured: the first call "
                "synchronises the ranks on the host"
            )
        known[key] = _met(ranks, capacity, head_dim, device)
    return known[key][0]


def mapped_memory(words: int, group: Any, device: torch.device) -> tuple[Tensor, Any]:
    """Allocate ``words`` 64-bit words of zeros on each rank, and map the memory of all ranks.

    All ranks must call this with equal arguments.

    Returns:
        (addresses (ranks,) int64 on the device, an object that keeps the memory alive).

    Raises:
        ImportError, RuntimeError: torch has no symmetric memory, or these GPUs cannot map each other's
            memory.
    """
    # A program that fails while it uses multicast can leave the host's GPUs unusable.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    symmetric = symmetric_memory()
    memory = symmetric.empty(words, dtype=torch.int64, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)  # other ranks may write right after the rendezvous
    handle = symmetric.rendezvous(memory, group)
    buffers = [handle.get_buffer(rank, memory.shape, memory.dtype) for rank in range(handle.world_size)]
    addresses = torch.tensor([t.data_ptr() for t in buffers], dtype=torch.int64, device=device)
    return addresses, (memory, handle, buffers)


def _met(ranks: Ranks, capacity: int, head_dim: int, device: torch.device) -> tuple[Shared, Any]:
    from flashtile.parallel.exchange import exchange_variant, memory_words

    variant = exchange_variant(ranks.size, capacity, head_dim)
    try:
        memories, kept = mapped_memory(-(-memory_words(variant) // 2), ranks.group, device)
    except (ImportError, RuntimeError) as error:
        raise NotImplementedError(
            "merge='symmetric' needs GPUs that reach each other's memory, and a torch that maps it "
            f"({str(error).splitlines()[0]}): use merge='allgather'"
        ) from error
    calls = torch.zeros(variant.PROGRAMS, dtype=torch.int64, device=device)
    return Shared(memories, calls, ranks.rank, variant), kept
