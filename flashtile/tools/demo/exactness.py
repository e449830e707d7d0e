"""Errors of flashtile against float64 standard attention, compared with those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from flashtile import testing
from flashtile.problems.common import UNLIMITED


@dataclass(frozen=True)
class Check:
    """A statement that the demo checks, whether it holds, and details for the report."""

    name: str
    holds: bool
    detail: str


DTYPES = ("float32", "bfloat16", "float16")
RESULTS = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One attention call without its data. ``lengths`` has (seqlen_q, seqlen_k) of each packed sequence."""

    name: str
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 64
    lengths: tuple[tuple[int, int], ...] = ()
    causal: bool = False
    window_left: int = UNLIMITED
    softcap: float = 0.0
    alibi: bool = False

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return random q, k and v: a batch of two, or packed sequences."""
        rows_q: tuple[int, ...] = (2, self.seqlen_q)
        rows_k: tuple[int, ...] = (2, self.seqlen_k)
        if self.lengths:
            rows_q, rows_k = ((sum(lengths),) for lengths in zip(*self.lengths, strict=True))
        shapes = ((*rows_q, self.heads), (*rows_k, self.heads_kv), (*rows_k, self.heads_kv))
        q, k, v = (
            testing.random_tensor((*shape, self.head_dim), dtype, device, seed=seed)
            for seed, shape in enumerate(shapes)
        )
        return q, k, v

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return the other arguments of :func:`flashtile.attention`."""
        found: dict[str, Any] = {
            "causal": self.causal, "window_size": (self.window_left, UNLIMITED), "softcap": self.softcap
        }  # fmt: skip
        if self.alibi:
            numbers = torch.arange(1, self.heads + 1, device=device)
            found["alibi_slopes"] = torch.exp2(-8 * numbers / self.heads)
        if self.lengths:
            for side, lengths in zip("qk", zip(*self.lengths, strict=True), strict=True):
                found |= {
                    f"cu_seqlens_{side}": testing.cu_seqlens(lengths, device),
                    f"max_seqlen_{side}": max(lengths),
                }
        return found


CASES = (
    Case("full"),
    Case("causal", causal=True),
    Case("causal, 64 keys", causal=True, window_left=63),
    Case("grouped (8 heads on 2)", heads=8, heads_kv=2, causal=True),
    Case("soft-cap 5", softcap=5.0),
    Case("ALiBi", causal=True, alibi=True),
    Case("113 queries, 257 keys", seqlen_q=113, seqlen_k=257, causal=True),
    Case("head_dim 80", head_dim=80),
    Case("variable lengths", causal=True, lengths=((1, 65), (130, 130), (0, 7), (69, 200))),
    Case(
        "all of these at once", heads=6, heads_kv=2, head_dim=72, causal=True, window_left=90, softcap=10.0,
        alibi=True, lengths=((100, 100), (33, 160)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Exactness:
    """Largest error of each result of one case in one dtype, against standard attention in float64.

    Each bound has the errors of flashtile and of plain PyTorch in the same dtype. ``holds`` says whether
    flashtile meets the error rule.
    """

    case: str
    dtype: str
    errors: dict[str, testing.Bound]
    holds: bool
    report: str
    """All numbers of the case if it breaks the error rule; otherwise empty."""

    def largest(self, results: Sequence[str]) -> testing.Bound:
        """Return the bound with the largest ratio of error to allowed error among ``results``."""
        return max((self.errors[r] for r in results), key=lambda bound: bound.error / bound.allowed)


def measure(device: torch.device, cases: Sequence[Case] = CASES) -> Iterator[Exactness]:
    """Yield the errors of both passes of each case, in each dtype, for random dout and dlse."""
    for one in cases:
        for dtype in DTYPES:
            tensors = one.tensors(getattr(torch, dtype), device)
            report = testing.measure(*tensors, **one.options(device))
            errors = {
                comparison.name: bound
                for comparison in report.comparisons
                for bound in comparison.bounds
                if bound.norm == "largest"
            }
            yield Exactness(one.name, dtype, errors, report.holds, "" if report.holds else str(report))


def table(measured: Sequence[Exactness]) -> Table:
    """Return a table with a row per case: errors of out and of the worst gradient in each dtype.

    Each cell has two lines: flashtile's error, and below it that of plain PyTorch.
    """
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
