"""``flashtile profile``: what it refuses, and its chart."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from flashtile.cli import application
from targets import CUDA


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["profile", "--shape", "4096"], "shape must be N,K"),
        (["profile", "--shape", "0,4"], "shape must be N,K"),
        (["profile", "--model", "gpt-5"], "model must be one of opt-13b"),
        (["profile", "--dtype", "float32"], "dtype must be one of bfloat16, float16"),
        (["profile", "--weight-dtype", "int8"], "weight-dtype must be one of bfloat16, float8_e4m3fn"),
        (["profile", "--rows", "0"], "--rows"),
    ],
)
def test_bad_options_are_refused(arguments, text):
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("\u2502", " ").split())
    assert text in words


def test_profile_leaves_a_file_alone_that_is_no_table(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text("{}")
    result = CliRunner().invoke(application(), ["profile", "--out", str(path)])
    assert result.exit_code == 2
    assert path.read_text() == "{}"


@pytest.mark.skipif(CUDA, reason="a machine without a GPU")
def test_profile_needs_a_gpu():
    result = CliRunner().invoke(application(), ["profile"])
    assert result.exit_code == 2
    assert "torch finds none" in result.output


def test_a_chart_shows_the_inflections(tmp_path):
    from flashtile.hardware.linear_table import rows
    from flashtile.tools.linear_profile import draw_chart

    row = next(row for row in rows() if row.N == 22016)
    draw_chart(row, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert text.startswith("<?xml")
    assert len(text) > 5000
