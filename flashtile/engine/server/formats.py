"""Formats in which models write reasoning and tool calls, and their parsers.

A parser is a generator that reads an answer's text from a :class:`Reader` and yields where it needs more
text. The result does not depend on how the text is cut into pieces, so a stream adds up to the whole answer.

Text that does not have the form of a call becomes content. The arguments of a call are passed on as the model
writes them, while it writes them. They are JSON only if the model writes JSON, and ``{}`` if it writes none.

If its length or a stop text cuts an answer, the last text may depend on text that is missing: a part of a
marker or a header, or a call before its arguments. Such text is left out.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from flashtile.engine.server.protocol import Conversation

WORD = re.compile(r"[\w.-]")
OUTSIDE_STRING, INSIDE_STRING = re.compile(r'["{}\[\]]'), re.compile(r'"|\\[\s\S]')
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""Tokens that end a message of gpt-oss."""
MAX_HEADER = 256
"""Maximum number of characters before the text of a message of gpt-oss."""
MAX_REREAD = 256
"""Maximum number of characters of a malformed call that are read a second time, to find calls within them."""
LAST_TOKENS = 16
"""Number of tokens at the end of a prompt that are decoded to see whether the answer begins in reasoning."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields where it needs more text, and returns a T."""


class NotACallError(Exception):
    """The text does not have the form of a tool call."""


class Reader:
    """The text of an answer as it arrives, and what was found in it.

    Attributes:
        text: the text that was neither reported nor dropped yet.
        at: position in ``text`` of the next character to read.
        ended: whether no more text follows.
        cut: whether the model would have written more text.
        exhausted: whether text was missing at the end to decide what the text before it is.
        unfinished: whether the text ends within a call.
        fields: what was reported and not sent to the client yet, in the form of a stream's delta.
        found: number of calls found.
        max_calls: maximum number of calls that are reported. None: no limit.
        tools: names of the tools.
    """

    def __init__(self, max_calls: int | None = None, tools: Collection[str] = ()):
        self.text, self.at, self.ended, self.cut = "", 0, False, False
        self.exhausted = self.unfinished = False
        self.tools = tools
        self.fields: dict[str, Any] = {}
        self.found, self.max_calls = 0, max_calls

    def report(self, kind: str, text: str) -> None:
        """Report a piece of text: "reasoning", "content", "name" (a new call) or "arguments" (of the last).

        The ids of calls are 9 letters and digits, because templates of Mistral allow no others.
        """
        self.found += kind == "name"
        if not text:
            return
        if kind in ("content", "reasoning"):
            for name in ("content",) if kind == "content" else ("reasoning", "reasoning_content"):
                self.fields[name] = self.fields.get(name, "") + text
        elif self.max_calls is None or self.found <= self.max_calls:
            calls, index = self.fields.setdefault("tool_calls", []), self.found - 1
            if kind == "name":
                new = {"index": index, "id": uuid.uuid4().hex[:9], "type": "function"}
                calls.append({**new, "function": {"name": text, "arguments": ""}})
                return
            if not calls:
                calls.append({"index": index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += text

    def emit(self, kind: str, end: int) -> None:
        """Report the first ``end`` characters of the text."""
        self.report(kind, self.text[:end])
        self.drop(end)

    def drop(self, end: int) -> None:
        """Forget the first ``end`` characters of the text."""
        self.text, self.at = self.text[end:], 0

    def more(self) -> Steps[bool]:
        """Wait for more text. Return False if none follows."""
        if self.ended:
            self.exhausted = True
            return False
        yield
        return True

    @property
    def stops_short(self) -> bool:
        """Whether the answer was cut where more text would decide what the last text is."""
        return self.cut and self.exhausted

    def peek(self) -> Steps[str]:
        """Return the next character, or an empty text at the end."""
        while self.at == len(self.text) and (yield from self.more()):
            pass
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()).isspace():
            self.at += 1

    def accept(self, wanted: str) -> Steps[bool]:
        """Read ``wanted`` and return True, or read nothing and return False."""
        while len(rest := self.text[self.at :]) < len(wanted) and wanted.startswith(rest):
            if not (yield from self.more()):
                return False
        found = self.text.startswith(wanted, self.at)
        self.at += len(wanted) if found else 0
        return found

    def sees(self, *markers: str) -> Steps[bool]:
        """Return whether one of the markers follows. Read nothing."""
        at, found = self.at, False
        for marker in markers:
            found = found or (yield from self.accept(marker))
        self.at = at
        return found

    def follows(self, wanted: str) -> Steps[bool]:
        """Read white space, and ``wanted`` if it follows. Return whether it did."""
        yield from self.skip_space()
        return (yield from self.accept(wanted))

    def expect(self, wanted: str) -> Steps[None]:
        """Read white space and ``wanted``. Raise NotACallError if something else follows."""
        if not (yield from self.follows(wanted)):
            raise NotACallError

    def word(self) -> Steps[str]:
        """Read letters, digits, ``_``, ``.`` and ``-``. Raise NotACallError if there are none."""
        begin = self.at
        while WORD.fullmatch((yield from self.peek())):
            self.at += 1
        if self.at == begin:
            raise NotACallError
        return self.text[begin : self.at]

    def copy(self, kind: str, *markers: str) -> Steps[str | None]:
        """Report the text before the first of the markers. Return this marker, or None if there is none.

        The marker and white space before it are not reported, and ``at`` is behind the marker.
        """
        while True:
            places = [(place, marker) for marker in markers if (place := self.text.find(marker)) >= 0]
            if places:
                place, marker = min(places)
                before = len(self.text[:place].rstrip())
                self.emit(kind, before)
                self.at = place - before + len(marker)
                return marker
            begun = max((_overlap(self.text, marker) for marker in markers), default=0)
            if self.ended and not (begun and self.cut):
                self.emit(kind, len(self.text))
                return None
            self.emit(kind, len(self.text[: len(self.text) - begun].rstrip() if markers else self.text))
            if not (yield from self.more()):
                self.drop(len(self.text))
                return None

    def string(self) -> Steps[str]:
        """Read white space and a JSON string."""
        yield from self.skip_space()
        try:
            text: str = json.loads((yield from self.value('"')), strict=False)
        except ValueError:
            raise NotACallError from None
        return text

    def call_with_object(self, name: str) -> Steps[None]:
        """Report a call, and report the text of its arguments as it arrives: one JSON object."""
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            raise NotACallError
        self.report("name", name)
        self.drop(self.at)
        yield from self.value("{", live=True)

    def value(self, first: str, live: bool = False) -> Steps[str]:
        """Read a JSON string or object, which begins with ``first``, and return its text.

        Quotes and brackets are counted, but the text is not validated. With ``live``, it is reported as
        arguments while it arrives, and may end too early.
        """
        begin, depth, quoted = self.at, 0, False
        if (yield from self.peek()) != first:
            raise NotACallError
        while True:
            found = (INSIDE_STRING if quoted else OUTSIDE_STRING).search(self.text, self.at)
            if found is None:
                half = quoted and self.text.endswith("\\", self.at)  # an escape's second character is missing
                self.at = len(self.text) - (half and not self.ended)
            else:
                self.at, quoted = found.end(), quoted != (found[0] == '"')
                depth += (found[0] in "{[") - (found[0] in "}]")
                if depth or quoted:
                    continue
            if live:
                self.emit("arguments", self.at)
            if found is not None:
                return self.text[begin : self.at]
            if not (yield from self.more()):
                self.unfinished = live
                if not live:
                    raise NotACallError
                return self.text[begin : self.at]

    def call(self, read: Callable[[Reader], Steps[None]], closing: str) -> Steps[bool]:
        """Read calls with ``read``, and then ``closing`` if it follows. Return whether there was a call.

        The text of a malformed call becomes content. Its beginning is reported here, and all of it if it is
        longer than ``MAX_REREAD``. Otherwise many markers of calls could cause the whole text to be read for
        each of them.
        """
        before, found, self.exhausted = self.at, self.found, False
        try:
            yield from read(self)
        except NotACallError:
            called = self.found > found
            if self.stops_short:
                self.unfinished = True
                self.drop(len(self.text))
                return called
            before = 0 if called else before  # the text before the failure was dropped with the last call
            self.emit("content", before if self.at - before <= MAX_REREAD else self.at)
            if not called:
                return False
        self.exhausted = False
        if (yield from self.follows(closing)):
            yield from self.skip_space()
        self.drop(len(self.text) if self.exhausted else self.at)  # the end may be within ``closing``
        return True


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``marker``."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)


def json_call(reader: Reader, marked: bool = True) -> Steps[None]:
    """Read ``{"name": NAME, "arguments": {...}}``. The arguments may come first, or be named parameters.

    They may also be missing or null. If no marker tells that the object is a call, it must then name a tool.
    """
    yield from reader.expect("{")
    name, arguments, reported = "", "", False
    while True:
        key = yield from reader.string()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key in ("name", "type", "id"):
            value = yield from reader.string()
            name = value if key == "name" else name
        elif key not in ("arguments", "parameters") or reported:
            raise NotACallError
        elif (yield from reader.peek()) == '"':  # an object within a string
            arguments = (yield from reader.string()).strip() or "{}"
        elif (yield from reader.accept("null")):
            arguments = "{}"
        elif name:
            yield from reader.call_with_object(name)
            reported = True
        else:
            arguments = yield from reader.value("{")
        if not (yield from reader.follows(",")):
            break
    yield from reader.expect("}")
    if not reported:
        if not arguments and (marked or name in reader.tools):
            arguments = "{}"
        if not name or not arguments.startswith("{"):
            raise NotACallError
        reader.report("name", name)
        reader.report("arguments", arguments)
    reader.drop(reader.at)


def json_calls(reader: Reader) -> Steps[None]:
    """Read calls with commas between them."""
    yield from json_call(reader)
    while (yield from reader.follows(",")):
        yield from json_call(reader)


def forced(reader: Reader) -> Steps[None]:
    """``[{"name": ..., "parameters": {...}}, ...]``, the form of answers that have to call a tool."""
    if (yield from reader.follows("[")):
        yield from reader.call(json_calls, "]")
    yield from reader.copy("content")


def hermes(reader: Reader) -> Steps[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for each call."""
    while (yield from reader.copy("content", "<tool_call>")):
        yield from reader.call(json_call, "</tool_call>")


def llama3_json(reader: Reader) -> Steps[None]:
    """``{"name": ..., "parameters": {...}}``, alone or after ``<|python_tag|>``, with ``;`` between calls."""
    yield from reader.skip_space()
    marked = (yield from reader.peek()) != "{"
    begun = not marked or bool((yield from reader.copy("content", "<|python_tag|>")))
    while begun:
        begun = yield from reader.call(partial(json_call, marked=marked), ";")
        begun, marked = begun and bool((yield from reader.peek())), True
    yield from reader.copy("content")


def mistral(reader: Reader) -> Steps[None]:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]NAME[ARGS]{}`` per call."""
    while (yield from reader.copy("content", "[TOOL_CALLS]")):
        yield from reader.call(_mistral_calls, "]")


def _mistral_calls(reader: Reader) -> Steps[None]:
    if (yield from reader.follows("[")):
        yield from json_calls(reader)
        return
    name = yield from reader.word()
    if (yield from reader.accept("[CALL_ID]")):
        yield from reader.word()
    yield from reader.accept("[ARGS]")
    yield from reader.skip_space()
    if (yield from reader.sees("[TOOL_CALLS]")) or not ((yield from reader.peek()) or reader.cut):
        reader.report("name", name)
        reader.report("arguments", "{}")
        reader.drop(reader.at)
    else:
        yield from reader.call_with_object(name)


def harmony(
    reader: Reader, calls: bool = True, reasoning: bool = True, is_forced: bool = False
) -> Steps[None]:
    """``<|channel|>CHANNEL to=functions.NAME<|message|>TEXT<|end|>`` for each message of gpt-oss.

    A message to a function is a call, a message of the channel analysis is reasoning, and others are content.
    If ``calls`` or ``reasoning`` is False, calls or reasoning are content. With ``is_forced``, content is
    read by :func:`forced`.
    """
    seen, more = set(), True
    while more:
        header, end, reader.exhausted = "", -1, False
        if (yield from reader.follows("<|")) or (yield from reader.accept("to=")):
            while (end := reader.text.find("<|message|>", 0, MAX_HEADER)) < 0:
                if len(reader.text) >= MAX_HEADER or not (yield from reader.more()):
                    break
        if reader.stops_short:
            reader.unfinished = "to=" in reader.text
            return reader.drop(len(reader.text))
        if end >= 0:
            header = reader.text[:end]
            reader.drop(end + len("<|message|>"))
        kind = "reasoning" if reasoning and "<|channel|>analysis" in header else "content"
        name = re.search(r"\bto=functions\.([\w.-]+)", header) if calls else None
        if name:
            kind = "arguments"
            yield from reader.skip_space()
            is_empty = (yield from reader.sees(*MESSAGE_ENDS)) or not (yield from reader.peek())
            if reader.stops_short:
                reader.unfinished = True
                return reader.drop(len(reader.text))
            reader.drop(reader.at)
            reader.report("name", name[1])
            reader.report("arguments", "{}" if is_empty else "")
        elif kind in seen:
            reader.report(kind, "\n")
        if is_forced and kind == "content":
            return (yield from forced(reader))
        seen.add(kind)
        more = bool((yield from reader.copy(kind, *MESSAGE_ENDS)))
        reader.unfinished = kind == "arguments" and not more
        reader.drop(reader.at)
        yield from reader.skip_space()
        more = more and bool((yield from reader.peek()))


def think(reader: Reader, begun: bool) -> Steps[None]:
    """``<think>REASONING</think>`` before everything else. ``begun``: the prompt ends with ``<think>``."""
    if not (yield from reader.follows("<think>")) and not begun:
        reader.at = 0
        return reader.drop(len(reader.text) if reader.stops_short else 0)
    yield from reader.skip_space()
    reader.drop(reader.at)
    if (yield from reader.copy("reasoning", "</think>")):
        yield from reader.skip_space()
    reader.drop(reader.at)


TOOL_PARSERS: dict[str, Callable[[Reader], Steps[None]]] = {
    "hermes": hermes, "llama3_json": llama3_json, "mistral": mistral, "openai": harmony,
}  # fmt: skip
"""Parsers of tool calls by vLLM's names."""

REASONING_PARSERS = {"deepseek_r1": think, "qwen3": think, "openai_gptoss": harmony}
"""Parsers of reasoning by vLLM's names."""


TOOL_MARKERS: dict[str, str | None] = {
    "<function=": None, "<arg_key>": None,  # formats that are not JSON
    "<|channel|>": "openai", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json", '"parameters": dictionary': "llama3_json",
}  # fmt: skip
REASONING_MARKERS = {"<|channel|>": "openai_gptoss", "<think>": "qwen3", "</think>": "qwen3"}
"""Parsers by texts in chat templates. The first text that a template contains decides."""


@dataclass(frozen=True)
class Formats:
    """Formats of a model's answers.

    Attributes:
        tools: key of ``TOOL_PARSERS``, or None if tools cannot be called.
        reasoning: key of ``REASONING_PARSERS``, or None if reasoning is not looked for.
    """

    tools: str | None = None
    reasoning: str | None = None

    def of_model(self, templates: Mapping[str, str]) -> Formats:
        """Replace "auto" by the formats that the model's chat templates show, and "none" by None."""
        text, found = "".join(templates.values()), []
        for name, markers in ((self.tools, TOOL_MARKERS), (self.reasoning, REASONING_MARKERS)):
            if name == "auto":
                name = next((parser for marker, parser in markers.items() if marker in text), None)
            found.append(None if name == "none" else name)
        return Formats(*found)

    @property
    def are_harmony(self) -> bool:
        return self.tools == "openai" or self.reasoning == "openai_gptoss"

    def reasoning_form(self, prompt: str) -> str | None:
        """Return the key ``reasoning`` of structured_outputs for an answer to this prompt, or None.

        Only the end of the prompt is read. Reasoning may be begun there, or left out.
        """
        if self.reasoning is None or prompt.rstrip().endswith("</think>"):
            return None
        if self.are_harmony:
            return "harmony"
        return "begun" if prompt.rstrip().endswith("<think>") else "think"


AUTO = Formats("auto", "auto")


def check_parsers(tools: str, reasoning: str) -> Formats:
    """Return the formats that a server's options name. Raise ValueError for unknown names."""
    for name, value, known in (
        ("tool_call_parser", tools, TOOL_PARSERS), ("reasoning_parser", reasoning, REASONING_PARSERS)
    ):  # fmt: skip
        if value not in ("auto", "none", *known):
            raise ValueError(f"{name} must be auto, none, {', '.join(known)}; got {value!r:.60}")
    return Formats(tools, reasoning)


class AnswerParser(Reader):
    """Parses the growing text of one answer into fields of a chat message.

    Args:
        conversation: tells whether calls and reasoning are looked for.
        prompt: the end of the prompt, which may begin the reasoning.
        structured: whether a structure restricts the answer, so that it calls no tools of its own accord.
    """

    def __init__(self, formats: Formats, conversation: Conversation, prompt: str, structured: bool = False):
        super().__init__(conversation.max_calls, {tool["function"]["name"] for tool in conversation.tools})
        self._steps = self._parse(formats, conversation, prompt, structured)

    def _parse(
        self, formats: Formats, conversation: Conversation, prompt: str, structured: bool
    ) -> Steps[None]:
        calls, is_forced = conversation.calls and not structured, bool(conversation.forced)
        if formats.are_harmony:
            yield from harmony(self, calls, conversation.separate_reasoning, is_forced)
            return
        if conversation.separate_reasoning and formats.reasoning:
            yield from think(self, formats.reasoning_form(prompt) == "begun")
        if is_forced:
            yield from forced(self)
        elif calls and formats.tools:
            yield from TOOL_PARSERS[formats.tools](self)
        yield from self.copy("content")

    def feed(self, text: str, ended: bool, cut: bool = False) -> dict[str, Any]:
        """Append text and return the new fields in the form of a stream's delta."""
        self.text += text
        self.ended, self.cut = ended, cut
        next(self._steps, None)
        fields, self.fields = self.fields, {}
        return fields
