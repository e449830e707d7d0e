"""Who knows of whose accesses to memory: vector clocks (Mattern 1989; FastTrack, Flanagan and Freund 2009).

An *agent* accesses memory in an order of its own, which its clock counts: a partition, its products in
flight, its TMA stores in flight, its asynchronous copies, or a barrier, on which loads complete phase by
phase. A partition's clock of an agent is how far it knows the agent to have come: by its own waits, and by
barriers, where it learns what those who arrived there knew. An access that conflicts with one that the
partition does not know to be over is a fault, in whatever order the two happened to run.

Ordinary accesses of threads (*generic proxy*) and those of TMA and wgmma (*async proxy*) are told apart: what
was written by the former is there for the latter only from a ``fence_async_shared`` of the writer on. Each
agent of ordinary writes has a second clock for that, its *fenced* one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_AGENTS = 320
NOBODY = 0
"""The agent that has written what nobody has: its clock is never known."""


class Agent(NamedTuple):
    number: int
    fenced: int
    """The number of its fenced clock; ``number`` if it needs none."""
    name: str


class Agents:
    """Of a launch."""

    def __init__(self) -> None:
        self.names = ["nobody"]
        self.for_async = torch.arange(MAX_AGENTS)
        """By which clock the async proxy knows an agent's writes."""

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
    """Of one who knows nothing."""
    return torch.zeros(MAX_AGENTS, dtype=torch.int32)
