"""MkDocs hook: pages link to files of the repository by relative paths, and the site shows those files.

A page may link to ``../../flashtile/api/merge.py`` or ``../CONTRIBUTING.md``, which leads somewhere in a
checkout and on a code host. For the site, each linked file becomes part of it: Markdown a page, any other
text a page that shows it, measurements their page, and other JSON a download. Links are rewritten to match.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

IN_SITE, NOT_IN_SITE = "docs/", "docs/scripts/"
"""Folder of the pages, and the folder in it that the site excludes. Its files are shown as those outside."""

LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
    ".cff": "yaml",
    ".sh": "bash",
    ".jinja": "jinja",
}

NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
"""Front matter of pages that the site's search leaves out."""

TRANSLATIONS = {"README.zh-CN.md": "index.zh-CN.md"}
"""Root pages whose place in the site is not their own name in lower case."""


def site_path(path: str) -> str | None:
    """Where a file of the repository (by its path from the root) lies in the site; None if nowhere."""
    if path == "README.md":
        return "index.md"
    if _is_page_or_asset(path):
        return path.removeprefix(IN_SITE)
    if path.endswith(".md"):
        return TRANSLATIONS.get(path, path.lower())
    if path.startswith("benchmarks/results/experiments/"):
        return f"measured/{Path(path).stem}.md"
    if path.startswith("benchmarks/results/"):
        return path.replace(".json", ".md")
    if path.endswith(".json"):
        return path
    return f"source/{path}.md" if Path(path).suffix in (*LANGUAGES, "") else None


def _is_page_or_asset(path: str) -> bool:
    return path.startswith(IN_SITE) and not path.startswith(NOT_IN_SITE)


def rewrite(markdown: str, path: str) -> str:
    """The page at ``path`` (from the repository's root) with its relative links as the site needs them."""
    own = site_path(path)
    assert own is not None

    def replace(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(path), link[2]))
        in_site = site_path(target)
        if link[2].startswith("/") or in_site is None:
            return link[0]
        return link[1] + os.path.relpath(in_site, os.path.dirname(own)) + link[3]

    return LINK.sub(replace, markdown)


def linked_files(root: Path, pages: list[str]) -> set[str]:
    """Files outside of docs/ that ``pages`` link to, and that those of them that are Markdown link to."""
    found: set[str] = set()
    while pages:
        page = pages.pop()
        for _, link, _ in LINK.findall((root / page).read_text()):
            target = os.path.normpath(os.path.join(os.path.dirname(page), link))
            inside = _is_page_or_asset(target) or target.startswith("..")
            if inside or target in found or not (root / target).is_file():
                continue
            found.add(target)
            if target.endswith(".md"):
                pages.append(target)
    return found


def shown(path: Path, root: Path) -> str:
    """A page that shows a text file."""
    name = path.relative_to(root).as_posix()
    language = LANGUAGES.get(path.suffix, "make" if path.name == "Makefile" else "text")
    return f'{NOT_SEARCHED}# {name}\n\n````{language} linenums="1"\n{path.read_text().rstrip()}\n````\n'


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None]
    for target in sorted({"README.md", *linked_files(root, [*pages, "README.md"])}):
        place = site_path(target)
        if place is None or files.get_file_from_path(place) is not None:
            continue
        if place.startswith("source/"):
            content = shown(root / target, root)
        elif place.endswith(".md"):
            content = rewrite((root / target).read_text(), target)
        else:
            content = (root / target).read_text()
        # Source pages need no place in the navigation.
        level = InclusionLevel.NOT_IN_NAV if place.startswith("source/") else InclusionLevel.UNDEFINED
        files.append(File.generated(config, place, content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by is not None:
        return markdown
    return rewrite(markdown, f"docs/{page.file.src_uri}")
