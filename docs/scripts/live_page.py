"""MkDocs hook: the interactive page is part of the site, and stands in place of the picture of its race."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from flashtile.learn.visualizer.page import write_page
from flashtile.learn.visualizer.settings import grid

PLACE = "assets/flashtile-visualize.html"
RACE = re.compile(r"^!\[([^\]]*)\]\([^)]*assets/visualizer/race\.gif\)$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        write_page(path, list(grid()))
        files.append(File.generated(config, PLACE, content=path.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the picture of the race, whose description becomes the frame's title, by the page itself."""
    if page.is_homepage:
        page.meta.setdefault("hide", ["navigation"])  # its section has no other page
    address = "../" * page.file.src_uri.count("/") + PLACE
    is_chinese = page.file.src_uri.endswith(".zh-CN.md")
    language, alone = ("zh", "单独打开此页") if is_chinese else ("en", "Open the page alone")

    def frame(race: re.Match[str]) -> str:
        return (
            f'<iframe class="live" src="{address}#lang={language}" title="{race[1]}" loading="lazy"></iframe>'
            f'\n\n<p class="live-link"><a href="{address}#lang={language}">{alone}</a></p>'
        )

    return RACE.sub(frame, markdown, count=1)
