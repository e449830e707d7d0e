"""OpenAI's own client, against the server."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from serving import MODEL, running

from flashtile.engine.server.service import Limits

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")  # openai needs it
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(model):
    with running(model, Limits(api_keys=("sesame",), request_timeout=30)) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0) as found:
        yield found


def test_models(client):
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt=["abc", [100]], max_tokens=3, temperature=0, logprobs=2, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["abcdef", "defg"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == list("abcdef")
    assert answer.usage.total_tokens == 10


def test_a_stream_of_completions(client):
    stream = client.completions.create(
        model=MODEL,
        prompt="abc",
        max_tokens=3,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert "".join(choice.text for event in events for choice in event.choices) == "def"
    assert events[-1].usage.completion_tokens == 3


def test_a_chat(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=4, temperature=0, n=2, stop="=", user="me",
        logprobs=True, top_logprobs=2, extra_body={"top_k": 5, "min_p": 0.0},
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == [";<", ";<"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == ";"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_of_a_chat(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=3,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content for event in events for choice in event.choices) == ";<="
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 3


class Letter(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})
    kind: Literal["vowel", "consonant"]
    places: list[Literal[1, 2]] = pydantic.Field(min_length=2, max_length=3)


def test_structured_chats(client):
    """The alphabet's model would never write JSON of its own."""
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Letter, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Letter)
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=1
    )
    assert answer.choices[0].message.content == "{"
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body={"structured_outputs": {"regex": "z[a-y]{3}"}}
    )
    events = list(stream)
    assert re.fullmatch("z[a-y]{3}", "".join(event.choices[0].delta.content or "" for event in events))
    assert events[-1].choices[0].finish_reason == "stop"


def test_structured_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt=[[97], [98]], n=2, temperature=0, max_tokens=9,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )  # fmt: skip
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", top_p=3)
    assert (caught.value.param, caught.value.code) == ("top_p", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a")
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format=bad)
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")
    assert "response_format must have a valid json, got" in caught.value.message
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as other,
    ):
        other.models.list()


def test_an_error_within_a_stream_is_raised(client, server):
    stream = client.completions.create(model=MODEL, prompt="abc", max_tokens=4000, temperature=0, stream=True)
    next(stream)
    (request_id,) = server.llm.engine.requests
    server.do(server.service.asynchronous.abort(request_id))
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "aborted"
