"""``make test`` runs all its parts, whatever becomes of one, and says at the end how each went."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run-parts"
MAKEFILE = """
good: ; @true
bad: ; @false
told: ; @test "$(ARGS)" = "--sample 3"
"""

pytestmark = pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("bash")), reason="needs make and bash"
)


@pytest.mark.parametrize(
    ("parts", "code"), [(("good", "told ARGS='--sample 3'"), 0), (("bad", "good", "told"), 1)]
)
def test_every_part_runs_and_is_reported(tmp_path, parts, code):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    done = subprocess.run(["bash", SCRIPT, *parts], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    told = done.stdout.split("Parts:\n")[1].splitlines()
    assert [line.split("  ")[1].strip() for line in told] == [part for part in parts]
    failed = {part for part, line in zip(parts, told, strict=True) if "FAILED" in line}
    assert failed == ({"bad", "told"} if code else set())
