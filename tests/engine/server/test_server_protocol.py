"""Bodies of requests: accepted fields, and errors that name each wrong field."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from flashtile.engine import BeamSearchParams, RequestOutputKind
from flashtile.engine.server.errors import ApiError
from flashtile.engine.server.protocol import (
    UNSUPPORTED,
    Body,
    ChatCall,
    CompletionCall,
    Conversation,
    parse,
    read_detokenize,
    read_tokenize,
)
from flashtile.engine.server.service import Service, TokenizedPrompt
from flashtile.engine.structured import Structures
from flashtile.engine.tokenizer import ByteTokenizer
from walk import walk

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refusal(read, *arguments):
    with pytest.raises(ApiError) as caught:
        read(*arguments)
    body = caught.value.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"
    return body


@walk(
    ("field", "values"),
    {
        "prompt": [None, 1, [], [""] * 0, [1, "a"], [1.5], [True], [-1], [[]], [[1], []], {"a": 1}],
        "max_tokens": [0, -1, 1.5, "7", True, 2**40],
        "temperature": [-0.1, "1", True, [], 1e400],
        "top_p": [0, 1.1, "x"],
        "top_k": [-2, 1.5],
        "min_p": [-1, 2],
        "n": [0, 1.5, 10**6, "2"],
        "stop": [1, [1], [""], ["a"] * 1000],
        "stop_token_ids": ["ab", [-1], [1.5]],
        "logprobs": [-1, 21, True, 1.5],
        "prompt_logprobs": [-1, 21],
        "seed": [1.5, 2**70],
        "logit_bias": [[], {"a": 1}, {"1": 101}, {"1": "x"}],
        "presence_penalty": [3], "frequency_penalty": [-3], "repetition_penalty": [0, -1],
        "min_tokens": [-1, 17], "ignore_eos": [1], "skip_special_tokens": ["yes"],
        "allowed_token_ids": [[-1], 3], "include_stop_str_in_output": [0],
        "stream": ["true", 1], "stream_options": [1, {"include_usage": True}],
        "echo": [1], "best_of": [2], "use_beam_search": [1], "length_penalty": [2],
        "add_special_tokens": [0], "truncate_prompt_tokens": [0, -1], "priority": [1.5, 2**40],
        "request_id": ["", 5, "x" * 300], "cache_salt": [5], "return_token_ids": [1], "user": [5],
        "store": ["yes", 1], "metadata": ["a", []], "prompt_cache_key": [1], "parallel_tool_calls": ["no"],
        "no_such_field": [1, "", False, {}],
    }.items(),
)  # fmt: skip
def test_a_wrong_field_is_named(field, values):
    for value in values:
        body = parse(json.dumps({"prompt": "a", field: value}).replace("Infinity", "1e999").encode())
        error = refusal(CompletionCall, body, 20)
        assert error["param"] == field, (value, error)
        assert field in error["message"]
        assert (error["code"] == "unknown_field") == (field == "no_such_field")


@walk("field", UNSUPPORTED)
def test_what_is_not_served_is_refused_by_name_unless_it_asks_for_nothing(field):
    for read, body in ((CompletionCall, {"prompt": "a"}), (ChatCall, HELLO)):
        error = refusal(read, Body({**body, field: {"an": "object"}}), 20)
        assert (error["param"], error["code"]) == (field, "unsupported_field")
        for neutral in (None, *UNSUPPORTED[field]):
            read(Body({**body, field: neutral}), 20)


def test_the_reasoning_effort_is_a_variable_of_the_template():
    def variables(**fields):
        return ChatCall(Body({**HELLO, **fields}), 20).conversation.chat_template_kwargs

    assert variables(reasoning_effort="high") == {"reasoning_effort": "high"}
    given = {"reasoning_effort": "low", "enable_thinking": True}
    assert variables(reasoning_effort="high", chat_template_kwargs=given) == given
    error = refusal(CompletionCall, Body({"prompt": "a", "reasoning_effort": "high"}), 20)
    assert (error["param"], error["code"]) == ("reasoning_effort", "unknown_field")


@pytest.mark.parametrize(
    ("field", "default"),
    [("spaces_between_special_tokens", True), ("return_tokens_as_token_ids", False)],
)
def test_a_switch_that_is_not_served_may_stay_as_it_is_by_default(field, default):
    """By vLLM's and OpenAI's defaults."""
    CompletionCall(Body({"prompt": "a", field: default}), 20)
    assert refusal(CompletionCall, Body({"prompt": "a", field: not default}), 20)["param"] == field


@walk(
    ("param", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": "hello"}),
        ("messages[1]", {"messages": [{"role": "user", "content": "a"}, "b"]}),
        ("messages[0]", {"messages": [{"content": "a"}]}),
        ("top_logprobs", {**HELLO, "top_logprobs": 2}),
        ("logprobs", {**HELLO, "logprobs": 2}),
        ("max_completion_tokens", {**HELLO, "max_completion_tokens": 0}),
        ("tools", {**HELLO, "tools": {"type": "function"}}),
        ("tools[0]", {**HELLO, "tools": [{"type": "function"}]}),
        ("tools[0]", {**HELLO, "tools": ["f"], "tool_choice": "none"}),
        ("tools[1]", {**HELLO, "tools": [TOOL, {"type": "function", "function": {"name": ""}}]}),
        ("tools[0].type", {**HELLO, "tools": [{"type": "custom", "function": {"name": "f"}}]}),
        ("tools[0].function.parameters", {**HELLO, "tools": [{"function": {"name": "f", "parameters": []}}]}),
        ("tool_choice", {**HELLO, "tool_choice": "required"}),
        ("tool_choice", {**HELLO, "tools": [TOOL], "tool_choice": "always"}),
        ("tool_choice", {**HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}),
        ("tool_choice", {**HELLO, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}),
        ("parallel_tool_calls", {**HELLO, "tools": [TOOL], "parallel_tool_calls": 1}),
        ("separate_reasoning", {**HELLO, "separate_reasoning": 1}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "a"}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": {}}]}),
        ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
        ("add_generation_prompt", {**HELLO, "add_generation_prompt": True, "continue_final_message": True}),
        ("chat_template_kwargs", {**HELLO, "chat_template_kwargs": {"messages": []}}),
        ("reasoning_effort", {**HELLO, "reasoning_effort": "much"}),
        ("reasoning_effort", {**HELLO, "reasoning_effort": ["high"]}),
        ("response_format", {**HELLO, "response_format": "json_object"}),
        ("response_format", {**HELLO, "response_format": {"type": "xml"}}),
        ("response_format", {**HELLO, "response_format": {"type": "json_schema"}}),
        (
            "response_format",
            {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        ),
        ("strictly", {**HELLO, "response_format": {"type": "json_object", "strictly": True}}),
        (
            "rules",
            {
                **HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "rules": []}},
            },
        ),
        ("structured_outputs", {**HELLO, "structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("structured_outputs", {**HELLO, "structured_outputs": {"xml": "a"}}),
        *(("structured_outputs", {**HELLO, "structured_outputs": empty}) for empty in ({}, [], "", 0, False)),
        (
            "structured_outputs",
            {**HELLO, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        ),
        ("echo", {**HELLO, "echo": True}),
        ("prompt", {**HELLO, "prompt": "a"}),
        ("temperature", {**HELLO, "temperature": "hot"}),
    ],
)
def test_a_wrong_field_of_a_conversation_is_named(param, body):
    assert refusal(ChatCall, Body(body), 20)["param"] == param


@walk(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"}),
        ("stop", ["a"]), ("top_p", 0.5), ("seed", 1), ("logprobs", 1), ("stream", True),
        ("logit_bias", {"1": 1}), ("n", 0), ("length_penalty", "long"), ("ignore_eos", "no"),
    ],
)  # fmt: skip
def test_a_beam_search_refuses_what_it_cannot_do(field, value):
    body = {"prompt": "a", "use_beam_search": True, "n": 3, field: value}
    error = refusal(CompletionCall, Body(body), 20)
    assert error["param"] == field


@walk(
    ("fields", "structure"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": False, "schema": {"type": "null"}},
                }
            },
            {"json": {"type": "null"}},
        ),
        ({"structured_outputs": {"choice": ["a"], "json": None}}, {"choice": ["a"]}),
    ],
)
def test_what_an_answer_must_match(fields, structure):
    for read, body in ((CompletionCall, {"prompt": "a"}), (ChatCall, HELLO)):
        assert read(Body({**body, **fields}), 20).params.structured_outputs == structure


def test_a_beam_search():
    fields = {"prompt": "a", "use_beam_search": True, "n": 3, "temperature": 0, "top_p": 1.0, "stop": []}
    call = CompletionCall(Body(fields), 20)
    assert call.params == BeamSearchParams(3, 16)


def test_a_completion_takes_everything_that_is_documented():
    fields = {
        "prompt": [[1, 2], "a"], "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "n": 2, "best_of": 2, "stop": "x", "stop_token_ids": [7], "logprobs": 2, "prompt_logprobs": 1,
        "echo": True, "seed": 4, "logit_bias": {"5": 1.5}, "presence_penalty": 1, "frequency_penalty": 1,
        "min_tokens": 1,
        "repetition_penalty": 1.1, "ignore_eos": True, "skip_special_tokens": False, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "user": "me",
        "include_stop_str_in_output": True, "allowed_token_ids": [5, 6], "add_special_tokens": False,
        "truncate_prompt_tokens": 9, "priority": 2, "request_id": "mine", "cache_salt": "s",
        "return_token_ids": True, "response_format": {"type": "text"}, "suffix": None,
    }  # fmt: skip
    call = CompletionCall(Body(fields), 20)
    params = call.params
    assert call.prompts == [[1, 2], "a"]
    assert (params.n, params.stop, params.logit_bias) == (2, ["x"], {5: 1.5})
    assert (params.logprobs, params.prompt_logprobs) == (2, 2)  # an echo has as many as an answer
    assert params.output_kind is RequestOutputKind.DELTA
    assert (call.include_usage, call.continuous_usage, call.truncate_prompt_tokens) == (True, True, 9)
    assert (call.request_id, call.priority, call.cache_salt) == ("mine", 2, "s")


@walk(
    ("fields", "calls", "forced", "most"),
    [
        ({}, False, [], None),
        ({"tools": [], "tool_choice": "auto"}, False, [], None),
        ({"tools": [TOOL]}, True, [], None),
        ({"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}, True, [], 1),
        ({"tools": [TOOL], "tool_choice": "none"}, False, [], None),
        ({"tools": [TOOL, {"function": {"name": "g"}}], "tool_choice": "required"}, True, ["f", "g"], None),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True, ["f"], 1),
    ],
)
def test_tools(fields, calls, forced, most):
    found = Conversation(Body({**HELLO, **fields}))
    assert found.tools == fields.get("tools", [])
    assert (found.calls, [one["name"] for one in found.forced], found.max_calls) == (calls, forced, most)


ROOT = {
    "properties": {"v": {"enum": [1, 2]}, "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "child"],
}  # fmt: skip
"""A schema that refers to itself, without a type."""
NAMED = {"$ref": "#/definitions/A", "$schema": "http://json-schema.org/draft-07/schema#"}
"""A schema that is a definition, as zod writes it; the definition is missing."""
VALUE = {"type": "object", "properties": {"v": {"enum": [1]}}, "additionalProperties": False}


@walk(
    ("parameters", "valid", "invalid"),
    [
        (None, "{}", '{"v": 1}'),
        ({}, "{}", '{"v": 1}'),
        ({"type": ["object", "null"]}, "{}", "null"),
        (ROOT, '{"v": 1, "child": {"v": 2, "child": null}}', '{"v": 1, "child": {"w": 2}}'),
        (
            {"properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}},
            '{"a": 1, "b": 2}', '{"a": 1, "b": 3}',
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"const": 2}}},
            '{"a": 2}', '{"a": 3}',
        ),
        ({**NAMED, "definitions": {"A": VALUE}}, '{"v": 1}', '{"v": 2}'),
        ({"anyOf": [VALUE, {"type": "null"}]}, '{"v": 1}', "null"),
        ({"$id": "https://example.org/a", **ROOT}, '{"v": 1, "child": null}', '{"v": 1, "child": 3}'),
        ({"$id": "#root", **ROOT}, '{"v": 1, "child": null}', '{"v": 1, "child": {"v": 3, "child": null}}'),
        *(
            ({"$id": identifier, "properties": {"c": {"$ref": reference}}, "additionalProperties": False},
             '{"c": {"c": {}}}', '{"c": {"c": 3}}')
            for identifier, reference in (
                ("http://a.b/c/tree", "http://a.b/c/tree"), ("http://a.b/c/tree", "tree"), ("tree", "tree"),
                ("urn:a:tree", "urn:a:tree#"),
            )
        ),
        (
            {"$id": "http://a.b/c", "properties": {"a": {"const": 2}, "b": {"$ref": "c#/properties/a"}}},
            '{"b": 2}', '{"b": 3}',
        ),
        ({**VALUE, "additionalProperties": {"const": 3}}, '{"v": 1, "w": 3}', '{"v": 1, "w": 4}'),
    ],
)  # fmt: skip
def test_arguments_of_forced_calls_match_the_tools_schema(parameters, valid, invalid):
    """As they do alone, next to a tool whose definitions have the same names."""
    pytest.importorskip("llguidance")
    other = {"type": "object", "$defs": {"A": {"const": 4}}, "definitions": {"A": {"const": 5}}}
    tools = [
        {"function": {"name": "f", "parameters": parameters}},
        {"function": {"name": "g", "parameters": other}},
    ]
    call = ChatCall(Body({**HELLO, "tools": tools, "tool_choice": "required"}), 20)
    structures = Structures(ByteTokenizer(), 256, [0])
    for arguments, is_valid in ((valid, True), (invalid, False)):
        matcher = structures.matcher(call.params.structured_outputs).deep_copy()
        text = f'[{{"name": "f", "parameters": {arguments}}}]'
        assert (
            matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
        ) == is_valid


def test_two_forced_tools_with_one_identifier_are_the_same_or_refused():
    def forced(*schemas):
        functions = [{"name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)]
        return Body({**HELLO, "tools": [{"function": one} for one in functions], "tool_choice": "required"})

    ChatCall(forced({"$id": "a", **ROOT}, {"$id": "a", **ROOT}), 20)
    for schemas, got in ((({"$id": "a", **ROOT}, {"$id": "a"}), "'a'"), (({"$id": 3},), "3")):
        error = refusal(ChatCall, forced(*schemas), 20)
        assert (error["param"], "'$id'" in error["message"], got in error["message"]) == ("tools", True, True)


def test_the_number_of_forced_calls_and_the_type_of_their_arguments():
    for choice, most in (("required", None), ({"type": "function", "function": {"name": "f"}}, 1)):
        call = ChatCall(Body({**HELLO, "tools": [TOOL], "tool_choice": choice}), 20)
        schema = call.params.structured_outputs["json"]
        assert (schema["minItems"], schema.get("maxItems")) == (1, most)
        assert schema["x-guidance"]["item_separator"] == ", "  # the white space of templates' tojson
    for kind in ("string", ["null"], 3, None):
        tools = [{"function": {"name": "f", "parameters": {"type": kind}}}]
        error = refusal(ChatCall, Body({**HELLO, "tools": tools, "tool_choice": "required"}), 20)
        assert (error["param"], "the type 'object'" in error["message"]) == ("tools", True)


def test_messages_of_tools_and_reasoning():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": []},
    ]
    thought = {"reasoning": "why", "reasoning_content": "why"}
    assert ChatCall(Body({"messages": messages}), 20).conversation.messages == [
        {"role": "assistant", "tool_calls": [call], **thought, "thinking": "why"},
        messages[1],
        {"role": "assistant", "content": "so", **thought},
    ]


def test_best_of_is_the_number_of_answers():
    for fields in ({"best_of": 1}, {"best_of": 1, "n": 1}, {"best_of": None}, {"best_of": 3, "n": 3}):
        assert CompletionCall(Body({"prompt": "a", **fields}), 20).params.n == fields.get("n", 1)
    error = refusal(CompletionCall, Body({"prompt": "a", "best_of": 2}), 20)
    assert (error["param"], error["code"]) == ("best_of", "unsupported_field")
    assert refusal(CompletionCall, Body({"prompt": "a", "best_of": 0}), 20)["code"] != "unsupported_field"


@pytest.mark.parametrize(("blocks", "window", "room"), [(11, -1, 35), (101, -1, 95), (11, 8, 95), (2, -1, 1)])
def test_an_answer_may_fill_what_the_model_and_the_memory_hold(blocks, window, room):
    """Where it has no ``max_tokens``: 100 tokens, or the blocks of 4, less a prompt of 5."""
    pool = SimpleNamespace(num_blocks=blocks, null_blocks=1)
    manager = SimpleNamespace(window_left=window, block_size=4, pool=pool)
    engine = SimpleNamespace(max_model_len=100, scheduler=SimpleNamespace(manager=manager))
    call = ChatCall(Body(HELLO), 20)
    Service.set_max_tokens(
        SimpleNamespace(engine=engine), call, [TokenizedPrompt(None, [0] * n) for n in (5, 2)]
    )
    assert call.params.max_tokens == room


def test_only_an_echo_may_ask_for_no_token():
    call = CompletionCall(Body({"prompt": "a", "echo": True, "max_tokens": 0}), 20)
    assert call.echo_only
    assert call.params.max_tokens == 1


@walk(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b"[" * 10**5,
        b'{"a": ' + b"9" * 9999 + b"}",
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(raw):
    assert refusal(parse, raw)["code"] == "invalid_json"


def test_characters_outside_of_the_basic_plane_come_as_two_escapes():
    assert parse(b'{"prompt": "\\ud83d\\ude00"}').take("prompt") == "\N{GRINNING FACE}"


@walk(
    ("param", "read", "body"),
    [
        ("prompt", read_tokenize, {}),
        ("prompt", read_tokenize, {**HELLO, "prompt": "a"}),
        ("prompt", read_tokenize, {"prompt": ["a"]}),
        ("text", read_tokenize, {"prompt": "a", "text": "b"}),
        ("tokens", read_detokenize, {}),
        ("tokens", read_detokenize, {"tokens": ["a"]}),
    ],
)
def test_wrong_fields_of_the_tokenizer(param, read, body):
    assert refusal(read, Body(body))["param"] == param
