"""Kernels that one process hands to another for compilation: their sources as bytes, and their locks.

Both processes use this module. The one that compiles runs ``compile_worker.py``.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path
from typing import Any

from triton import knobs

from flashtile.backends.compat import JITCallable

LONGEST_WAIT = 300.0
"""Seconds after which a process compiles a kernel though another process holds the kernel's lock. While 50
programs start on two cores, one compilation takes more than a minute."""

POLLED_EVERY = 0.005
"""Seconds between two attempts to lock a kernel."""


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
        if not module.startswith(("flashtile.", "triton.")) or _named(module, name) is not obj:
            raise pickle.PicklingError(f"{module}.{name} cannot be imported")
        return module, name, ""


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        module, name, text = pid
        return _named(module, name) if name else _named(module, "function_of")(text)


def _named(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def pickled(source: tuple[Any, Any, dict]) -> bytes:
    """Return the source, target and options of a kernel as bytes.

    Raises:
        pickle.PicklingError: the kernel has a function that another process cannot import.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(source)
    return file.getvalue()


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


def unpickled(source: bytes) -> tuple[Any, Any, dict]:
    """Return what :func:`pickled` was given."""
    found: tuple[Any, Any, dict] = _Unpickler(io.BytesIO(source)).load()
    return found


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
