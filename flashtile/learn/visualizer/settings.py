"""Settings that the page offers: each combination is one recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from flashtile.hardware.cards import CARDS
from flashtile.learn.algorithms.memory import DEFAULT_SRAM_BYTES

SRAM_CARDS = ("t4", "l40s", "a100", "h100")
SRAM_SIZES = tuple(CARDS[name].shared_bytes for name in SRAM_CARDS)
"""Shared memory of a multiprocessor, from Turing to Hopper."""

MASKS = ("full", "causal", "window")
WINDOW_SHARE = 4
"""A window covers the sequence's length divided by this."""

ONE_QUERY = ("flash_decoding", "unified_max", "paged")
"""Algorithms for decoding steps."""

SPLIT = ("flash_decoding", "unified_max")
"""Algorithms that split the keys."""

AUTO = "auto"
"""Blocks as large as SRAM allows, by each paper's rule."""

DEFAULT_SPLITS = 8
DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True)
class Setting:
    """Algorithm and sizes of one run.

    Args:
        algorithm: a key of :data:`flashtile.learn.visualizer.recording.RUNNERS`.
        seqlen: number of tokens. If there is only one query, the number of keys.
        head_dim: head size of queries, keys and values.
        queries: "all" for one query per token, or "one" for a decoding step.
        mask: "full", "causal" or "window". A window is causal, and a query sees only its nearest keys, a
            quarter of seqlen.
        block: "64x64" for blocks of 64 queries and 64 keys, or "auto".
        sram_bytes: size of SRAM from which "auto" derives the blocks. None if the blocks are given, because
            such a run is the same on every SRAM that it fits into.
        num_splits, page_size: options of the algorithms that have them.
    """

    algorithm: str
    seqlen: int
    head_dim: int
    queries: str = "all"
    mask: str = "full"
    block: str | None = None
    sram_bytes: int | None = None
    num_splits: int | None = None
    page_size: int | None = None

    @property
    def block_sizes(self) -> tuple[int | None, int | None]:
        """(block_m, block_n), or (None, None) if the blocks are derived from the size of SRAM.

        Raises:
            ValueError: ``block`` is neither "auto" nor of the form "64x64".
        """
        if self.block is None or self.block == AUTO:
            return None, None
        sizes = self.block.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f'block must be "{AUTO}" or like "64x64" (queries x keys), got {self.block!r}')
        return int(sizes[0]), int(sizes[1])

    @property
    def window_size(self) -> tuple[int, int]:
        """Window (left, right) in the form that flashtile's functions take."""
        return {"full": (-1, -1), "causal": (-1, 0), "window": (self.seqlen // WINDOW_SHARE - 1, 0)}[
            self.mask
        ]

    def as_record(self) -> dict[str, Any]:
        """Return the settings that are not None, without the algorithm. The page finds a run by them."""
        record = {name: value for name, value in asdict(self).items() if value is not None}
        del record["algorithm"]
        return record


def own_runs(
    algorithm: str,
    seqlen: int = 1024,
    head_dim: int = 64,
    mask: str = "full",
    block: str | None = None,
    sram_bytes: int = DEFAULT_SRAM_BYTES,
    num_splits: int | None = None,
    page_size: int | None = None,
) -> list[Setting]:
    """Return the setting that the caller describes, and that of standard attention for the same problem.

    Raises:
        ValueError: the algorithm does not have a setting, or the mask is unknown.
    """
    if mask not in MASKS:
        raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {mask!r}")
    queries = "one" if algorithm in ONE_QUERY else "all"
    if queries == "one" and mask != "full":
        raise ValueError(f'mask must be "full" for {algorithm}, whose one query sees all keys, got {mask!r}')
    options: dict[str, tuple[Any, Any, bool]] = {  # value, default, whether the algorithm has the option
        "block": (block, AUTO, algorithm not in ("standard", "standard_backward", "paged")),
        "num_splits": (num_splits, DEFAULT_SPLITS, algorithm in SPLIT),
        "page_size": (page_size, DEFAULT_PAGE_SIZE, algorithm == "paged"),
    }
    for name, (value, _, taken) in options.items():
        if value is not None and not taken:
            raise ValueError(f"{name} must not be given for {algorithm}, which has none, got {value!r}")
    problem = Setting("", seqlen, head_dim, queries, mask, sram_bytes=sram_bytes)
    own = {name: value or default for name, (value, default, taken) in options.items() if taken}
    chosen = replace(problem, algorithm=algorithm, **own)
    baseline = "standard_backward" if algorithm.endswith("_backward") else "standard"
    return [chosen] if algorithm == baseline else [chosen, replace(problem, algorithm=baseline)]


def grid() -> Iterator[Setting]:
    """Yield every run that the page offers."""
    yield from _prefill()
    yield from _backward()
    yield from _decoding()
    yield from _paged()


LONG = 4096
"""Length of long runs. They take seconds to record, so there are fewer of them."""

BLOCKS = {
    256: ("16x16", "32x32", "64x64"),
    1024: ("64x64", "128x64", "64x128", "128x128"),
    LONG: ("64x64", "128x128"),
}
TILED = ("flash1", "flash2", "flash3")
FLASH3_BLOCKS = {256: ("16x16", "32x32", "64x64"), 1024: ("64x64",), LONG: ("64x64",)}
"""Blocks by length. Each of two warpgroups has tiles of its own, so larger blocks exceed all SRAM sizes of
the page."""


def _prefill() -> Iterator[Setting]:
    for seqlen, head_dim, mask in product(BLOCKS, (64, 128), MASKS):
        if seqlen == LONG and (mask == "window" or (mask, head_dim) == ("causal", 128)):
            continue
        for sram in SRAM_SIZES:
            yield Setting("standard", seqlen, head_dim, mask=mask, sram_bytes=sram)
        for algorithm in TILED:
            for block in (FLASH3_BLOCKS if algorithm == "flash3" else BLOCKS)[seqlen]:
                if not (seqlen == LONG and head_dim == 128 and block == "64x64"):
                    yield Setting(algorithm, seqlen, head_dim, mask=mask, block=block)
            if head_dim == 64 and mask == "full":
                for sram in SRAM_SIZES:
                    yield Setting(algorithm, seqlen, head_dim, mask=mask, block=AUTO, sram_bytes=sram)


def _backward() -> Iterator[Setting]:
    for seqlen, mask in product((256, 1024), ("full", "causal")):
        for sram in SRAM_SIZES:
            yield Setting("standard_backward", seqlen, 64, mask=mask, sram_bytes=sram)
        for algorithm, block in product(("flash1_backward", "flash2_backward"), ("32x32", "64x64")):
            if seqlen // 32 <= 8 or block == "64x64":
                yield Setting(algorithm, seqlen, 64, mask=mask, block=block)


def _decoding() -> Iterator[Setting]:
    for seqlen, head_dim in product((1024, LONG), (64, 128)):
        for sram in SRAM_SIZES:
            yield Setting("standard", seqlen, head_dim, queries="one", sram_bytes=sram)
        for block in ("1x64", "1x128"):
            yield Setting("flash2", seqlen, head_dim, queries="one", block=block)
            for algorithm, splits in product(SPLIT, (1, 2, 4, 8, 16)):
                if splits * int(block[2:]) <= seqlen:
                    yield Setting(algorithm, seqlen, head_dim, queries="one", block=block, num_splits=splits)


def _paged() -> Iterator[Setting]:
    for seqlen, page_size in product((64, 256), (4, 8, 16, 32)):
        if 4 <= seqlen // page_size <= 32:
            yield Setting("paged", seqlen, 64, queries="one", page_size=page_size)
