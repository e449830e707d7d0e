"""MkDocs hooks for the text of pages: files next to algorithms, formulas, languages, order in the search."""

from __future__ import annotations

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ALGORITHMS = "algorithms"
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>',
    re.DOTALL,
)


FIRST_FOUND = {"start.md": 4, "index.md": 2, "guides/training.md": 2}
"""Pages that the site's search lists before others, with the factor of their scores."""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the file of an algorithm next to the text of its page, in any language."""
    page_path = Path(page.file.src_uri)
    if page.file.src_uri in FIRST_FOUND:
        page.meta["search"] = {"boost": FIRST_FOUND[page.file.src_uri]}
    name = page_path.name.split(".")[0]
    source = Path(config.config_file_path).parent / "flashtile" / "learn" / ALGORITHMS / f"{name}.py"
    if page_path.parent.as_posix() != ALGORITHMS or not source.exists():
        return markdown
    page.meta.setdefault("hide", ["toc"])  # the file takes its place
    title, _, text = markdown.lstrip().partition("\n")  # the title stays outside: it names the page
    name = f"flashtile/learn/{ALGORITHMS}/{source.name}"
    return (
        f'{title}\n\n<div class="beside" markdown="1">\n<div markdown="1">\n\n{text}\n\n</div>\n'
        f'<div class="source" markdown="1" data-search-exclude>\n\n````python title="{name}" linenums="1"\n'
        f"{source.read_text().rstrip()}\n````\n\n</div>\n</div>\n"
    )


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert LaTeX formulas to MathML, so that a reader's browser loads no library."""
    return FORMULA.sub(to_mathml, content)


def to_mathml(formula: re.Match[str]) -> str:
    if formula["inline"] is not None:
        return convert(html.unescape(formula["inline"]))
    mathml = convert(html.unescape(formula["block"]), display="block")
    return f'<div class="formula">{mathml}</div>'


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Mark a page in Chinese as such; browsers choose glyphs by it, and screen readers voices."""
    if not page.file.src_uri.endswith(".zh-CN.md"):
        return output
    output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output.replace("Table of contents", "目录").replace("Back to top", "回到顶部")
