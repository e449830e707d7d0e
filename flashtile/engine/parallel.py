"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3): one process per GPU.

Each process holds some heads, some columns of the MLP and some of the vocabulary. Two all-reduces per layer
add the partial sums of the processes. Otherwise every process runs the same program on the same numbers, and
its own scheduler arrives at the same steps. Only the chosen tokens are taken from the first process, so that
rounding differences cannot make the processes diverge.
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
"""Largest number of bytes that a rank sends to all ranks, including itself, by one kernel that writes into
the memory of all ranks. For more bytes, NCCL is faster."""
HOST_TIMEOUT = timedelta(days=365)
"""Timeout of collectives on the CPU. It is long because a server may be idle for long. If a process ends, the
collectives of the others raise an error at once."""
GPU_TIMEOUT = 600.0
"""Maximum seconds that a GPU waits for the others in a step. A rank may compile kernels in that time."""
FIRST_BYTES = 1024
"""Bytes of the first broadcast of a message."""

logger = logging.getLogger("flashtile.engine")


class Ranks:
    """The processes that compute one model together. This base class exchanges nothing, as a single process.

    Args:
        rank, world: this process's number, and the number of processes.
    """

    def __init__(self, rank: int = 0, world: int = 1):
        self.rank, self.world = rank, world

    def slice(self, size: int) -> slice:
        """Return this process's part of a dimension that tensor parallelism divides."""
        return slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def split_residual(self, residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Split the residual so that all processes together add it exactly once.

        Return (tensor to add to this process's product, tensor to pass to :meth:`sum`). Each may be None.
        """
        return residual, None

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Sum x (rows, hidden_size) over all processes, and add ``residual`` once.

        ``residual`` is the second result of :meth:`split_residual`.
        """
        return x

    def join(self, x: Tensor) -> Tensor:
        """Concatenate the columns of all processes: (rows, columns) to (rows, world * columns)."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with the first process's x, and return it."""
        return x

    def minimum(self, number: int) -> int:
        """Return the smallest of the processes' numbers."""
        return number

    def send(self, what: Any) -> None:
        """Send an object from the first process to the others, which receive it with :meth:`receive`."""

    def receive(self) -> Any:
        """Receive an object from the first process. Raise EOFError if that process has ended."""
        raise EOFError("there is no other process")


ALONE = Ranks()


class ProcessRanks(Ranks):
    """The processes started by ``torchrun`` or :func:`start_others`. Each makes its own instance.

    Raises:
        ValueError: ``world``, the expected number of processes, differs from the number of started ones.
    """

    def __init__(self, world: int, device: torch.device):
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != world:
            raise ValueError(
                f"tensor_parallel_size must be the number of processes ({started}), got {world}: "
                f"start them with torchrun --nproc-per-node {world}"
            )
        _forbid_multicast()
        self._leaving = None if dist.is_initialized() else _join_group(device)
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._host = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        self._direct = DirectCollectives.between(self, device)

    def split_residual(self, residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
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
        # torch 2.13 renamed this function.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(parts, x.contiguous())
        return parts.view(self.world, rows, columns).transpose(0, 1).reshape(rows, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        if self._direct is not None and self._direct.serves(x):
            return self._direct(x, result="first")
        dist.broadcast(x, 0)
        return x

    def minimum(self, number: int) -> int:
        numbers = torch.tensor(number, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._host)
        return int(numbers)

    def send(self, what: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        # Most messages fit into the first broadcast.
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        first[:8] = torch.tensor([len(data)], device="cpu").view(torch.uint8)
        first[8 : 8 + len(data)] = data[: FIRST_BYTES - 8]
        dist.broadcast(first, 0, group=self._host)
        if len(data) > FIRST_BYTES - 8:
            dist.broadcast(data, 0, group=self._host)

    def receive(self) -> Any:
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        try:
            dist.broadcast(first, 0, group=self._host)
            size = int(first[:8].view(torch.int64))
            data = first[8 : 8 + size]
            if size > FIRST_BYTES - 8:
                data = torch.empty(size, dtype=torch.uint8, device="cpu")
                dist.broadcast(data, 0, group=self._host)
        except RuntimeError as error:
            if self._leaving is not None:
                self._leaving.detach()
            raise EOFError(f"the first process has ended: {error}") from None
        # Unpickling is safe, because only processes of this program are in the group.
        return pickle.loads(data.numpy().tobytes())


class DirectCollectives:
    """Collectives by one kernel that writes into the memory of all processes, without NCCL
    (:mod:`flashtile.engine.all_reduce`).

    Args:
        capacity: maximum size of a tensor, in 32-bit words.
        memories, kept: the results of :func:`flashtile.parallel.symmetric.mapped_memory`.
    """

    def __init__(self, rank: int, capacity: int, memories: Tensor, kept: Any):
        from flashtile.engine.all_reduce import PROGRAMS

        self._rank, self._capacity, self._memories, self._kept = rank, capacity, memories, kept
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=memories.device)

    @classmethod
    def between(cls, ranks: ProcessRanks, device: torch.device) -> DirectCollectives | None:
        """Map a part of every GPU's memory into all processes, and return the collectives that use it.

        Returns None without NVIDIA GPUs, or if a GPU cannot access the memory of another GPU.
        """
        if device.type != "cuda" or torch.version.hip is not None:
            return None
        from flashtile.engine.all_reduce import memory_words
        from flashtile.parallel.symmetric import mapped_memory

        capacity, found = ONE_SHOT_BYTES // 4 // ranks.world, None
        try:
            found = mapped_memory(memory_words(ranks.world, capacity), dist.group.WORLD, device)
        except (ImportError, RuntimeError) as error:
            logger.warning("all-reduces use NCCL, because GPUs cannot map each other's memory: %s", error)
        # All processes must choose the same implementation.
        everywhere = ranks.minimum(int(found is not None))
        return cls(ranks.rank, capacity, *found) if everywhere and found is not None else None

    def serves(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= 4 * self._capacity and x.nbytes % 4 == 0 and x.dtype != torch.float64

    def __call__(self, x: Tensor, residual: Tensor | None = None, result: str = "sum") -> Tensor:
        from flashtile.engine.all_reduce import FIRST, JOIN, SUM, all_reduce

        kind = {"sum": SUM, "first": FIRST, "join": JOIN}[result].value
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        return all_reduce(
            x, residual, self._memories, self._calls, self._rank, self._capacity, GPU_TIMEOUT, kind
        )


def start_others(
    command: Sequence[str], world: int, device: torch.device
) -> tuple[list[subprocess.Popen[bytes]], dist.TCPStore]:
    """Form a group of ``world`` processes on this host.

    This process is the first of the group, and ``command`` starts each of the others. If another process
    fails, this process ends with exit code 1 instead of waiting for it. Return the other processes, and the
    store of the process group. Keep the store while these processes run.
    """
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        # These two variables make torch use ``store``.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    others = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(1, world)
    ]
    os.environ.update({**place, "RANK": "0", "LOCAL_RANK": "0"})

    def watch(process: subprocess.Popen[bytes]) -> None:
        if process.wait():
            code = process.returncode
            logger.error("a tensor parallel process has ended with code %d", code)
            os._exit(1)

    for process in others:
        threading.Thread(target=watch, args=(process,), daemon=True).start()
    _forbid_multicast()
    _join_group(device)
    return others, store


def broadcast_changes(engine: Any) -> None:
    """Send every later change of this engine to the other processes, which run :func:`repeat_changes`."""
    ranks = engine.runner.ranks
    engine.on_change = lambda *change: ranks.send(change)


def repeat_changes(engine: Any) -> None:
    """Repeat the changes of the first process's engine until that process calls :func:`end_repeating`.

    Raise EOFError if that process ends without calling it.
    """
    while (change := engine.runner.ranks.receive()) is not None:
        name, arguments, options = change
        getattr(engine, name)(*arguments, **options)


def end_repeating(engine: Any) -> None:
    """End :func:`repeat_changes` in the other processes."""
    engine.runner.ranks.send(None)


def _join_group(device: torch.device) -> weakref.finalize[..., Any]:
    """Join the process group, and leave it when the process ends.

    Finalizers run in reverse order, so runners free their CUDA graphs first. NCCL may wait for such graphs.
    """
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return weakref.finalize(ProcessRanks, _leave_group)


def _leave_group() -> None:
    """Leave the process group.

    After an error, the group is not left, because NCCL would wait for ranks that have already ended.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def _forbid_multicast() -> None:
    """Disable NVLink multicast, because a program that fails while using it can make GPUs unusable."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def local_device() -> str | None:
    """Return the name of this process's GPU, with ``LOCAL_RANK`` as its index, or None without GPUs."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else None


def check_divides(config: Any, world: int) -> None:
    """Raise NotImplementedError if a size of the model is not divisible by the number of processes."""
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "expert_size", "vocab_size"):
        if getattr(config, name) % world:
            raise NotImplementedError(
                f"tensor_parallel_size must divide the model's {name}={getattr(config, name)}, got {world}"
            )
