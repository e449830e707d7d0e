"""Processes that are ranks of one process group, started once and used by many tests.

They are forked from a server that has imported torch and flashtile, so that eight cost little more than one.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = 240
"""Seconds after which a rank that says nothing is taken for stuck."""


PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "parallel_tasks",
]
"""What takes long to import, some of it by autograd."""


class Pool:
    """``size`` ranks. A task is a function of a module that they can import: ``task(group, **arguments)``."""

    def __init__(self, size: int, groups: tuple[int, ...] = (), backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, groups, backend, self._store.port, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, task: Callable[..., Any], ranks: int, by_rank: Any = None, **arguments: Any) -> list[Any]:
        """What ``task`` returns on each of the first ``ranks`` ranks; an exception where it raises one.

        ``by_rank`` are further arguments of each rank.
        """
        for rank in range(ranks):
            own = {} if by_rank is None else by_rank[rank]
            self._pipes[rank].send((task, ranks, {**arguments, **own}))
        return [self._answer(rank) for rank in range(ranks)]

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(PATIENCE):
            raise AssertionError(f"rank {rank} hangs")
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return None  # it has died

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@contextmanager
def pool(size: int, groups: tuple[int, ...] = (), backend: str = "gloo") -> Iterator[Pool]:
    ranks = Pool(size, groups, backend)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, size: int, groups: tuple[int, ...], backend: str, port: int, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    patience = timedelta(seconds=PATIENCE)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    of_size = {count: dist.new_group(list(range(count))) for count in groups}
    while True:
        try:
            task, count, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = task(of_size.get(count, dist.group.WORLD), **arguments)
        except Exception as error:
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            answer = error
        pipe.send(answer)
