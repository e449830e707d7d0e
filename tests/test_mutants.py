"""The list of planted faults can be planted; ``make mutants`` plants it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from script_runner import load

ROOT = Path(__file__).parents[1]
mutants = load("scripts/mutants.py")
LISTED = mutants.read_list()


def test_the_list_is_long_and_names_nothing_twice():
    assert len([mutant for mutant in LISTED if not mutant.equivalent]) >= 100
    assert len({(mutant.file, mutant.line, mutant.fault) for mutant in LISTED}) == len(LISTED)


@pytest.mark.parametrize("mutant", LISTED, ids=str)
def test_a_fault_can_be_planted(mutant):
    """Its line is there once, the file with it is another and still Python, and its tests are there."""
    source = (ROOT / mutant.file).read_text("utf-8")
    planted = mutant.planted(source)
    assert planted != source
    compile(planted, mutant.file, "exec")
    named = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert named
    assert all((ROOT / path).exists() for path in named)
