"""Programs and their partitions, with their vector clocks and their operations in flight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gluon_interpreter.clocks import NOBODY, Agents, new_clock
from gluon_interpreter.errors import KernelError
from gluon_interpreter.global_clocks import GlobalClocks
from gluon_interpreter.schedule import Copy, Schedule, current_task

if TYPE_CHECKING:
    from gluon_interpreter.shared_memory import Tile


class Launch:
    """State that the programs of a launch share."""

    def __init__(self, schedule: Schedule, programs: int, ordered_sums: bool = False) -> None:
        self.schedule, self.programs = schedule, programs
        self.agents = Agents()
        self.memory = GlobalClocks(self.agents, ordered_sums)


class Program:
    """One program of a launch."""

    def __init__(self, launch: Launch, index: int) -> None:
        self.launch, self.index = launch, index


class Partition:
    """State of a thread of the interpreter: a warp-specialised partition, or a whole program.

    The partition's products, TMA stores and groups of asynchronous copies are numbered from 1. They complete
    in this order.
    """

    def __init__(self, program: Program, name: str, num_warps: int, clock: Tensor | None = None) -> None:
        self.program, self.name, self.num_warps = program, name, num_warps
        new = program.launch.agents.new
        self.agent = new(name, generic=True)
        self.products = new(f"a product of {name}")
        self.stores = new(f"a TMA store of {name}")
        self.writes = new(f"a TMA store of {name}")
        """Agent that counts the TMA stores that have written global memory."""
        self.copies = new(f"an asynchronous copy of {name}", generic=True)
        self.clock = new_clock() if clock is None else clock
        self.clock[self.agent.number] = 1
        self.num_products = 0
        self.num_groups = 0
        self.stores_in_flight: list[Copy] = []
        self.num_stores = 0
        self.loads_in_flight: list[Any] = []
        """Loads from shared memory to registers since the last fence; some may be done."""
        self._acquired = new_clock()
        """Clock acquired from other programs by counters; a proxy fence merges it into ``clock``."""

    @property
    def schedule(self) -> Schedule:
        return self.program.launch.schedule

    @property
    def now(self) -> int:
        return int(self.clock[self.agent.number])

    def tick(self) -> None:
        """Advance the partition's own clock: other partitions do not know accesses from here on."""
        self.clock[self.agent.number] += 1

    def meet(self, clock: Tensor) -> None:
        torch.maximum(self.clock, clock, out=self.clock)

    def fence(self) -> None:
        """Make earlier generic writes visible to the async proxy, and complete earlier loads to registers."""
        for loaded in self.loads_in_flight:
            loaded.arrived()
        self.loads_in_flight.clear()
        for agent in (self.agent, self.copies):
            self.clock[agent.fenced] = self.clock[agent.number]
        self.tick()

    def release(self, counter: Hashable) -> None:
        """Publish the partition's clock with a counter; programs that read the counter acquire it."""
        self.program.launch.memory.release(counter, self.clock)
        self.tick()

    def acquire(self, counter: Hashable) -> None:
        self._acquired = self._acquired.maximum(self.program.launch.memory.acquire(counter))

    def fence_global(self) -> None:
        """Merge the acquired clock, so it also applies to TMA operations."""
        self.meet(self._acquired)

    def for_async(self) -> Tensor:
        return self.clock[self.program.launch.agents.for_async]

    def check_read(self, tile: Tile, does: str, is_async: bool) -> None:
        number = tile.unknown_writer(self.for_async() if is_async else self.clock)
        if number is not None:
            self._fault(tile, does, number, is_async, "written")

    def check_write(self, tile: Tile, does: str, is_async: bool) -> None:
        written = tile.allocation.same_part(tile.allocation.written, tile.writer)
        clock = (self.for_async() if is_async else self.clock).clone()
        clock[NOBODY] = int(written.max())  # memory that was never written may be written
        number = tile.unknown_writer(clock)
        if number is not None:
            self._fault(tile, does, number, is_async, "written")
        number = tile.unknown_reader(self.clock)
        if number is not None:
            self._fault(tile, does, number, False, "read")
        number = tile.unknown_load(self.clock) if is_async else None
        if number is not None:
            self._fault(tile, does, number, False, "loaded")

    def _fault(self, tile: Tile, does: str, number: int, is_async: bool, access: str) -> None:
        names = self.program.launch.agents.names
        if number == NOBODY:
            raise KernelError(f"{does} {tile.name}, parts of which nobody has written")
        if is_async and tile.unknown_writer(self.clock) is None:
            raise KernelError(f"{does} {tile.name}, {access} by {names[number]} without fence_async_shared")
        raise KernelError(f"{does} {tile.name}, {access} by {names[number]}, and knows of no end of that")

    def wait_products(self, pending: int) -> None:
        done = max(self.num_products - pending, 0)
        self.clock[self.products.number] = max(done, int(self.clock[self.products.number]))

    def wait_store_reads(self, pending: int) -> None:
        """Wait until all TMA stores except the last ``pending`` have read shared memory."""
        done = max(self.num_stores - pending, 0)
        for copy in self.stores_in_flight[: max(len(self.stores_in_flight) - pending, 0)]:
            self.schedule.land(copy, steps_left=min(copy.steps_left, 1))
        self.clock[self.stores.number] = max(done, int(self.clock[self.stores.number]))

    def wait_store_writes(self, pending: int) -> None:
        """Wait until all TMA stores except the last ``pending`` have written global memory."""
        self.wait_store_reads(pending)
        keep = len(self.stores_in_flight) - pending
        for copy in self.stores_in_flight[: max(keep, 0)]:
            self.schedule.land(copy)
        del self.stores_in_flight[: max(keep, 0)]
        done = max(self.num_stores - pending, 0)
        self.clock[self.writes.number] = max(done, int(self.clock[self.writes.number]))

    def wait_copies(self, pending: int) -> None:
        done = max(self.num_groups - pending, 0)
        self.clock[self.copies.number] = max(done, int(self.clock[self.copies.number]))

    def end(self) -> None:
        """Check that no operation of the partition that uses shared memory is in flight at its end."""
        if int(self.clock[self.stores.number]) < self.num_stores:
            raise KernelError("ends before its TMA stores have read shared memory (store_wait)")
        if int(self.clock[self.products.number]) < self.num_products:
            raise KernelError("ends with products in flight (warpgroup_mma_wait)")


def current_partition() -> Partition:
    return current_task().state


def warp_specialize(
    functions: Sequence[tuple[Callable, tuple]], num_warps: Sequence[int], num_registers: Sequence[int]
) -> Any:
    """Run the first function in this partition and each other one in a new partition, until all end."""
    mine = current_partition()
    if not len(functions) - 1 == len(num_warps) == len(num_registers):
        raise KernelError(f"{len(functions)} functions for 1 + {len(num_warps)} partitions")
    program, schedule = mine.program, mine.schedule
    mine.tick()
    tasks = []
    for i, ((function, arguments), warps) in enumerate(zip(functions[1:], num_warps, strict=True), 1):
        name = f"program {program.index}, partition {i} ({function.__name__})"
        partition = Partition(program, name, int(warps), mine.clock.clone())

        def body(function: Any = function, arguments: Any = arguments, partition: Any = partition) -> None:
            function(*arguments)
            partition.end()

        tasks.append(schedule.start(name, body, partition))
    function, arguments = functions[0]
    result = function(*arguments)
    mine.end()
    for task in tasks:
        schedule.wait(lambda task=task: task.done, lambda task=task: f"waits for the end of {task.name}")
        mine.meet(task.state.clock)
    return result
