"""What holds without being said: the defaults of sampling, and fields that change no answer."""

from __future__ import annotations

import json
import shutil

import pytest
from serving import running

from flashtile.engine import LLM, SamplingParams
from flashtile.engine.server.protocol import IGNORED, Body, ChatCall, CompletionCall

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
GENERATION = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05,
    "max_new_tokens": 7, "bos_token_id": 1, "min_p": None, "transformers_version": "4.51.0",
}  # fmt: skip
DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 7}


@pytest.fixture(scope="module")
def generating(model, tmp_path_factory):
    """The folder of a model with a generation_config.json."""
    folder = tmp_path_factory.mktemp("generating") / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.fixture(scope="module")
def server(model):
    with running(model) as found:
        yield found


def load(folder, **options):
    return LLM(folder, device="cpu", block_size=4, num_gpu_blocks_override=64, **options)


def test_an_engines_defaults_are_the_models(model, generating):
    assert load(generating).get_default_sampling_params() == SamplingParams(**DEFAULTS)
    for folder, option in ((generating, "vllm"), (model, "auto")):
        assert load(folder, generation_config=option).get_default_sampling_params() == SamplingParams()
    assert load(model, generation_config=generating).sampling_defaults == DEFAULTS
    (answer,) = load(generating).generate("abc")
    assert len(answer.outputs[0].token_ids) == 7


@pytest.mark.parametrize(
    ("written", "named"), [({"temperature": -1}, "temperature must be"), ({"top_k": "many"}, "top_k must be")]
)
def test_a_wrong_default_is_named_with_its_file(generating, tmp_path, written, named):
    shutil.copytree(generating, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=f"generation_config.json: {named}"):
        load(tmp_path / "model")
    assert load(tmp_path / "model", generation_config="vllm").sampling_defaults == {}
    with pytest.raises(FileNotFoundError, match="generation_config must be"):
        load(generating, generation_config=tmp_path)


@pytest.mark.parametrize(("read", "fields"), [(CompletionCall, {"prompt": "a"}), (ChatCall, HELLO)])
def test_what_a_call_says_comes_before_the_defaults(read, fields):
    params = read(Body(fields, DEFAULTS), 20).params
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 30}
    params = read(Body({**fields, **said}, DEFAULTS), 20).params
    assert {name: getattr(params, name) for name in said} == said
    params = read(Body({**fields, "max_tokens": None}, {"max_tokens": 40}), 20).params
    assert params.max_tokens == (16 if read is CompletionCall else 40)


def test_a_server_answers_with_the_defaults(generating):
    with running(generating) as server:
        for path, fields in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", HELLO)):
            for more, tokens in ({}, 7), ({"max_tokens": 9}, 9):
                status, answer = server.ask(path, {**fields, "ignore_eos": True, **more})
                assert (status, answer["usage"]["completion_tokens"]) == (200, tokens)


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", HELLO)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_change_no_answer_are_named_in_a_header(server, path, fields, stream):
    harmless = {
        "metadata": {"run": "1"}, "parallel_tool_calls": False, "prompt_cache_key": "k", "store": True,
        "prompt_cache_retention": "24h", "safety_identifier": "me", "service_tier": "flex", "user": "me",
    }  # fmt: skip
    assert set(harmless) == set(IGNORED)
    fields = {**fields, "stream": stream, "max_tokens": 2}
    response = server.send(path, {**fields, **harmless})
    assert response.status == 200, response.read()
    assert response.getheader("X-Ignored-Fields") == ", ".join(sorted(harmless))
    assert response.read()
    response = server.send(path, {**fields, "store": None})
    assert (response.status, response.getheader("X-Ignored-Fields")) == (200, None)
    assert response.read()
