"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3): one process a GPU.

Each process holds some heads, some columns of the MLP and some of the vocabulary. Products that leave a part
of the sum in each process are added by an all-reduce, two a layer. Everything else is the same program with
the same numbers in every process: each one schedules for itself and comes to the same steps. Only tokens are
taken from the first process, so that a last bit that differs cannot lead two of them apart.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ONE_SHOT_BYTES = 2**23
"""That a rank sends to all together, itself included: up to here one kernel that writes into their memory is
faster than NCCL."""
PATIENCE = timedelta(days=365)
"""A server may have nothing to do for long; a process that ends is noticed at once all the same."""


SECONDS = 600.0
"""That a GPU waits for the others within a step: one of them may have kernels to compile."""
MESSAGE = 1024
"""Bytes that one broadcast tells."""


logger = logging.getLogger("flashtile.engine")


class Ranks:
    """The processes that compute one model together: here this one alone.

    Attributes:
        rank, world: this process's number, and how many there are.
    """

    rank, world = 0, 1

    def placed(self, residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(what this process's product adds, what :meth:`sum` adds) of a residual, which enters once."""
        return residual, None

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Of all processes' x (rows, hidden_size), plus what :meth:`placed` has left to it."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """(rows, columns of all) from each one's columns."""
        return x

    def agree(self, x: Tensor) -> Tensor:
        """The first process's numbers, in the memory of ``x``."""
        return x

    def least(self, number: int) -> int:
        """Of all processes' numbers."""
        return number

    def tell(self, what: Any) -> None:
        """From the first process to the others, which :meth:`hear`."""

    def hear(self) -> Any:
        """What the first process tells; EOFError if it has ended."""
        raise EOFError("there is no other process")


ALONE = Ranks()


class ProcessRanks(Ranks):
    """The processes that ``torchrun`` or :func:`start_others` started, of which each has called this.

    Args:
        world: how many there must be.
        device: this process's.

    Raises:
        ValueError: there are not so many.
    """

    def __init__(self, world: int, device: torch.device):
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != world:
            raise ValueError(
                f"tensor_parallel_size must be the number of processes, got {world} in {started}: "
                f"start them with torchrun --nproc-per-node {world}"
            )
        _forbid_multicast()
        self._leaving = None if dist.is_initialized() else _join_group(device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._host = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._direct = Direct.between(self, device)

    def placed(self, residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self._direct is not None and self._direct.serves(residual):
            return None, residual
        return (residual if self.rank == 0 else None), None

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._direct is not None and self._direct.serves(x):
            return self._direct(x, residual)
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        if self._direct is not None and self._direct.serves(x[:1]) and self._direct.serves(x):
            return self._direct(x, result="join")
        parts = x.new_empty(self.world * rows, columns)
        # torch 2.13 has a new name for it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(parts, x.contiguous())
        return parts.view(self.world, rows, columns).transpose(0, 1).reshape(rows, -1)

    def agree(self, x: Tensor) -> Tensor:
        if self._direct is not None and self._direct.serves(x):
            return self._direct(x, result="first")
        dist.broadcast(x, 0)
        return x

    def least(self, number: int) -> int:
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._host)
        return int(numbers)

    def tell(self, what: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        # Most of what is told fits into the first message.
        first = torch.zeros(MESSAGE, dtype=torch.uint8)
        first[:8] = torch.tensor([len(data)]).view(torch.uint8)
        first[8 : 8 + len(data)] = data[: MESSAGE - 8]
        dist.broadcast(first, 0, group=self._host)
        if len(data) > MESSAGE - 8:
            dist.broadcast(data, 0, group=self._host)

    def hear(self) -> Any:
        first = torch.empty(MESSAGE, dtype=torch.uint8)
        try:
            dist.broadcast(first, 0, group=self._host)
            size = int(first[:8].view(torch.int64))
            data = first[8 : 8 + size]
            if size > MESSAGE - 8:
                data = torch.empty(size, dtype=torch.uint8)
                dist.broadcast(data, 0, group=self._host)
        except RuntimeError as error:
            if self._leaving is not None:
                self._leaving.detach()
            raise EOFError(f"the first process has ended: {error}") from None
        # Only processes of this program are in the group.
        return pickle.loads(data.numpy().tobytes())


class Direct:
    """Sums by one kernel that writes into the memory of all processes, without NCCL
    (:mod:`flashtile.backends.portable.all_reduce`).

    Args:
        rank: this process's number.
        capacity: words of 32 bits of a sum, at most.
        memories, kept: as :func:`flashtile.parallel.symmetric.mapped_memory` has them.
    """

    def __init__(self, rank: int, capacity: int, memories: Tensor, kept: Any):
        from flashtile.backends.portable.all_reduce import PROGRAMS

        self._rank, self._capacity, self._memories, self._kept = rank, capacity, memories, kept
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=memories.device)

    @classmethod
    def between(cls, ranks: ProcessRanks, device: torch.device) -> Direct | None:
        """None if not all of them reach each other's memory."""
        if device.type != "cuda" or torch.version.hip is not None:
            return None
        from flashtile.backends.portable.all_reduce import memory_words
        from flashtile.parallel.symmetric import mapped_memory

        capacity, found = ONE_SHOT_BYTES // 4 // ranks.world, None
        try:
            found = mapped_memory(memory_words(ranks.world, capacity), dist.group.WORLD, device)
        except (ImportError, RuntimeError) as error:
            logger.warning("sums take NCCL, because GPUs do not reach each other's memory: %s", error)
        # Each of them takes the same way.
        everywhere = ranks.least(int(found is not None))
        return cls(ranks.rank, capacity, *found) if everywhere and found is not None else None

    def serves(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= 4 * self._capacity and x.nbytes % 4 == 0 and x.dtype != torch.float64

    def __call__(self, x: Tensor, residual: Tensor | None = None, result: str = "sum") -> Tensor:
        from flashtile.backends.portable.all_reduce import FIRST, JOIN, SUM, all_reduce

        kind = {"sum": SUM, "first": FIRST, "join": JOIN}[result].value
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        return all_reduce(x, residual, self._memories, self._calls, self._rank, self._capacity, SECONDS, kind)


def start_others(
    command: Sequence[str], world: int, device: torch.device
) -> tuple[list[subprocess.Popen[bytes]], dist.TCPStore]:
    """Become the first of ``world`` processes on this host; the others run ``command``. They meet at a store,
    which must live as long as they do.

    If one of them fails, this process ends, too, with exit code 1: it would wait for it.
    """
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",  # all meet at that store
    }  # fmt: skip
    others = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(1, world)
    ]
    os.environ.update({**place, "RANK": "0", "LOCAL_RANK": "0"})

    def watch(process: subprocess.Popen[bytes]) -> None:
        if process.wait():
            code = process.returncode
            logger.error("a process that computes a part of the model has ended with code %d", code)
            os._exit(1)

    for process in others:
        threading.Thread(target=watch, args=(process,), daemon=True).start()
    _forbid_multicast()
    _join_group(device)
    return others, store


def lead(engine: Any) -> None:
    """From now on tell the other processes, which :func:`follow`, what this engine is asked to do."""
    ranks = engine.runner.ranks
    engine.on_change = lambda *change: ranks.tell(change)


def follow(engine: Any) -> None:
    """Do what the first process's engine does, until it says that this is all (:func:`dismiss`).

    Raises:
        EOFError: the first process has ended without a word.
    """
    while (change := engine.runner.ranks.hear()) is not None:
        name, arguments, options = change
        getattr(engine, name)(*arguments, **options)


def dismiss(engine: Any) -> None:
    """Let the processes go that follow."""
    engine.runner.ranks.tell(None)


def _join_group(device: torch.device) -> weakref.finalize[..., Any]:
    """And leave it at the end of the process, after what was registered later: the end of runners, with their
    graphs, for which NCCL may wait."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return weakref.finalize(ProcessRanks, _leave_group)


def _leave_group() -> None:
    """Unless an error ended the process: others may be gone, and NCCL would wait for them."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def _forbid_multicast() -> None:
    """A program that fails while it uses multicast can leave the host's GPUs unusable."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def local_device() -> str | None:
    """The GPU that is this process's among those of its host; None where there is none."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else None


def check_divides(config: Any, world: int) -> None:
    """NotImplementedError if a size of the model cannot be divided among so many processes."""
    sizes = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    for name in sizes:
        if getattr(config, name) % world:
            raise NotImplementedError(
                f"tensor_parallel_size must divide the model's {name}={getattr(config, name)}, got {world}"
            )
