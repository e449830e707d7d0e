"""The page that users get."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.learn.visualizer.settings import grid

MAX_BYTES = 2 * 10**6


def test_the_page_is_small_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    own = ["--seqlen", "48", "--head-dim", "24", "--film", str(tmp_path / "run.gif")]
    result = CliRunner().invoke(application(), ["visualize", "-o", str(path), *own])
    assert result.exit_code == 0, result.output
    html = path.read_text("utf-8")
    assert path.stat().st_size < MAX_BYTES
    assert (tmp_path / "run.gif").read_bytes().startswith(b"GIF89a")
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", html)
    catalog = json.loads(re.search(r'id="catalog-data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert len(catalog["recordings"]) == len(list(grid())) + 2
    assert {entry["packed"] for entry in catalog["recordings"]} == set(catalog["packed"])
    start = json.loads(re.search(r'id="start-data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert (start["seqlen"], start["head_dim"], start["b"]) == (48, 24, {"algorithm": "standard"})
