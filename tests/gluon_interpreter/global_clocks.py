"""Who has read and written which elements of global memory by TMA when, within a launch.

Programs tell each other by counters: an atomic addition releases what its partition knows, reading the
counter acquires it, and ``fence.proxy.async`` makes it count for what the partition then has TMA do.
Additions may meet one another in any order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from gluon_interpreter.clocks import Agents, new_clock
from gluon_interpreter.errors import KernelError
from gluon_interpreter.global_memory import Box

_Clocks = dict[int, Tensor]
"""By agent: its clock at the last access of each element."""


class GlobalClocks:
    """Of a launch. Memory that no TMA store or addition has touched yet is not looked at."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._writes: dict[tuple[int, bool], _Clocks] = {}
        """By memory, and whether they were additions."""
        self._reads: dict[int, _Clocks] = {}
        self._counters: dict[Hashable, Tensor] = {}

    def release(self, counter: Hashable, clock: Tensor) -> None:
        known = self._counters.get(counter)
        self._counters[counter] = clock.clone() if known is None else known.maximum(clock)

    def acquire(self, counter: Hashable) -> Tensor:
        known = self._counters.get(counter)
        return new_clock() if known is None else known

    def load(self, box: Box, where: list[int], clock: Tensor, agent: int, number: int) -> None:
        """A load that is over when the clock of ``agent`` is ``number``, by one who knows ``clock``."""
        reads = self._reads.get(box.buffer.address)
        if reads is not None:
            self._check(self._writes_of(box), box, where, clock, "loads", "written")
            self._note(reads, box, where, agent, number)

    def store(self, box: Box, where: list[int], clock: Tensor, agent: int, number: int, add: bool) -> None:
        """A store or an addition, likewise."""
        does = "adds to" if add else "stores to"
        reads = self._reads.setdefault(box.buffer.address, {})
        self._check([reads], box, where, clock, does, "read")
        writes = self._writes_of(box)
        self._check(writes[:1] if add else writes, box, where, clock, does, "written")
        self._note(writes[add], box, where, agent, number)

    def _writes_of(self, box: Box) -> list[_Clocks]:
        return [self._writes.setdefault((box.buffer.address, add), {}) for add in (False, True)]

    def _check(
        self, accesses: list[_Clocks], box: Box, where: list[int], clock: Tensor, does: str, access: str
    ) -> None:
        for clocks in accesses:
            for agent, last in clocks.items():
                part = box.part_of(last, where)
                if part is not None and int(part.max()) > int(clock[agent]):
                    name = self._agents.names[agent]
                    raise KernelError(
                        f"{does} global memory at {where}, {access} by {name}, and knows of no end of that"
                    )

    def _note(self, clocks: _Clocks, box: Box, where: list[int], agent: int, number: int) -> None:
        last: Any = clocks.get(agent)
        if last is None:
            last = clocks[agent] = torch.zeros(len(box.row), dtype=torch.int32)
        part = box.part_of(last, where)
        if part is not None:
            part.fill_(number)
