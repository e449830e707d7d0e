"""Kernels that a launch needs: found on disk, or compiled, for a first call in several processes at once.

When the first kernel of a call must be compiled, the call is repeated on torch's "meta" device, with the
backward pass that will follow, to find its other kernels. New processes compile these kernels into Triton's
cache (``compile_worker.py``), while the program compiles the first. It then finds the others in the cache,
and waits for those that are not ready.

Each kernel has a lock, a file in Triton's cache, which a process holds while it compiles the kernel. So if
several programs need a kernel at the same time, only one compiles it. If its process ends without a result,
the lock is free, and a process that waits for it compiles the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton import knobs

from flashtile.backends.common import kernel_store
from flashtile.backends.common.device import Target, compiling_for, multiprocessors
from flashtile.backends.common.handed_kernels import KernelLock, opening, pickled, send, start_worker
from flashtile.backends.common.launch import recording
from flashtile.hardware.machine import usable_cores
from flashtile.problems.newest import newest_call

WORKERS = "FLASHTILE_COMPILE_WORKERS"
"""Environment variable: maximum number of processes that a program has compiling at a time. 0: none."""
MOST_WORKERS = 4
"""Upper bound of the default of WORKERS (:func:`_default_workers`)."""
LONGEST_HASHING = 10.0
"""Seconds that a process waits for the digest of Triton's installation, which the program computes in about
0.4 s of processor time."""

ANNOUNCED_AFTER = 2.0
"""Seconds of compilation after which a line says what is compiled."""
QUIET = "FLASHTILE_QUIET"
"""Environment variable: 1 hides the line that says what is compiled."""

logger = logging.getLogger("flashtile.kernels")

_workers: list[subprocess.Popen] = []
"""Started processes. Those that have ended are removed before others start."""
_starting = threading.Lock()
"""Held while processes are started, so that threads together start no more than are free."""


def load_or_compile(src: Any, target: Any = None, options: dict | None = None, **more: Any) -> Any:
    """Compile as :func:`triton.compile` does, or load the kernel if it has been compiled before.

    Folders of compiled kernels are searched first, then Triton's disk cache. The look-up in that cache is
    faster than Triton's own.
    """
    if (named := _named.get()) is not None:
        named[kernel_store.key_in_folders(src, target, options)] = src, target, options
        raise _OnlyNamedError
    if _is_observed():
        return triton.compile(src, target=target, options=options, **more)
    if (found := kernel_store.find(src, target, options)) is not None:
        return found
    with _announced(src.name), alone(kernel_store.key_in_folders(src, target, options), target):
        return kernel_store.load_or_compile_alone(src, target, options, **more)


class _OnlyNamedError(Exception):
    """Ends the compilation of a kernel inside :func:`only_naming`."""


@contextlib.contextmanager
def only_naming() -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """Inside the context, no kernel is compiled or loaded. The context ends at the first one.

    The dictionary then has (source, target, options) of this kernel under its key
    (:func:`compiled_folder.key_of`). It is empty if this process already uses the kernel.
    """
    named: dict[str, tuple[Any, Any, Any]] = {}
    token = _named.set(named)
    try:
        with contextlib.suppress(_OnlyNamedError):
            yield named
    finally:
        _named.reset(token)


_named: ContextVar[dict[str, tuple[Any, Any, Any]] | None] = ContextVar("named_kernels", default=None)


@contextlib.contextmanager
def alone(key: str, target: Any) -> Iterator[None]:
    """Hold the lock of a kernel inside the context, and start processes for the other kernels of its call.

    If another process holds the lock, wait until it has compiled the kernel, or until LONGEST_WAIT has
    passed. On Windows, and if the cache cannot be written, nothing is locked and no process starts.
    """
    lock = KernelLock(key)
    kernel_store.begin_key()
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
    """Start processes for those kernels of the newest call that are neither compiled nor being compiled."""
    call = newest_call.get()
    if call is None or target.backend != "cuda":
        return
    with _starting, contextlib.ExitStack() as locks:
        free = _free_workers()
        if free < 1:
            return
        newest_call.set(None)
        try:
            tasks = []
            for key, source in _missing(call, target).items():
                lock = KernelLock(key)
                if lock.acquire():
                    locks.callback(lock.release)
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
    return min(usable_cores() - 1, MOST_WORKERS)


def _missing(call: Any, target: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Return (source, target, options) of each kernel of a call that is not compiled yet, by its key.

    Folders of compiled kernels and Triton's cache are searched.
    """
    gpu = Target("this GPU", divmod(target.arch, 10), multiprocessors(torch.device("cuda")))
    with compiling_for(gpu), recording() as recorded:
        call()
    found: dict[str, tuple[Any, Any, Any]] = {}
    for launch, tensors in recorded:
        with only_naming() as named:
            launch.compile_ahead(tensors)
        found |= {key: source for key, source in named.items() if kernel_store.find(*source) is None}
    return found


def _hand(tasks: list[tuple[KernelLock, bytes]]) -> None:
    """Start a process for kernels. It inherits the first kernel's lock, and locks each other one later."""
    first = tasks[0][0].descriptor
    given = [
        ("compile_handed", lock.key, source, first if i == 0 else None)
        for i, (lock, source) in enumerate(tasks)
    ]
    inherited = () if first is None else (first,)
    process = start_worker({"TRITON_CACHE_DIR": str(knobs.cache.dir)}, inherited, subprocess.DEVNULL)
    _workers.append(process)
    threading.Thread(target=_attend, args=(process, given), daemon=True).start()
    tasks[0][0].close()  # the process holds it now


def _attend(process: subprocess.Popen, tasks: list[tuple]) -> None:
    """Send a process its tasks. Keep its stdin open until it ends, because closing stdin ends it."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError), process.stdin, process.stdout:  # OSError: it has ended
        send(process, opening(LONGEST_HASHING), *tasks, None)
        process.stdout.read()
    process.wait()


@contextlib.contextmanager
def _announced(name: str) -> Iterator[None]:
    """Print a line to a terminal if a kernel compiles for longer than ANNOUNCED_AFTER."""
    if os.environ.get(QUIET) == "1" or not _has_terminal():
        yield
        return
    line = f"flashtile: compiling {name}; `flashtile compile` does it ahead of time ({QUIET}=1 hides this)"
    timer = threading.Timer(ANNOUNCED_AFTER, print, (line,), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _has_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # None in a program that was started without stderr, or closed
        return False


def _is_observed() -> bool:
    """Whether a setting or a hook of Triton requires that ``triton.compile`` is called for every kernel."""
    return bool(
        knobs.compilation.always_compile
        or knobs.compilation.listener is not None
        or knobs.runtime.add_stages_inspection_hook is not None
    )
