"""MkDocs hook: the site's name has the version of the package."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig

import flashtile


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.site_name = f"{config.site_name} {flashtile.__version__}"
    return config
