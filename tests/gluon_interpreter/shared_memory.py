"""Shared memory of a program: tiles, and the clocks of the last reads and writes of each element."""

from __future__ import annotations

import linecache
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gluon_interpreter.clocks import NOBODY, Agent, Agents
from gluon_interpreter.errors import KernelError
from gluon_interpreter.program import current_partition
from gluon_interpreter.values import LAYOUT, TORCH_DTYPES, Value, cast, undefined, value_of

NEVER = 2**31 - 1
SWIZZLED_BITS = 8 * 128
"""Bits of a row of the widest swizzle pattern, 128 bytes."""
ASSIGNMENT = re.compile(r"\s*(\w+)\s*=[^=]")


def name_of_caller() -> str:
    """Return the name that a kernel gives to memory that it allocates, by assignments on the call stack.

    For example "k.full", if ``full = ...`` allocates in a function called by ``k = ...``.
    """
    names: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = ASSIGNMENT.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        if "gluon_interpreter" not in frame.f_code.co_filename and found is not None:
            names.insert(0, found[1])
        if "gluon_interpreter" in frame.f_code.co_filename and names:
            break
        frame = frame.f_back
    return ".".join(names) or "memory"


class Allocation:
    """Allocated elements of shared memory.

    For each element it has the agent and clock of the last write (``writer``, ``written``), and for each
    agent the clock of its last read (``readers``).
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: Any, agents: Agents) -> None:
        self.name, self.agents = name, agents
        self.writer = torch.full(list(shape), NOBODY, dtype=torch.int32)
        self.written = torch.full(list(shape), NEVER, dtype=torch.int32)
        self.readers: dict[int, Tensor] = {}
        self.loads: dict[int, Tensor] = {}
        """Clock at which an agent's last load to registers was done, by the agent's number."""
        self.data = undefined(shape, TORCH_DTYPES[dtype])
        self.barriers: dict[int, Any] = {}
        """mbarriers in this memory, by the offset of their element."""

    def same_part(self, whole: Tensor, part: Tensor) -> Tensor:
        """Return the view of ``whole`` with the same elements as ``part``, which is a view of ``writer``."""
        return whole.as_strided(part.shape, part.stride(), part.storage_offset())


class Tile:
    """A view of shared memory: a ``shared_memory_descriptor`` in a kernel.

    ``writer`` is the same view of the allocation's ``writer``. Its additional last dimension has the
    allocated elements that make one element of ``data``.
    """

    layout = LAYOUT

    def __init__(self, allocation: Allocation, data: Tensor, dtype: Any, writer: Tensor, name: str) -> None:
        self.allocation, self.data, self.dtype = allocation, data, dtype
        self.writer, self.name = writer, name

    @staticmethod
    def allocate(shape: Sequence[Any], dtype: Any, agents: Agents) -> Tile:
        sizes = [int(size) for size in shape]
        allocation = Allocation(name_of_caller(), sizes, dtype, agents)
        return Tile(allocation, allocation.data, dtype, allocation.writer[..., None], allocation.name)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def type(self) -> Any:
        return self

    def _view(self, data: Tensor, writer: Tensor, name: str | None = None) -> Tile:
        return Tile(self.allocation, data, self.dtype, writer, self.name if name is None else name)

    def index(self, i: Any) -> Tile:
        i = int(i)
        if not 0 <= i < len(self.data):
            raise KernelError(f"{self.name} has {len(self.data)} tiles, number {i} is asked for")
        return self._view(self.data[i], self.writer[i], f"{self.name}[{i}]")

    def slice(self, start: Any, length: Any, dim: int = 0) -> Tile:
        start, length = int(start), int(length)
        if start < 0 or start + length > self.data.shape[dim]:
            raise KernelError(f"{self.name} of {self.shape}: {length} from {start} on along {dim}")
        return self._view(self.data.narrow(dim, start, length), self.writer.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Tile:
        return self._view(self.data.permute(*order), self.writer.permute(*order, self.rank))

    def reshape(self, shape: Sequence[Any]) -> Tile:
        sizes = [int(size) for size in shape]
        return self._view(self.data.view(sizes), self.writer.view(*sizes, self.writer.shape[-1]))

    def reinterpret(self, dtype: Any, shape: Sequence[Any]) -> Tile:
        """Return the same memory as elements of ``dtype``, whose size is the same or larger.

        If ``shape`` has more columns than the tile, these are the columns of the next tiles in memory, as in
        swizzled layouts.
        """
        sizes = [int(size) for size in shape]
        if TORCH_DTYPES[dtype] == self.data.dtype and math.prod(sizes) > self.data.numel():
            rows, columns = sizes[0], self.shape[-1]
            tiles = [sizes[1] // columns, rows, columns]
            data = self.data.as_strided(tiles, (rows * columns, columns, 1)).transpose(0, 1)
            writer = self.writer.as_strided([*tiles, 1], (rows * columns, columns, 1, 1)).transpose(0, 1)
            return Tile(self.allocation, data.reshape(sizes), dtype, writer, self.name)
        bits = sizes[-1] * dtype.primitive_bitwidth
        if dtype == self.dtype and bits == SWIZZLED_BITS and sizes[-1] < self.shape[-1]:
            return SwizzledParts(self, sizes)  # type: ignore[return-value]
        data = self.data.view(TORCH_DTYPES[dtype]).view(sizes)
        writer = self.writer.reshape(*sizes, -1)
        if writer.data_ptr() != self.writer.data_ptr():
            raise NotImplementedError(f"{self.name} does not lie in one piece")
        return Tile(self.allocation, data, dtype, writer, self.name)

    def load(self, layout: Any = None) -> Value:
        partition = current_partition()
        partition.check_read(self, "loads", is_async=False)
        self.record_read(partition.agent, partition.now)
        self.record_load(partition.agent, NEVER)
        loaded = Loaded(self.data.clone(), self.dtype, Load(self, partition))
        partition.loads_in_flight.append(loaded)
        return loaded

    def store(self, value: Value) -> None:
        partition = current_partition()
        data = cast(value_of(value), self.dtype).tensor()
        if math.prod(data.shape) != math.prod(self.shape) or list(data.shape) != self.shape:
            raise KernelError(f"{self.name} of {self.shape} is given {list(data.shape)}")
        if value.dtype != self.dtype:
            raise KernelError(f"{self.name} of {self.dtype} is given {value.dtype}")
        partition.check_write(self, "stores to", is_async=False)
        self.record_write(partition.agent, partition.now)
        self.data.copy_(data)

    def record_read(self, agent: Agent, clock: int) -> None:
        self._record(self.allocation.readers, agent, clock)

    def record_load(self, agent: Agent, clock: int) -> None:
        self._record(self.allocation.loads, agent, clock)

    def _record(self, clocks_of: dict[int, Tensor], agent: Agent, clock: int) -> None:
        clocks = clocks_of.get(agent.number)
        if clocks is None:
            clocks = clocks_of[agent.number] = torch.zeros_like(self.allocation.written)
        self.allocation.same_part(clocks, self.writer).fill_(clock)

    def record_write(self, agent: Agent, clock: int) -> None:
        self.writer.fill_(agent.number)
        self.allocation.same_part(self.allocation.written, self.writer).fill_(clock)

    def unknown_writer(self, clock: Tensor) -> int | None:
        """Return the number of an agent whose write to the tile is unknown at ``clock``; None without one."""
        written = self.allocation.same_part(self.allocation.written, self.writer)
        unknown = clock[self.writer] < written
        return int(self.writer[unknown][0]) if bool(unknown.any()) else None

    def unknown_reader(self, clock: Tensor) -> int | None:
        """Return the number of an agent whose read of the tile is unknown at ``clock``; None without one."""
        return self._unknown(self.allocation.readers, clock)

    def unknown_load(self, clock: Tensor) -> int | None:
        """Return the number of an agent whose load to registers is unknown at ``clock``; None without one.

        This matters for writes of the async proxy.
        """
        return self._unknown(self.allocation.loads, clock)

    def _unknown(self, clocks_of: dict[int, Tensor], clock: Tensor) -> int | None:
        for number, clocks in clocks_of.items():
            if int(self.allocation.same_part(clocks, self.writer).max()) > int(clock[number]):
                return number
        return None


class Load:
    """A load from shared memory to registers. It is done when its result is first used, or at a fence."""

    def __init__(self, tile: Tile, partition: Any) -> None:
        self._source: tuple[Tile, Any] | None = (tile, partition)

    def finish(self) -> None:
        if self._source is not None:
            tile, partition = self._source
            self._source = None
            tile.record_load(partition.agent, partition.now)


class Loaded(Value):
    """The result of a load to registers.

    Neither an arrival at a barrier nor TMA waits for the load. To reshape the result is not to use it.
    """

    __slots__ = ("_load",)

    def __init__(self, data: Tensor, dtype: Any, load: Load) -> None:
        super().__init__(data, dtype)
        self._load = load

    @property
    def data(self) -> Any:
        self._load.finish()
        return self._data

    @property
    def registers(self) -> Any:
        return self._data

    def renamed(self, data: Any) -> Value:
        return Loaded(data, self.dtype, self._load)


class SwizzledParts:
    """View of wide tiles [.., rows, columns] as tiles that are as wide as the swizzle pattern.

    A wide tile is stored as one such narrow tile after the other, each with all rows.
    """

    def __init__(self, tile: Tile, sizes: list[int]) -> None:
        self._tile, self._sizes = tile, sizes

    def index(self, i: Any) -> Tile:
        rows, columns = math.prod(self._sizes[1:-1]), self._sizes[-1]
        slots, *middle, width = self._tile.shape
        wide = self._tile.reshape([slots, math.prod(middle), width])
        across, part = divmod(int(i), math.prod(middle) // rows)
        slot, column = divmod(across, width // columns)
        tile = wide.index(slot).slice(part * rows, rows).slice(column * columns, columns, 1)
        return tile.reshape(self._sizes[1:])
