"""Script of a process that compiles kernels into Triton's cache, without torch, which imports in seconds.

A class without attributes replaces each name of torch. Kernels do not depend on them: a kernel is compiled
only if its key is the one that the program has, with torch.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules have common names

import importlib.abc
import importlib.machinery
import os
import pickle
import threading
import time
import types
from typing import Any

LONGEST_HASHING = 1.0
"""Seconds after which this process computes the digest of Triton's installation itself."""


class _Nothing(type):
    """Type of the classes that replace torch's names. Their attributes and their calls are such classes."""

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
    """Finds modules of torch, which have every attribute."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because attributes are made when they are used."""


def _end_with_stdin(descriptor: int) -> None:
    """Wait until the program that started this process has ended, then end this process."""
    while os.read(descriptor, 2**16):
        pass
    os._exit(1)


def without_torch(paths: list[str], package: str) -> None:
    """Prepare this process to import modules of flashtile with kernels, without torch.

    Args:
        paths: ``sys.path`` of the program.
        package: folder of flashtile.
    """
    sys.path[:] = paths
    sys.meta_path.insert(0, _WithoutTorch())
    flashtile: Any = types.ModuleType("flashtile")  # the package's own module imports much more than kernels
    flashtile.__path__ = [package]
    sys.modules["flashtile"] = flashtile


def _hash_nothing_again() -> None:
    """Give Triton the digest of its installation that another process has computed and stored.

    If it is not there, the program has just begun to compute it. This process is only for compilation, so a
    function of Triton's may be replaced in it.
    """
    from triton.runtime import cache

    from flashtile.backends.common.kernel_cache import stored_key

    end = time.monotonic() + LONGEST_HASHING
    while (key := stored_key()) is None and time.monotonic() < end:
        time.sleep(0.01)
    if key is not None and hasattr(cache, "triton_key"):
        cache.triton_key = lambda: key


def _main() -> None:
    paths, package, tasks = pickle.load(sys.stdin.buffer)  # only the program that started this can write
    threading.Thread(target=_end_with_stdin, args=(sys.stdin.fileno(),), daemon=True).start()
    without_torch(paths, package)
    from flashtile.backends.common.handed_kernels import compile_handed

    _hash_nothing_again()
    for task in tasks:
        compile_handed(*task)
    os._exit(0)


if __name__ == "__main__":
    _main()
