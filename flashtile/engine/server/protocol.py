"""Validation of clients' calls and their conversion to the engine's arguments."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from flashtile.checks.vllm_arguments import SAMPLING_ARGUMENTS
from flashtile.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from flashtile.engine.server.errors import ApiError, refused

Params = SamplingParams | BeamSearchParams
T = TypeVar("T")

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "bad_words": ([],), "chat_template": (), "documents": ([],), "function_call": ("none",),
    "functions": ([],), "guided_choice": (), "guided_grammar": (), "guided_json": (), "guided_regex": (),
    "kv_transfer_params": (), "logits_processors": ([],), "mm_processor_kwargs": (),
    "modalities": (["text"],), "prediction": (), "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,), "spaces_between_special_tokens": (True,), "suffix": ("",),
    "verbosity": (), "vllm_xargs": (), "web_search_options": (),
}  # fmt: skip
"""Unsupported fields of OpenAI's and vLLM's interfaces. The listed values of each field are accepted, because
they have no effect."""

IGNORED: dict[str, type] = {
    "metadata": dict, "parallel_tool_calls": bool, "prompt_cache_key": str, "prompt_cache_retention": str,
    "safety_identifier": str, "service_tier": str, "store": bool, "user": str,
}  # fmt: skip
"""Fields that never change an answer, with the types of their values. They are accepted without effect."""

JSON_NAMES = {dict: "an object", list: "a list", bool: "true or false", str: "a string"}

SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output", "logit_bias", "allowed_token_ids",
)  # fmt: skip
"""Fields of completions and chat completions that are arguments of SamplingParams with the same name."""

BEAMS = ("ignore_eos", "include_stop_str_in_output", "stop_token_ids", "temperature")
"""Sampling fields that a beam search also takes."""

LONGEST_NAME = 200
MAX_TOKENS = 2**30
LIKE_TOJSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of forced tool calls, as options of llguidance: that of ``tojson`` in chat templates."""

CLOSED = {"$id", "$defs", "definitions", "type", "properties", "required", "title", "description"}
"""Keywords of a tool's schema that only lists parameters."""

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of ``reasoning_effort``, which chat templates take as a variable."""

TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 60


class Body:
    """A JSON object whose fields are taken one by one. Null counts as absent.

    Attributes:
        defaults: arguments of SamplingParams that hold where the call has no field.
        ignored: names of the given fields that have no effect, after :meth:`finish`.
    """

    def __init__(self, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.defaults = dict(defaults or {})
        self.ignored: list[str] = []
        self._left = set(self.fields)

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def take(self, name: str, default: Any = None) -> Any:
        self._left.discard(name)
        return self.fields.get(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        return check_type(name, self.take(name, default), bool)

    def object(self, name: str) -> dict[str, Any]:
        return check_type(name, self.take(name, {}), dict)

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.take(name, default)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise wrong(name, f"an integer from {least} to {most}", value)
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME):
            raise wrong(name, f"a string of 1 to {LONGEST_NAME} characters", value)
        return value

    def finish(self) -> None:
        """Refuse the fields that were not taken."""
        for name in sorted(self._left):
            value = self.fields[name]
            if name in IGNORED:
                check_type(name, value, IGNORED[name])
                self.ignored.append(name)
                continue
            if name not in UNSUPPORTED:
                raise ApiError(f"{name:.60} is not a field of this call", name[:60], code="unknown_field")
            if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
                instead = f": {SAMPLING_ARGUMENTS[name].words}" if name in SAMPLING_ARGUMENTS else ""
                raise unsupported(name, f", got {shown(value)}{instead}")


def shown(value: Any) -> str:
    """Return the first 60 characters of a value's representation."""
    return f"{_short.repr(value):.60}"


def wrong(name: str, allowed: str, value: Any) -> ApiError:
    return ApiError(f"{name} must be {allowed}, got {shown(value)}", name, code="invalid_value")


def unsupported(name: str, when: str = " with use_beam_search") -> ApiError:
    return ApiError(f"{name} is not supported{when}", name, code="unsupported_field")


def check_type(name: str, value: Any, kind: type[T]) -> T:
    """Return a value. Raise ApiError if it has another type."""
    if type(value) is not kind:
        raise wrong(name, JSON_NAMES[kind], value)
    return value


def parse(raw: bytes, defaults: Mapping[str, Any] | None = None) -> Body:
    """Parse the body of a call. Raise ApiError unless it is a JSON object in UTF-8."""
    try:
        text = raw.decode("utf-8")
        fields = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            json.dumps(fields, ensure_ascii=False).encode()  # raises for lone surrogates, which have no UTF-8
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body must be JSON in UTF-8: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {type(fields).__name__}", code="invalid_json")
    return Body(fields, defaults)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class Conversation:
    """Messages, and the arguments of the chat template that renders them. Raises ApiError if one is invalid.

    Attributes:
        calls: whether the answer may call tools.
        forced: descriptions of functions, one of which the answer must call. Empty: it need not call any.
        max_calls: maximum number of calls of an answer; None: no limit.
        separate_reasoning: return reasoning in fields of its own.
    """

    def __init__(self, body: Body):
        messages = body.take("messages")
        if not isinstance(messages, list) or not messages:
            raise wrong("messages", "a list of messages, not empty", messages)
        self.messages = [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
        self.tools = check_type("tools", body.take("tools", []), list)
        for i, tool in enumerate(self.tools):
            parameters = _function_of(f"tools[{i}]", tool).get("parameters")
            if parameters is not None:
                check_type(f"tools[{i}].function.parameters", parameters, dict)
        self.forced, self.max_calls = _read_tool_choice(body, self.tools)
        self.calls = bool(self.tools) and body.take("tool_choice") != "none"
        variables = body.object("chat_template_kwargs")
        clash = next((name for name in variables if name in TEMPLATE_ARGUMENTS), None)
        if clash is not None:
            raise wrong("chat_template_kwargs", f"without {', '.join(TEMPLATE_ARGUMENTS)}", clash)
        effort = body.take("reasoning_effort")
        if effort is not None:
            if effort not in REASONING_EFFORTS:
                raise wrong("reasoning_effort", f"one of {', '.join(REASONING_EFFORTS)}", effort)
            variables = {"reasoning_effort": effort} | variables
        self.chat_template_kwargs = variables
        self.continue_final_message = body.flag("continue_final_message")
        self.add_generation_prompt = body.flag("add_generation_prompt", not self.continue_final_message)
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong("add_generation_prompt", "false with continue_final_message", True)
        self.separate_reasoning = body.flag("separate_reasoning", True)


class ApiCall:
    """Fields that completions and chat completions share.

    Attributes:
        stream: answer with server-sent events.
        include_usage: send token counts in a last event.
        continuous_usage: also send token counts in every event.
        return_token_ids: return tokens in addition to texts.
        add_special_tokens: add the tokenizer's special tokens to prompts.
        truncate_prompt_tokens: how many of a prompt's last tokens to keep; None: all.
        request_id, priority, cache_salt: as for :meth:`flashtile.engine.Engine.add_request`.
        echo: return the prompt before the answer.
        echo_only: return the prompt without an answer.
        fields: names of the fields that the client gave.
    """

    echo = echo_only = False

    def __init__(self, body: Body, max_logprobs: int, max_tokens: int | None, logprobs: int | None):
        """Read the fields, after all others. Refuse unknown or unsupported fields."""
        prompt_logprobs = body.integer("prompt_logprobs", None, 0, max_logprobs)
        if self.echo and logprobs is not None:
            prompt_logprobs = max(logprobs, prompt_logprobs or 0)
        own = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        self.stream = body.flag("stream")
        options = Body(body.object("stream_options"))
        if options.fields and not self.stream:
            raise wrong("stream_options", "absent unless stream is true", options.fields)
        self.include_usage = options.flag("include_usage")
        self.continuous_usage = options.flag("continuous_usage_stats")
        options.finish()
        read = _read_beams if body.flag("use_beam_search") else _read_sampling
        try:
            self.params: Params = read(body, self.stream, own)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise refused(error, body.fields) from None
        self.priority = body.integer("priority", 0, -(2**31), 2**31 - 1) or 0
        self.return_token_ids = body.flag("return_token_ids")
        self.add_special_tokens = body.flag("add_special_tokens", "messages" not in body)
        self.truncate_prompt_tokens = body.integer("truncate_prompt_tokens", None, 1, MAX_TOKENS)
        self.request_id, self.cache_salt = body.text("request_id"), body.text("cache_salt")
        self.fields = frozenset(body.fields)
        body.finish()


class CompletionCall(ApiCall):
    """A call of /v1/completions. Raises ApiError if a field is invalid."""

    def __init__(self, body: Body, max_logprobs: int):
        self.echo = body.flag("echo")
        max_tokens = body.integer("max_tokens", min(16, body.defaults.get("max_tokens", 16)), 0, MAX_TOKENS)
        self.echo_only = max_tokens == 0
        if self.echo_only and not self.echo:
            raise wrong("max_tokens", "at least 1 without echo", max_tokens)
        prompt = body.take("prompt")
        self.prompts = [prompt] if _is_prompt(prompt) else prompt
        if not isinstance(self.prompts, list) or not self.prompts or not all(map(_is_prompt, self.prompts)):
            lists = "a list of tokens, or a list of strings and lists of tokens"
            raise wrong("prompt", f"a string, {lists}, none of them empty", prompt)
        best_of = body.integer("best_of", None, 1, MAX_TOKENS)
        if best_of is not None and best_of != body.take("n", 1):
            raise unsupported("best_of", " unless it equals n")
        logprobs = body.integer("logprobs", None, 0, max_logprobs)
        super().__init__(body, max_logprobs, max_tokens or 1, logprobs)


class ChatCall(ApiCall):
    """A call of /v1/chat/completions. Raises ApiError if a field is invalid."""

    def __init__(self, body: Body, max_logprobs: int):
        wanted, top = body.flag("logprobs"), body.integer("top_logprobs", None, 0, max_logprobs)
        if top is not None and not wanted:
            raise wrong("top_logprobs", "absent unless logprobs is true", top)
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        max_tokens = body.integer(name, body.defaults.get("max_tokens"), 1, MAX_TOKENS)
        body.take("max_tokens")
        self.conversation = Conversation(body)
        if self.conversation.forced:
            schema = _schema_of_calls(self.conversation.forced, self.conversation.max_calls)
            body.defaults["structured_outputs"] = {"json": schema}
        super().__init__(body, max_logprobs, max_tokens, (top or 0) if wanted else None)
        if self.conversation.calls and isinstance(self.params, BeamSearchParams):
            raise unsupported("tools")


def _read_message(name: str, message: Any) -> dict[str, Any]:
    """Check a message. Return it without null fields, and with its reasoning under all templates' names."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong(name, "an object with a role and a content", message)
    message = {key: value for key, value in message.items() if value is not None}
    calls = check_type(f"{name}.tool_calls", message.get("tool_calls", []), list)
    for i, call in enumerate(calls):
        _function_of(f"{name}.tool_calls[{i}]", call)
    if not calls:
        message.pop("tool_calls", None)  # templates take an empty list for calls
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise wrong(f"{name}.tool_call_id", "the id of a tool call", message.get("tool_call_id"))
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str):
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls and not message.get("content"):
            message.setdefault("thinking", reasoning)  # gpt-oss's template refuses it next to content
    return message


def _function_of(name: str, value: Any) -> dict[str, Any]:
    """Return the field ``function`` of a tool, of a tool call or of ``tool_choice``. Check its name."""
    function = value.get("function") if isinstance(value, dict) else None
    found = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(found, str) or not found:
        raise wrong(name, "an object with a function that has a name", value)
    if value.get("type") not in (None, "function"):
        raise wrong(f"{name}.type", "'function'", value["type"])
    return function


def _read_tool_choice(body: Body, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int | None]:
    """Return ``forced`` and ``max_calls`` of :class:`Conversation`."""
    choice = body.take("tool_choice", "auto")
    max_calls = None if not tools or body.flag("parallel_tool_calls", True) else 1
    if choice in ("none", "auto"):
        return [], max_calls
    functions = [tool["function"] for tool in tools]
    if choice == "required" and tools:
        return functions, max_calls
    if not isinstance(choice, dict):
        allowed = "'none', 'auto', 'required' or a function" if tools else "'none' or 'auto' without tools"
        raise wrong("tool_choice", allowed, choice)
    name = _function_of("tool_choice", choice)["name"]
    named = [function for function in functions if function["name"] == name]
    if not named:
        raise wrong("tool_choice", "the name of one of the tools", name)
    return named[:1], 1


def _schema_of_calls(functions: list[dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """Return the JSON schema of a list of calls, ``{"name": NAME, "parameters": {...}}`` each.

    Each tool's schema has an identifier, its own or a new one, so it is a root of its own and its references
    stay valid. If it only lists parameters, it is changed to allow no others. The arguments of a call are
    always an object.
    """
    calls: list[dict[str, Any]] = []
    identified: dict[str, dict[str, Any]] = {}
    for i, function in enumerate(functions):
        parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        kinds = parameters["type"]
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise wrong("tools", "functions whose parameters have the type 'object'", kinds)
        identifier = parameters.get("$id") or ""
        if not isinstance(identifier, str):
            raise wrong("tools", "functions whose '$id' of parameters is a string", identifier)
        if identifier.startswith("#") or not identifier:  # a fragment does not make a schema a root
            identifier = f"urn:tool:{i}"
        parameters |= {"type": "object", "$id": identifier}
        parameters.pop("$schema", None)  # in older drafts, "$ref" hides the identifier
        if parameters.keys() <= CLOSED:
            parameters["additionalProperties"] = False
        if identified.setdefault(identifier, parameters) != parameters:  # llguidance would take one for both
            raise wrong("tools", "functions with different '$id' in their parameters", identifier)
        properties = {"name": {"const": function["name"]}, "parameters": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"],
             "additionalProperties": False}
        )  # fmt: skip
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "x-guidance": LIKE_TOJSON}
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def read_tokenize(body: Body) -> tuple[str | Conversation, bool, bool]:
    """Read a call of /tokenize. Return (text or conversation, add_special_tokens, return_token_strs)."""
    conversation = Conversation(body) if "messages" in body else None
    prompt = body.take("prompt")
    if conversation is None and not isinstance(prompt, str):
        raise wrong("prompt", "a string if messages is absent", prompt)
    if conversation is not None and prompt is not None:
        raise wrong("prompt", "absent if messages is given", prompt)
    flags = body.flag("add_special_tokens", conversation is None), body.flag("return_token_strs")
    body.finish()
    return conversation or prompt, *flags


def read_detokenize(body: Body) -> list[int]:
    tokens: Any = body.take("tokens")
    if tokens != [] and not _are_tokens(tokens):
        raise wrong("tokens", "a list of tokens", tokens)
    body.finish()
    return tokens


def read_folder(body: Body) -> str:
    path = body.take("model_path")
    if not isinstance(path, str) or not path:
        raise wrong("model_path", "a folder with weights", path)
    body.finish()
    return path


def read_reset(query: Mapping[str, str]) -> bool:
    """Return ``reset_running_requests`` of a query, which has vLLM's names."""
    flags = {"reset_running_requests": False, "reset_external": False}
    for name, text in query.items():
        if name not in flags:
            raise ApiError(f"{name:.60} is not a parameter of this call", name[:60], code="unknown_field")
        if text.lower() not in ("true", "1", "false", "0"):
            raise wrong(name, "true or false", text)
        flags[name] = text.lower() in ("true", "1")
    if flags["reset_external"]:
        raise unsupported("reset_external", ": the engine shares no blocks with other engines")
    return flags["reset_running_requests"]


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _are_tokens(value)


def _are_tokens(values: Any) -> bool:
    """Whether a value is a list of tokens that is not empty. Fast for millions of tokens."""
    return isinstance(values, list) and set(map(type, values)) == {int} and min(values) >= 0


def _read_sampling(body: Body, stream: bool, own: dict[str, int | None]) -> Params:
    given = body.defaults | {name: body.take(name) for name in SAMPLING if name in body}
    structure, forced = _read_structure(body), body.defaults.get("structured_outputs")
    if structure is not None and forced is not None:
        text = "tool_choice must be 'none' or 'auto' with response_format or structured_outputs"
        raise ApiError(text, "tool_choice", code="unsupported_field")
    given["structured_outputs"] = forced if structure is None else structure
    if body.take("length_penalty", 1) != 1:
        raise wrong("length_penalty", "1 unless use_beam_search is true", body.take("length_penalty"))
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**given | own, output_kind=kind)


def _read_structure(body: Body) -> dict[str, Any] | None:
    """Return ``structured_outputs`` of a call, or OpenAI's ``response_format`` in the same form, or None."""
    given, form = body.take("structured_outputs"), Body(body.object("response_format"))
    kind, described = form.take("type", "text"), Body(form.object("json_schema"))
    form.finish()
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong("response_format", "of type text, json_object or json_schema", kind)
    if kind == "text":
        return given
    if given is not None:
        raise wrong("structured_outputs", "absent if response_format is given", given)
    if kind == "json_object":
        return {"json_object": True}
    schema = described.take("schema")
    if not isinstance(schema, dict):
        raise wrong("response_format", "an object whose json_schema has an object as schema", schema)
    for name in ("name", "description", "strict"):  # the answer matches the schema in any case
        described.take(name)
    described.finish()
    return {"json": schema}


def _read_beams(body: Body, stream: bool, own: dict[str, int | None]) -> Params:
    """Read the parameters of a beam search with ``n`` beams. Refuse fields that beam search does not use."""
    neutral = SamplingParams()
    others = {name: body.take(name) for name in SAMPLING if name in body and name not in (*BEAMS, "n")}
    others |= {name: own[name] for name in ("logprobs", "prompt_logprobs")}
    for name, value in others.items():
        if value != getattr(neutral, name) and value not in ([], {}):
            raise unsupported(name)
    if _read_structure(body) is not None:
        raise unsupported("structured_outputs" if "structured_outputs" in body else "response_format")
    if stream:
        raise ApiError("stream must be false with use_beam_search", "stream", code="unsupported_field")
    given = {name: body.take(name) for name in (*BEAMS, "length_penalty") if name in body}
    # Service.set_max_tokens lowers this default to the number of tokens for which the model has room.
    return BeamSearchParams(beam_width=body.take("n", 1), max_tokens=own["max_tokens"] or MAX_TOKENS, **given)
