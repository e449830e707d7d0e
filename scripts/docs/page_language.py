"""MkDocs hook: a page in Chinese says so, for browsers choose glyphs, and screen readers voices, by it."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    if not page.file.src_uri.endswith(".zh-CN.md"):
        return output
    return output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
