"""Memory that every rank of a group can write into, over torch's symmetric memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flashtile.parallel.ranks import Ranks

if TYPE_CHECKING:
    from flashtile.backends.portable.exchange import ExchangeVariant


class Shared(NamedTuple):
    """What ``exchange`` needs beside the rows."""

    memories: Tensor
    calls: Tensor
    rank: int
    variant: ExchangeVariant


_shared: WeakKeyDictionary[Ranks, dict[tuple[int, int, int | None], tuple[Shared, Any]]] = WeakKeyDictionary()
"""With the memory itself. A captured graph holds its address, so it stays as long as the group."""


def check_symmetric(q: Tensor) -> None:
    """NotImplementedError where there is no symmetric memory at all."""
    if not q.is_cuda or torch.version.hip is not None:
        where = "an AMD GPU" if q.is_cuda else q.device
        raise NotImplementedError(
            f"merge='symmetric' needs NVIDIA GPUs, got q on {where}: take merge='allgather'"
        )
    if q.dtype == torch.float64:
        raise NotImplementedError("merge='symmetric' takes no float64: take merge='allgather'")


def shared_memory(ranks: Ranks, rows: int, head_dim: int, device: torch.device) -> Shared:
    """For so many rows of float32. All ranks ask for the same; the first time they meet on the host.

    Sizes are powers of two, so that there are few of them.

    Raises:
        NotImplementedError: torch has no symmetric memory, or these GPUs cannot reach each other's.
        RuntimeError: the first time is within the capture of a graph.
    """
    capacity = 1 << max(rows - 1, 0).bit_length()
    known, key = _shared.setdefault(ranks, {}), (capacity, head_dim, device.index)
    if key not in known:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "merge='symmetric' must be called once before a CUDA graph is captured: ranks meet then, on "
                "the host"
            )
        known[key] = _met(ranks, capacity, head_dim, device)
    return known[key][0]


def mapped_memory(words: int, group: Any, device: torch.device) -> tuple[Tensor, Any]:
    """(addresses (ranks,) int64, on the device, of so many words of 64 bits of each rank, which are 0; what
    must live as long). All ranks ask for the same, and meet on the host.

    Raises:
        ImportError, RuntimeError: torch has no symmetric memory, or these GPUs cannot reach each other's.
    """
    # A program that fails while it uses multicast can leave the host's GPUs unusable.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(words, dtype=torch.int64, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)  # a rank may write as soon as all have met
    handle = symmetric.rendezvous(memory, group)
    buffers = [handle.get_buffer(rank, memory.shape, memory.dtype) for rank in range(handle.world_size)]
    addresses = torch.tensor([t.data_ptr() for t in buffers], dtype=torch.int64, device=device)
    return addresses, (memory, handle, buffers)


def _met(ranks: Ranks, capacity: int, head_dim: int, device: torch.device) -> tuple[Shared, Any]:
    from flashtile.backends.portable.exchange import variant_of, words_of

    variant = variant_of(ranks.size, capacity, head_dim)
    try:
        memories, kept = mapped_memory(-(-words_of(variant) // 2), ranks.group, device)
    except (ImportError, RuntimeError) as error:
        raise NotImplementedError(
            "merge='symmetric' needs GPUs that reach each other's memory, and a torch that maps it "
            f"({str(error).splitlines()[0]}): take merge='allgather'"
        ) from error
    calls = torch.zeros(variant.PROGRAMS, dtype=torch.int64, device=device)
    return Shared(memories, calls, ranks.rank, variant), kept
