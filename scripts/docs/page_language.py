"""MkDocs hook: a page in Chinese says so, because browsers choose glyphs and screen readers voices by it."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    if not page.file.src_uri.endswith(".zh-CN.md"):
        return output
    output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output.replace("Table of contents", "目录").replace("Back to top", "回到顶部")
