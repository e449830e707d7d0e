"""Validation of clients' calls and their conversion to the engine's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashtile.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from flashtile.engine.server.errors import ApiError, refused
from flashtile.engine.server.fields import Body, wrong

Params = SamplingParams | BeamSearchParams

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
TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclass
class ApiCall:
    """Fields that completions and chat completions share.

    Attributes:
        params: sampling parameters. ``max_tokens`` is None if the client left it out.
        max_tokens_field: the client's name of ``max_tokens``.
        logprobs: how many likeliest tokens to list in addition to the chosen one; None: no log-probabilities.
        prompt_logprobs: as ``logprobs``, for the prompt's tokens.
        stream: answer with server-sent events.
        include_usage, continuous_usage: send token counts in a last event, or in every event.
        return_token_ids: return tokens in addition to texts.
        add_special_tokens: add the tokenizer's special tokens to prompts.
        truncate_prompt_tokens: how many of a prompt's last tokens to keep; None: all.
        request_id, priority, cache_salt: as for :meth:`flashtile.engine.Engine.add_request`.
        fields: names of the fields that the client gave.
    """

    params: Params
    max_tokens_field: str
    logprobs: int | None
    prompt_logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    request_id: str | None
    priority: int
    cache_salt: str | None
    fields: frozenset[str]


@dataclass
class CompletionCall(ApiCall):
    """A call of /v1/completions. ``echo`` returns the prompt before the answer, ``echo_only`` only the
    prompt.
    """

    prompts: list[str | list[int]] = field(default_factory=list)
    echo: bool = False
    echo_only: bool = False


@dataclass
class Conversation:
    """Messages, and the arguments of the chat template that renders them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


@dataclass
class ChatCall(ApiCall):
    """A call of /v1/chat/completions."""

    conversation: Conversation = field(default_factory=lambda: Conversation([], None, True, False, {}))


@dataclass
class TokenizeCall:
    """A call of /tokenize, with a text or a conversation."""

    prompt: str | None
    conversation: Conversation | None
    add_special_tokens: bool
    return_token_strs: bool


def read_completion(body: Body, max_logprobs: int) -> CompletionCall:
    """Read a call of /v1/completions. Raise ApiError naming an invalid field."""
    echo = body.flag("echo")
    logprobs = body.integer("logprobs", None, 0, max_logprobs)
    prompt_logprobs = body.integer("prompt_logprobs", None, 0, max_logprobs)
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    max_tokens = body.integer("max_tokens", 16, 0, MAX_TOKENS)
    echo_only = max_tokens == 0
    if echo_only and not echo:
        raise wrong("max_tokens", "at least 1 without echo", max_tokens)
    prompts = read_prompts(body)
    common = _read_common(body, max(1, max_tokens or 1), "max_tokens", logprobs, prompt_logprobs, True)
    best_of = body.integer("best_of", None, 1, MAX_TOKENS)
    if best_of is not None and best_of != body.take("n", 1):
        raise ApiError("best_of is not supported unless it equals n", "best_of", code="unsupported_field")
    body.finish()
    return CompletionCall(**common, prompts=prompts, echo=echo, echo_only=echo_only)


def read_chat(body: Body, max_logprobs: int) -> ChatCall:
    """Read a call of /v1/chat/completions. Raise ApiError naming an invalid field."""
    wanted, top = body.flag("logprobs"), body.integer("top_logprobs", None, 0, max_logprobs)
    if top is not None and not wanted:
        raise wrong("top_logprobs", "absent unless logprobs is true", top)
    prompt_logprobs = body.integer("prompt_logprobs", None, 0, max_logprobs)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    max_tokens = body.integer(name, None, 1, MAX_TOKENS)
    body.take("max_tokens")
    conversation = read_conversation(body)
    common = _read_common(body, max_tokens, name, (top or 0) if wanted else None, prompt_logprobs, False)
    body.finish()
    return ChatCall(**common, conversation=conversation)


def read_prompts(body: Body) -> list[str | list[int]]:
    """Read ``prompt``, which is one prompt or a list of them, each a text or its tokens."""
    prompt = body.take("prompt")
    if isinstance(prompt, str):
        return [prompt]
    allowed = "a string, a list of tokens, or a list of strings and lists of tokens, none of them empty"
    if not isinstance(prompt, list) or not prompt:
        raise wrong("prompt", allowed, prompt)
    if _are_tokens(prompt):
        return [prompt]
    for one in prompt:
        if not isinstance(one, str) and not (isinstance(one, list) and one and _are_tokens(one)):
            raise wrong("prompt", allowed, prompt)
    return prompt


def read_conversation(body: Body) -> Conversation:
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of messages, not empty", messages)
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(f"messages[{i}]", "an object with a role and a content", message)
    tools, choice = body.take("tools"), body.take("tool_choice")
    if choice not in (None, "none", "auto") or (tools and choice != "none"):
        raise ApiError(
            "tool_choice must be 'none': the model is shown the tools, but tool calls are not supported",
            "tools" if tools else "tool_choice", code="unsupported_field",
        )  # fmt: skip
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong("tools", "a list of objects", tools)
    variables = body.object("chat_template_kwargs")
    clash = next((name for name in variables if name in TEMPLATE_ARGUMENTS), None)
    if clash is not None:
        raise wrong("chat_template_kwargs", f"without {', '.join(TEMPLATE_ARGUMENTS)}", clash)
    continued = body.flag("continue_final_message")
    generate = body.flag("add_generation_prompt", not continued)
    if generate and continued:
        raise wrong("add_generation_prompt", "false with continue_final_message", generate)
    return Conversation(messages, tools or None, generate, continued, variables)


def read_tokenize(body: Body) -> TokenizeCall:
    conversation = read_conversation(body) if "messages" in body else None
    prompt = body.take("prompt")
    if conversation is None and not isinstance(prompt, str):
        raise wrong("prompt", "a string if messages is absent", prompt)
    if conversation is not None and prompt is not None:
        raise wrong("prompt", "absent if messages is given", prompt)
    call = TokenizeCall(
        prompt, conversation, body.flag("add_special_tokens", conversation is None),
        body.flag("return_token_strs"),
    )  # fmt: skip
    body.finish()
    return call


def read_detokenize(body: Body) -> list[int]:
    tokens = body.take("tokens")
    if not isinstance(tokens, list) or not _are_tokens(tokens):
        raise wrong("tokens", "a list of tokens", tokens)
    body.finish()
    return tokens


def _are_tokens(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0  # fast for millions of tokens


def _read_common(
    body: Body,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
    prompt_logprobs: int | None,
    add_special_tokens: bool,
) -> dict[str, Any]:
    stream = body.flag("stream")
    options = Body(body.object("stream_options"))
    if options.fields and not stream:
        raise wrong("stream_options", "absent unless stream is true", options.fields)
    include_usage = options.flag("include_usage")
    continuous_usage = options.flag("continuous_usage_stats")
    options.finish()
    if body.flag("use_beam_search"):
        params: Params = _read_beams(body, max_tokens, stream, logprobs, prompt_logprobs)
    else:
        given = {name: body.take(name) for name in SAMPLING if name in body}
        if body.take("length_penalty", 1) != 1:
            raise wrong("length_penalty", "1 unless use_beam_search is true", body.take("length_penalty"))
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        try:
            params = SamplingParams(
                **given, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                output_kind=kind,
            )  # fmt: skip
        except (TypeError, ValueError, NotImplementedError) as error:
            raise refused(error, body.fields) from None
    priority = body.integer("priority", 0, -(2**31), 2**31 - 1)
    assert priority is not None
    return {
        "params": params,
        "max_tokens_field": max_tokens_field,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": continuous_usage,
        "return_token_ids": body.flag("return_token_ids"),
        "add_special_tokens": body.flag("add_special_tokens", add_special_tokens),
        "truncate_prompt_tokens": body.integer("truncate_prompt_tokens", None, 1, MAX_TOKENS),
        "request_id": body.text("request_id", LONGEST_NAME),
        "priority": priority,
        "cache_salt": body.text("cache_salt", LONGEST_NAME),
        "fields": frozenset(body.fields),
    }


def _read_beams(
    body: Body, max_tokens: int | None, stream: bool, logprobs: int | None, prompt_logprobs: int | None
) -> BeamSearchParams:
    """Read a beam search, whose number of beams is ``n``. Refuse sampling fields that would change it."""
    neutral = SamplingParams()
    for name in SAMPLING:
        if name in BEAMS or name == "n" or name not in body:
            continue
        value = body.take(name)
        if value != getattr(neutral, name) and value not in ([], {}):
            raise ApiError(f"{name} is not supported with use_beam_search", name, code="unsupported_field")
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None:
            raise ApiError(f"{name} is not supported with use_beam_search", name, code="unsupported_field")
    if stream:
        raise ApiError("stream must be false with use_beam_search", "stream", code="unsupported_field")
    given = {name: body.take(name) for name in (*BEAMS, "length_penalty") if name in body}
    try:
        # Without the client's max_tokens, Service.set_max_tokens sets it to the room after the prompt.
        return BeamSearchParams(beam_width=body.take("n", 1), max_tokens=max_tokens or MAX_TOKENS, **given)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise refused(error, body.fields) from None
