"""Where compiled kernels are found (:func:`find`), so that they need not be compiled again: first in folders
that ``flashtile compile`` made, then in Triton's disk cache.

*Folders* are made on one machine, without a GPU, and used on another. A folder has ``index.json`` and two
files for each kernel, its compressed binary and its metadata. The index has the versions of flashtile and
Triton that made the kernels, and the SHA-256 digest of every file. A kernel is loaded only if its files have
those digests, so a damaged file means that the kernel is compiled as usual. A folder contains code that will
be run, so it is refused if users other than its owner may write to it. Its kernels are found by
:func:`key_of`, which depends on the kernel's source, its arguments and options and on the target, but neither
on the path of Triton's installation nor on the version of Python.

*Triton's cache* is read without reading Triton's whole installation. The name of a cache entry depends on the
kernel's source and options, and on ``triton_key``: a digest of every file of Triton's compiler, including the
400 to 500 MB of libtriton.so. In Triton, each process computes that digest before its first launch. But file
sizes and modification times suffice to tell whether files changed, as for a .pyc. So ``triton_key`` is stored
in the cache under a digest of sizes and times. The name of the entry is then built from the stored
``triton_key``, as in Triton. All other cases fall back to Triton: no stored key, no entry of this name, an
entry that cannot be read, or a Triton that names entries differently. Triton is told the stored key before it
compiles, so only the first process that compiles computes it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from flashtile.backends import compat
from flashtile.backends.common.keys import source_key
from flashtile.files import as_path, replace_file
from flashtile.garbage import uncollected
from flashtile.version import __version__

COMPILER_FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
"""Folders of Triton's installation that hold all files that ``triton_key`` reads."""

COMPILER_FILES = (".py", ".so")
POLLED_EVERY = 0.01
"""Seconds between two attempts to read the stored key."""
_computing = threading.Lock()
"""Held while ``triton_key``, a digest of 400 to 500 MB, is computed."""


def find(src: Any, target: Any, options: dict | None) -> Any:
    """Return a kernel from the folders of compiled kernels or Triton's disk cache, or None."""
    if folders := in_use_for(target):
        key = key_in_folders(src, target, options)
        for folder in folders:
            if (found := folder.load(key, src)) is not None:
                return found
    return _load(src, target, options, _key_file())


def key_in_folders(src: Any, target: Any, options: dict | None) -> str:
    """Return the key of a kernel (:func:`key_of`) with options that are not parsed."""
    parsed, variables = _parsed(src, compat.compiler_of(target), options)
    return key_of(src, target, parsed, variables)


def _parsed(src: Any, backend: Any, options: dict | None) -> tuple[Any, list[tuple[str, str]]]:
    """Return the compiler's parsed options, and the environment variables that change what it compiles."""
    parsed = backend.parse_options(dict(options or {}, **src.parse_options()))
    return parsed, compat.compiler_variables()


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
        triton_key = _read_key(key_file)
        if triton_key is None:
            return None
        backend = compat.compiler_of(target)
        parsed, variables = _parsed(src, backend, options)
        key = f"{triton_key}-{src.hash()}-{backend.hash()}-{parsed.hash()}-{variables}"
        name = hashlib.sha256(key.encode()).hexdigest()
        metadata = f"{src.name[:150]}.json"
        files = compat.files_in_cache(name, metadata)
        return compat.compiled_from(src, files, name) if metadata in files else None
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
        compute = compat.digest_function()
        if compute is None:
            return
        with _computing:  # Triton keeps the key, but two threads would both compute it
            stored = _read_key(key_file)
            if stored is not None:
                compat.tell_digest(lambda: stored)
                return
            key = compute()
        key_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(key_file, f"{_digest(key)} {key}")
    except OSError:  # the cache cannot be written
        return


FORMAT = 2
INDEX = "index.json"
VARIABLE = "FLASHTILE_KERNELS"
"""Environment variable with folders to use, separated as in PATH."""
PACKAGE = "flashtile_kernels"
"""Namespace package of installed folders. The wheels that ``make kernels`` builds put folders into it."""
NO_SOURCE_LINES = "TRITON_DISABLE_LINE_INFO"
"""Triton's variable for binaries without what only debuggers and profilers read: source lines and the text of
PTX. This is most of their bytes, so the kernels of folders are compiled with it."""
_SUFFIXES = (".json", ".cubin.xz")
_DAMAGED = (OSError, KeyError, TypeError, ValueError)
"""Exceptions that mean that the files of a kernel, or its entry in the index, are missing or damaged."""

logger = logging.getLogger("flashtile.kernels")


def key_of(src: Any, target: Any, options: Any, variables: list[tuple[str, str]]) -> str:
    """Return the key of a kernel, a hexadecimal digest that names the kernel's files in a folder.

    Args:
        src: source of the kernel with its signature and constants, an ``ASTSource`` of Triton.
        target: ``GPUTarget`` that it is compiled for.
        options: options of the compiler, as Triton's backend has parsed them.
        variables: environment variables that change what Triton compiles, sorted. ``NO_SOURCE_LINES`` is not
            part of the key.
    """
    variables = [(name, value) for name, value in variables if name != NO_SOURCE_LINES]
    parts = (triton.__version__, src.name, source_key(src), str(target), options.hash(), str(variables))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class CompiledFolder:
    """A folder of compiled kernels.

    Attributes:
        path: the folder.
        flashtile, triton: versions that made its kernels, and that can load them.
        archs: number of kernels by architecture, such as ``{"sm_90": 112}``.
        files: maps the key of each kernel to the digests of its files, by suffix.
    """

    path: Path
    flashtile: str
    triton: str
    archs: dict[str, int]
    files: dict[str, dict[str, str]]

    @staticmethod
    def read(path: str | os.PathLike[str]) -> CompiledFolder:
        """Read the index of a folder.

        Raises:
            ValueError: ``path`` is not a folder made by ``flashtile compile``, others may write to it, or it
                was made by another version of flashtile or Triton.
        """
        folder = as_path(path).absolute()
        try:
            _check_owner(folder)
            index = json.loads((folder / INDEX).read_text("utf-8"))
            if index["format"] != FORMAT:
                raise ValueError(f"it has format {index['format']}, expected {FORMAT}")
            found = CompiledFolder(
                folder, index["flashtile"], index["triton"], dict(index["archs"]), dict(index["kernels"])
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = f"no {INDEX}" if isinstance(error, FileNotFoundError) else error
            raise ValueError(
                f"path must be a folder made by `flashtile compile`, got {path}: {reason}"
            ) from None
        for name, made, here in (
            ("flashtile", found.flashtile, __version__), ("Triton", found.triton, triton.__version__)
        ):  # fmt: skip
            if made != here:
                raise ValueError(f"path must have kernels for {name} {here}, got {path} for {name} {made}")
        return found

    def load(self, key: str, src: Any) -> Any:
        """Return the ``CompiledKernel`` of this key, or None if its files are missing or damaged."""
        digests = self.files.get(key)
        if digests is None:
            return None
        try:
            import lzma  # some builds of Python lack it

            metadata, binary = self._contents(key, digests)
            with tempfile.TemporaryDirectory() as place:  # CompiledKernel reads files, each of them once
                group = {"kernel.json": metadata, "kernel.cubin": lzma.decompress(binary)}
                for name, content in group.items():
                    Path(place, name).write_bytes(content)
                return compat.compiled_from(src, {name: str(Path(place, name)) for name in group}, key)
        except (ImportError, *_DAMAGED) as error:
            logger.warning("%s: %s is compiled again: %s", self.path, src.name, error)
            return None

    def has_whole(self, key: str) -> bool:
        """Whether the folder has the files of a kernel, undamaged, so that it is not compiled again."""
        try:
            return bool(self._contents(key, self.files[key]))
        except _DAMAGED:
            return False

    def _contents(self, key: str, digests: dict[str, str]) -> list[bytes]:
        """Return the contents of a kernel's files, or raise one of _DAMAGED."""
        contents = []
        for suffix in _SUFFIXES:
            contents.append((self.path / f"{key}{suffix}").read_bytes())
            if hashlib.sha256(contents[-1]).hexdigest() != digests[suffix]:
                raise ValueError(f"{key}{suffix} is damaged")
        return contents


def write_kernel(folder: Path, key: str, compiled: Any) -> dict[str, str]:
    """Write a compiled kernel and return the digests of its files, by suffix."""
    import lzma

    metadata = compiled.metadata._asdict()
    metadata["target"] = vars(metadata["target"])
    # Instructions have 16 bytes: their positions modulo 16 save 2 % of a folder.
    aligned = {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 1, "lp": 2, "pb": 4}
    binary = lzma.compress(compiled.asm["cubin"], filters=[aligned])
    digests = {}
    for suffix, content in zip(_SUFFIXES, (json.dumps(metadata, default=vars).encode(), binary), strict=True):
        replace_file(folder / f"{key}{suffix}", content)
        digests[suffix] = hashlib.sha256(content).hexdigest()
    return digests


def write_index(folder: Path, kernels: dict[str, tuple[str, dict[str, str]]]) -> None:
    """Write the index of a folder.

    Args:
        kernels: maps the key of each kernel to its architecture and the digests of its files.
    """
    index = {
        "format": FORMAT, "flashtile": __version__, "triton": triton.__version__,
        "archs": Counter(arch for arch, _ in kernels.values()),
        "kernels": {key: digests for key, (_, digests) in sorted(kernels.items())},
    }  # fmt: skip
    replace_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
    (folder / INDEX).chmod(0o644)  # readers refuse an index that a group may write to


_in_use: list[CompiledFolder] = []
"""Folders that :func:`use_compiled` was called with, the last one first."""


def use_compiled(path: str | os.PathLike[str]) -> CompiledFolder:
    """Use the compiled kernels of a folder, made by ``flashtile compile``, in this process.

    A kernel in the folder is never compiled; any other is compiled as usual. The environment variable
    ``FLASHTILE_KERNELS`` does the same for every process.

    Args:
        path: the folder. Its kernels are run, so it must come from someone you trust.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``path`` is not a folder made by ``flashtile compile``, others may write to it, or it was
            made by another version of flashtile or Triton.

    Examples:
        >>> flashtile.use_compiled("/nowhere")
        Traceback (most recent call last):
        ValueError: path must be a folder made by `flashtile compile`, got /nowhere: no index.json
    """
    folder = CompiledFolder.read(path)
    _in_use[:] = [folder, *(other for other in _in_use if other.path != folder.path)]
    return folder


def in_use() -> tuple[CompiledFolder, ...]:
    """Return the folders in use, in the order in which they are searched.

    First come those of :func:`use_compiled`, then those of ``FLASHTILE_KERNELS``, then installed packages.
    """
    return (*_in_use, *_of_environment(os.environ.get(VARIABLE, "")), *_installed())


def in_use_for(target: Any) -> tuple[CompiledFolder, ...]:
    """Return the folders in use that have kernels for the architecture of a ``GPUTarget``.

    For each other folder it is logged once that it has none.
    """
    folders = in_use()
    arch = f"sm_{target.arch}" if folders else ""
    return tuple(folder for folder in folders if _has(folder.path, tuple(folder.archs), arch))


@cache
def _has(path: Path, archs: tuple[str, ...], arch: str) -> bool:
    """Whether ``arch`` is in ``archs``, the architectures of the folder ``path``. If not, it is logged."""
    if arch not in archs:
        logger.warning("%s has kernels for %s, but none for %s", path, ", ".join(archs), arch)
    return arch in archs


@cache
def _of_environment(paths: str) -> tuple[CompiledFolder, ...]:
    return _usable(filter(None, paths.split(os.pathsep)), VARIABLE)


@cache
def _installed() -> tuple[CompiledFolder, ...]:
    """Return the usable folders in the namespace package PACKAGE, which is found without being imported."""
    spec = importlib.util.find_spec(PACKAGE)
    places = () if spec is None else spec.submodule_search_locations or ()
    folders = (index.parent for place in places for index in Path(place).glob(f"*/{INDEX}"))
    return _usable(map(str, folders), PACKAGE)


def _usable(paths: Iterable[str], source: str) -> tuple[CompiledFolder, ...]:
    """Return the usable folders among ``paths``. For each other path, log why it cannot be used.

    ``source`` says in the log where the paths come from.
    """
    found = []
    for path in paths:
        try:
            found.append(CompiledFolder.read(path))
        except ValueError as error:
            logger.warning("%s: %s", source, error)
    return tuple(found)


def _check_owner(folder: Path) -> None:
    """Refuse a folder that users other than its owner may write to, since its kernels are run."""
    for path in (folder, folder / INDEX):
        status = path.stat()
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"others may write to {path}")
        if status.st_uid not in (os.getuid(), 0):
            raise ValueError(f"{path} belongs to another user")
