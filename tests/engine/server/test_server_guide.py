"""The server's guide: its commands and its Python run against a server, its lists are those of the code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import MODEL, running

from flashtile.engine import server as server_package
from flashtile.engine.core import EngineStats
from flashtile.engine.server import protocol
from flashtile.engine.server.metrics import Metrics

GUIDE = (Path(__file__).parents[3] / "docs/guides/server.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(model):
    with running(model) as found:
        yield found


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def named(text):
    return set(re.findall(r"`([\w]+)`", text))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_run(server):
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("curl")]
    assert len(commands) > 3
    for command in commands:
        command = [word.replace(ADDRESS, server.url) for word in command]
        result = subprocess.run([*command, "-sS", "--fail"], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, (command, result.stderr)
        assert result.stdout


def test_the_python_runs(server, capsys):
    pytest.importorskip("openai")
    (code,) = blocks("python")
    namespace = {}
    exec(code.replace(ADDRESS, server.url), namespace)
    namespace["client"].close()
    assert namespace["model"] == MODEL
    assert capsys.readouterr().out


def test_the_error_is_the_servers(server):
    (shown,) = (text for text in blocks("text") if "error" in text)
    assert server.ask("/v1/completions", {"prompt": "a", "top_p": 3})[1] == json.loads(shown)


def test_every_field_path_code_and_number_is_named():
    source = "".join(path.read_text() for path in Path(server_package.__file__).parent.glob("*.py"))
    read = set(re.findall(r'body\.(?:take|flag|integer|text|object)\(\s*"(\w+)"', source))
    assert len(read) > 25
    section = GUIDE.split("## Fields")[1].split("## Errors")[0] + GUIDE.split("## Paths")[1]
    tokenizers_own = {"tokens", "return_token_strs"}
    assert read | set(protocol.SAMPLING) | set(protocol.UNSUPPORTED) <= named(section) | tokenizers_own
    assert set(protocol.IGNORED) <= named(section)
    errors = GUIDE.split("## Errors")[1].split("## Limits")[0]
    codes = set(re.findall(r'code="(\w+)"', source)) | {"invalid_value", "unsupported_value"}
    assert codes == named(errors) & codes
    paths = set(re.findall(r'(?:get|post)\("(/[\w/]*)', source))
    assert {path.rstrip("/") for path in paths} <= set(re.findall(r"(/[\w/]+)", GUIDE)) | {""}
    numbers = set(
        re.findall(
            r"^# TYPE vllm:(\w+)", Metrics("m").text(EngineStats(0, 0, 0.0, 0, 0, 0, 0, 0)), re.MULTILINE
        )
    )
    assert numbers == numbers & named(GUIDE.split("## Numbers")[1])
