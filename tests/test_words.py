"""Words that a program can judge: openings of docstrings, and words that stand for too much."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashtile"
OPENING = re.compile(r"\s*(Of|What|That|The same|The other way)\b")
"""No docstring that begins like this can be understood without another one."""
UNCLEAR = re.compile(r"\bbeside\b|, too[.,;:)]|\bwhatsoever\b", re.IGNORECASE)
TO_DO = ("backends/cpu/",)
"""Rooms whose lines still hold an unclear word, if only as a name in code (``cpu.beside``)."""


def docstrings(path: Path) -> list[tuple[int, str]]:
    """(line, text) of each expression that is only a string: docstrings, and those below a name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        text = getattr(getattr(node, "value", None), "value", None)
        if isinstance(node, ast.Expr) and isinstance(text, str):
            found.append((node.lineno, text))
    return found


def modules(to_do: tuple[str, ...] = ()) -> list[Path]:
    rooms = ((path, path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path, room in rooms if not room.startswith(to_do))


@pytest.mark.parametrize("text", ["Of its guesses each gets one.", "What it has not.", "\n  The same in C."])
def test_riddles_are_found(text):
    assert OPENING.match(text)
    assert UNCLEAR.search("measured beside cuDNN")
    assert UNCLEAR.search("On Hopper, too.")


def test_every_docstring_stands_alone():
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for path in modules()
        for line, text in docstrings(path)
        if OPENING.match(text)
    ]
    assert bad == []


def test_no_word_stands_for_too_much():
    bad = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in modules(TO_DO)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if UNCLEAR.search(line)
    ]
    assert bad == []
