"""Builds dist/flashtile-VERSION.tar.gz and the wheel made from it: ``python scripts/make_dist.py [FOLDER]``.

The build uses a copy of the sources, so files of earlier builds in the checkout are left out. It uses the
installed setuptools, so it needs no network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTENTS = ("pyproject.toml", "README.md", "LICENSE", "flashtile")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build in ``source`` with setuptools and return the file that it wrote to ``folder``.

    ``kind`` is "sdist" or "wheel".
    """
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    before = set(folder.iterdir())
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, check=True, stdout=subprocess.DEVNULL
    )
    (written,) = set(folder.iterdir()) - before
    return written


def make(folder: Path) -> tuple[Path, Path]:
    """Write the sdist and the wheel to ``folder`` and return their paths; the wheel is built from the sdist.

    Earlier files of flashtile in ``folder`` are deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("flashtile-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as place:
        copy, unpacked = Path(place, "copy"), Path(place, "unpacked")
        copy.mkdir()
        for name in CONTENTS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        sdist = build("sdist", copy, folder)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked)
        (source,) = unpacked.iterdir()
        return sdist, build("wheel", source, folder)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    for path in make(target.resolve()):
        print(path)
