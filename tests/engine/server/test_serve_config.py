"""``flashtile serve --config FILE``: what a file says holds where the command line says nothing."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.tools.commands.options import as_arguments
from flashtile.tools.commands.serve import KEY, serve

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
TOML = """
# the small machine
model = "a/model"
port = 8100
max-num-seqs = 32
gpu_memory_utilization = 0.5
enforce-eager = true
access-log = false
enable-prefix-caching = true
api-key = ["one", "two"]
cors-origin = "*"
[speculative-config]
method = "ngram"
"""
VALUES = {
    "model": "a/model", "port": "8100", "max-num-seqs": "32", "gpu-memory-utilization": "0.5",
    "speculative-config": '{"method": "ngram"}',
}  # fmt: skip


def given(arguments):
    """The arguments of ``flashtile serve`` as it understands them, and as its replicas get them."""
    found = []

    def show(context: typer.Context, **others):
        found.append(as_arguments(context))

    program = typer.Typer()
    show.__signature__ = inspect.signature(serve, eval_str=True)
    program.command()(show)
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def as_dict(arguments):
    model, *others = arguments
    found = {"model": model}
    while others:
        name = others.pop(0).removeprefix("--")
        value = others.pop(0) if others and not others[0].startswith("--") else True
        found[name] = [*found[name], value] if name == "api-key" and name in found else value
        if name == "api-key" and not isinstance(found[name], list):
            found[name] = [value]
    return found


@needs_toml
def test_a_file_gives_options_and_the_command_line_wins(tmp_path):
    (tmp_path / "serve.toml").write_text(TOML)
    found = as_dict(given(["--config", str(tmp_path / "serve.toml")]))
    assert {name: found[name] for name in VALUES} == VALUES
    assert found["api-key"] == ["one", "two"]
    assert found["cors-origin"] == "*"
    assert found["enforce-eager"] is found["no-access-log"] is found["enable-prefix-caching"] is True
    assert "config" not in found
    more = ["b", "--port", "1", "--access-log", "--api-key", "three"]
    found = as_dict(given([*more, "--config", str(tmp_path / "serve.toml")]))
    assert (found["model"], found["port"], found["api-key"]) == ("b", "1", ["three"])
    assert found["access-log"] is True
    assert found["max-num-seqs"] == "32"


def test_a_file_of_json(tmp_path):
    values = {"model": "a", "port": 7, "max_prompts": 3, "tokenizer": None, "no_such": 1}
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if name != "no_such"}))
    found = as_dict(given(["--config", str(path)]))
    assert (found["port"], found["max-prompts"], "tokenizer" in found) == ("7", "3", False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"no-such": 1}', "'no-such' is not an option"),
        ('{"config": "x"}', "'config' is not an option"),
        ('{"port": [1]}', "port must be a single value"),
        ('{"port": 1.5}', "--port"),
        ('{"port": true}', "--port"),
        ('{"max-logprobs": -1}', "--max-logprobs must be"),
        ("{", "serve.json must be JSON: "),
        ('{"quantization": "awq"}', "--quantization must be None or 'fp8', got 'awq'; vLLM serves"),
        ("[]", "must hold an object"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(model, tmp_path, text, said):
    path = tmp_path / "serve.json"
    if text is not None:
        path.write_text(text)
    result = CliRunner(env={"COLUMNS": "400"}).invoke(
        application(), ["serve", str(model), "--config", str(path), "--device", "cpu"]
    )
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


@needs_toml
def test_a_file_of_another_form_is_named(tmp_path):
    (tmp_path / "serve.yaml").write_text("model: a\nport: 8000\n")
    result = CliRunner(env={"COLUMNS": "400"}).invoke(
        application(), ["serve", "--config", str(tmp_path / "serve.yaml")]
    )
    assert result.exit_code == 2
    assert "serve.yaml must be TOML, or JSON in a file that ends in .json: " in result.output


def test_replicas_have_no_tls_and_no_origins_of_their_own(model, tmp_path, monkeypatch):
    """They get what the file says, and not the file. Keys are in their environments only."""
    found = []

    def stop(arguments, environments, *others):
        found.append(as_dict(arguments))
        assert [one[KEY] for one in environments] == ["open\nsesame"] * 2
        raise typer.Exit(0)

    monkeypatch.setattr(sys.modules[serve.__module__], "_serve_replicas", stop)
    path, certificate = tmp_path / "serve.json", Path(__file__).with_name("certificate.pem")
    values = {"ssl-certfile": str(certificate), "cors-origin": ["*"], "max-num-seqs": 5, "port": 8765}
    values["api-key"] = ["open", "sesame"]
    path.write_text(json.dumps({**values, "data-parallel-size": 2, "model": str(model)}))
    result = CliRunner().invoke(application(), ["serve", "--config", str(path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (own,) = found
    assert not {"config", "ssl-certfile", "cors-origin", "api-key"} & set(own)
    assert (own["max-num-seqs"], own["port"], own["data-parallel-size"]) == ("5", "0", "1")


def test_tensor_parallel_processes_get_no_keys(model, tmp_path, monkeypatch):
    found = []

    def stop(command, world, device):
        found.extend(command)
        raise typer.Exit(0)

    monkeypatch.setattr("flashtile.engine.parallel.start_others", stop)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({"api-key": ["sesame"], "tensor-parallel-size": 2, "model": str(model)}))
    result = CliRunner().invoke(application(), ["serve", "--config", str(path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert str(model) in found
    assert "sesame" not in found


def test_the_environment_has_a_key_in_each_line(model, monkeypatch):
    """As replicas get them."""
    found = []

    def stop(llm, name, limits, *others):
        found.append(limits.api_keys)
        raise typer.Exit(0)

    monkeypatch.setattr("flashtile.engine.server.run.Server", stop)
    monkeypatch.setenv(KEY, "open\nsesame")
    for options, keys in (([], ("open", "sesame")), (["--api-key", "other"], ("other",))):
        result = CliRunner().invoke(application(), ["serve", str(model), "--device", "cpu", *options])
        assert (result.exit_code, found.pop()) == (0, keys), result.output
