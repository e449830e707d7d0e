"""Look-up of compiled kernels in Triton's disk cache, without reading Triton's whole installation.

The name of a cache entry depends on the kernel's source and options, and on ``triton_key``: a digest of every
file of Triton's compiler, including the 400 to 500 MB of libtriton.so. In Triton, each process computes that
digest before its first launch. But file sizes and modification times suffice to tell whether files changed,
as for a .pyc. So ``triton_key`` is stored in the cache under a digest of sizes and times. The name of the
entry is then built from the stored ``triton_key``, as in Triton. All other cases fall back to Triton: no
stored key, no entry of this name, an entry that cannot be read, or a Triton that names entries differently.
Triton is told the stored key before it compiles, so only the first process that compiles computes it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from flashtile.backends import compat
from flashtile.backends.common import compiled_folder
from flashtile.files import replace_file
from flashtile.garbage import uncollected

COMPILER_FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
"""Folders of Triton's installation that hold all files that ``triton_key`` reads."""

COMPILER_FILES = (".py", ".so")
POLLED_EVERY = 0.01
"""Seconds between two attempts to read the stored key."""
_computing = threading.Lock()


def find(src: Any, target: Any, options: dict | None) -> Any:
    """Return a kernel from the folders of compiled kernels or Triton's disk cache, or None."""
    if folders := compiled_folder.in_use_for(target):
        key = key_in_folders(src, target, options)
        for folder in folders:
            if (found := folder.load(key, src)) is not None:
                return found
    return _load(src, target, options, _key_file())


def key_in_folders(src: Any, target: Any, options: dict | None) -> str:
    """Return the key of a kernel (:func:`compiled_folder.key_of`) with options that are not parsed."""
    from triton.compiler.compiler import make_backend

    parsed, variables = _parsed(src, make_backend(target), options)
    return compiled_folder.key_of(src, target, parsed, variables)


def _parsed(src: Any, backend: Any, options: dict | None) -> tuple[Any, list[tuple[str, str]]]:
    """Return the compiler's parsed options, and the environment variables that change what it compiles."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    parsed = backend.parse_options(dict(options or {}, **src.parse_options()))
    return parsed, sorted(get_cache_invalidating_env_vars().items())


def load_or_compile_alone(src: Any, target: Any, options: dict | None, **more: Any) -> Any:
    """Return a kernel from Triton's disk cache, or compile it. The caller holds the kernel's lock."""
    key_file = _key_file()
    found = _load(src, target, options, key_file)
    if found is None:
        _keep_key(key_file)
        with uncollected():
            found = triton.compile(src, target=target, options=options, **more)
    return found


def stored_key(wait_until: float = 0.0) -> str | None:
    """Return the ``triton_key`` that a process has stored for this installation of Triton, or None.

    ``wait_until``: time of ``time.monotonic`` until which this function waits for a process to store it.
    """
    key_file = _key_file()
    while (key := _read_key(key_file)) is None and time.monotonic() < wait_until:
        time.sleep(POLLED_EVERY)
    return key


def _read_key(key_file: Path) -> str | None:
    """Return the stored ``triton_key``, or None if there is none, or if the file is damaged."""
    try:
        digest, key = key_file.read_text().split(" ", 1)
    except (OSError, ValueError):
        return None
    return key if digest == _digest(key) else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _key_file() -> Path:
    return Path(knobs.cache.dir) / "flashtile" / fingerprint(Path(triton.__file__).parent)


def fingerprint(installation: Path) -> str:
    """Return a digest of Triton's version and path, and of the sizes and times of its compiler's files."""
    parts = [triton.__version__, str(installation)]
    for path in _compiler_files(installation):
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _compiler_files(installation: Path) -> Iterator[Path]:
    for name in COMPILER_FOLDERS:
        for folder, folders, files in os.walk(installation / name, followlinks=True):
            folders.sort()
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(COMPILER_FILES))


def _load(src: Any, target: Any, options: dict | None, key_file: Path) -> Any:
    """Return the compiled kernel from Triton's disk cache, or None if there is no readable entry for it."""
    try:
        from triton.compiler.compiler import CompiledKernel, make_backend
        from triton.runtime.cache import get_cache_manager

        triton_key = _read_key(key_file)
        if triton_key is None:
            return None
        backend = make_backend(target)
        parsed, variables = _parsed(src, backend, options)
        key = f"{triton_key}-{src.hash()}-{backend.hash()}-{parsed.hash()}-{variables}"
        name = hashlib.sha256(key.encode()).hexdigest()
        metadata = f"{src.name[:150]}.json"
        group = get_cache_manager(name).get_group(metadata) or {}
        return CompiledKernel(src, group, name) if metadata in group else None
    except Exception:  # the caller falls back to triton.compile, which reports a lasting error
        return None


def begin_key() -> None:
    """Begin to compute ``triton_key`` in another thread, if no process has stored it yet."""
    key_file = _key_file()
    if _read_key(key_file) is None:
        threading.Thread(target=_keep_key, args=(key_file,), daemon=True).start()


def _keep_key(key_file: Path) -> None:
    """Tell Triton the stored ``triton_key``. If there is none, Triton computes it, and it is stored.

    Several processes may do this at the same time.
    """
    try:
        from triton.runtime.cache import triton_key

        with _computing:  # Triton keeps the key, but two threads would both compute it
            stored = _read_key(key_file)
            if stored is not None:
                compat.tell_key(lambda: stored)
                return
            key = triton_key()
        key_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(key_file, f"{_digest(key)} {key}")
    except (ImportError, OSError):  # this Triton has no such function, or the cache cannot be written
        return
