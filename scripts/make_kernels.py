"""Builds a wheel of compiled kernels: ``python scripts/make_kernels.py [FOLDER] [--arch sm_90] [OPTIONS]``.

The wheel is named after the architecture, such as flashtile-kernels-sm90, and made for the installed Triton.
It has no code. Where it is installed, flashtile finds the kernels before it compiles. OPTIONS go to
``flashtile compile``; unless they name calls, models or presets, ``--preset everything`` is added.
The kernels stay in FOLDER/.kernels_sm90, so an interrupted call is continued by the next.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from make_dist import ROOT, build

from flashtile import __version__
from flashtile.backends.common.kernel_store import INDEX, PACKAGE, CompiledFolder

MAX_BYTES = 60 * 10**6
"""Largest size of a wheel."""

PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "flashtile-kernels-{arch}"
version = "{version}"
description = "Compiled kernels of flashtile {flashtile} for {arch}, made with Triton {triton}"
requires-python = ">=3.10"
license = "BSD-3-Clause"

[tool.setuptools]
packages = ["{package}.{arch}"]

[tool.setuptools.package-data]
"*" = ["*"]
"""


def make(folder: Path, arch: str, options: list[str]) -> Path:
    """Write the wheel to ``folder``, where it replaces an earlier one, and return its path.

    Args:
        arch: architecture, such as "sm_90".
        options: what ``flashtile compile`` compiles, as its arguments.
    """
    name = arch.replace("_", "")
    kept = folder / f".kernels_{name}"
    kept.mkdir(mode=0o755, parents=True, exist_ok=True)
    compile_ = (sys.executable, "-m", "flashtile", "compile", kept, "--arch", arch, *options)
    subprocess.run([str(word) for word in compile_], check=True, cwd=ROOT, stdout=sys.stderr)
    triton_version = triton.__version__.partition("+")[0]
    with tempfile.TemporaryDirectory() as place:
        kernels = Path(place, PACKAGE, name)
        kernels.mkdir(parents=True)
        shutil.copy(kept / INDEX, kernels)
        for key, digests in CompiledFolder.read(kept).files.items():
            for suffix in digests:  # the folder may also have files of earlier versions
                shutil.copy(kept / f"{key}{suffix}", kernels)
        project = PROJECT.format(
            arch=name, version=f"{__version__}+triton{triton_version}", flashtile=__version__,
            triton=triton_version, package=PACKAGE,
        )  # fmt: skip
        Path(place, "pyproject.toml").write_text(project)
        for old in folder.glob(f"{PACKAGE}_{name}-*"):
            old.unlink()
        wheel = build("wheel", Path(place), folder)
    if (size := wheel.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"expected at most {MAX_BYTES / 1e6:.0f} MB, got {size / 1e6:.1f} MB: {wheel}")
    return wheel


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", default="sm_90")
    given, options = parser.parse_known_args()
    if not any(option.startswith(("--calls", "--model", "--preset")) for option in options):
        options += ["--preset", "everything"]
    print(make(given.folder.resolve(), given.arch, options))
