"""MkDocs hook: the site has the colours and fonts of flashtile's own pages."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from flashtile.files import DESIGN

VARIABLES = re.compile(r"^:root \{\n.*?^\}\n", re.MULTILINE | re.DOTALL)
"""The part of the design that defines names and styles no element."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    found = VARIABLES.search(DESIGN.read_text("utf-8"))
    assert found is not None
    files.append(File.generated(config, "assets/design.css", content=found[0]))
    return files
