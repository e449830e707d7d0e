"""Conclusions of a demo: its claim, and one sentence for each section of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashtile.learn.io_model.tables import format_bytes, format_seconds
from flashtile.tools.bench.operations import DROP
from flashtile.tools.demo import exactness, scaling
from flashtile.tools.demo.training import bits_per_byte

if TYPE_CHECKING:
    from flashtile.tools.demo.results import Results


def claim(results: Results) -> str:
    """Return the headline: speed and memory if every check holds, otherwise how many checks failed."""
    checks = results.checks()
    failed = sum(not check.holds for check in checks)
    if failed:
        return f"{failed} of {len(checks)} checks failed"
    row = scaling.compared(results.scaling)
    if row is None or row.speed_up is None:
        return "Exact attention, without the score matrix"
    memory = "" if row.memory_ratio is None else f" with {_factor(row.memory_ratio)} times less memory"
    return f"Exact attention, {_factor(row.speed_up)} times as fast{memory}"


def findings(results: Results) -> dict[str, str]:
    """Return a sentence for each section of the report, by the name of the section."""
    agreement, bits = results.training.agreement, bits_per_byte(results.training.validation_loss)
    return {
        "scaling": _scaling(results),
        "exactness": _exactness(results.exactness),
        "operations": _operations(results.operations),
        "training": (
            f"The two loss curves are at most {agreement.largest_difference:.1e} nats per byte apart, and "
            f"the model needs {bits:.2f} bits per byte of files that it never saw (guessing takes 8)."
        ),
    }


def _exactness(measured: Sequence[exactness.Exactness]) -> str:
    check = exactness.check(measured)
    if not check.holds:
        return f"Results are {check.detail}."
    count = len(measured) * len(exactness.RESULTS)
    return f"All {count} results are as close to float64 as the error rule allows."


def _scaling(results: Results) -> str:
    row = scaling.compared(results.scaling)
    if row is None or row.standard is None:
        return "Standard attention ran at none of the lengths."
    time = f"takes {_compared(row.flashtile.milliseconds, row.standard.milliseconds)}"
    ours, theirs = row.flashtile.peak_bytes, row.standard.peak_bytes
    if row.memory_ratio is None or ours is None or theirs is None:
        return f"At {row.seqlen:,} tokens a pass {time}."
    sizes = f"needs {format_bytes(ours)} instead of {format_bytes(theirs)}"
    return f"At {row.seqlen:,} tokens a pass {time}, and {sizes}, {_factor(row.memory_ratio)} times less."


def _operations(cell: dict[str, Any]) -> str:
    """Return a sentence that compares flashtile's time with the sum of standard attention's operations.

    Both times include dropout if flashtile was timed with dropout. Otherwise both exclude it.
    """
    found = cell["operations"]
    if found["status"] != "ok":
        return f"Standard attention was not taken apart: {found['reason']}."
    dropped = found.get("fused_dropout_ms")
    ours = cell["results"]["flashtile"].get("ms") if dropped is None else dropped
    theirs = found["together_ms"] - (found["ms"][DROP] if dropped is None else 0.0)
    if ours is None:
        return f"Standard attention takes {format_seconds(theirs / 1e3)}; flashtile was not timed."
    return f"A forward pass takes {_compared(ours, theirs)}."


def _compared(ours: float, theirs: float) -> str:
    """Compare two times in milliseconds."""
    times = f"{format_seconds(ours / 1e3)} instead of {format_seconds(theirs / 1e3)}"
    return f"{times}, {_factor(theirs / ours)} times as fast"


def _factor(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
