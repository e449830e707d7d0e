"""MkDocs hook: a page about an algorithm, in any language, shows the algorithm's file beside its text."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FOLDER = "algorithms"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    page_path = Path(page.file.src_uri)
    name = page_path.name.split(".")[0]
    source = Path(config.config_file_path).parent / "flashtile" / "learn" / FOLDER / f"{name}.py"
    if page_path.parent.as_posix() != FOLDER or not source.exists():
        return markdown
    page.meta.setdefault("hide", ["toc"])  # the file takes its place
    title, _, text = markdown.lstrip().partition("\n")  # the title stays outside: it names the page
    name = f"flashtile/learn/{FOLDER}/{source.name}"
    return (
        f'{title}\n\n<div class="beside" markdown="1">\n<div markdown="1">\n\n{text}\n\n</div>\n'
        f'<div class="source" markdown="1">\n\n````python title="{name}" linenums="1"\n'
        f"{source.read_text().rstrip()}\n````\n\n</div>\n</div>\n"
    )
