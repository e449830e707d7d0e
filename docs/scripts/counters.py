"""The table of docs/io_model.md: the model of the portable kernels and the counters of Nsight Compute.

The counters were read by ``benchmarks/ncu_bytes.py`` of commit 0a2ffe22.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashtile.backends.common.config import KernelConfig
from flashtile.hardware.calls import Call
from flashtile.hardware.cards import Card
from flashtile.io_model import kernels
from flashtile.problems.common import UNLIMITED

SECTOR_BYTES = 32

SHAPE = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "dtype", "window_left")
"""Fields of a document that describe a call, in addition to ``causal``."""

HEAD = (
    "launch",
    "through L2",
    "read, model",
    "read, counted",
    "written, model",
    "written, counted",
    "model / counted",
)
"""Headings of :attr:`Comparison.cells`."""


@dataclass(frozen=True)
class Comparison:
    """Predicted and counted bytes of one launch.

    Args:
        name: name of the case, with the kernel's if the case has several.
        model: the prediction.
        dram_read: bytes that the kernel read; L2 was cold before.
        dram_written: bytes that the kernel wrote, including those still in L2 when it ended.
        l2_read: bytes that L2 served, None if they were not counted. SMs load more: loads of one address by
            several SMs at the same time are merged before L2 (the L2 request coalescer, "lrc", in Nsight
            Compute's Kernel Profiling Guide).
        l2_written: bytes that SMs wrote to L2, None if they were not counted.
    """

    name: str
    model: kernels.KernelTraffic
    dram_read: float
    dram_written: float
    l2_read: float | None
    l2_written: float | None

    @property
    def ratio(self) -> float:
        """Predicted over counted DRAM bytes, read and written."""
        return self.model.dram_bytes / (self.dram_read + self.dram_written)

    @property
    def merging(self) -> float | None:
        """Predicted loads of the SMs over those that L2 served."""
        return None if self.l2_read is None else self.model.sm_read / self.l2_read

    @property
    def spilled(self) -> float | None:
        """Bytes that SMs wrote in addition to the results: registers that the kernel spills."""
        return None if self.l2_written is None else self.l2_written - self.model.written

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a table's row, sizes in 10^6 bytes."""
        model = self.model
        moved = (model.sm_read, model.dram_read, self.dram_read, model.written, self.dram_written)
        return (self.name, *(f"{size / 1e6:.0f}" for size in moved), f"{self.ratio:.3f}")


def compare(document: dict[str, Any], card: Card) -> Iterator[Comparison]:
    """Yield a comparison for each launch of a document that was counted on ``card``."""
    for row in document["kernels"]:
        read, written = (row[f"lts__t_sectors_srcunit_tex_op_{way}.sum"] for way in ("read", "write"))
        name = row["case"]["name"]
        yield Comparison(
            name=f"{name} {row['kernel']}" if row["case"]["backward"] else name,
            model=predict(row, card),
            dram_read=row["dram_read"],
            dram_written=row["dram_written"] + row["dram_written_after"],
            l2_read=None if read is None else read * SECTOR_BYTES,
            l2_written=None if written is None else written * SECTOR_BYTES,
        )


def predict(row: dict[str, Any], card: Card) -> kernels.KernelTraffic:
    """Return the model's traffic for one launch of the document, with the tile that the kernel had then."""
    case = row["case"]
    window_right = 0 if case["causal"] else UNLIMITED
    call = Call(**{name: case[name] for name in SHAPE}, window_right=window_right)
    if row["kernel"] in ("preprocess", "prepare"):  # "prepare" in documents of 2026-11
        return kernels.preprocess(call, card)
    model = {"forward": kernels.forward, "dkdv": kernels.dkdv, "dq": kernels.dq}[row["kernel"]]
    tile = {name: row["tile"][name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")}
    return model(call, KernelConfig(**tile), card)
