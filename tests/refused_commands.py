"""Commands that are refused before they begin their work, for the tests of bad options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def refusals(
    main: Callable[[], None],
    program: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs ``main`` with arguments, and returns its exit code and its message.

    ``folder``, for which "{tmp}" stands in arguments, gets files that no command can read. The command must
    write no file, and nothing to its output.
    """
    (folder / "file").write_text("not JSON")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "other.json").write_text(json.dumps({"date": "2026", "versions": {}}))
    cells = {"cells": [{"results": 3}], "settings": {}, "contestants": 7}
    (folder / "cells.json").write_text(json.dumps(cells))
    before = sorted(folder.iterdir())

    def call(*arguments: str) -> tuple[int, str]:
        given = [argument.replace("{tmp}", str(folder)) for argument in arguments]
        monkeypatch.setattr(sys, "argv", [program, *given])
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as stopped:
            main()
        assert sorted(folder.iterdir()) == before
        written = capsys.readouterr()
        assert written.out == ""
        return stopped.value.code, written.err

    return call
