"""The page that users get."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.commands import visualize
from flashtile.visualizer.settings import grid

MOST_BYTES = 2 * 10**6
STRIDE = 9
"""Of the settings every so many are recorded, which takes a minute for all."""


def test_the_page_is_small_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, settings = tmp_path / "page.html", list(grid())[::STRIDE]
    monkeypatch.setattr(visualize, "grid", lambda: settings)
    result = CliRunner().invoke(
        application(), ["visualize", "-o", str(path), "--seqlen", "48", "--head-dim", "24"]
    )
    assert result.exit_code == 0, result.output
    html = path.read_text("utf-8")
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", html)
    catalog = json.loads(re.search(r'id="catalog-data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert len(catalog["recordings"]) == len(settings) + 2
    assert {entry["packed"] for entry in catalog["recordings"]} == set(catalog["packed"])
    recorded = len(json.dumps(catalog["packed"])) + len(json.dumps(catalog["recordings"]))
    assert path.stat().st_size - recorded + recorded * STRIDE < MOST_BYTES
    start = json.loads(re.search(r'id="start-data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert (start["seqlen"], start["head_dim"], start["b"]) == (48, 24, {"algorithm": "standard"})
