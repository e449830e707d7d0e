"""What a program can judge of prose: openings of docstrings, misused words, and the length of lines."""

import ast
import re
from pathlib import Path

import pytest

from sources import FILES, tree
from walk import walk

ROOT = Path(__file__).resolve().parents[1]
OPENING = re.compile(r"\s*(Of|What|That|The same|The other way)\b")
"""No docstring that begins like this can be understood without another one."""
UNCLEAR = re.compile(r"\bbeside\b|, too[.,;:)]|\bwhatsoever\b", re.IGNORECASE)
MISUSED = re.compile(
    r"\b(nobody|whoever|whatever|comes? even|at its leave|for ever|"
    r"ask(ed|s)? for|deal(s|t|ing)? (\w+ )?out)\b",
    re.IGNORECASE,
)
"""Words that made programs persons, or riddles of sentences, in every use that was found."""
MAX_COLUMNS = 120
UNBREAKABLE = re.compile(r"\[[^\]]*\]\([^)]*\)|`[^`]*`|\$[^$]*\$")
"""A link, code or a formula, which stays on one line."""


def docstrings(path: Path) -> list[tuple[int, str]]:
    """(line, text) of each expression that is only a string: docstrings, and those below a name."""
    found = []
    for node in ast.walk(tree(path)):
        text = getattr(getattr(node, "value", None), "value", None)
        if isinstance(node, ast.Expr) and isinstance(text, str):
            found.append((node.lineno, text))
    return found


@pytest.mark.parametrize("text", ["Of its guesses each gets one.", "What it has not.", "\n  The same in C."])
def test_riddles_are_found(text):
    assert OPENING.match(text)
    assert UNCLEAR.search("measured beside cuDNN")
    assert UNCLEAR.search("On Hopper, too.")


def test_every_docstring_stands_alone():
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for path in FILES
        for line, text in docstrings(path)
        if OPENING.match(text)
    ]
    assert bad == []


@pytest.mark.parametrize("words", [UNCLEAR, MISUSED], ids=["unclear", "misused"])
def test_no_word_is_unclear_or_misused(words):
    bad = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert bad == []


@walk(
    "text",
    [
        "so that nobody waits",
        "Whatever the lengths, the order holds.",
        "no way of dealing them out comes even",
        "the table is asked for the keys",
        "Dealt out by a counter.",
        "waits for ever",
    ],
)
def test_misused_words_are_found(text):
    assert MISUSED.search(text)


@pytest.mark.parametrize("text", ["a task for each", "for every row", "a dealer", "asked_for"])
def test_other_words_are_not_found(text):
    assert not MISUSED.search(text)


def is_too_long(line: str) -> bool:
    """Whether a line of prose is longer than MAX_COLUMNS, and could be broken before."""
    blanked = UNBREAKABLE.sub(lambda match: "x" * len(match[0]), line.strip())
    marker = re.match(r"([-*>]|\d+\.) ", blanked)  # a line is not broken after the sign of a list
    begin = marker.end() if marker else 0
    return len(line) > MAX_COLUMNS and " " in blanked[begin:MAX_COLUMNS]


def long_lines(text: str) -> list[int]:
    """Return the numbers of too long lines of a page, outside of code blocks, formulas and tables."""
    found, fence = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        start = line.strip()[:3]
        if fence:
            fence = "" if start.startswith(fence) else fence
        elif start == "```" or start[:2] == "$$":
            fence = start if start == "```" else "$$"
            closed = len(line.strip()) > len(fence) and line.strip().endswith(fence)
            fence = "" if closed else fence
        elif not start.startswith("|") and is_too_long(line):
            found.append(number)
    return found


def pages() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found if not path.name.endswith(".zh-CN.md"))


@walk(
    ("text", "expected"),
    [
        ("word " * 25, [1]),
        ("word " * 24, []),
        ("```\n" + "word " * 30 + "\n```\n" + "word " * 30, [4]),
        ("$$\n" + "x " * 90 + "\n$$\n$$" + "x " * 90 + "$$\n" + "word " * 30, [5]),
        ("| " + "cell " * 30, []),
        ("- [" + "word " * 20 + "](" + "x" * 40 + ")", []),
        ("see [" + "word " * 20 + "](" + "x" * 40 + ")", [1]),
    ],
)
def test_long_lines_are_found(text, expected):
    assert long_lines(text) == expected


def test_no_line_of_a_page_is_too_long():
    bad = [f"{name}:{n}" for name in pages() for n in long_lines((ROOT / name).read_text("utf-8"))]
    assert bad == []


def prose_of(path: Path) -> list[tuple[int, str]]:
    """(line number, line) of a module's docstrings, and of comments on lines of their own."""
    source = path.read_text("utf-8")
    found = [
        (number + i, line) for number, text in docstrings(path) for i, line in enumerate(text.splitlines())
    ]
    lines = enumerate(source.splitlines(), 1)
    return found + [(number, line) for number, line in lines if line.lstrip().startswith("#")]


def test_no_line_of_a_docstring_or_comment_is_too_long():
    bad = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        for number, line in prose_of(path)
        if is_too_long(line)
    ]
    assert bad == []
