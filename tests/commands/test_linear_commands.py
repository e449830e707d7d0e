"""``flashtile profile`` and ``flashtile bench -w linear``: what they refuse, and a measurement on the CPU."""

from __future__ import annotations

import json

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
        (["bench", "-w", "linear-else"], "workload must be linear or one of"),
        (["bench", "-w", "linear-ci", "-w", "paper"], "workload must be linear or one of"),
        (["bench", "-w", "linear-ci", "--dtype", "float16"], "linear workloads take --peers"),
        (["bench", "-w", "linear-ci", "--device", "cpu", "--peers", "mkl"], "peer must be none or one of"),
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


def test_products_are_measured_beside_torchs(tmp_path):
    path = tmp_path / "linear.json"
    arguments = [
        "bench",
        "-w",
        "linear-ci",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--rep",
        "1",
        "--json",
        str(path),
    ]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    assert "linear-ci-m16" in result.output
    document = json.loads(path.read_text())
    assert [cell["rows"] for cell in document["cells"]] == [1, 16]
    for cell in document["cells"]:
        assert {result["status"] for result in cell["results"].values()} == {"ok"}


def test_a_chart_shows_the_inflections(tmp_path):
    from flashtile.hardware.linear_table import rows
    from flashtile.tools.bench.linear_bench import draw_chart

    row = next(row for row in rows() if row.N == 22016)
    draw_chart(row, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert text.startswith("<?xml")
    assert len(text) > 5000
