"""MkDocs hook: the page about the command line, from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from flashtile.cli import application

PLACE = "reference/cli.md"


def page() -> str:
    group: Any = typer.main.get_command(application())
    context = group.make_context("flashtile", [], resilient_parsing=True)
    parts = ["# Command line", "`pip install '.[cli]'` brings the `flashtile` command."]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        parts += [f"## flashtile {name}", command.help or "", *_options(name, command)]
    return "\n\n".join(parts) + "\n"


def _options(name: str, command: Any) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    records = filter(None, (option.get_help_record(context) for option in command.params))
    lines = [f"| `{names}` | {text} |" for names, text in records]
    return ["\n".join(["| option | |", "|---|---|", *lines])] if lines else []


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PLACE, content=page()))
    return files
