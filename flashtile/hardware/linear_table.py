"""Which kernel multiplies how many rows: measured offline, by card, shape and dtype.

Of a shape (N, K) two numbers of rows matter (FlashDecoding++, Hong et al. 2023, arXiv:2311.01282, section
5): from M1 on the flat product is faster than the one on CUDA cores (GEMV), from M2 on the library's is. The
tables that come with flashtile are in ``tables/``; ``flashtile profile`` adds a user's own in the cache
folder. Nothing is measured at run time.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

VERSION = 1
"""Of the file's format. Files of another version are left alone."""

GEMV, FLAT, LIBRARY = "gemv", "flat", "library"


@dataclass(frozen=True)
class Row:
    """What was measured of one shape on one card.

    Args:
        card: as the driver calls it, such as "NVIDIA H200".
        gemv_below, library_from: M1 and M2, in rows of x.
        kernels: for numbers of rows (as text: JSON has no other keys), the fastest kernel of each kind with
            its configuration and time: ``{"16": {"flat": {"us": 9.1, "config": [...]}, "library": {...}}}``.
        read_tbps: what the card reads at most, in 10^12 bytes a second, measured beside.
    """

    card: str
    N: int
    K: int
    dtype: str
    weight_dtype: str
    gemv_below: int
    library_from: int
    kernels: dict[str, dict[str, dict[str, Any]]] = field(hash=False)
    read_tbps: float

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        return self.card, self.N, self.K, self.dtype, self.weight_dtype

    @property
    def weight_bytes(self) -> int:
        return self.N * self.K * (1 if self.weight_dtype.startswith("float8") else 2)

    def kind(self, rows: int) -> str:
        return GEMV if rows < self.gemv_below else FLAT if rows < self.library_from else LIBRARY

    def measured(self, rows: int, kind: str) -> dict[str, Any] | None:
        """What was measured for as many rows, or for the next number of rows above (below if there is
        none above)."""
        known = sorted(int(m) for m, kinds in self.kernels.items() if kind in kinds)
        above = [m for m in known if m >= rows]
        at = above[0] if above else known[-1] if known else None
        return None if at is None else self.kernels[str(at)][kind]


@dataclass(frozen=True)
class Found:
    """The row that decides about a shape, and why this one."""

    row: Row
    how: str


def cache_file() -> Path:
    """The user's own table; ``FLASHTILE_CACHE_DIR`` names another folder than ``~/.cache/flashtile``."""
    folder = os.environ.get("FLASHTILE_CACHE_DIR")
    if folder:
        return Path(folder) / "linear.json"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "flashtile" / "linear.json"


def read_table(path: Path) -> tuple[Row, ...]:
    """The rows of a file.

    Raises:
        ValueError: it is no table of this version, with what is wrong.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text())
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of flashtile profile: {error!r}") from None
    if version != VERSION:
        raise ValueError(f"{path} has version {version!r}, this flashtile reads {VERSION}")
    try:
        rows = tuple(Row(**row) for row in document["rows"])
        for row in rows:
            if not (row.N > 0 and row.K > 0 and math.isfinite(row.read_tbps) and row.library_from >= 1):
                raise ValueError(f"numbers of {row.key}")
            for m in row.kernels:
                int(m)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no table of flashtile profile: {error!r}") from None
    return rows


def write_table(path: Path, rows: tuple[Row, ...]) -> None:
    """Replace a file by these rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, "rows": [asdict(row) for row in rows]}
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(document, indent=1) + "\n")
    written.replace(path)


def merged(old: tuple[Row, ...], new: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows of both; of two for the same, the new one."""
    return tuple(({row.key: row for row in old} | {row.key: row for row in new}).values())


def rows() -> tuple[Row, ...]:
    """What came with flashtile, replaced and extended by the user's own table."""
    path = cache_file()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return _shipped()
    return merged(_shipped(), _own(path, stamp))


@lru_cache(maxsize=1)
def _shipped() -> tuple[Row, ...]:
    folder = Path(__file__).with_name("linear_tables")
    return tuple(row for path in sorted(folder.glob("*.json")) for row in read_table(path))


@lru_cache(maxsize=4)
def _own(path: Path, stamp: int) -> tuple[Row, ...]:
    """Read once for each state of the file, so that one that is no table is told of once."""
    try:
        return read_table(path)
    except (ValueError, OSError) as error:
        warnings.warn(f"flashtile leaves a table alone: {error}", stacklevel=2)
        return ()


def find(card: str, N: int, K: int, dtype: str, weight_dtype: str) -> Found | None:
    """The row that decides about a shape on a card; None if no table has a row for these dtypes.

    In this order: the shape's own on this card; on this card the one whose weight has about as many bytes, of
    those with a similar number of rows first; the same of another card. 16-bit dtypes are as fast as one
    another.
    """
    usable = [row for row in rows() if _width(row.weight_dtype) == _width(weight_dtype)]
    if not usable:
        return None

    def distance(row: Row) -> tuple:
        return (
            row.card != card,
            (row.N, row.K) != (N, K),
            row.dtype != dtype,
            abs(math.log(row.N / N)) + abs(math.log(row.N * row.K / (N * K))),
        )

    row = min(usable, key=distance)
    if row.card == card:
        exact = (row.N, row.K) == (N, K)
        return Found(row, "measured for this shape" if exact else "the nearest shape measured on this card")
    return Found(row, f"measured on {row.card}, none on {card or 'this device'}")


def _width(dtype: str) -> int:
    return 1 if dtype.startswith("float8") else 2 if dtype in ("float16", "bfloat16") else 4
