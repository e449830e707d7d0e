"""Records all runs of the interactive page into a file of the package; takes a minute on two idle cores.

python scripts/record_page.py
"""

from __future__ import annotations

from pathlib import Path

from flashtile.learn.visualizer import prebuilt
from flashtile.learn.visualizer.page import record_all
from flashtile.learn.visualizer.settings import grid

PATH = Path(__file__).parents[1] / "flashtile" / "learn" / "visualizer" / "assets" / prebuilt.NAME

if __name__ == "__main__":
    settings = list(grid())
    size = PATH.write_bytes(prebuilt.dump(zip(settings, record_all(settings), strict=True)))
    print(f"{PATH.name}: {len(settings)} runs, {size / 2**20:.1f} MiB")
