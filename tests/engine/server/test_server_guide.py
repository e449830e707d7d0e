"""The server's guide: its commands and its Python run against a server, its lists are those of the code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import MODEL, running, scripted

from flashtile.engine import server as server_package
from flashtile.engine.core import EngineStats
from flashtile.engine.server import formats, protocol
from flashtile.engine.server.metrics import Metrics
from flashtile.engine.server.service import Limits
from flashtile.tools.commands.serve import serve

GUIDE = (Path(__file__).parents[3] / "docs/guides/server.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(model):
    with running(model, Limits(server_dev_mode=True)) as found:
        yield found


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def named(text):
    return set(re.findall(r"`([\w]+)`", text))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_run(server, model):
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("curl")]
    assert len(commands) > 3
    for command in commands:
        command = [
            word.replace(ADDRESS, server.url).replace("path/to/new/weights", str(model)) for word in command
        ]
        result = subprocess.run([*command, "-sS", "--fail"], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, (command, result.stderr)
        assert result.stdout


def test_the_python_runs(server, capsys):
    pytest.importorskip("openai")
    code, _ = blocks("python")
    namespace = {}
    exec(code.replace(ADDRESS, server.url), namespace)
    namespace["client"].close()
    assert namespace["model"] == MODEL
    assert capsys.readouterr().out


def test_the_python_with_tools_runs(model, capsys):
    pytest.importorskip("openai")
    _, code = blocks("python")
    with scripted(model) as found:
        found.script += [
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
            "Warm.",
        ]
        namespace = {}
        exec(code.replace(ADDRESS, found.url), namespace)
        namespace["client"].close()
        assert "tool:18 degrees in Paris" in found.asked[1]
    assert capsys.readouterr().out == "Warm.\n"


def test_every_parser_is_in_the_table():
    section = GUIDE.split("## Tools and reasoning")[1].split("## ")[0]
    assert {*formats.TOOL_PARSERS, *formats.REASONING_PARSERS} <= named(section)


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


def test_every_limit_is_in_the_table_with_its_default():
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]+?) \|", GUIDE, re.MULTILINE))
    parameters = inspect.signature(serve).parameters
    not_limits = {"api_keys", "access_log", "cors_origins", "server_dev_mode", "tls"}
    names = {field.name for field in dataclasses.fields(Limits)} - not_limits
    assert names <= {row.replace("-", "_") for row in rows}
    for row, shown in rows.items():
        default = parameters[row.replace("-", "_")].default
        assert default is None or float(shown) == default, row
