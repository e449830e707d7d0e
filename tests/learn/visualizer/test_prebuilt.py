"""The recordings in the package: those of the code that is here, and used instead of recording."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.learn.visualizer import page, prebuilt
from flashtile.learn.visualizer.recording import record
from flashtile.learn.visualizer.settings import Setting, grid

KEPT = prebuilt.load()
SAMPLE = [setting for setting in grid() if setting.seqlen <= 64] + [Setting("flash2", 256, 64, block="64x64")]


def test_they_are_up_to_date() -> None:
    assert set(KEPT) == set(grid()), "python scripts/record_page.py makes them anew"


@pytest.mark.parametrize("setting", SAMPLE, ids=lambda setting: f"{setting.algorithm}-{setting.seqlen}")
def test_they_are_what_a_run_records(setting: Setting) -> None:
    """All but statistics of watched rows, which may differ in their last digits between machines."""
    entry, packed = KEPT[setting]
    recording = record(setting)
    assert entry == json.loads(json.dumps(recording.as_record()))
    kept, now = (unpacked(events) for events in (packed, recording.packed()))
    assert {**kept, "series": None} == {**now, "series": None}
    assert [(s["name"], s["row"]) for s in kept["series"]] == [(s["name"], s["row"]) for s in now["series"]]


def unpacked(events: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(events)))


def test_the_command_records_only_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Setting] = []
    original = page._record
    monkeypatch.setattr(page, "_record", lambda setting: recorded.append(setting) or original(setting))
    for options, new in (([], 0), (["--seqlen", "48", "--head-dim", "24"], 2)):
        result = CliRunner().invoke(application(), ["visualize", "-o", str(tmp_path / "page.html"), *options])
        assert result.exit_code == 0, result.output
        assert len(recorded) == new


def test_other_code_records_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "stamp", lambda: "another")
    assert prebuilt.load() == {}


MAX_BYTES = 1_700_000


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
    recordings = unpacked(catalog["recordings"])
    assert len(recordings) == len(list(grid())) + 2
    assert {entry["packed"] for entry in recordings} == set(catalog["packed"])
    start = json.loads(re.search(r'id="start-data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert (start["seqlen"], start["head_dim"], start["b"]) == (48, 24, {"algorithm": "standard"})
