"""``flashtile serve`` as a process: it starts, it serves, a signal ends it; bad options are one line."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import MODEL
from typer.testing import CliRunner

from flashtile.cli import application

ROOT = Path(__file__).parents[3]
COMMAND = """
import atexit, gc, runpy, sys
atexit.register(lambda: print("frozen:", gc.get_freeze_count(), file=sys.stderr))
runpy.run_module("flashtile", run_name="__main__", alter_sys=True)
"""
"""``python -m flashtile``, which says last how many objects Python does not collect as it ends."""


@pytest.fixture
def process(model):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHTILE_API_KEY": "sesame"}
    command = [
        sys.executable, "-c", COMMAND, "serve", str(model), "--port", "0", "--device", "cpu",
        "--served-model-name", MODEL, "--shutdown-timeout", "20", "--kv-cache-memory-bytes", "40000000",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as found:
        yield found
        found.kill()


def test_a_server_from_start_to_end(process):
    """A call that is in flight when SIGTERM comes is answered; a second signal ends it with an error."""
    port = None
    for line in process.stderr:
        if found := re.search(r"serving alphabet at http://127.0.0.1:(\d+)", line):
            port = int(found[1])
            break
    assert port, "it did not start"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
    fields = {"model": MODEL, "prompt": "abc", "temperature": 0, "max_tokens": 60, "stream": True}

    def stream(**more):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({**fields, **more}), headers)
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        return response

    short, long = stream(), stream(max_tokens=4000)
    process.send_signal(signal.SIGTERM)
    texts = short.read().decode()
    assert '"finish_reason":"length"' in texts
    assert texts.endswith("data: [DONE]\n\n")
    process.send_signal(signal.SIGTERM)
    texts = long.read().decode()
    assert '"code":"aborted"' in texts
    assert texts.endswith("data: [DONE]\n\n")
    said = process.stderr.read()
    assert process.wait(30) == 0
    assert int(re.findall(r"frozen: (\d+)", said)[-1]) > 100_000, "torch's objects are collected at the end"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["/no/such/folder"], "config.json"),
        ([], "model"),
        (["MODEL", "--dtype", "int8"], "--dtype must be"),
        (["MODEL", "--port", "70000"], "port"),
        (["MODEL", "--request-timeout", "0"], "--request-timeout must be above 0"),
        (["MODEL", "--max-body-bytes", "-1"], "--max-body-bytes must be above 0"),
        (["MODEL", "--shutdown-timeout", "-1"], "--shutdown-timeout must be"),
        (["MODEL", "--api-key", ""], "--api-key must be"),
        (["MODEL", "--max-priority", "-1"], "--max-priority must be from 0"),
        (["MODEL", "--idle-timeout", "0"], "--idle-timeout must be above 0"),
        (["MODEL", "--device", "tpu"], "tpu"),
        (["MODEL", "--cors-origin", "example.org"], "--cors-origin must be"),
        (["MODEL", "--tool-call-parser", "pythonic"], "--tool-call-parser must be auto, none, hermes"),
        (["MODEL", "--reasoning-parser", "hermes"], "--reasoning-parser must be auto, none, deepseek"),
        (["MODEL", "--ssl-keyfile", "/no/such/key"], "--ssl-certfile must be given"),
        (["MODEL", "--ssl-certfile", "/no/such/file"], "--ssl-certfile must be certificates"),
        (["MODEL", "--generation-config", "/no/such/folder"], "--generation-config must be"),
        (["no-such/model", "--data-parallel-size", "2"], "model must be a folder"),
        (["MODEL", "--server-dev-mode", "--data-parallel-size", "2"], "--server-dev-mode must be off"),
        (["UNTOLD"], "has no tokenizer.json (give --tokenizer, or --skip-tokenizer-init)"),
        (["UNTOLD", "--skip-tokenizer-init", "--dtype", "int8"], "--dtype must be"),
        (["MODEL", "--max-num-seqs", "0"], "--max-num-seqs must be"),
        (["MODEL", "--swap-space", "inf"], "--swap-space must be"),
        (["MODEL", "--tensor-parallel-size", "3"], "--tensor-parallel-size must divide"),
    ],
)
def test_bad_options_are_errors_of_the_command_line(model, tmp_path, options, said):
    """Which name the options, and not the arguments of Python's that they become."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model / file)
    folders = {"MODEL": str(model), "UNTOLD": str(tmp_path)}
    options = [folders.get(option, option) for option in options]
    result = CliRunner().invoke(application(), ["serve", *options])
    assert result.exit_code == 2, result.output
    assert said in " ".join(re.sub(r"[│╭╰─╮╯]", " ", result.output).split()).lower().replace(" _", "_")


def test_an_address_that_is_taken(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(
            application(), ["serve", str(model), "--port", port, "--device", "cpu", "--block-size", "64"]
        )
    assert result.exit_code == 2
    assert port in result.output
