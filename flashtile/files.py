"""Paths that callers give, files that are replaced atomically, and the design of flashtile's pages."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

DESIGN = Path(__file__).with_name("assets") / "design.css"
"""Colours, type and spacing of every page; see the file."""


def as_path(path: Any, name: str = "path") -> Path:
    """Return ``path`` as a Path. ``name`` is the argument's name in errors.

    Raises:
        TypeError: it is neither a str nor an os.PathLike.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a str or an os.PathLike, got {type(path).__name__}")
    return Path(path)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write or replace a file atomically. Several processes and threads may do so at the same time."""
    written = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    written.write_bytes(content if isinstance(content, bytes) else content.encode())
    written.replace(path)
