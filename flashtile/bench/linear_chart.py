"""The three curves of a shape over rows of x, with M1 and M2, as FlashDecoding++'s figure 9 draws them."""

from __future__ import annotations

from pathlib import Path

from flashtile.hardware.linear_table import FLAT, GEMV, LIBRARY, Row

NAMES = {GEMV: "GEMV (CUDA cores)", FLAT: "flat (tensor cores)", LIBRARY: "cuBLAS"}


def draw(row: Row, path: Path) -> None:
    """Write a picture of what was measured of one shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    numbers = sorted(map(int, row.kernels))
    for kind, name in NAMES.items():
        known = [m for m in numbers if kind in row.kernels[str(m)]]
        axes.plot(known, [row.kernels[str(m)][kind]["us"] for m in known], marker="o", label=name)
    axes.axhline(row.weight_bytes / row.read_tbps / 1e6, color="grey", ls=":", label="reading the weight")
    for m, name in ((row.gemv_below, "M1"), (row.library_from, "M2")):
        axes.axvline(m, color="grey", lw=0.8)
        axes.annotate(name, (m, axes.get_ylim()[1]), ha="left", va="top")
    axes.set(xscale="log", yscale="log", xlabel="rows of x", ylabel="microseconds")
    axes.set_xticks(numbers, [str(m) for m in numbers], minor=False)
    axes.set_title(f"{row.N} x {row.K} {row.weight_dtype}, {row.card}")
    axes.legend(frameon=False)
    figure.savefig(path)
