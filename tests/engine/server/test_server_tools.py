"""Tool calls and reasoning through HTTP, from a model that answers by a script."""

from __future__ import annotations

import itertools
import json

import pytest
from serving import END, MODEL, scripted
from serving import tool_call as call

from flashtile.engine.server.formats import AUTO, Formats
from flashtile.engine.server.run import Server
from flashtile.engine.server.service import Limits
from flashtile.engine.tokenizer import ByteTokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}


@pytest.fixture(scope="module")
def server(model):
    with scripted(model) as found:
        yield found


def ask(server, answer, **fields):
    """The choice of a whole answer; that of a stream must be the same."""
    fields = {"model": MODEL, "messages": [USER], "temperature": 0, **fields}
    server.script += [answer, answer]
    status, body = server.ask(PATH, fields)
    assert status == 200, body
    (choice,) = body["choices"]
    assert joined(server.events(PATH, **fields)) == (without_ids(choice["message"]), choice["finish_reason"])
    return choice


def without_ids(message):
    calls = [one["function"] for one in message.get("tool_calls", ())]
    return {**{name: value or "" for name, value in message.items()}, "tool_calls": calls}


def joined(events):
    """(message, finish reason) of a stream."""
    message, calls, reason = {"content": ""}, [], None
    for event in events:
        (choice,) = event["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        for one in delta.pop("tool_calls", ()):
            if "id" in one:
                assert one["index"] == len(calls)
                calls.append({"name": one["function"]["name"], "arguments": ""})
            calls[one["index"]]["arguments"] += one["function"]["arguments"]
        for name, text in delta.items():
            message[name] = message.get(name, "") + text
    return {**message, "tool_calls": calls}, reason


def test_a_call(server):
    choice = ask(server, f"I add.\n{call('add', a=1, b=2)}", tools=[ADD, STOP])
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (found,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "I add."}
    assert set(found) == {"id", "type", "function"}
    assert found["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert server.asked[-1] == "[add][stop]user:hello;assistant:"
    assert not server.params.skip_special_tokens


def test_two_calls_or_one(server):
    answer = call("add", a=1, b=2) + "\n" + call("stop")
    message = ask(server, answer, tools=[ADD, STOP])["message"]
    assert message["content"] is None
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["add", "stop"]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    message = ask(server, answer, tools=[ADD, STOP], parallel_tool_calls=False)["message"]
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["add"]


def test_an_answer_without_calls(server):
    choice = ask(server, "Hello. ", tools=[ADD])
    assert choice["message"] == {"role": "assistant", "content": "Hello. "}
    assert choice["finish_reason"] == "stop"


def test_tools_that_may_not_be_called(server):
    choice = ask(server, call("stop"), tools=[STOP], tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": call("stop")}
    assert server.asked[-1].startswith("[stop]")


def forced(choice, parameters):
    tools = [STOP, {"type": "function", "function": {"name": "pick", "parameters": parameters}}]
    return {
        "model": MODEL, "messages": [USER], "temperature": 0, "parallel_tool_calls": False, "max_tokens": 100,
        "tools": tools[choice == "required" :], "tool_choice": choice, "separate_reasoning": False,
    }  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_tool_that_must_be_called(server, choice):
    """The model's own answer would be letters; the schema leaves it one call."""
    pytest.importorskip("llguidance")
    parameters = {
        "type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"],
        "$defs": {"X": {"const": 7}},
    }  # fmt: skip
    server.script += [None, None]
    fields = forced(choice, parameters)
    (whole,) = server.ask(PATH, fields)[1]["choices"]
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == (None, "tool_calls")
    assert [one["function"] for one in message["tool_calls"]] == [{"name": "pick", "arguments": '{"x": 7}'}]
    assert joined(server.events(PATH, **fields)) == (without_ids(message), "tool_calls")


def test_a_schema_that_the_grammar_refuses_names_the_tools(server):
    pytest.importorskip("llguidance")
    server.script.append(None)
    status, body = server.ask(PATH, forced("required", {"type": 3}))
    assert (status, body["error"]["param"]) == (400, "tools")
    server.script.clear()


def test_a_structured_answer_has_no_calls(server):
    """Its text matches the structure, even where that looks like a call or the prompt begins reasoning."""
    pytest.importorskip("llguidance")
    server.script.append(None)
    fields = {
        "model": MODEL,
        "messages": [USER],
        "tools": [STOP],
        "chat_template_kwargs": {"enable_thinking": True},
        "separate_reasoning": False,
    }
    structure = {"structured_outputs": {"choice": [call("stop")]}, "temperature": 0, "max_tokens": 100}
    (choice,) = server.ask(PATH, {**fields, **structure})[1]["choices"]
    assert choice["message"] == {"role": "assistant", "content": call("stop")}
    status, body = server.ask(PATH, {**fields, **structure, "tool_choice": "required"})
    assert (status, body["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("thought", ["<think>Why {no}?</think>\n\n", "Why {no}?</think>", ""])
def test_a_structured_answer_reasons_first(server, thought):
    """Also if it has to call a tool. The prompt may begin the reasoning, and the model may leave it out."""
    pytest.importorskip("llguidance")
    begun = bool(thought) and not thought.startswith("<think>")
    fields = {"tools": [STOP], "chat_template_kwargs": {"enable_thinking": begun}, "max_tokens": 100}
    structure = {"structured_outputs": {"choice": [call("stop")]}}
    reasoning = {"reasoning": "Why {no}?", "reasoning_content": "Why {no}?"} if thought else {}
    choice = ask(server, thought + call("stop"), **fields, **structure)
    assert choice["message"] == {"role": "assistant", "content": call("stop"), **reasoning}
    choice = ask(server, thought + '[{"name": "stop", "parameters": {}}]', **fields, tool_choice="required")
    (found,) = choice["message"].pop("tool_calls")
    assert (choice["finish_reason"], found["function"]["name"]) == ("tool_calls", "stop")
    assert choice["message"] == {"role": "assistant", "content": None, **reasoning}


def test_a_call_that_is_cut_has_the_reason_of_the_cut(server):
    answer = call("add", a=1, b=2)
    choice = ask(server, answer, tools=[ADD], max_tokens=answer.index("2"))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": '


def test_reasoning_is_in_the_next_prompt(server):
    thought = {"role": "assistant", "content": "a", "reasoning": "Why?"}
    ask(server, "b", messages=[USER, thought, USER])
    assert server.asked[-1] == "user:hello;assistant:aWhy?;user:hello;assistant:"


def test_reasoning_is_apart(server):
    choice = ask(server, "<think>\nWhy?\n</think>\n\nSo.")
    thought = {"reasoning": "Why?", "reasoning_content": "Why?"}
    assert choice["message"] == {"role": "assistant", "content": "So.", **thought}
    choice = ask(server, "Why?</think>So.", chat_template_kwargs={"enable_thinking": True})
    assert choice["message"] == {"role": "assistant", "content": "So.", **thought}
    assert not server.params.skip_special_tokens
    choice = ask(server, "<think>Why?</think>So.", separate_reasoning=False)
    assert server.params.skip_special_tokens
    assert choice["message"] == {"role": "assistant", "content": "<think>Why?</think>So."}
    choice = ask(server, f"<think>Why?</think>{call('stop')}", tools=[STOP])
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "Why?")


def test_tokens_and_log_probabilities_are_those_of_the_whole_answer(server):
    answer = call("stop")
    fields = {"model": MODEL, "messages": [USER], "tools": [STOP], "logprobs": True, "return_token_ids": True}
    server.script += [answer, answer]
    (whole,) = server.ask(PATH, fields)[1]["choices"]
    events = [event["choices"][0] for event in server.events(PATH, **fields)][1:]
    assert whole["token_ids"] == [*answer.encode(), END]
    assert [token for one in events for token in one["token_ids"]] == whole["token_ids"]
    assert len(whole["logprobs"]["content"]) == sum(len(one["logprobs"]["content"]) for one in events)


def test_several_answers_have_calls_of_their_own(server):
    server.script.append(call("stop"))
    fields = {"model": MODEL, "messages": [USER], "tools": [STOP], "n": 2}
    choices = server.ask(PATH, fields)[1]["choices"]
    assert [one["finish_reason"] for one in choices] == ["tool_calls"] * 2
    assert len({one["message"]["tool_calls"][0]["id"] for one in choices}) == 2


def test_an_agent_of_six_turns(server, monkeypatch):
    """Each turn adds 1 by a call, half of them streamed; the last answer has no call."""
    monkeypatch.setattr(server.service, "formats", Formats("llama3_json", None))  # the shortest calls
    openai = pytest.importorskip("openai")
    server.script += [f'{{"name":"add","parameters":{{"a":{i}}}}}' for i in range(5)] + ["It is 5."]
    messages, total, ids = [USER], 0, set()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for turn in itertools.count():
            options = {"model": MODEL, "messages": messages, "tools": [ADD], "temperature": 0}
            if turn % 2:
                with client.chat.completions.stream(**options) as stream:
                    choice = stream.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(**options).choices[0]
            messages.append(choice.message.model_dump(exclude={"parsed"}))
            if choice.finish_reason == "stop":
                break
            assert choice.finish_reason == "tool_calls"
            (one,) = choice.message.tool_calls
            arguments = json.loads(one.function.arguments)
            total = arguments["a"] + 1
            ids.add(one.id)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": str(total)})
    assert (turn, total, len(ids), choice.message.content) == (5, 5, 5, "It is 5.")
    prompt = server.asked[-1]
    assert prompt.count("<tool_call>") == prompt.count("tool:") == 5
    assert '"arguments": {"a": 4}' in prompt
    assert prompt.endswith("</tool_call>;tool:5;assistant:")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": "add"}),
        ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "no"}}}),
        ("messages[1].tool_call_id", {"messages": [USER, {"role": "tool", "content": "3"}]}),
        ("tools", {"tools": [ADD], "use_beam_search": True}),
    ],
)
def test_wrong_fields_are_refused(server, param, fields):
    status, body = server.ask(PATH, {"model": MODEL, "messages": [USER], **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("template", "what"),
    [("{{ messages }}<tool_call>", "does not show tools"), ("{{ tools }}", "--tool-call-parser")],
)
def test_a_model_without_tools_refuses_them(server, monkeypatch, template, what):
    monkeypatch.setattr(ByteTokenizer, "chat_templates", {"default": template})
    monkeypatch.setattr(server.service, "formats", AUTO.of_model({"default": template}))
    for path in (PATH, "/tokenize"):
        status, body = server.ask(path, {"messages": [USER], "tools": [ADD]})
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "tools", "unsupported_field")
        assert what in body["error"]["message"]


def test_formats_by_option(server):
    found = Server(server.llm, MODEL, Limits(), formats=AUTO)
    assert found.service.formats == AUTO.of_model(ByteTokenizer.chat_templates)
