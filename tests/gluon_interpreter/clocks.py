"""Vector clocks (Mattern 1989; Flanagan and Freund 2009), which find unsynchronised accesses to memory.

An *agent* makes accesses in a fixed order, which its clock counts. Agents are a partition, its products in
flight, its TMA stores in flight, its asynchronous copies, and a barrier, on which loads complete phase by
phase. A partition has a vector clock, whose entry for an agent says up to which access the agent is known to
be done. A partition learns this by its own waits, and at a barrier from the partitions that arrived there. An
access is a fault if it conflicts with another access that the partition does not know to be done. The fault
is found in any order in which the two run.

Ordinary accesses of threads (*generic proxy*) are distinguished from those of TMA and wgmma (*async proxy*).
Generic writes become visible to the async proxy only by a ``fence_async_shared`` of the writer. Agents with
generic writes have a second clock for this, the *fenced* clock.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_AGENTS = 320
NOBODY = 0
"""Agent that stands as the writer of memory that was never written; no partition knows its clock."""


class Agent(NamedTuple):
    number: int
    fenced: int
    """Number of the agent's fenced clock; equal to ``number`` if it has none."""
    name: str


class Agents:
    """All agents of a launch."""

    def __init__(self) -> None:
        self.names = ["nobody"]
        self.for_async = torch.arange(MAX_AGENTS)
        """Number of the clock that tells the async proxy about an agent's writes, by the agent's number."""

    def new(self, name: str, generic: bool = False) -> Agent:
        number = fenced = len(self.names)
        self.names.append(name)
        if generic:
            fenced = len(self.names)
            self.names.append(name)
            self.for_async[number] = fenced
        if len(self.names) > MAX_AGENTS:
            raise ValueError(f"more than {MAX_AGENTS} agents")
        return Agent(number, fenced, name)


def new_clock() -> Tensor:
    """Return a vector clock without any knowledge, (MAX_AGENTS,) int32 zeros."""
    return torch.zeros(MAX_AGENTS, dtype=torch.int32)
