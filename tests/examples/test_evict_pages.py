"""examples/evict_pages.py, run as a user runs it."""

import re

import script_runner


def test_the_least_read_pages_are_missed_least():
    run = script_runner.runner(script_runner.load("examples/evict_pages.py"))
    result = run("--device", "cpu", "--batch", "2", "--pages", "32", "--keep", "10", "--steps", "3")
    assert result.exit_code == 0, result.output
    errors = {
        name: float(error) for name, error in re.findall(r"evicted by ([\w ]+): ([\d.]+)", result.output)
    }
    assert errors.keys() == {"least mass", "oldest", "random"}
    assert errors["least mass"] < min(errors["oldest"], errors["random"])
    assert "44 pages are free" in result.output


def test_numbers_of_pages_are_checked():
    run = script_runner.runner(script_runner.load("examples/evict_pages.py"))
    for given, words in (
        (("--keep", "100"), "--keep must be at most --pages"),
        (("--keep", "0"), "than or equal to 1"),
        (("--pages", "5", "--keep", "2"), "than or equal to 6"),
    ):
        result = run("--device", "cpu", *given)
        assert result.exit_code == 2
        assert words in result.output
