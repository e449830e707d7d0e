"""Real text that every machine has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
"""Size of the vocabulary: tokens are bytes."""

NOT_PROSE = frozenset({"encodings", "pydoc_data"})  # folders of generated tables
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})

VALIDATION_EVERY = 10
"""Every tenth file in order of path is used for validation only."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, both (number of bytes,) uint8 on the CPU."""

    source: str
    files: int
    train: Tensor
    validation: Tensor


def python_library(folder: Path | None = None) -> Corpus:
    """Read the ``.py`` files of the standard library, or those below ``folder``.

    Tests, installed packages and generated tables are left out. Each call returns the same bytes.

    Raises:
        FileNotFoundError: there are fewer than two files, for example in a Python with compiled files only.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = [path for path in paths if not (NOT_PROSE | NOT_LIBRARY).intersection(path.parts)]
    if len(paths) < 2:
        raise FileNotFoundError(f"the corpus needs Python source files, but {folder} holds {len(paths)}")
    files = [(folder / path).read_bytes() for path in paths]
    held_out = [i % VALIDATION_EVERY == min(VALIDATION_EVERY, len(paths)) - 1 for i in range(len(paths))]
    train = b"\n".join(text for text, held in zip(files, held_out, strict=True) if not held)
    validation = b"\n".join(text for text, held in zip(files, held_out, strict=True) if held)
    return Corpus("Python standard library", len(files), _as_tensor(train), _as_tensor(validation))


def sample_batch(text: Tensor, batch: int, seqlen: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), each (batch, seqlen) int64.

    The inputs are random excerpts. The targets are the same excerpts shifted by one byte.

    Raises:
        ValueError: the text is too short for an excerpt of that length.
    """
    if len(text) <= seqlen:
        raise ValueError(f"seqlen must be below the text's {len(text)} bytes, got {seqlen}")
    starts = torch.randint(len(text) - seqlen, (batch, 1), generator=generator, device="cpu")
    excerpts = text[starts + torch.arange(seqlen + 1, device="cpu")].long()
    return excerpts[:, :-1], excerpts[:, 1:]


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
