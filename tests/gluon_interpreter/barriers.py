"""mbarriers: phases, with their arrivals and transaction bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gluon_interpreter.clocks import new_clock
from gluon_interpreter.errors import KernelError
from gluon_interpreter.program import Partition, Program, current_partition
from gluon_interpreter.shared_memory import Tile


class Barrier:
    """An mbarrier. A phase completes after ``count`` arrivals and all bytes that they expect."""

    def __init__(self, name: str, count: int, program: Program) -> None:
        self.name, self.count = name, count
        self.agent = program.launch.agents.new(f"a load that completes on {name}")
        self.phase = 0
        self.pending = count
        self.bytes = 0
        self._met = new_clock()
        self._known: Tensor = new_clock()
        """Clock that partitions merge into their own when they wait for the last completed phase."""

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes missing"
        return f"{self.name}, which is in phase {self.phase} with {missing}"

    def arrive(self, partition: Partition, count: int, num_bytes: int = 0) -> None:
        if count > self.pending:
            raise KernelError(f"{count} more arrive at {self}")
        self._met = self._met.maximum(partition.clock)
        partition.tick()
        self.bytes += num_bytes
        self.pending -= count
        self._complete()

    def land(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        if self.bytes < 0 and self.pending == 0:
            raise KernelError(f"more bytes have landed than were expected at {self}")
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self._met[self.agent.number] = self.phase
            self._known = self._met.clone()

    def is_over(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def wait(self, partition: Partition, parity: int) -> None:
        partition.schedule.wait(lambda: self.is_over(parity), lambda: f"waits for parity {parity} of {self}")
        partition.meet(self._known)


def _place(tile: Tile) -> int:
    if tile.data.numel() != 1:
        raise KernelError(f"{tile.name} of {tile.shape} is taken for one barrier")
    return tile.data.storage_offset()


def barrier_of(tile: Tile) -> Barrier:
    """Return the barrier that was initialised in ``tile``.

    Raises:
        KernelError: there is none.
    """
    found = tile.allocation.barriers.get(_place(tile))
    if found is None:
        raise KernelError(f"{tile.name} is no barrier that was initialised")
    return found


def init(tile: Tile, count: int = 1) -> None:
    barriers, place = tile.allocation.barriers, _place(tile)
    if place in barriers:
        raise KernelError(f"{tile.name} is initialised twice")
    barriers[place] = Barrier(tile.name, int(count), current_partition().program)


def expect(tile: Tile, bytes_per_cta: Any, pred: Any = True) -> None:
    partition = current_partition()
    if pred:
        barrier_of(tile).arrive(partition, 1, int(bytes_per_cta))
    partition.schedule.pause()


def arrive(tile: Tile, *, count: Any = 1, pred: Any = True) -> None:
    partition = current_partition()
    if pred:
        barrier_of(tile).arrive(partition, int(count))
    partition.schedule.pause()


def wait(tile: Tile, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        barrier_of(tile).wait(current_partition(), int(phase))
