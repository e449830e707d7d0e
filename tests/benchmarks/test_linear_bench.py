"""``python -m benchmarks -w linear``: what it refuses, and a measurement on the CPU."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.suite.command import application


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-w", "linear-else"], "workload must be linear or one of"),
        (["-w", "linear-ci", "-w", "paper"], "workload must be linear or one of"),
        (["-w", "linear-ci", "--dtype", "float16"], "linear workloads take --peers"),
        (["-w", "linear-ci", "--device", "cpu", "--peers", "mkl"], "peer must be none or one of"),
    ],
)
def test_bad_options_are_refused(arguments, text):
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("\u2502", " ").split())


def test_products_are_measured_beside_torchs(tmp_path):
    path = tmp_path / "linear.json"
    arguments = ["-w", "linear-ci", "--device", "cpu", "--rounds", "1", "--rep", "1", "--json", str(path)]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    assert "linear-ci-m16" in result.output
    document = json.loads(path.read_text())
    assert [cell["rows"] for cell in document["cells"]] == [1, 16]
    for cell in document["cells"]:
        assert {result["status"] for result in cell["results"].values()} == {"ok"}
