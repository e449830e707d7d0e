"""The model of our kernels beside the counters of Nsight Compute (``benchmarks/ncu_bytes.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from flashtile.io_model import kernels
from flashtile.io_model.calls import Call
from flashtile.io_model.cards import Card
from flashtile.problem import UNLIMITED

SECTOR_BYTES = 32


@dataclass(frozen=True)
class Comparison:
    """One launch: the model's traffic beside what was counted, in bytes.

    ``dram_written`` are the results that reached DRAM, with those still in L2 when the kernel ended;
    ``sm_read`` is what SMs loaded through L2, None if it was not counted.
    """

    name: str
    model: kernels.KernelTraffic
    dram_read: float
    dram_written: float
    sm_read: float | None

    @property
    def ratio(self) -> float:
        """Predicted over counted DRAM bytes, read and written."""
        return self.model.dram_bytes / (self.dram_read + self.dram_written)

    @property
    def sm_ratio(self) -> float | None:
        """Predicted over counted loads of the SMs."""
        return None if self.sm_read is None else self.model.sm_read / self.sm_read


def compare(document: dict[str, Any], card: Card) -> Iterator[Comparison]:
    """Each launch of a document of ``benchmarks/ncu_bytes.py`` that was counted on ``card``."""
    for row in document["kernels"]:
        sectors = row["lts__t_sectors_srcunit_tex_op_read.sum"]
        name = row["case"]["name"]
        yield Comparison(
            name=f"{name} {row['kernel']}" if row["case"]["backward"] else name,
            model=predict(row, card),
            dram_read=row["dram_read"],
            dram_written=row["dram_written"] + row["dram_written_after"],
            sm_read=None if sectors is None else sectors * SECTOR_BYTES,
        )


def predict(row: dict[str, Any], card: Card) -> kernels.KernelTraffic:
    """The model's traffic for one launch of the document, with the tile that it had then."""
    case = row["case"]
    call = Call(
        batch=case["batch"],
        seqlen_q=case["seqlen_q"],
        seqlen_k=case["seqlen_k"],
        num_heads_q=case["num_heads_q"],
        num_heads_kv=case["num_heads_kv"],
        head_dim=case["head_dim"],
        dtype=case["dtype"],
        window_left=case["window_left"],
        window_right=0 if case["causal"] else UNLIMITED,
    )
    if row["kernel"] == "prepare":
        return kernels.prepare(call, card)
    model = {"forward": kernels.forward, "dkdv": kernels.dkdv, "dq": kernels.dq}[row["kernel"]]
    return model(call, SimpleNamespace(**row["tile"]), card)
