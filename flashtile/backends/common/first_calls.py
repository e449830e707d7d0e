"""First calls: the kernels of a call compile at once, each in a process of its own.

When the first kernel of a call must be compiled, the call is repeated on torch's "meta" device, with the
backward pass that will follow, to find its other kernels. New processes compile these kernels into Triton's
cache (``compile_worker.py``). The program finds them there, and waits for those that are not ready.

Each kernel has a lock, a file in Triton's cache. A kernel that is locked is compiled by another process, so
of several programs that need a kernel only one compiles it. If that process ends without a result, the next
one compiles the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from flashtile.backends.common import kernel_cache
from flashtile.backends.common.cached_launch import recording
from flashtile.backends.common.device import Target, compiling_for, multiprocessors
from flashtile.backends.common.handed_kernels import KernelLock, pickled
from flashtile.problems.newest import newest_call

WORKERS = "FLASHTILE_COMPILE_WORKERS"
"""Environment variable: the most processes that compile kernels of first calls at a time. 0 starts none."""
MOST_WORKERS = 4
"""Default of WORKERS, on a machine with more idle cores (:func:`_default_workers`)."""

logger = logging.getLogger("flashtile.kernels")

_workers: list[subprocess.Popen] = []
"""Processes that have not ended, at most WORKERS."""


@contextlib.contextmanager
def alone(key: str, target: Any) -> Iterator[None]:
    """Hold the lock of a kernel, whose other kernels start to compile in other processes.

    If another process holds the lock, wait until it has compiled the kernel. Without locks, on Windows or in
    a cache that cannot be written, nothing is locked and no process starts.
    """
    lock = KernelLock(key)
    try:
        try:
            held = lock.acquire()
            _start(target)
            if not held:
                lock.wait()
        except (ImportError, OSError) as error:
            logger.debug("kernels are not locked: %s", error)
        yield
    finally:
        lock.release()


def _start(target: Any) -> None:
    """Start processes for the kernels of the newest call that are not compiled or being compiled."""
    call, free = newest_call.get(), _free_workers()
    if call is None or free < 1 or target.backend != "cuda":
        return
    newest_call.set(None)
    with contextlib.ExitStack() as locks:
        try:
            tasks = []
            for key, source in _missing(call, target).items():
                lock = KernelLock(key)
                if lock.acquire():
                    locks.callback(lock.close)
                    tasks.append((lock, pickled(source)))
            for i in range(min(free, len(tasks))):
                _hand(tasks[i::free])
        except Exception as error:  # the program compiles the kernels itself
            logger.debug("kernels are compiled one after the other: %s", error)


def _free_workers() -> int:
    _workers[:] = [worker for worker in _workers if worker.poll() is None]
    given = os.environ.get(WORKERS, "")
    if not sys.executable or hasattr(sys, "frozen"):  # a program without an interpreter
        return 0
    return (int(given) if given.isdigit() else _default_workers()) - len(_workers)


def _default_workers() -> int:
    """Return MOST_WORKERS or fewer, so that the program keeps a core; 0 on a machine whose cores are busy."""
    if os.getloadavg()[0] >= (os.cpu_count() or 1):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores - 1, MOST_WORKERS)


def _missing(call: Any, target: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Return the sources of the kernels of a call that are in no folder and not in Triton's cache, by key."""
    gpu = Target("this GPU", divmod(target.arch, 10), multiprocessors(torch.device("cuda")))
    with compiling_for(gpu), recording() as recorded:
        call()
    found: dict[str, tuple[Any, Any, Any]] = {}
    for launch, tensors in recorded:
        with kernel_cache.only_looking() as missing:
            launch.compile_ahead(tensors)
        found |= missing
    return found


def _hand(tasks: list[tuple[KernelLock, bytes]]) -> None:
    """Start a process that compiles kernels. It inherits the lock of the first, and locks the others."""
    import flashtile

    first = tasks[0][0].descriptor
    given = [(lock.key, source, first if i == 0 else None) for i, (lock, source) in enumerate(tasks)]
    paths = [path for path in sys.path if isinstance(path, str)]
    content = pickle.dumps((paths, str(Path(flashtile.__file__ or "").parent), given))
    inherited = () if first is None else (first,)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("compile_worker.py"))], pass_fds=inherited,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "TRITON_CACHE_DIR": str(knobs.cache.dir)},
    )  # fmt: skip
    _workers.append(process)
    threading.Thread(target=_attend, args=(process, content), daemon=True).start()


def _attend(process: subprocess.Popen, content: bytes) -> None:
    """Send a process its tasks, and wait for its end. It would end at once if its stdin were closed."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended
        process.stdin.write(content)
        process.stdin.flush()
    process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()
