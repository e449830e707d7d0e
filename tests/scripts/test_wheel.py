"""What ``make dist`` builds is complete: the wheel works where nothing of the checkout can be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]

CALL = """
import sys
import torch
import flashtile
assert flashtile.__file__.startswith(sys.prefix), flashtile.__file__
q, k, v = torch.randn(3, 1, 64, 4, 32).unbind()
heads_first = [t.transpose(1, 2) for t in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
torch.testing.assert_close(flashtile.flash_attn_func(q, k, v, causal=True), expected)
"""


def run(*command, cwd):
    """A command that sees neither the checkout nor this process's settings of Python; what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dist")
    sdist, wheel = run(sys.executable, ROOT / "scripts" / "make_dist.py", folder, cwd=folder).split()
    return Path(sdist), Path(wheel)


def test_the_wheel_holds_every_file_of_the_package(built):
    """Templates, scripts, texts and the mark of a typed package among them."""
    files = (path for path in (ROOT / "flashtile").rglob("*") if path.is_file() and path.suffix != ".pyc")
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    with zipfile.ZipFile(built[1]) as archive:
        held = {name for name in archive.namelist() if name.startswith("flashtile/")}
    assert {"flashtile/py.typed", "flashtile/learn/visualizer/assets/page.html.jinja"} <= held
    assert held == expected


@pytest.mark.thorough
def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """It sees the torch of the test's environment, but neither the checkout nor an editable install."""
    place = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    python = place / "bin" / "python"
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders |= {entry for entry in sys.path if entry.endswith("-packages")}
    (own,) = place.glob("lib/python*/site-packages")
    # A folder named in a .pth file is seen without the .pth files in it, which lead to editable installs.
    (own / "tests-environment.pth").write_text("\n".join(sorted(folders)))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", built[1], cwd=tmp_path)

    run(python, "-c", CALL, cwd=tmp_path)
    pytest.importorskip("typer")
    assert "flashtile" in run(place / "bin" / "flashtile", "info", cwd=tmp_path)
