"""Counters in GPU memory that are 0 before and after every kernel that uses them.

Kernels of one stream run one after another, so they share a buffer per stream, which is known by its address.
Several threads may launch on it, and a kernel that starts early first waits for the one before it. This is
as safe as torch's allocator: it also knows a stream by its address, and gives the memory of a freed tensor
to the next tensor of the same address without waiting. So kernels that could meet in these counters could
meet in any temporary tensor as well, for example those of a stream that another library destroyed with
unfinished work, before CUDA gave its address to a new one.

A captured graph may be replayed on any stream, concurrently with other work, so each captured call gets
counters of its own. CUDA runs two replays of one graph in turn, and two copies of it would also share the
memory of its results. The counters come from a reserve that is zeroed beforehand. Zeroing them in the graph
would take one more kernel, and the kernel after it could not start early (programmatic dependent launch). The
graph zeroes its own counters only after the reserve is used up.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from flashtile import torch_private
from flashtile.backends.common.device import is_capturing
from flashtile.caches import BoundedCache

RESERVED = 2**18
"""Counters for captured calls, per device."""
CACHE_BYTES = 2**20
"""Host memory for handles of the buffers."""
ENTRY_BYTES = 1024
"""Host memory that one entry of the cache counts as."""
LEAST = 4096
"""Minimum number of counters in a stream's buffer."""


class _Reserve:
    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(RESERVED, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # captured graphs do not wait for the zeroing
        self._taken = 0
        self._lock = Lock()

    def take(self, count: int) -> Tensor | None:
        """Return ``count`` counters that no other call gets, or None if too few are left."""
        with self._lock:
            first, self._taken = self._taken, self._taken + count
        if first + count > RESERVED:
            return None
        return self._counters[first : first + count]


_of_stream: BoundedCache = BoundedCache(CACHE_BYTES)
_reserves: dict[int, _Reserve] = {}


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """Return at least ``count`` int32 counters, all 0, for one launch on the current stream.

    The launched kernel must reset them to 0.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if is_capturing(device):
        reserve = _reserves.get(device.index)
        taken = None if reserve is None else reserve.take(count)
        return torch.zeros(count, dtype=torch.int32, device=device) if taken is None else taken
    if device.index not in _reserves:
        # If two threads come here, the first reserve stays: a graph may have taken counters from it.
        _reserves.setdefault(device.index, _Reserve(device))
    key = (device.index, torch_private.cuda_stream(device.index))
    counters = _of_stream.get(key)
    if counters is None or counters.shape[0] < count:
        fresh = torch.zeros(max(count, LEAST), dtype=torch.int32, device=device)
        counters = _of_stream.store(key, fresh, ENTRY_BYTES)
    return counters
