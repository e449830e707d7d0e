"""Process that compiles kernels (``first_calls.start_worker``). It imports no torch, which takes seconds.

An empty class stands for each name of torch that flashtile's modules use. Kernels do not depend on these
classes: a kernel is compiled only if its key is the same as in the program, which has torch.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules could hide others of the same name

import importlib.abc
import importlib.machinery
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any


class _Nothing(type):
    """Type of the classes that stand for torch's names. Their attributes and calls are more such classes."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return _Nothing(cls.__name__, (), {})


def _attribute(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Nothing(name, (), {})
    setattr(owner, name, made)
    return made


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)


class _WithoutTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that makes an empty module for torch and each of its submodules, with any attribute."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because attributes are made when they are used."""


def _receive(tasks: queue.SimpleQueue) -> None:
    """Put the tasks from stdin into a queue. End this process when stdin is closed."""
    try:
        while True:
            tasks.put(pickle.load(sys.stdin.buffer))  # from the program that started this process
    finally:
        os._exit(1)


def without_torch(paths: list[str], package: str) -> None:
    """Prepare this process to import modules of flashtile with kernels, without torch.

    Args:
        paths: ``sys.path`` of the program.
        package: folder of flashtile.
    """
    sys.path[:] = paths
    sys.meta_path.insert(0, _WithoutTorch())
    for name, folder in (("flashtile", package), ("flashtile.engine", os.path.join(package, "engine"))):
        # Their __init__.py files import much more than kernels, and not all of it can be without torch.
        empty: Any = types.ModuleType(name)
        empty.__path__ = [folder]
        sys.modules[name] = empty


def _use_stored_digest(longest_hashing: float) -> None:
    """Give Triton the digest of its installation that another process has computed and stored.

    If none is stored when Triton needs it, wait for it, at most ``longest_hashing`` seconds from now on.
    """
    from flashtile.backends.common.kernel_store import stored_key
    from flashtile.backends.compat import digest_function, tell_digest

    compute: Any = digest_function()
    end = time.monotonic() + longest_hashing
    stored = stored_key()
    tell_digest(lambda: stored or stored_key(end) or compute())


def compile_handed(key: str, source: bytes, descriptor: int | None) -> None:
    """Compile a kernel into Triton's cache, unless another process is compiling it.

    Nothing is compiled if the kernel has another key in this process.

    Args:
        key: key of the kernel (:func:`kernel_store.key_of`).
        source: the kernel as bytes (:func:`pickled`).
        descriptor: :attr:`KernelLock.descriptor`, which this process has inherited. None: this process locks
            the kernel itself.
    """
    from flashtile.backends.common import kernel_store
    from flashtile.backends.common.first_calls import KernelLock, unpickled

    lock = KernelLock(key, descriptor)
    if descriptor is None and not lock.acquire():
        return
    try:
        kernel = unpickled(source)
        if kernel_store.key_in_folders(*kernel) == key:
            kernel_store.load_or_compile_alone(*kernel)
    finally:
        lock.release()


def compile_into(key: str, source: bytes, folder: str | None) -> dict[str, str]:
    """Compile a kernel into a folder for other machines, and return the digests of its files, by suffix.

    Triton's cache is then not used, because it takes 3 MB for each kernel. If ``folder`` is None, the kernel
    goes to Triton's cache, and there are no digests. ``key`` and ``source`` are those of
    :func:`compile_handed`.

    Raises:
        ValueError: the kernel has another key in this process.
    """
    from triton import knobs

    from flashtile.backends.common.first_calls import load_or_compile, unpickled
    from flashtile.backends.common.kernel_store import key_in_folders, write_kernel

    kernel = unpickled(source)
    if (own := key_in_folders(*kernel)) != key:
        raise ValueError(f"expected a kernel with key {key}, got {own}")
    if folder is None:
        load_or_compile(*kernel)
        return {}
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
        knobs.cache.dir = cache
        return write_kernel(Path(folder), key, load_or_compile(*kernel))


TASKS: dict[str, Any] = {"compile_handed": compile_handed, "compile_into": compile_into}


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted program closes stdin, or needs the kernels
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    *program, longest_hashing = pickle.load(sys.stdin.buffer)
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks,), daemon=True).start()
    without_torch(*program)
    _use_stored_digest(longest_hashing)
    while (task := tasks.get()) is not None:
        name, *arguments = task
        try:
            answer = TASKS[name](*arguments)
        except Exception as error:  # the other kernels are still compiled
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
