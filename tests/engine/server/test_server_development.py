"""Paths for trainers, which ``--server-dev-mode`` adds: sleep, wake up, weights of a folder."""

from __future__ import annotations

import shutil

import pytest
from serving import MODEL, running

from flashtile.engine.server.openapi import DEVELOPMENT
from flashtile.engine.server.service import Limits


@pytest.fixture(scope="module")
def server(model):
    with running(model, Limits(server_dev_mode=True)) as found:
        yield found


def refusal(server, path, body=b"", headers=None):
    status, answer = server.ask(path, body, headers)
    assert 400 <= status < 500
    message = answer["error"]["message"]
    assert "\n" not in message
    return message


def test_a_trainer_sleeps_the_server_and_gives_it_weights(server, model, tmp_path):
    """Without a body and a content type, as vLLM's clients call."""
    plain = {"Content-Type": ""}
    expected = server.complete(prompt="abc", max_tokens=5)["choices"][0]["text"]
    assert expected == "defgh"
    assert server.ask("/is_sleeping") == (200, {"is_sleeping": False})
    assert server.ask("/sleep?level=2", b"", plain) == (200, {"is_sleeping": True})
    assert server.ask("/health")[0] == 200
    status, answer = server.ask("/v1/completions", {"model": MODEL, "prompt": "abc"})
    assert (status, answer["error"]["code"]) == (503, "engine_sleeping")
    assert "the engine must be awake for sleep" in refusal(server, "/sleep", b"", plain)
    assert server.ask("/wake_up?tags=weights", b"", plain) == (200, {"is_sleeping": True})
    copied = tmp_path / ("long name" * 20)
    shutil.copytree(model, copied)
    status, answer = server.ask("/update_weights_from_disk", {"model_path": str(copied)})
    assert (status, answer["success"]) == (200, True)
    assert server.ask("/wake_up?tags=weights&tags=kv_cache", b"", plain) == (200, {"is_sleeping": False})
    assert server.complete(prompt="abc", max_tokens=5)["choices"][0]["text"] == expected


def test_what_is_wrong_is_one_line(server, tmp_path):
    disk = "/update_weights_from_disk"
    assert refusal(server, "/sleep?level=3") == "level must be from 1 to 2, got 3"
    assert refusal(server, "/sleep?level=deep") == "level must be an int, got str 'deep'"
    assert refusal(server, "/sleep?modes=wait") == "AsyncLLM.sleep has no argument modes; did you mean mode?"
    assert refusal(server, "/wake_up?tag=weights").startswith("AsyncLLM.wake_up() got an unexpected")
    assert "tags must be a list of 'weights' and 'kv_cache'" in refusal(server, "/wake_up?tags=all")
    assert refusal(server, disk, {}) == "model_path must be a folder with weights, got None"
    assert refusal(server, disk, {"model_path": 3}) == "model_path must be a folder with weights, got 3"
    assert "flush_cache is not a field" in refusal(server, disk, {"model_path": "a", "flush_cache": True})
    assert "no/such/folder" in refusal(server, disk, {"model_path": "no/such/folder"})
    assert "safetensors" in refusal(server, disk, {"model_path": str(tmp_path)})
    assert server.ask("/is_sleeping") == (200, {"is_sleeping": False})


def test_a_server_at_work_does_not_sleep(server, model):
    stream = server.send("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": True})
    assert stream.readline().startswith(b"data: ")
    assert refusal(server, "/sleep") == "sleep must be called without unfinished requests, got 1 of them"
    assert "update_weights must be called without" in refusal(
        server, "/update_weights_from_disk", {"model_path": str(model)}
    )
    stream.close()


def test_a_page_of_another_origin_cannot_call(server):
    """Browsers name the origin of each POST, also of one without a body, which needs no leave of CORS."""
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        page = {"Content-Type": "", "Origin": "https://example.org"}
        assert "Content-Type must be application/json" in refusal(server, path, b"", page)
    assert server.ask("/is_sleeping") == (200, {"is_sleeping": False})


def test_without_the_option_nothing_of_it_is_served(model):
    with running(model) as server:
        for method, path in DEVELOPMENT:
            body = None if method == "get" else b""
            assert refusal(server, path, body) == f"{path} is off: start the server with --server-dev-mode"
        assert not {path for _, path in DEVELOPMENT} & server.ask("/openapi.json")[1]["paths"].keys()
