"""Kernels that a launch needs: found on disk, or compiled, for a first call in several processes at once.

The story of a first call, whose kernels have not been compiled before:

1. Triton needs the first kernel, and calls :func:`load_or_compile`. Neither a folder of compiled kernels nor
   Triton's cache has it (``kernel_store``).
2. The program takes the *lock* of this kernel (:class:`KernelLock`, :func:`alone`), a file in Triton's cache
   that one process holds while it compiles the kernel. So if several programs need a kernel at the same time,
   only one compiles it. If its process ends without a result, the lock is free, and a process that waits for
   it compiles the kernel.
3. The call is *repeated* on torch's "meta" device, with the backward pass that will follow
   (``problems/newest.py``). Its launches are recorded, and each is followed up to the point where Triton
   would compile (:func:`only_naming`). This gives the other kernels of the call (:func:`_missing`).
4. Their sources are *pickled*, with JIT functions as names, and *handed* to new processes with their locks
   (:func:`_start`). A process (``compile_worker.py``) imports flashtile with an empty torch, and compares the
   *key* of each kernel with the program's. If they are equal, it compiles the kernel into Triton's cache.
5. Meanwhile the program compiles the first kernel. It then finds the others in the cache, and waits at their
   locks for those that are not ready.

A failure in 3 or 4 costs only time: the program then compiles the kernels itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from flashtile.backends.common import kernel_store
from flashtile.backends.common.device import Target, compiling_for, multiprocessors
from flashtile.backends.common.launch import recording
from flashtile.backends.compat import JITCallable
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
LONGEST_WAIT = 300.0
"""Seconds after which a process compiles a kernel though another process holds the kernel's lock. While 50
programs start on two cores, one compilation takes more than a minute."""

POLLED_EVERY = 0.005
"""Seconds between two attempts to lock a kernel."""

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


class KernelLock:
    """Lock of a kernel: a file in Triton's cache that one process locks. It is freed if that process ends.

    Attributes:
        descriptor: file descriptor of the locked file, or None if the lock is not held. A process that
            inherits the descriptor also holds the lock.
    """

    def __init__(self, key: str, descriptor: int | None = None) -> None:
        self.key, self.descriptor = key, descriptor

    def acquire(self) -> bool:
        """Try to take the lock, without waiting. Return whether this process holds it now.

        Raises:
            ImportError, OSError: this system has no such locks, or the cache cannot be written.
        """
        import fcntl  # Windows does not have it

        path = Path(knobs.cache.dir) / "flashtile_locks" / self.key
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # less the umask, as all files of the cache
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        return True

    def wait(self) -> None:
        """Wait until this process holds the lock, but not longer than LONGEST_WAIT."""
        end = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < end and not self.acquire():
            time.sleep(POLLED_EVERY)

    def release(self) -> None:
        """Free the lock, even if another process has inherited it."""
        if self.descriptor is not None:
            import fcntl

            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has a copy
            self.close()

    def close(self) -> None:
        """Close the descriptor. A process that has inherited it still holds the lock."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


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


def start_worker(
    environment: dict[str, str], inherited: tuple[int, ...] = (), stderr: int | None = None
) -> subprocess.Popen:
    """Start a process that compiles kernels.

    Messages go to it by :func:`send`: first :func:`opening`, then tasks, and None to end it. It also ends
    when its stdin is closed. A task is a name in ``compile_worker.TASKS`` with the function's arguments. For
    each task, stdout has a pickled answer: the function's result, or the text of its error.

    Args:
        environment: environment variables to add to those of this process.
        inherited: file descriptors that the process inherits.
        stderr: as in ``Popen``. What compilers print goes there.
    """
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("compile_worker.py"))], pass_fds=inherited,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **environment},
    )  # fmt: skip


def opening(longest_hashing: float = 0.0) -> tuple:
    """Return the first message for a process that compiles kernels.

    ``longest_hashing``: seconds that it waits for the stored digest of Triton's installation, before it
    computes the digest itself.
    """
    paths = [path for path in sys.path if isinstance(path, str)]
    return paths, str(Path(__file__).parents[2]), longest_hashing


def send(process: subprocess.Popen, *messages: Any) -> None:
    """Send messages to a process that compiles kernels.

    Raises:
        OSError: the process has ended.
    """
    assert process.stdin is not None
    for message in messages:
        pickle.dump(message, process.stdin)
    process.stdin.flush()


class _Pickler(pickle.Pickler):
    """Pickler that writes a JIT function of flashtile or Triton as its module and name.

    A function that flashtile has generated is written as its source text. Other JIT functions raise a
    PicklingError.
    """

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, JITCallable):
            return None
        function = obj.fn
        module, name = function.__module__, function.__qualname__
        if function.__code__.co_filename.startswith("<flashtile "):
            return module, "", obj.src
        if not module.startswith(("flashtile.", "triton.")) or _imported(module, name) is not obj:
            raise pickle.PicklingError(f"{module}.{name} cannot be imported")
        return module, name, ""


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        module, name, text = pid
        return _imported(module, name) if name else _imported(module, "function_of")(text)


def _imported(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def pickled(source: tuple[Any, Any, dict]) -> bytes:
    """Return the source, target and options of a kernel as bytes.

    Raises:
        pickle.PicklingError: the kernel has a function that another process cannot import.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(source)
    return file.getvalue()


def unpickled(source: bytes) -> tuple[Any, Any, dict]:
    """Return what :func:`pickled` was given."""
    found: tuple[Any, Any, dict] = _Unpickler(io.BytesIO(source)).load()
    return found
