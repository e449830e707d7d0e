"""Tables of the fastest kernels for matrix products, by card, shape, dtype and number of rows.

For a weight (N, K), two numbers of rows M1 and M2 select the kernel (FlashDecoding++, Hong et al. 2023,
arXiv:2311.01282, section 5): below M1 the kernel on CUDA cores ("gemv"), from M1 the flat product on tensor
cores ("flat"), and from M2 the vendor's library ("library"). flashtile ships tables in ``linear_tables/``.
``flashtile profile`` measures shapes on this machine and writes a user's own table into the cache folder.
Nothing is measured at run time.
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

from flashtile.files import replace_file

VERSION = 1
"""Version of the file format. Files of other versions are ignored."""

GEMV, FLAT, LIBRARY = "gemv", "flat", "library"


@dataclass(frozen=True)
class Row:
    """Measurements of one shape on one card.

    Args:
        card: name of the card from the driver, such as "NVIDIA H200".
        N, K: shape of the weight.
        dtype, weight_dtype: names of the dtypes of x and of the weight.
        gemv_below, library_from: M1 and M2, in rows of x.
        kernels: maps a number of rows (as text, because JSON's keys are strings) to the fastest kernel of
            each kind, with its configuration and its time in microseconds:
            ``{"16": {"flat": {"us": 9.1, "config": [...]}, "library": {...}}}``.
        read_tbps: highest read bandwidth of the card, in 10^12 bytes per second, measured in the same run.
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
        """Return the measurement of a kind of kernel, or None if the kind was not measured.

        If this number of rows was not measured, the result is the measurement of the next larger number. If
        no larger number was measured, it is the measurement of the largest number.
        """
        known = sorted(int(m) for m, kinds in self.kernels.items() if kind in kinds)
        above = [m for m in known if m >= rows]
        at = above[0] if above else known[-1] if known else None
        return None if at is None else self.kernels[str(at)][kind]


@dataclass(frozen=True)
class Found:
    """The measurements that select kernels for a shape, and ``how``, the reason why they were chosen."""

    row: Row
    how: str


def cache_file() -> Path:
    """Return the path of the user's table, in ``FLASHTILE_CACHE_DIR`` or ``~/.cache/flashtile``."""
    folder = os.environ.get("FLASHTILE_CACHE_DIR")
    if folder:
        return Path(folder) / "linear.json"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "flashtile" / "linear.json"


def read_table(path: Path) -> tuple[Row, ...]:
    """Read a table of measurements from a file, for example one that ``flashtile profile`` wrote.

    Raises:
        ValueError: the file is not a valid table of this version.
        OSError: the file cannot be read.
    """
    try:
        document = json.loads(path.read_text())
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of flashtile profile: {error!r}") from None
    if version != VERSION:
        raise ValueError(f"{path} must have version {VERSION}, got {version!r}")
    try:
        rows = tuple(Row(**row) for row in document["rows"])
        for row in rows:
            if not (row.N > 0 and row.K > 0 and math.isfinite(row.read_tbps) and row.library_from >= 1):
                raise ValueError(f"invalid numbers in row {row.key}")
            for m in row.kernels:
                int(m)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of flashtile profile: {error!r}") from None
    return rows


def write_table(path: Path, rows: tuple[Row, ...]) -> None:
    """Write a table of measurements to a file atomically. An existing file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, "rows": [asdict(row) for row in rows]}
    replace_file(path, json.dumps(document, indent=1) + "\n")


def merged(old: tuple[Row, ...], new: tuple[Row, ...]) -> tuple[Row, ...]:
    """Merge two tables of measurements. A new row replaces an old row with the same key."""
    return tuple(({row.key: row for row in old} | {row.key: row for row in new}).values())


def rows() -> tuple[Row, ...]:
    """Return all measurements of matrix products: those that flashtile ships, and the user's own.

    A row of the user's table replaces flashtile's row with the same key.
    """
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
    """Read the user's table of measurements, or warn and return no rows if the file is invalid.

    ``stamp`` is the file's modification time. The result is cached until the file changes, so that an invalid
    file is reported only once.
    """
    try:
        return read_table(path)
    except (ValueError, OSError) as error:
        warnings.warn(f"flashtile ignores a table: {error}", stacklevel=2)
        return ()


def find(card: str, N: int, K: int, dtype: str, weight_dtype: str) -> Found | None:
    """Return the measurements to use for a weight (N, K) on a card.

    The first choice is a measurement of the same card and shape. The second is the measurement on the same
    card whose N and N * K are most similar, and the third is the most similar one on another card. float16
    and bfloat16 share measurements, because they are equally fast. Returns None if no weight with this number
    of bytes per element was measured on any card.
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
