"""Numbers on their way to the device, without a wait of the host: from pinned memory, in one copy a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RING = 3
"""Steps of which the host's numbers are kept: one runs, one waits, one is written."""


class Transfer:
    """A place on the device that each step's int32 numbers are copied to, always from its start on.

    Args:
        count: numbers of a step, at most.
    """

    def __init__(self, count: int, device: torch.device):
        self.numbers = torch.zeros(count, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._pinned = [torch.empty(count, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._turn = 0

    def __call__(self, parts: Sequence[Sequence[int]], tensors: Sequence[Tensor] = ()) -> list[Tensor]:
        """Views of all of them on the device, one after another."""
        self._turn = (self._turn + 1) % RING
        flat = array("i", [number for part in parts for number in part])
        written: list[Tensor] = [torch.frombuffer(flat, dtype=torch.int32)] if flat else []
        pinned, at = self._pinned[self._turn], 0
        for tensor in (*written, *tensors):
            pinned[at : at + len(tensor)] = tensor
            at += len(tensor)
        sizes = [*map(len, parts), *map(len, tensors)]
        self.numbers[:at].copy_(pinned[:at], non_blocking=True)
        return list(self.numbers[:at].split(sizes))


def on_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.tensor(numbers)`` there. A copy from memory that is not pinned would wait for all that the
    device has been given."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
