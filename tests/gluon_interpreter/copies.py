"""Asynchronous copies between global and shared memory: TMA, and cp.async of each thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gluon_interpreter import global_memory
from gluon_interpreter.barriers import barrier_of
from gluon_interpreter.errors import KernelError
from gluon_interpreter.global_memory import Box, Pointer
from gluon_interpreter.program import current_partition
from gluon_interpreter.schedule import Copy
from gluon_interpreter.shared_memory import Tile
from gluon_interpreter.values import undefined


def _check_tile(box: Box, tile: Tile) -> None:
    if tile.shape != box.block_shape or tile.dtype != box.dtype:
        found, wanted = f"{tile.shape} of {tile.dtype}", f"{box.block_shape} of {box.dtype}"
        raise KernelError(f"TMA between {tile.name}, {found}, and a box of {wanted}")


def _coordinates(where: Sequence[Any]) -> list[int]:
    return [int(coordinate) for coordinate in where]


def load(box: Box, where: Sequence[Any], barrier: Tile, tile: Tile, pred: Any = True) -> None:
    """Start a TMA load. It writes the tile until the barrier's phase completes."""
    if not pred:
        return
    partition, where = current_partition(), _coordinates(where)
    _check_tile(box, tile)
    complete = barrier_of(barrier)
    memory = partition.program.launch.memory
    memory.load(box, where, partition.clock, complete.agent.number, complete.phase + 1)
    partition.check_write(tile, "loads to", is_async=True)
    tile.record_write(complete.agent, complete.phase + 1)
    tile.data.copy_(undefined(tile.shape, tile.data.dtype))

    def land() -> None:
        tile.data.copy_(box.read(where))
        complete.land(box.block_type.nbytes)

    partition.schedule.launch(Copy(f"load to {tile.name}", land))
    partition.schedule.pause()


def _store(box: Box, where: Sequence[Any], tile: Tile, add: bool) -> None:
    partition, where = current_partition(), _coordinates(where)
    _check_tile(box, tile)
    partition.check_read(tile, "adds" if add else "stores", is_async=True)
    partition.num_stores += 1
    tile.record_read(partition.stores, partition.num_stores)
    memory = partition.program.launch.memory
    memory.store(box, where, partition.clock, partition.writes.number, partition.num_stores, add)
    schedule = partition.schedule
    taken: list[torch.Tensor] = []

    def write() -> None:
        (box.add if add else box.write)(where, taken.pop())
        schedule.version += 1

    copy = Copy(f"store of {tile.name}", lambda: taken.append(tile.data.clone()), write)
    partition.stores_in_flight.append(copy)
    schedule.launch(copy)
    schedule.pause()


def store(box: Box, where: Sequence[Any], tile: Tile) -> None:
    """Start a TMA store. It reads the tile until ``store_wait``, and writes global memory some time later."""
    _store(box, where, tile, add=False)


def add(box: Box, where: Sequence[Any], tile: Tile) -> None:
    """Start a TMA reduction, which adds the tile to global memory; it is in flight as a store is."""
    _store(box, where, tile, add=True)


def store_wait(pendings: Any) -> None:
    partition = current_partition()
    partition.wait_store_reads(int(pendings))
    partition.schedule.pause()


def copy_to_shared(tile: Tile, pointer: Pointer, mask: Any = None, **hints: Any) -> None:
    """Start cp.async copies, which belong to the next group to commit; zeros where ``mask`` is false."""
    partition = current_partition()
    partition.check_write(tile, "copies to", is_async=False)
    tile.record_write(partition.copies, partition.num_groups + 1)
    # The data may be copied at once: the clocks already find a partition that reads it without waiting.
    found = global_memory.load(pointer, mask, 0).tensor().expand(tile.shape)
    if found.dtype != tile.data.dtype:
        raise KernelError(f"{tile.name} of {tile.dtype} is given {found.dtype}")
    tile.data.copy_(found)


def commit_group() -> None:
    current_partition().num_groups += 1


def wait_group(pending: Any) -> None:
    partition = current_partition()
    partition.wait_copies(int(pending))
    partition.schedule.pause()
