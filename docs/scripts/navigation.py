"""MkDocs hook: ``folder/*`` in the navigation stands for the pages of that folder that it does not name.

``folder/*.zh-CN.md`` stands for those in Chinese, which ``folder/*`` leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

TRANSLATED = ".zh-CN.md"


def named(entries: Iterable[Any]) -> Iterator[str]:
    """Every page in a navigation, in its sections as well."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from named([value] if isinstance(value, str) else value)


def expanded(entries: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with each ``folder/*`` replaced by those of ``pages`` that lie in that folder."""
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            sections = {
                title: expanded(value, pages) if isinstance(value, list) else value
                for title, value in entry.items()
            }
            result += [sections] if all(sections.values()) else []
        elif PurePosixPath(entry).name in ("*", f"*{TRANSLATED}"):
            folder, chinese = PurePosixPath(entry).parent, entry.endswith(TRANSLATED)
            result += [
                page
                for page in pages
                if PurePosixPath(page).parent == folder and page.endswith(TRANSLATED) == chinese
            ]
        else:
            result.append(entry)
    return result


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    assert config.nav is not None
    already = set(named(config.nav))
    pages = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri not in already)
    config.nav = expanded(config.nav, pages)
    return files
