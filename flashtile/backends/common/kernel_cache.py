"""Kernels that an earlier process compiled, found in Triton's disk cache without reading all of Triton.

The name of an entry in that cache holds, beside the kernel's own source and options, ``triton_key``: a digest
of every file of Triton's compiler, libtriton.so with its 400 to 500 MB included, which each process computes
anew before its first launch. Whether the files are still the same, their sizes and times tell, as they tell
Python whether a .pyc is current. So the key is kept in the cache, under a digest of sizes and times, and an
entry's name is put together from it as Triton does. Whatever does not fit leads to Triton's own way: no key
for these files, no entry of this name, an entry that cannot be read, a Triton that names entries differently.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

COMPILER_FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
"""Of Triton's installation: they hold all that ``triton_key`` reads."""

COMPILER_FILES = (".py", ".so")


class _Kept:
    """What a function of Triton needs to be compiled our way."""

    def create_binder(self) -> Any:
        binder = super().create_binder()  # type: ignore[misc]
        self.compile = load_or_compile
        return binder


class KeptFunction(_Kept, JITFunction):
    """A function that is compiled when it is launched."""


def kernel(**options: Any) -> Callable[[Callable], Any]:
    """:func:`triton.jit` for a kernel that is launched, of which a compiled form is looked for here first."""
    if knobs.runtime.interpret:
        return triton.jit(**options)
    return lambda function: KeptFunction(function, **options)


def gluon_kernel(**options: Any) -> Callable[[Callable], Any]:
    """:func:`kernel` in Gluon."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    class KeptGluonFunction(_Kept, GluonJITFunction):
        """The same in Gluon."""

    return lambda function: KeptGluonFunction(function, **options)


def load_or_compile(src: Any, target: Any = None, options: dict | None = None, **more: Any) -> Any:
    """:func:`triton.compile`, but that an entry of the cache is found faster."""
    if _is_observed():
        return triton.compile(src, target=target, options=options, **more)
    key_file = Path(knobs.cache.dir) / "flashtile" / fingerprint(Path(triton.__file__).parent)
    found = _load(src, target, options, key_file)
    if found is not None:
        return found
    compiled = triton.compile(src, target=target, options=options, **more)
    _keep_key(key_file)
    return compiled


def fingerprint(installation: Path) -> str:
    """A digest of Triton's version and place, and of the sizes and times of its compiler's files."""
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


def _is_observed() -> bool:
    """Whether something wants to see, or to change, what Triton does with each kernel."""
    return bool(
        knobs.compilation.always_compile
        or knobs.compilation.listener is not None
        or knobs.runtime.add_stages_inspection_hook is not None
    )


def _load(src: Any, target: Any, options: dict | None, key_file: Path) -> Any:
    """The compiled kernel from Triton's cache, None if it cannot be had without Triton's help."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler.compiler import CompiledKernel, make_backend
        from triton.runtime.cache import get_cache_manager

        triton_key = key_file.read_text()
        backend = make_backend(target)
        parsed = backend.parse_options(dict(options or {}, **src.parse_options()))
        variables = sorted(get_cache_invalidating_env_vars().items())
        key = f"{triton_key}-{src.hash()}-{backend.hash()}-{parsed.hash()}-{variables}"
        name = hashlib.sha256(key.encode()).hexdigest()
        metadata = f"{src.name[:150]}.json"
        group = get_cache_manager(name).get_group(metadata) or {}
        return CompiledKernel(src, group, name) if metadata in group else None
    except Exception:  # of whatever kind: Triton's own way is there, and says what is wrong
        return None


def _keep_key(key_file: Path) -> None:
    """Write down the key, which a compilation has just computed; another process may do the same."""
    try:
        from triton.runtime.cache import triton_key

        key = triton_key()
        if key_file.exists() and key_file.read_text() == key:
            return
        key_file.parent.mkdir(parents=True, exist_ok=True)
        written = key_file.with_name(f"{key_file.name}.{uuid.uuid4()}")
        written.write_text(key)
        written.replace(key_file)
    except (ImportError, OSError):  # a Triton without such a key, a cache that is not to be written
        return
