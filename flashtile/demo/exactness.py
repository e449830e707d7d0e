"""How far flashtile is from float64 standard attention, beside how far plain PyTorch is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from flashtile import testing
from flashtile.demo.check import Check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESULTS = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One kind of call. ``lengths_q`` and ``lengths_k`` are those of a varlen call's sequences."""

    name: str
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 64
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        batch_q: tuple[int, ...] = (2, self.seqlen_q)
        batch_k: tuple[int, ...] = (2, self.seqlen_k)
        if self.lengths_q:
            batch_q, batch_k = (sum(self.lengths_q),), (sum(self.lengths_k),)
        shapes = (
            (*batch_q, self.heads, self.head_dim),
            (*batch_k, self.heads_kv, self.head_dim),
            (*batch_k, self.heads_kv, self.head_dim),
        )
        q, k, v = (testing.random_tensor(shape, dtype, device, seed=i) for i, shape in enumerate(shapes))
        return q, k, v

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of :func:`flashtile.attention`."""
        chosen: dict[str, Any] = {
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
        }
        if self.alibi:
            chosen["alibi_slopes"] = testing.random_alibi_slopes((self.heads,), device)
        if self.lengths_q:
            chosen |= {
                "cu_seqlens_q": testing.cu_seqlens(self.lengths_q, device),
                "cu_seqlens_k": testing.cu_seqlens(self.lengths_k, device),
                "max_seqlen_q": max(self.lengths_q),
                "max_seqlen_k": max(self.lengths_k),
            }
        return chosen


CASES = (
    Case("full"),
    Case("causal", causal=True),
    Case("causal, 64 keys", causal=True, window_size=(63, 0)),
    Case("grouped (8 heads on 2)", heads=8, heads_kv=2, causal=True),
    Case("soft-cap 5", softcap=5.0),
    Case("ALiBi", causal=True, alibi=True),
    Case("113 queries, 257 keys", seqlen_q=113, seqlen_k=257, causal=True),
    Case("head_dim 80", head_dim=80),
    Case("variable lengths", causal=True, lengths_q=(1, 130, 0, 69), lengths_k=(65, 130, 7, 200)),
    Case(
        "all of these at once",
        heads=6,
        heads_kv=2,
        head_dim=72,
        causal=True,
        window_size=(90, 0),
        softcap=10.0,
        alibi=True,
        lengths_q=(100, 33),
        lengths_k=(100, 160),
    ),
)


@dataclass(frozen=True)
class Exactness:
    """The largest errors of one case in one dtype, by result, against float64 standard attention: flashtile's
    and plain PyTorch's in the same dtype. ``holds`` is the error rule's verdict."""

    case: str
    dtype: str
    errors: dict[str, testing.Bound]
    holds: bool
    report: str
    """Every number of a case that does not hold; empty for one that does."""

    def largest(self, results: Sequence[str]) -> testing.Bound:
        """The error of flashtile that is the largest share of what is allowed, among ``results``."""
        return max((self.errors[r] for r in results), key=lambda bound: bound.error / bound.allowed)


def measure(device: torch.device, cases: Sequence[Case] = CASES) -> Iterator[Exactness]:
    """Every case in every dtype, forward and backward, with random gradients of out and lse."""
    for case in cases:
        for dtype in DTYPES:
            q, k, v = case.tensors(dtype, device)
            report = testing.measure(q, k, v, **case.arguments(device))
            errors = {
                comparison.name: bound
                for comparison in report.comparisons
                for bound in comparison.bounds
                if bound.norm == "largest"
            }
            name = str(dtype).removeprefix("torch.")
            yield Exactness(case.name, name, errors, report.holds, "" if report.holds else str(report))


def table(measured: Sequence[Exactness]) -> Table:
    """A row a case: the errors of out and of the worst gradient in each dtype, plain PyTorch's below."""
    dtypes = list(dict.fromkeys(one.dtype for one in measured))
    headings = [f"{dtype}\n{result}" for dtype in dtypes for result in ("out", "worst gradient")]
    columns = [Column(heading, justify="right") for heading in headings]
    found = Table("flashtile, below\nplain PyTorch", *columns, box=None, padding=(0, 1), pad_edge=False)
    for case in dict.fromkeys(one.case for one in measured):
        cells = []
        for one in (one for one in measured if one.case == case):
            for error in (one.errors["out"], one.largest(GRADIENTS)):
                style = "green" if one.holds else "bold red"
                cells.append(f"[{style}]{error.error:.1e}[/]\n[dim]{error.plain_error:.1e}[/]")
        found.add_row(case, *cells)
    return found


def check(measured: Sequence[Exactness]) -> Check:
    wrong = [f"{m.case} in {m.dtype}" for m in measured if not m.holds]
    results = len(measured) * len(RESULTS)
    detail = f"{results} results within the error rule" if not wrong else f"outside of it: {'; '.join(wrong)}"
    return Check("exact: no further from float64 than the error rule allows", not wrong, detail)
