"""Folders of compiled kernels, which are made on one machine, without a GPU, and used on another.

A folder has ``index.json`` and two files for each kernel, its binary and its metadata. The index has the
versions of flashtile and Triton that made the kernels, and the SHA-256 digest of every file. A kernel is
loaded only if its files have those digests, so a damaged file means that the kernel is compiled as usual.
A folder contains code that will be run, so it is refused if users other than its owner may write to it.

Kernels are found by :func:`key_of`, which depends on the kernel's source, its arguments and options and on
the target, but neither on the path of Triton's installation nor on the version of Python.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton

from flashtile.files import as_path, replace_file

FORMAT = 1
INDEX = "index.json"
VARIABLE = "FLASHTILE_KERNELS"
"""Environment variable with folders to use, separated as in PATH."""
_SUFFIXES = (".json", ".cubin")

logger = logging.getLogger("flashtile.kernels")


def key_of(src: Any, target: Any, options: Any, variables: list[tuple[str, str]]) -> str:
    """Return the key of a kernel, a hexadecimal digest that names the kernel's files in a folder.

    Args:
        src: source of the kernel with its signature and constants, an ``ASTSource`` of Triton.
        target: ``GPUTarget`` that it is compiled for.
        options: options of the compiler, as Triton's backend has parsed them.
        variables: environment variables that change what Triton compiles, sorted.
    """
    parts = (triton.__version__, src.name, src.hash(), str(target), options.hash(), str(variables))
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
        from flashtile import __version__

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
        from triton.compiler.compiler import CompiledKernel

        try:
            group = {}
            for suffix in _SUFFIXES:
                path = self.path / f"{key}{suffix}"
                if hashlib.sha256(path.read_bytes()).hexdigest() != digests[suffix]:
                    raise ValueError(f"{path.name} is damaged")
                group[f"{src.name[:150]}{suffix}"] = str(path)
            return CompiledKernel(src, group, key)
        except (OSError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s: %s is compiled again: %s", self.path, src.name, error)
            return None


def write_kernel(folder: Path, key: str, compiled: Any) -> dict[str, str]:
    """Write a compiled kernel and return the digests of its files, by suffix."""
    metadata = compiled.metadata._asdict()
    metadata["target"] = vars(metadata["target"])
    contents = json.dumps(metadata, default=vars).encode(), compiled.asm["cubin"]
    digests = {}
    for suffix, content in zip(_SUFFIXES, contents, strict=True):
        replace_file(folder / f"{key}{suffix}", content)
        digests[suffix] = hashlib.sha256(content).hexdigest()
    return digests


def write_index(folder: Path, kernels: dict[str, tuple[str, dict[str, str]]]) -> None:
    """Write the index of a folder.

    Args:
        kernels: maps the key of each kernel to its architecture and the digests of its files.
    """
    from flashtile import __version__

    index = {
        "format": FORMAT, "flashtile": __version__, "triton": triton.__version__,
        "archs": Counter(arch for arch, _ in kernels.values()),
        "kernels": {key: digests for key, (_, digests) in sorted(kernels.items())},
    }  # fmt: skip
    replace_file(folder / INDEX, json.dumps(index, indent=1) + "\n")


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
    """Return the folders in use: those of :func:`use_compiled`, then those of ``FLASHTILE_KERNELS``."""
    return (*_in_use, *_of_environment(os.environ.get(VARIABLE, "")))


@cache
def _of_environment(paths: str) -> tuple[CompiledFolder, ...]:
    """Return the usable folders of a list of paths. For each other path, log why it cannot be used."""
    found = []
    for path in filter(None, paths.split(os.pathsep)):
        try:
            found.append(CompiledFolder.read(path))
        except ValueError as error:
            logger.warning("%s: %s", VARIABLE, error)
    return tuple(found)


def _check_owner(folder: Path) -> None:
    for path in (folder, folder / INDEX):
        status = path.stat()
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"others may write to {path}")
        if status.st_uid not in (os.getuid(), 0):
            raise ValueError(f"{path} belongs to another user")
