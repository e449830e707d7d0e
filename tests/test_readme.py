"""The README's Python runs as it stands, and what it points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def python_blocks(document: Path) -> list[tuple[int, str]]:
    """(line it starts on, code) of each block of Python."""
    text = document.read_text()
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def test_readme_shows_python():
    assert len(python_blocks(ROOT / "README.md")) >= 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(document):
    """In order, in one namespace: later blocks build on earlier ones, as a reader does."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in python_blocks(document):
        # Blank lines in front make tracebacks point to the document's own lines.
        exec(compile("\n" * (line - 1) + code, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_readme_names_existing_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text())
    assert named
    assert set(named) <= targets
