"""Parsers of reasoning and tool calls: whole texts, and the same texts cut into pieces."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from flashtile.engine.server.formats import AnswerParser, Formats, Reader, check_parsers
from walk import walk

HERMES, LLAMA, MISTRAL = Formats("hermes"), Formats("llama3_json"), Formats("mistral")
QWEN3, GPT = Formats("hermes", "qwen3"), Formats("openai", "openai_gptoss")
F, G = ("f", '{"a": 1}'), ("g", "{}")
NESTED = r'{"t": "}\" ]</tool_call>\\", "u": {"v": [1, {"w": "\u00e9{"}]}}'
"""Arguments with brackets, quotes and an end marker within strings."""

WHOLE = [
    # (format, text, content, reasoning, calls)
    (HERMES, "Hello <b>", "Hello <b>", "", []),
    (HERMES, " \n a \n", " \n a \n", "", []),
    (HERMES, "", "", "", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", "", [F]),
    (HERMES, 'Yes.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n', "Yes.", "", [F]),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call> Done.',
        "Done.", "", [F, G],
    ),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {NESTED}}}</tool_call>', "", "", [("f", NESTED)]),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", "", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>a', "a", "", [F]),  # a bracket lacks
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", "", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\\', "", "", [("f", '{"a": "x\\')]),  # cut
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", "", [F]),
    (LLAMA, '\n{"type": "function", "name": "f", "parameters": {"a": 1}}', "", "", [F]),
    (
        LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "", "", [F, G],
    ),
    (LLAMA, 'I call. <|python_tag|>{"name": "g", "arguments": {}}', "I call.", "", [G]),
    (LLAMA, "Hello", "Hello", "", []),
    (LLAMA, '{"result": [1, 2]}', '{"result": [1, 2]}', "", []),
    (LLAMA, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', "", []),
    (
        MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "", "", [F, G],
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", "", [F]),
    (MISTRAL, 'Yes. [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Yes.", "", [F, G]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", "", [F]),
    (MISTRAL, "See [1].", "See [1].", "", []),
    (QWEN3, "<think>\nWhy?\n</think>\n\nSo.", "So.", "Why?", []),
    (QWEN3, "<think>\n\n</think>\n\nSo.", "So.", "", []),
    (QWEN3, "<think>Wh", "", "Wh", []),
    (QWEN3, "No <think>", "No <think>", "", []),
    (QWEN3, '<think>a</think>b\n<tool_call>{"name": "g", "arguments": {}}</tool_call>', "b", "a", [G]),
    (
        GPT,
        "<|channel|>analysis<|message|>We call.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        "", "We call.", [F],
    ),
    (GPT, '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", "", [F]),
    (GPT, ' to=functions.g<|channel|>commentary<|message|>{}<|call|>', "", "", [G]),
    (
        GPT,
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>analysis<|message|>a\n<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So.<|return|>",
        "First.\nSo.", "a\nb", [],
    ),
    (GPT, "Plain <text>.", "Plain <text>.", "", []),
    (GPT, "Plain.<|end|>More.", "Plain.\nMore.", "", []),
]  # fmt: skip

FORCED = [
    (HERMES, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'),
    (QWEN3, '<think>a</think>\n[{"name": "f", "parameters": {"a": 1}}]'),
    (GPT, '<|channel|>final<|message|>[{"name": "f", "parameters": {"a": 1}}]'),
]

MALFORMED = [
    (HERMES, "<tool_call>"),
    (HERMES, "\n<tool_call>not JSON</tool_call>\n"),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "one"}</tool_call>'),
    (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1'),
    (HERMES, '<tool_call>{"name": "f", "input": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>'),
    (LLAMA, '<|python_tag|>brave_search.call(query="x")'),
    (LLAMA, ' {"name": "f", "parameters": 3}'),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS][1]"),
    (MISTRAL, "[TOOL_CALLS]f(1)"),
    (GPT, "<|channel|>anal"),
    (GPT, "<|nothing|>" + "a" * 400),
    (QWEN3, "a</think>b"),
    (LLAMA, '{"name": "Bob"}'),
    (LLAMA, '{"name": "f", "parameters": [1]}'),
    (MISTRAL, "[TOOL_CALLS]f Hello"),
    (HERMES, '<tool_call>{"arguments": null}</tool_call>'),
]

WITHOUT_ARGUMENTS = [
    (HERMES, '<tool_call>{"name": "g"}</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "g", "arguments": null}\n</tool_call>\n'),
    (HERMES, '<tool_call>{"arguments": "", "name": "g"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    (LLAMA, '{"name": "g"}'),
    (LLAMA, '{"name": "g", "parameters": null}'),
    (LLAMA, '<|python_tag|>{"name": "g"}'),
    (MISTRAL, '[TOOL_CALLS][{"name": "g"}]'),
    (MISTRAL, "[TOOL_CALLS]g"),
    (MISTRAL, "[TOOL_CALLS]g[ARGS]"),
    (MISTRAL, "[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS] {}"),
    (GPT, "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>"),
    (GPT, "<|channel|>commentary to=functions.g<|message|> "),
    (GPT, "<|channel|>commentary to=functions.g<|message|>\n{}<|call|>"),
]


def make_parser(formats, calls=True, max_calls=None, reasoning=True, prompt="", forced=(), **structured):
    talk = SimpleNamespace(
        calls=calls, forced=forced, max_calls=max_calls, separate_reasoning=reasoning,
        tools=[{"function": {"name": name}} for name in "fg"],
    )  # fmt: skip
    return AnswerParser(formats, talk, prompt, **structured)


def parsed(formats, pieces, cut=False, **options):
    """(content, reasoning, calls), each made of what the pieces gave. ``cut``: not ended by the model."""
    parser = make_parser(formats, **options)
    content, reasoning, calls = "", "", []
    for i, piece in enumerate(pieces):
        fields = parser.feed(piece, i == len(pieces) - 1, cut)
        content += fields.get("content", "")
        reasoning += fields.get("reasoning_content", "")
        assert fields.get("reasoning") == fields.get("reasoning_content")
        indices = [call["index"] for call in fields.get("tool_calls", ())]
        assert len(indices) == len(set(indices))  # what one delta adds to a call is in one piece
        for call in fields.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                assert len(call["id"]) == 9
                assert call["id"].isalnum()
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1
            calls[-1][1] += call["function"]["arguments"]
    assert len(calls) == min(parser.found, options.get("max_calls") or parser.found)
    return content, reasoning, [tuple(call) for call in calls]


def check(formats, text, wanted):
    assert parsed(formats, [text]) == wanted
    for cut in range(len(text) + 1):
        assert parsed(formats, [text[:cut], text[cut:]]) == wanted, cut
    assert parsed(formats, [*text, ""]) == wanted
    assert parsed(formats, [text[i : i + 3] for i in range(0, max(1, len(text)), 3)]) == wanted


@walk(("formats", "text", "content", "reasoning", "calls"), WHOLE)
def test_a_text_gives_the_same_in_all_pieces(formats, text, content, reasoning, calls):
    check(formats, text, (content, reasoning, calls))


@walk(("formats", "text"), WITHOUT_ARGUMENTS)
def test_a_call_without_arguments_has_an_empty_object(formats, text):
    """Clients read the arguments as JSON."""
    check(formats, text, ("", "", [G]))


def test_calls_without_arguments_follow_each_other():
    check(MISTRAL, '[TOOL_CALLS]g[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g', ("", "", [G, F, G]))
    check(LLAMA, '{"name": "g"}; {"name": "f", "parameters": {"a": 1}};{"name": "g"}', ("", "", [G, F, G]))


@walk(("formats", "text"), [case[:2] for case in WHOLE] + WITHOUT_ARGUMENTS + FORCED)
def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_answer(formats, text):
    """Wherever it is cut: within a marker, a header, or a call. All pieces give the same."""
    options = {"forced": [{"name": "f"}]} if (formats, text) in FORCED else {}
    content, reasoning, calls = parsed(formats, [text], **options)
    for end in range(len(text)):
        found = parsed(formats, [text[:end]], cut=True, **options)
        pieces = [text[i : min(i + 5, end)] for i in range(0, end, 5)]
        assert parsed(formats, [*pieces, ""], cut=True, **options) == found
        assert content.startswith(found[0].rstrip()), end
        assert reasoning.startswith(found[1].rstrip()), end
        assert len(found[2]) <= len(calls)
        for (name, arguments), (wanted, whole) in zip(found[2], calls, strict=False):
            assert name == wanted
            assert whole.startswith(arguments)


@walk(
    ("formats", "text", "within"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', True),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', False),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>', True),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', False),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"na', True),
        (GPT, '<|channel|>commentary to=functions.f<|message|>{"a": 1}', True),
        (GPT, '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', False),
        (GPT, "<|channel|>commentary to=functions.f<|mess", True),
    ],
)
def test_whether_an_answer_ends_within_a_call(formats, text, within):
    parser = make_parser(formats)
    parser.feed(text, True, True)
    assert parser.unfinished == within


@walk(("formats", "text"), MALFORMED)
def test_what_is_not_a_call_is_content_without_loss(formats, text):
    check(formats, text, (text, "", []))


@pytest.mark.parametrize(
    ("formats", "text", "rest"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>', ", oops}</tool_call>"),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"nam": 3}]', ', {"nam": 3}]'),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}} I called.', "I called."),
    ],
)
def test_what_follows_a_call_is_content(formats, text, rest):
    check(formats, text, (rest, "", [F]))


@pytest.mark.parametrize(("formats", "first"), [(HERMES, ""), (MISTRAL, '{"name": "f", "arguments": {}}, ')])
def test_many_malformed_calls_are_read_once(formats, first, monkeypatch):
    read, objects = Reader.value, []

    def value(reader, first, live=False):
        objects.extend("{" * (first == "{" and not live))
        return read(reader, first, live)

    monkeypatch.setattr(Reader, "value", value)
    marker = "<tool_call>" if formats is HERMES else "[TOOL_CALLS]["
    text = (marker + first + '{"arguments": {') * 300
    content, _, calls = parsed(formats, [text])
    assert len(calls) == (first != "")
    assert len(content) >= 0.99 * (len(text) - len(marker + first))
    assert len(objects) == 1


def test_arguments_stream_while_they_are_written():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 50
    parser = make_parser(HERMES)
    for piece in text:
        fields = parser.feed(piece, False)
    assert fields == {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}


def test_a_message_without_a_header_streams():
    parser = make_parser(GPT)
    assert [parser.feed(piece, False) for piece in ("<|message|>", "Hello")] == [{}, {"content": "Hello"}]


@pytest.mark.parametrize("length", [255, 256, 257])
def test_the_longest_header_of_a_message(length):
    """With its end. A longer one is content: the text must not wait for an end that may never come."""
    begin, end = " to=functions.g<|channel|>", "<|message|>"
    header = begin + "a" * (length - len(begin + end)) + end
    content, _, calls = parsed(GPT, [*header, "{}", "<|call|>", ""])
    assert (content, calls) == (("", [G]) if length <= 256 else (header + "{}", []))


def test_the_prompt_may_begin_the_reasoning():
    assert parsed(QWEN3, ["Why?</think>So."], prompt="assistant\n<think>\n") == ("So.", "Why?", [])
    assert parsed(QWEN3, ["<think>Why?</think>So."], prompt="<think>") == ("So.", "Why?", [])
    assert parsed(QWEN3, ["Why?</think>So."], prompt="<think>\n\n</think>") == ("Why?</think>So.", "", [])


def test_what_a_call_does_not_want_is_content():
    text = '<think>a</think>b<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parsed(QWEN3, [text], calls=False, reasoning=False) == (text, "", [])
    assert parsed(QWEN3, [text], calls=False) == (text.removeprefix("<think>a</think>"), "a", [])
    text = "<|channel|>analysis<|message|>a<|end|><|channel|>commentary to=functions.g<|message|>{}"
    assert parsed(GPT, [text], calls=False) == ("{}", "a", [])
    assert parsed(GPT, [text], reasoning=False) == ("a", "", [G])


def test_no_more_calls_than_the_client_wants():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for pieces in ([2 * text + "a"], [*text, *text, "a"]):
        assert parsed(HERMES, pieces, max_calls=1) == ("a", "", [F])


@pytest.mark.parametrize("formats", [HERMES, QWEN3, GPT])
def test_calls_that_are_forced_have_one_form_for_all_models(formats):
    text = '[{"name": "f", "parameters": {"a": 1}},\n {"name": "g", "parameters": {}}]'
    options = {"forced": [{"name": "f"}], "prompt": "</think>"}
    for pieces in ([text], [*text, ""]):
        assert parsed(formats, pieces, **options) == ("", "", [F, G])
        assert parsed(formats, pieces, max_calls=1, **options) == ("", "", [F])
    for text in ("", "[", '[{"na'):  # cut
        assert parsed(formats, [text], **options) == (text, "", [])


def test_reasoning_comes_before_forced_calls_and_structures():
    text, forced = '[{"name": "f", "parameters": {"a": 1}}]', {"forced": [{"name": "f"}]}
    analysis = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>"
    for formats, prompt, before in (
        (QWEN3, "", "<think>Why?</think>\n\n"), (QWEN3, "<think>\n", "Why?</think>"), (GPT, "", analysis)
    ):  # fmt: skip
        for pieces in ([before + text], [*before, *text, ""]):
            assert parsed(formats, pieces, prompt=prompt, **forced) == ("", "Why?", [F])
        call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
        assert parsed(formats, [before + call], prompt=prompt, structured=True) == (call, "Why?", [])


def test_where_reasoning_may_begin():
    forms = [QWEN3.reasoning_form(prompt) for prompt in ("a", "<think>\n", "<think>\n\n</think>\n\n")]
    assert forms == ["think", "begun", None]
    assert (GPT.reasoning_form("<|start|>assistant"), HERMES.reasoning_form("<think>")) == ("harmony", None)


@walk(
    ("template", "wanted"),
    [
        ("", (None, None)),
        ("{{ tools }}<|tool_call|>", (None, None)),
        ("{{ '<tool_call>' }}", ("hermes", None)),
        ("<tool_call>\n<function=f>", (None, None)),
        ("<think><tool_call><arg_key>", (None, "qwen3")),
        ("{{ c.split('</think>') }}<tool_call>", ("hermes", "qwen3")),
        ("[TOOL_CALLS]", ("mistral", None)),
        ("<|python_tag|>", ("llama3_json", None)),
        ("<|python_tag|><function=", (None, None)),
        ("<|channel|>analysis", ("openai", "openai_gptoss")),
    ],
)
def test_the_template_shows_the_formats(template, wanted):
    found = check_parsers("auto", "auto").of_model({"default": template})
    assert (found.tools, found.reasoning) == wanted


def test_formats_by_name():
    assert check_parsers("mistral", "deepseek_r1").of_model({}) == Formats("mistral", "deepseek_r1")
    assert check_parsers("none", "none").of_model({"default": "<think><tool_call>"}) == Formats()
    for names in (("pythonic", "auto"), ("auto", "hermes")):
        with pytest.raises(ValueError, match=r"_parser must be auto, none, \w+, .*; got"):
            check_parsers(*names)


def test_arguments_are_the_models_own_text():
    (_, text) = parsed(HERMES, [f'<tool_call>{{"name": "f", "arguments": {NESTED}}}'])[2][0]
    assert json.loads(text)["u"] == {"v": [1, {"w": "é{"}]}
