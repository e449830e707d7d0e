"""``--help`` of every command shows the whole text of every option; ``--version`` prints one line."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import flashtile
from flashtile import cli, io_model, version
from flashtile.learn.visualizer import film, recording, settings
from flashtile.tools.commands import options, visualize
from walk import walk

ROOT = Path(__file__).parents[3]
GROUP = typer.main.get_command(cli.application())
COMMANDS = GROUP.list_commands(None)


def help_of(*command: str) -> str:
    """The help at 80 columns, not on a terminal."""
    result = CliRunner().invoke(cli.application(), [*command, "--help"], env={"COLUMNS": "80", "LINES": "24"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    return result.output


@walk("name", COMMANDS)
def test_help_is_whole(name):
    text = help_of(name)
    words = text.split()
    command = GROUP.commands[name]
    for parameter in command.params:
        for spelled in (*parameter.opts, *parameter.secondary_opts):
            assert spelled in words or f"{spelled}," in words or f"[{spelled}]..." in words, spelled
        described = (getattr(parameter, "help", None) or "").split()
        assert _in_order(described, words), described
    assert _in_order((command.help or "").split(), words)
    assert "…" not in text
    assert "│" not in text


def test_the_list_of_commands_is_whole():
    text = help_of()
    for name in COMMANDS:
        assert f"\n  {name} " in text
        assert _in_order(GROUP.commands[name].short_help.split(), text.split())
    assert not re.search(r"\.\.\.$", text.partition("Commands:")[2], re.MULTILINE)
    assert "--version" in text.split()


@walk(
    "arguments",
    [
        ["--help"], ["no-such"], ["--version"], ["generate"], ["serve", "--no-such"],
        *([name, "--help"] for name in COMMANDS),
    ],
)  # fmt: skip
def test_help_versions_and_usage_errors_import_no_torch(arguments, tmp_path):
    """In an empty folder, because `generate` takes the model that the demo leaves in the current one."""
    command = [sys.executable, "-X", "importtime", "-m", "flashtile", *arguments]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True)
    imported = re.findall(r"^import time:.*\| *(\S+)$", result.stderr, re.MULTILINE)
    assert "flashtile.cli" in imported
    assert "torch" not in imported


def test_help_lists_what_there_is():
    """Help texts have their own lists, because the modules that know it import torch."""
    assert tuple(model.name.lower() for model in io_model.MODELS) == options.MODEL_NAMES
    assert tuple(recording.RUNNERS) == visualize.ALGORITHMS
    assert visualize.MASKS == settings.MASKS
    assert visualize.FILMS == film.SUFFIXES


def test_a_recorded_program_finds_the_operators(tmp_path):
    """Files of torch.export need only ``import flashtile``, also below the command line."""
    program = tmp_path / "program.py"
    program.write_text("import torch, flashtile\nprint(torch.ops.flashtile.forward)\n")
    command = [sys.executable, "-m", "flashtile", "record", str(tmp_path / "calls.json"), str(program)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "flashtile.forward" in result.stdout, result.stderr


def _in_order(part: list[str], words: list[str]) -> bool:
    """Whether ``part`` occurs in ``words`` without a gap."""
    return any(words[i : i + len(part)] == part for i in range(len(words)))


def run_version(monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["flashtile", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    written = capsys.readouterr()
    assert written.err == ""
    return written.out


@pytest.mark.parametrize(("triton", "shown"), [("3.7.1", "triton 3.7.1"), (None, "no triton")])
def test_version(monkeypatch, capsys, triton, shown):
    versions = {"torch": torch.__version__, "triton": triton}
    monkeypatch.setattr(version, "installed_version", versions.get)
    expected = f"flashtile {flashtile.__version__}, torch {torch.__version__}, {shown}\n"
    assert run_version(monkeypatch, capsys) == expected
    result = CliRunner().invoke(cli.application(), ["--version"])
    assert (result.exit_code, result.output) == (0, expected)


def test_version_needs_no_extras(monkeypatch, capsys):
    import_module = builtins.__import__

    def without_typer(name, *rest, **keywords):
        if name.partition(".")[0] == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return import_module(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    assert run_version(monkeypatch, capsys).startswith("flashtile ")
