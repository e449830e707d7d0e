"""What can be chosen, recorded and said."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.learn.algorithms.memory import SramExceededError
from flashtile.learn.visualizer.page import SCRIPTS, texts, write_page
from flashtile.learn.visualizer.recording import RUNNERS, record, watched_rows
from flashtile.learn.visualizer.settings import AUTO, BLOCKS, MASKS, SRAM_SIZES, Setting, grid, own_runs

ASSETS = files("flashtile.learn.visualizer") / "assets"


def test_the_grid_has_every_algorithm_once_for_each_setting() -> None:
    settings = list(grid())
    assert len(set(settings)) == len(settings)
    assert {setting.algorithm for setting in settings} == set(RUNNERS)
    assert {setting.mask for setting in settings} == set(MASKS)
    assert {setting.seqlen for setting in settings} >= set(BLOCKS)
    assert all(setting.sram_bytes in (None, *SRAM_SIZES) for setting in settings)


def test_blocks_are_at_most_64_a_side() -> None:
    for setting in grid():
        block_m, block_n = setting.block_sizes
        assert block_n is None or setting.seqlen / block_n <= 64
        assert block_m is None or setting.queries == "one" or setting.seqlen / block_m <= 64


def test_given_blocks_fit_into_some_sram() -> None:
    for setting in grid():
        if setting.block not in (None, AUTO) and setting.seqlen <= 256:
            assert record(setting).totals["sram_peak"] <= max(SRAM_SIZES)


def test_totals_are_those_of_the_events() -> None:
    for setting in grid():
        if setting.seqlen <= 64 or (setting.seqlen == 256 and setting.head_dim == 64):
            recording = record(setting)
            assert recording.totals == recording.trace.totals(), setting


def test_watched_rows_span_the_matrix() -> None:
    assert watched_rows(1) == (0,)
    assert watched_rows(3) == (0, 1, 2)
    assert watched_rows(256) == (0, 85, 170, 255)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "flash2", "mask": "odd"}, "mask must be one of"),
        ({"algorithm": "flash_decoding", "mask": "causal"}, 'mask must be "full" for flash_decoding'),
        ({"algorithm": "flash2", "num_splits": 4}, "num_splits must not be given for flash2"),
        ({"algorithm": "standard", "page_size": 4}, "page_size must not be given for standard"),
        ({"algorithm": "standard", "block": "64x64"}, "block must not be given for standard"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_runs(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", ["64", "64x", "0x64", "ax64", "64x64x64", ""])
def test_blocks_that_are_none_are_refused(block: str) -> None:
    with pytest.raises(ValueError, match="block must be"):
        record(Setting("flash2", 64, 16, block=block))


def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="algorithm must be one of"):
        record(Setting("flash9", 64, 16))
    with pytest.raises(ValueError, match="seqlen must be at least 1"):
        record(Setting("flash2", 0, 16))
    monkeypatch.setattr("flashtile.learn.visualizer.recording.MAX_EVENTS", 1000)
    with pytest.raises(ValueError, match="more than 1000 events"):
        record(Setting("flash2", 64, 16, block="1x1"))
    with pytest.raises(SramExceededError, match="does not fit"):
        record(Setting("flash2", 64, 16, block="64x64", sram_bytes=1024))


@pytest.mark.parametrize("algorithm", RUNNERS)
def test_own_runs_are_recorded(algorithm: str) -> None:
    runs = own_runs(algorithm, seqlen=48, head_dim=24, sram_bytes=20 * 1024)
    assert runs[0].algorithm == algorithm
    for setting in runs:
        recording = record(setting)
        assert 0 < recording.totals["sram_peak"] <= 20 * 1024
        assert recording.setting.seqlen == 48


def test_both_languages_say_the_same() -> None:
    by_language = texts()
    english = by_language["en"]
    for language, translated in by_language.items():
        assert translated.keys() == english.keys(), language
        for key, text in translated.items():
            places = set(re.findall(r"\{(\w+)\}", text))
            assert places == set(re.findall(r"\{(\w+)\}", english[key])), (language, key)
            assert text, (language, key)


def test_the_page_uses_texts_that_there_are() -> None:
    used = set(re.findall(r'data-(?:text|label)="(\w+)"', (ASSETS / "page.html.jinja").read_text("utf-8")))
    scripts = "".join((ASSETS / "js" / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    used |= set(re.findall(r'(?:language\.text\(|data-text": ?)"(\w+)"', scripts))
    for algorithm in RUNNERS:
        used |= {f"algorithm_{algorithm}", f"about_{algorithm}"}
    assert len(used) > 50
    assert used <= texts()["en"].keys()


def test_every_script_is_part_of_the_page() -> None:
    found = {path.relative_to(ASSETS / "js").as_posix() for path in (ASSETS / "js").rglob("*.js")}
    assert found == {f"{name}.js" for name in SCRIPTS}


def test_data_cannot_end_its_element(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    size = write_page(path, [Setting("flash2", 32, 16, block="16x16")], start={"card": "</script><b>"})
    html = path.read_text("utf-8")
    assert size == path.stat().st_size
    assert "</script><b>" not in html
    assert "\\u003c/script>" in html


def test_the_command_refuses_what_it_cannot_record(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for options in (
        ["--sram-kib", "1", "--block", "64x64"],
        ["--algorithm", "flash9", "--seqlen", "64"],
        ["--block", "big"],
    ):
        result = CliRunner().invoke(application(), ["visualize", "-o", str(path), *options])
        assert result.exit_code == 2, result.output
    assert not path.exists()
