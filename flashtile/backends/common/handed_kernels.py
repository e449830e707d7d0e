"""Kernels that one process hands to another for compilation: their sources as bytes, and their locks."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import time
from functools import reduce
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.jit import JITCallable

from flashtile.backends.common import kernel_cache

LONGEST_WAIT = 60.0
"""Seconds after which a process compiles a kernel though another process holds the kernel's lock."""

POLLED_EVERY = 0.005
"""Seconds between two attempts to lock a kernel."""


class _Pickler(pickle.Pickler):
    """Pickler that writes each JIT function of flashtile as its name, and a generated function as its text.

    Other JIT functions raise a PicklingError.
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
    """Lock of a kernel, which only one process holds. It is free when the processes that hold it have ended.

    Attributes:
        descriptor: the locked file, or None if the lock is not held. A process that inherits the descriptor
            holds the lock.
    """

    def __init__(self, key: str, descriptor: int | None = None) -> None:
        self.key, self.descriptor = key, descriptor

    def acquire(self) -> bool:
        """Return whether this process holds the lock now.

        Raises:
            ImportError, OSError: this system has no such locks, or the cache cannot be written.
        """
        import fcntl  # Windows does not have it

        path = Path(knobs.cache.dir) / "flashtile_locks" / self.key
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
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
        """Free the lock, also for a process that has inherited it."""
        if self.descriptor is not None:
            import fcntl

            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor also
            self.close()

    def close(self) -> None:
        """Forget the lock. A process that has inherited it still holds it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def unpickled(source: bytes) -> tuple[Any, Any, dict]:
    """Return what :func:`pickled` was given."""
    found: tuple[Any, Any, dict] = _Unpickler(io.BytesIO(source)).load()
    return found


def compile_handed(key: str, source: bytes, descriptor: int | None) -> None:
    """Compile a kernel into Triton's cache, unless another process is compiling it.

    Nothing is compiled if the kernel has another key in this process.

    Args:
        key: key of the kernel (:func:`compiled_folder.key_of`).
        source: the kernel as bytes (:func:`pickled`).
        descriptor: the kernel's lock, which this process has inherited. None: the kernel is not locked.
    """
    lock = KernelLock(key, descriptor)
    if descriptor is None and not lock.acquire():
        return
    src, target, options = unpickled(source)
    if kernel_cache.key_in_folders(src, target, options) == key:
        kernel_cache.load_or_compile_alone(src, target, options)
    lock.release()
