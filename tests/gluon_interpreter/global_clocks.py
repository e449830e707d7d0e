"""Vector clocks for TMA accesses to global memory within a launch.

Programs synchronise by counters in memory. An atomic addition releases the clock of its partition, and a read
of the counter acquires it. After ``fence.proxy.async``, the acquired clock also applies to TMA operations of
the partition. TMA additions to the same elements may run in any order, unless the launch orders them.
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
"""The agent's clock at its last access of each element, by the agent's number."""


class GlobalClocks:
    """TMA accesses of a launch. Loads are recorded only from memory that TMA has written before.

    With ``ordered_sums``, an addition must know of the end of all earlier additions to its elements.
    """

    def __init__(self, agents: Agents, ordered_sums: bool = False) -> None:
        self._agents = agents
        self._ordered_sums = ordered_sums
        self._writes: dict[tuple[int, bool], _Clocks] = {}
        """Writes by (address of the memory, whether they are additions)."""
        self._reads: dict[int, _Clocks] = {}
        self._counters: dict[Hashable, Tensor] = {}

    def release(self, counter: Hashable, clock: Tensor) -> None:
        known = self._counters.get(counter)
        self._counters[counter] = clock.clone() if known is None else known.maximum(clock)

    def acquire(self, counter: Hashable) -> Tensor:
        known = self._counters.get(counter)
        return new_clock() if known is None else known

    def load(self, box: Box, where: list[int], clock: Tensor, agent: int, number: int) -> None:
        """Check and record a load of a partition whose vector clock is ``clock``.

        The load is done when the clock of ``agent`` reaches ``number``.
        """
        reads = self._reads.get(box.buffer.address)
        if reads is not None:
            self._check(self._writes_of(box), box, where, clock, "loads", "written")
            self._note(reads, box, where, agent, number)

    def store(self, box: Box, where: list[int], clock: Tensor, agent: int, number: int, add: bool) -> None:
        """Check and record a store or, with ``add``, an addition; the arguments are those of :meth:`load`."""
        does = "adds to" if add else "stores to"
        reads = self._reads.setdefault(box.buffer.address, {})
        self._check([reads], box, where, clock, does, "read")
        writes = self._writes_of(box)
        any_order = add and not self._ordered_sums
        self._check(writes[:1] if any_order else writes, box, where, clock, does, "written")
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
