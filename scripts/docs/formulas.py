"""MkDocs hook: LaTeX formulas become MathML while the site is built; a reader's browser loads no library."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>',
    re.DOTALL,
)


def to_mathml(formula: re.Match[str]) -> str:
    if formula["inline"] is not None:
        return convert(html.unescape(formula["inline"]))
    mathml = convert(html.unescape(formula["block"]), display="block")
    return f'<div class="formula">{mathml}</div>'


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return FORMULA.sub(to_mathml, content)
