"""Answers in every format of tool calls, cut at every token: whole, in a stream, and replayed as history."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted import ANSWERS, ARGUMENTS, MARKERS, write_model
from serving import MODEL
from serving import scripted as serve

from flashtile.engine.server.protocol import Body, Conversation

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
PARAMETERS = {"add": {"properties": {"a": {"type": "string"}}}, "stop": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", **of_tool}}}
    for name, of_tool in PARAMETERS.items()
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("scripted"))
    with serve(path, load_format="dummy", warmup=False) as found:
        yield found


def asked(server, **fields):
    """(message, finish reason) of a whole answer by the script. That of a stream must be the same."""
    fields = {"model": MODEL, "messages": [USER], "tools": TOOLS, "temperature": 0, **fields}
    status, body = server.ask(PATH, fields)
    assert status == 200, body
    (choice,) = body["choices"]
    for one in choice["message"].get("tool_calls", ()):
        assert re.fullmatch("[0-9a-f]{9}", one["id"])  # templates of Mistral's models refuse others
    message, reason, streamed = (
        choice["message"],
        choice["finish_reason"],
        {"role": "assistant", "content": ""},
    )
    for event in server.events(PATH, **fields):
        (found,) = event["choices"]
        for one in found["delta"].pop("tool_calls", ()):
            calls = streamed.setdefault("tool_calls", [])
            if "id" in one:
                calls.append({"id": one["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            for name, text in one["function"].items():
                calls[one["index"]]["function"][name] += text
        for name, text in found["delta"].items():
            streamed[name] = text if name == "role" else streamed.get(name, "") + text
    assert found["finish_reason"] == reason
    assert without_ids(streamed) == without_ids(message)
    return message, reason


def without_ids(message):
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return {**message, "content": message["content"] or "", "tool_calls": calls}


def cuts(tokenizer, text):
    """Fields that cut a text at each of its tokens: by its length, and by a stop text that begins there."""
    tokens = tokenizer.encode(text, False)
    for count in range(1, len(tokens)):
        yield {"max_tokens": count}
        begin = len(tokenizer.decode(tokens[:count], False).rstrip("\ufffd"))
        stops = (text[begin:end] for end in range(begin + 1, len(text) + 1))
        yield from (
            {"stop": stop} for stop in itertools.islice((s for s in stops if text.find(s) == begin), 1)
        )


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_answer(server, monkeypatch, name):
    formats, text, more, calls = ANSWERS[name]
    if "tool_choice" in more:
        pytest.importorskip("llguidance")
    monkeypatch.setattr(server.service, "formats", formats)

    def check(fields):
        message, reason = asked(server, **more, **fields)
        found = without_ids(message)
        assert not any(marker in found["content"] for marker in MARKERS), fields
        for field in ("content", "reasoning"):
            assert whole.get(field, "").startswith(found.get(field, "").rstrip().rstrip("\ufffd")), fields
        assert len(found["tool_calls"]) <= len(calls), fields
        for (called, arguments), (tool, wanted) in zip(found["tool_calls"], calls, strict=False):
            assert called == tool
            assert wanted.startswith(arguments.rstrip("\ufffd")), fields
        if reason == "tool_calls":
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in found["tool_calls"])
        else:
            assert reason == ("length" if "max_tokens" in fields else "stop")
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": "x"}
            for one in message.get("tool_calls", ())
        ]
        history = {"messages": [USER, message, *results, USER], "tools": TOOLS}
        assert server.service.render(Conversation(Body(history))).endswith("user:hello;assistant:")

    server.script += [text] * 2
    message, reason = asked(server, **more)
    whole = without_ids(message)
    assert (whole["tool_calls"], reason) == (list(calls), "tool_calls")
    assert whole["content"] == "I call." * ("I call." in text)
    assert whole.get("reasoning", "") == "Why 1?" * ("Why 1?" in text)
    given = list(cuts(server.service.tokenizer, text))
    server.script += [text] * 2 * len(given)  # all requests of the pool take the same answer
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(check, given))


@pytest.mark.parametrize("name", ["hermes", "gpt"])
def test_a_stop_text_in_the_reasoning_does_not_end_the_answer(server, monkeypatch, name):
    formats, text, *_ = ANSWERS[name]
    monkeypatch.setattr(server.service, "formats", formats)
    server.script += [text] * 2
    message, reason = asked(server, stop="1")
    assert (message["reasoning"], message["content"], reason) == ("Why 1?", "I call.", "stop")
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS[: ARGUMENTS.index("1")]
    server.script += [text] * 2
    message, _ = asked(server, stop="1", separate_reasoning=False)
    assert "I call." not in message["content"]
